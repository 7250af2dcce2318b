"""FlashAttention-3 of the package `fa3-fwd`: one operation for a chunk of any length over a history of any length.

It takes keys and values where they lie, their last dimension contiguous, and is for Hopper and bfloat16. Source: Shah
et al., FlashAttention-3, arXiv 2407.08608.

`FlashChunks` is the operation for the chunks of several sessions, within a recorded step: where chunks and entries lie
is read on the device. Each head of a chunk is a sequence of its own, for sessions have their heads at other distances:

    rows    head 0: rows before | chunk a | between | chunk b | behind · head 1: …      only chunks have entries
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

# So many chunks are taken together: each sequence takes its time, without entries, too.
CHUNKS = (1, 4, 16)
# What a chunk of a layer is: its first row in the step and the one behind it, the vector where the layer's entries
# begin, from one head to the next, and how many each head has, the chunk's own the last. Without entries: no chunk.
CHUNK_FIELDS = 5

_MODULE = "fa3_fwd_interface"
_HOPPER = (9, 0)  # compute capability
_SPLIT = 512  # queries, up to which a history is cut into parts, as many as fill the device
_STRIDE = 2**16  # vectors from one view of a pool to the next: its whole length is more than the operation counts


def why_absent(device: torch.device, dtype: torch.dtype) -> str:
    """Why it cannot be had on this GPU; nothing: it is installed. Imports nothing."""
    if torch.cuda.get_device_capability(device) != _HOPPER:
        return "it is for Hopper GPUs"
    if dtype != torch.bfloat16:
        return "it is for bfloat16"
    if find_spec(_MODULE) is None:
        return "the package fa3-fwd is not installed"
    return ""


def by_flash3(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """(out [T, Hq, D], lse [T, Hq]) of queries [T, Hq, D], keys and values [Hkv, S, D].

    is_causal: the queries stand at the last T of the S positions and see none behind their own; else each sees all.
    Raises what an import raises if the package does not fit this torch.
    """
    # The operation itself: its wrappers in Python take the host several times as long.
    out, lse, *_ = import_module(_MODULE).fa3_fwd_cuda.fwd(
        queries[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        softmax_scale=scaling,
        is_causal=is_causal,
        num_splits=0 if len(queries) <= _SPLIT else 1,
    )
    return out[0], lse[0].T


class _Layout(NamedTuple):
    """Views of a pool, each `length` vectors, from one to the next `stride`; the last one is number `last`.

    Any `longest` vectors that follow each other lie in one of them.
    """

    last: int
    stride: int
    length: int

    @staticmethod
    def of(vectors: int, longest: int) -> _Layout:
        behind = vectors - longest - _STRIDE
        if behind <= 0:
            return _Layout(0, 1, vectors)
        last = -(-behind // _STRIDE)
        return _Layout(last, behind // last, vectors - last * (behind // last))

    def views(self, states: Tensor) -> Tensor:
        """[last + 1, length, 1, D] of [R, D]."""
        width = states.stride(0)
        shape = (self.last + 1, self.length, 1, states.shape[1])
        return states.as_strided(shape, (self.stride * width, width, width, 1), states.storage_offset())


class FlashChunks:
    """The chunks of one step, in all of its layers."""

    def __init__(self, table: Tensor, tokens: int, heads: tuple[int, ...], vectors: int, longest: int) -> None:
        """table: int64 [L, chunks, CHUNK_FIELDS], in the order of their rows. heads: KV heads of each layer. vectors:
        of a pool. longest: no chunk reads more."""
        self._tokens, self._heads = tokens, heads
        self._nothing: Tensor | None = None
        self._layout = _Layout.of(vectors, longest)
        first, end, start, apart, used = table.unbind(-1)
        rows = torch.arange(tokens, device=table.device)
        is_own = (rows >= first[..., None]) & (rows < end[..., None]) & (used[..., None] > 0)
        self._own = is_own.any(1)[..., None, None, None]  # [L, N, 1, 1, 1]
        self._sequences = {each: self._of(each, first, end, start, apart, used) for each in set(heads)}

    def _of(self, heads: int, first: Tensor, end: Tensor, start: Tensor, apart: Tensor, used: Tensor) -> list[Tensor]:
        """Of each layer, int32: where sequences begin, [n + 1], and of each the view, its first entry in it, and the
        place behind its last one."""
        layers, chunks = first.shape
        head = torch.arange(heads, device=first.device)[:, None]
        vectors = start[:, None] + apart[:, None] * head  # [L, Hkv, chunks]
        view = (vectors // self._layout.stride).clamp(max=self._layout.last)
        before = vectors - view * self._layout.stride
        upto = torch.where(used[:, None] > 0, before + used[:, None], 0)
        edges = torch.stack([first, end], dim=-1).reshape(layers, 1, 2 * chunks) + head * self._tokens
        begins = head.expand(layers, heads, 1) * self._tokens
        edges = torch.cat([begins, edges], dim=-1).flatten(1)
        edges = torch.cat([edges, edges.new_full((layers, 1), heads * self._tokens)], dim=-1)
        lines = torch.stack([view, before, upto])  # [3, L, Hkv, chunks]
        pairs = torch.stack([torch.zeros_like(lines), lines], dim=-1).flatten(-2)
        lines = torch.cat([pairs, torch.zeros_like(pairs[..., :1])], dim=-1).flatten(-2)
        return [edges.to(torch.int32), *lines.to(torch.int32)]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """[N, Hq, D] of queries [N, Hq, D], each by the entries up to its own; zeros in rows of no chunk. keys, values:
        [R, D]."""
        count, _, dim = queries.shape
        kv_heads = self._heads[layer]
        edges, view, before, upto = (each[layer] for each in self._sequences[kv_heads])
        own = queries.reshape(count, kv_heads, -1, dim).transpose(0, 1)
        out, *_ = import_module(_MODULE).fa3_fwd_cuda.fwd(
            own.reshape(kv_heads * count, -1, dim),
            self._layout.views(keys),
            self._layout.views(values),
            cu_seqlens_q=edges,
            seqused_k=upto,
            max_seqlen_q=count,
            kv_batch_idx=view,
            leftpad_k=before,
            softmax_scale=scaling,
            is_causal=True,
            num_splits=0 if count <= _SPLIT else 1,
        )
        by_head: Tensor = out.reshape(kv_heads, count, -1, out.shape[-1])
        attended = by_head.new_empty(count, kv_heads, *by_head.shape[2:])
        if self._nothing is None:
            self._nothing = by_head.new_zeros(())
        torch.where(self._own[layer], by_head.transpose(0, 1), self._nothing, out=attended)
        return attended.flatten(1, 2)
