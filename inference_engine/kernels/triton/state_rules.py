"""Layers with a recurrent state, in Triton: as `kernels/states.py` says.

    few tokens     a program has some columns of a head's matrix in registers, and the open entries beside it; it goes
                   from token to token, and folds a chunk where one ends
    many tokens    pieces of 64: what tokens of a piece add to the state follows from the inverse of a triangle, for all
                   pieces at once; then a program goes from piece to piece, all products on tensor cores. What is behind
                   the last whole chunk is left to the programs of few tokens

The second adds in another order than the first. Where no token may change the bits of another, the first does all.

Sources: Yang et al., Gated Delta Networks, arXiv 2412.06464, section 3.3 (WY form of a piece); Dao and Gu, Transformers
are SSMs, arXiv 2405.21060, section 6 (the same without a correction).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from inference_engine.kernels.states import (
    CHUNK,
    PIECE_TOKENS,
    ROOM,
    STATE_FIELDS,
    StateLayer,
)
from inference_engine.kernels.triton.dependent_launch import chained
from inference_engine.kernels.triton.state_folds import fold_chunks, move_entries
from inference_engine.kernels.triton.state_pieces import correct_pieces, run_pieces
from inference_engine.kernels.triton.state_tokens import convolve_tokens, run_tokens

_FEW = 32  # tokens of a step, below which no piece is worth its kernels
_EXACT = 4  # tokens: steps of so few are never padded
_SPANS = 64  # that programs begin with
_COLUMNS = 32  # of a matrix, by a program
_CHANNELS = 512
_ROWS = 16  # of a chunk, as a product takes them


class _Rule(NamedTuple):
    """Where the parts of a token lie in its registers."""

    queries_at: int
    keys_at: int
    values_at: int
    decays_at: int


class TritonStates:
    """Implements StateKernels. is_invariant: does no token change the bits of another?"""

    def __init__(self, *, is_invariant: bool) -> None:
        self._is_invariant = is_invariant

    def convolve(
        self, inputs: Tensor, table: Tensor, layer: StateLayer, *, weights: Tensor, bias: Tensor | None, activates: bool
    ) -> Tensor:
        out = torch.empty_like(inputs)
        convolve_tokens[(len(inputs), triton.cdiv(layer.channels, _CHANNELS))](
            inputs,
            table,
            weights,
            weights if bias is None else bias,
            out,
            layer.offset,
            **_sizes(layer),
            HAS_BIAS=bias is not None,
            ACTIVATES=activates,
            num_warps=4,
            **chained(inputs.device),
        )
        return out

    def delta_rule(
        self, inputs: Tensor, gates: Tensor, table: Tensor, layer: StateLayer, *, rates: Tensor, bias: Tensor,
        doubles: bool,
    ) -> Tensor:  # fmt: skip
        width = layer.key_heads * layer.key_dim
        rule = _Rule(queries_at=0, keys_at=width, values_at=2 * width, decays_at=layer.value_heads)
        return self._run(inputs, gates, table, layer, rule, (rates, bias, rates), corrects=True, doubles=doubles)

    def scan(
        self, inputs: Tensor, gates: Tensor, table: Tensor, layer: StateLayer, *, rates: Tensor, bias: Tensor,
        skips: Tensor, least: float = 0.0,
    ) -> Tensor:  # fmt: skip
        values, width = layer.value_heads * layer.value_dim, layer.key_heads * layer.key_dim
        rule = _Rule(queries_at=values + width, keys_at=values, values_at=0, decays_at=0)
        return self._run(inputs, gates, table, layer, rule, (rates, bias, skips), least=least)

    def _run(
        self,
        inputs: Tensor,
        gates: Tensor,
        table: Tensor,
        layer: StateLayer,
        rule: _Rule,
        numbers: tuple[Tensor, Tensor, Tensor],
        *,
        corrects: bool = False,
        doubles: bool = False,
        least: float = 0.0,
    ) -> Tensor:
        count, width = len(inputs), layer.value_heads * layer.value_dim
        # Nothing is written for padding, and what is there may not be a number.
        out = (inputs.new_empty if count <= _EXACT else inputs.new_zeros)(count, width)
        has_pieces = not self._is_invariant and count >= _FEW
        columns = min(_COLUMNS, triton.next_power_of_2(layer.value_dim))
        given: dict[str, Any] = {
            **_sizes(layer),
            **{name.upper(): place for name, place in rule._asdict().items()},
            "INPUT_WIDTH": inputs.shape[1],
            "GATE_WIDTH": gates.shape[1],
            "CORRECTS": corrects,
            "DOUBLES": doubles,
            "LEAST": least,
            "SPLITS": has_pieces,
            "BLOCK_K": triton.next_power_of_2(layer.key_dim),
            "BLOCK_V": columns,
            "BLOCK_ALL": triton.next_power_of_2(layer.value_dim),
            "PIECE": PIECE_TOKENS,
            "IS_EXACT": inputs.dtype.itemsize > 2,
            **chained(inputs.device),
        }
        heads, blocks = layer.value_heads, triton.cdiv(layer.value_dim, columns)
        if has_pieces:
            # Two groups of warps would share 16 columns of a product; Triton 3.6 has them read beside the tile.
            warps = 8 if min(columns, given["BLOCK_K"], given["BLOCK_ALL"]) > 16 else 4
            readers = values = inputs
            if corrects:
                readers, values = inputs.new_empty(count, heads * layer.key_dim), torch.empty_like(out)
                # Of one session there are no more; programs go on to those of others.
                pieces = count // PIECE_TOKENS + 2
                correct_pieces[(pieces, heads)](
                    inputs, gates, table, readers, values, *numbers[:2], count, **_of(correct_pieces, given),
                    num_warps=warps, num_stages=1,
                )  # fmt: skip
            spans = min(_SPANS, count // (ROOM - CHUNK + 1))
            run_pieces[(spans, heads, blocks)](
                inputs, gates, table, readers, values, out, *numbers, layer.offset, **_of(run_pieces, given),
                num_warps=warps, num_stages=1,
            )  # fmt: skip
        run_tokens[(min(_SPANS, count), heads, blocks)](
            inputs, gates, table, out, *numbers, layer.offset, **_of(run_tokens, given), num_warps=4
        )
        return out

    def settle(self, memory: Tensor, layers: tuple[StateLayer, ...], held: int, kept: int, staged: int) -> None:
        numbers, folds = memory.view(torch.float32), (held + kept) // CHUNK
        for layer, offsets in _alike(layers, memory.device):
            columns = min(_COLUMNS, triton.next_power_of_2(max(1, layer.value_dim)))
            if folds and layer.value_heads:
                grid = len(offsets), layer.value_heads, triton.cdiv(layer.value_dim, columns)
                blocks = {"BLOCK_K": triton.next_power_of_2(layer.key_dim), "BLOCK_V": columns}
                fold_chunks[grid](numbers, offsets, folds, **_of(fold_chunks, _sizes(layer) | blocks), num_warps=4)
            parts = sum(triton.cdiv(width, _CHANNELS) for width in _widths(layer))
            rows = {"ROWS": triton.next_power_of_2(ROOM + layer.taps - 1)}
            move_entries[(len(offsets), parts)](
                numbers, offsets, folds * CHUNK, held + kept, held + staged,
                **_of(move_entries, _sizes(layer) | rows), num_warps=4,
            )  # fmt: skip


def _widths(layer: StateLayer) -> tuple[int, int, int, int]:
    heads = layer.value_heads
    return layer.key_heads * layer.key_dim, heads * layer.value_dim, heads, layer.channels


def _sizes(layer: StateLayer) -> dict[str, int]:
    return {
        "KEY_HEADS": layer.key_heads,
        "VALUE_HEADS": layer.value_heads,
        "KEY_DIM": layer.key_dim,
        "VALUE_DIM": layer.value_dim,
        "CHUNK": CHUNK,
        "ROOM": ROOM,
        "FIELDS": STATE_FIELDS,
        "CHANNELS": layer.channels,
        "TAPS": layer.taps,
        "BLOCK": _CHANNELS,
    }


def _of(kernel: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Those that the kernel has, and options of a launch."""
    return {name: value for name, value in given.items() if name in kernel.arg_names or name == "launch_pdl"}


@cache
def _alike(layers: tuple[StateLayer, ...], device: torch.device) -> Sequence[tuple[StateLayer, Tensor]]:
    """Of layers of the same sizes, one and the offsets of all."""
    groups: dict[tuple[int, ...], list[StateLayer]] = {}
    for layer in layers:
        groups.setdefault(layer.sizes, []).append(layer)
    return [(group[0], torch.tensor([each.offset for each in group], device=device)) for group in groups.values()]
