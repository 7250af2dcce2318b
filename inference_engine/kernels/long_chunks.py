"""Attention of a long chunk of a prefill over a long history, through the fastest fused operations that torch has.

    positions   0 … 32767 | … 36863 | 36864 … 38000 | 38001 … 42096        a chunk of 4,096 at the end of 42,097
    attended    whole     | whole   | whole, rest   | causal, the chunk itself

Of the history, pieces of a few sizes are attended to as wholes, then what is left of it; the chunk attends to itself.
The states are merged by their log-sum-exps (`kernels/merge.py`). On Hopper, cuDNN's operations take half the time of
torch's own, but they need a plan for each shape, which takes longer to make than to run: hence the few sizes,
contiguous copies of pieces, and chunks of whole multiples of `_CHUNK` alone. The rest, of any size, is torch's own
flash attention's. Other chunks are attended to as `kernels/attention.py` has it.
Where old entries come piece by piece (`kv/views.py`), pieces of these sizes are attended to in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from inference_engine.kernels.attention import CausalAttention, attend_causal
from inference_engine.kernels.merge import attend_state, by_flash, merge_states

logger = logging.getLogger(__name__)

# out [T, Hq, D] · lse [T, Hq] float32, both of any strides but out's last.
State = tuple[Tensor, Tensor]
# (queries [1, Hq, T, D], keys and values [1, Hkv, S, D], scaling) -> state
Attend = Callable[[Tensor, Tensor, Tensor, float], State]


class AttendPiece(Protocol):
    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float, softcap: float | None = None
    ) -> State:
        """The state of entries [Hkv, S, D], contiguous, all of which each query [T, Hq, D] sees. On a GPU out may have
        the dtype of the keys."""


class MergeTwo(Protocol):
    def __call__(self, first: State, second: State, dtype: torch.dtype) -> State:
        """The state of both sets of entries, neither empty, contiguous; out is rounded to `dtype`."""


PIECES = (32768, 16384, 8192, 4096)  # entries
_CHUNK = 1024  # queries
_TRIED = (4096, sum(PIECES) + 100)  # queries, and entries before them, of the trial: those of most prefills
_WORST = 2e-2  # of the largest number, in half precision


def merge_two(first: State, second: State, dtype: torch.dtype) -> State:
    """See `MergeTwo`."""
    (out_a, lse_a), (out_b, lse_b) = first, second
    out, lse = merge_states(out_a.float(), lse_a, out_b.float(), lse_b)
    return out.to(dtype).contiguous(), lse.contiguous()


def attend_piece(
    queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float, softcap: float | None = None
) -> State:
    """See `AttendPiece`."""
    return attend_state(queries, keys, values, None, scaling=scaling, softcap=softcap)


def by_cudnn(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, *, is_causal: bool) -> State:
    """Every query sees every key; is_causal: of as many keys as queries, those up to its own."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries, keys, values, None, True, 0.0, is_causal, scale=scaling
    )
    return out[0].transpose(0, 1), lse.reshape(queries.shape[1], queries.shape[2]).T


class LongChunks:
    """Implements CausalAttention."""

    def __init__(
        self,
        whole: Attend,
        square: Attend,
        rest: Attend,
        *,
        merge: MergeTwo = merge_two,
        pieces: Iterable[int] = PIECES,
        chunk: int = _CHUNK,
    ) -> None:
        """whole: every query sees every key, of a piece. square: a chunk sees itself, each token up to its own place.
        rest: as `whole`, of any number of keys. pieces: sizes, the largest first. chunk: it serves chunks that are a
        multiple of it.
        """
        self._whole, self._square, self._rest, self._merge = whole, square, rest, merge
        self._pieces, self._chunk = tuple(pieces), chunk
        self._works = True

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
        head_sinks: Tensor | None = None,
    ) -> Tensor:
        count, length = len(queries), keys.shape[1]
        history = length - count
        is_fitting = self._works and not count % self._chunk and (not history or history >= self._pieces[-1])
        is_fitting &= keys.dtype == queries.dtype
        if is_fitting and softcap is None and head_sinks is None:
            with self._giving_up(queries):
                return self.attend(queries, keys, values, scaling)
        return attend_causal(queries, keys, values, scaling=scaling, softcap=softcap, head_sinks=head_sinks)

    def attend_piece(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float, softcap: float | None = None
    ) -> State:
        """Implements AttendPiece."""
        count, length = len(queries), keys.shape[1]
        is_fitting = self._works and count > 0 and not count % self._chunk and length in self._pieces
        if is_fitting and keys.dtype == queries.dtype and softcap is None:
            with self._giving_up(queries):
                return self._whole(queries.transpose(0, 1)[None], keys[None], values[None], scaling)
        return attend_state(queries, keys, values, None, scaling=scaling, softcap=softcap)

    @contextmanager
    def _giving_up(self, queries: Tensor) -> Iterator[None]:
        """For an operation that is not asked again once it failed. Memory that is missing is not its fault."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._works = False
            logger.warning(
                "cuDNN attends to no more long chunks: with %d queries of %d heads it says %s",
                len(queries),
                queries.shape[1],
                error,
            )

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        by_head, history = queries.transpose(0, 1)[None], keys.shape[1] - len(queries)
        state: State | None = None
        for first, end in self._cut(history):
            attend = self._whole if end - first in self._pieces else self._rest
            own = attend(by_head, *(each[None, :, first:end].contiguous() for each in (keys, values)), scaling)
            state = own if state is None else self._merge(state, own, torch.float32)
        last = self._square(by_head, *(each[None, :, history:].contiguous() for each in (keys, values)), scaling)
        return (last if state is None else self._merge(state, last, queries.dtype))[0]

    def _cut(self, history: int) -> Iterator[tuple[int, int]]:
        """Pieces of it, the largest first, and what is left."""
        first = 0
        for size in self._pieces:
            while history - first >= size:
                yield first, first + size
                first += size
        if first < history:
            yield first, history


def open_long_chunks(
    device: torch.device, dtype: torch.dtype, shapes: Iterable[tuple[int, int, int]], merge: MergeTwo = merge_two
) -> CausalAttention:
    """What attends to long chunks on this device: tried once for each shape (Hq, Hkv, D) of the model's layers.

    `attend_causal` where cuDNN has no operation for them, or one that gives something else; the log says which and why.
    """
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return attend_causal
    found = LongChunks(
        partial(by_cudnn, is_causal=False),
        partial(by_cudnn, is_causal=True),
        partial(by_flash, is_causal=False),
        merge=merge,
    )
    faults = ((shape, _fault(found, device, dtype, *shape)) for shape in dict.fromkeys(shapes))
    fault = next((each for each in faults if each[1]), None)
    torch.cuda.empty_cache()  # what the trial took is room for entries
    if fault is not None:
        logger.info("torch's flash attention attends to long chunks: cuDNN's, with heads %s: %s", *fault)
        return attend_causal
    logger.debug("cuDNN attends to long chunks")
    return found


def _fault(found: LongChunks, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> str:
    """What is wrong; nothing: it is right."""
    generator = torch.Generator(device).manual_seed(0)
    count, length = _TRIED[0], sum(_TRIED)
    queries, keys, values = (
        torch.randn(shape, generator=generator, device=device, dtype=dtype)
        for shape in ((count, heads, dim), (kv_heads, length, dim), (kv_heads, length, dim))
    )
    try:
        out = found.attend(queries, keys, values, dim**-0.5)
    except (RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0][:200]
    expected = attend_causal(queries, keys, values, scaling=dim**-0.5)
    worst = float((out.float() - expected.float()).abs().max() / expected.float().abs().max())
    return "" if worst < _WORST else f"it differs by {worst:.2g} of the largest number"
