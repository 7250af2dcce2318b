"""Layers that keep a recurrent state: a short convolution, and behind it the gated delta rule or a state space.

Of one session and layer there is one run of float32 numbers: the state after a whole number of chunks, counted from
position 0, and entries of the tokens since, the open chunk (`kv/parts/open_chunk.py`):

    matrices [Hv, Dk, Dv] | keys [room, Hk, Dk] | values [room, Hv, Dv] | decays [room, Hv]
    inputs of the convolution [taps - 1 + room, C]

A value is what its token adds to the state; a decay is the logarithm of that since the chunk began. A token is computed
from the state at the last multiple of a chunk before it and from the entries since, which a step writes behind those
that are open. A step of more tokens than there is room for gives a run of its own.

Which sessions a step has is a table of integers, STATE_FIELDS of each token, so that a step can be recorded:

    of token t   SPAN: 1 + the line of its span, the tokens of its session; 0: it is padding
    of span s    SPANS: how many there are, in each line. BEFORE, AFTER: addresses of a session's states, and of the run
                 of its own (0: none). POSITION, FIRST, COUNT: of its first token, where that lies in the step, and of
                 how many tokens
    of piece p   PIECE_SPAN: 1 + the line of a span with a run of its own; PIECE: where in it PIECE_TOKENS positions
                 begin, from a multiple of these

There is no plain variant: without kernels transformers' modules run such layers. The functions here are what kernels
are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

SPAN, SPANS, BEFORE, AFTER, POSITION, FIRST, COUNT, PIECE_SPAN, PIECE = range(9)
STATE_FIELDS = 9
PIECE_TOKENS = 64
CHUNK = 8  # tokens of an open chunk
ROOM = 16  # entries: 8 draft tokens behind those of a chunk and one


@dataclass(frozen=True, kw_only=True)
class StateLayer:
    """Of a layer: the sizes of its state (`StateSizes` of `models/operations.py`), and the numbers before its own."""

    channels: int
    taps: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    offset: int

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return self.channels, self.taps, self.key_heads, self.value_heads, self.key_dim, self.value_dim


def enter_span(
    table: NDArray[np.int64], line: int, spans: int, tokens: slice, position: int, before: int, after: int
) -> None:
    """Write a session's tokens into a table of `spans` sessions. position: of the first one. before, after: addresses
    of states; after: 0 where there is none."""
    count = tokens.stop - tokens.start
    table[tokens, SPAN] = line + 1
    table[line, SPANS : COUNT + 1] = spans, before, after, position, tokens.start, count
    if after:
        end = position + count
        begins = range(position - position % PIECE_TOKENS, end - end % CHUNK, PIECE_TOKENS)
        first = int(np.count_nonzero(table[:, PIECE_SPAN]))
        pieces = table[first : first + len(begins)]
        pieces[:, PIECE_SPAN], pieces[:, PIECE] = line + 1, begins


class StateKernels(Protocol):
    """The operations of layers with a state. table: [N, STATE_FIELDS] int64, made before the step begins.

    Registers are [N, width], in the model's dtype; what is between them is float32.
    """

    def convolve(
        self, inputs: Tensor, table: Tensor, layer: StateLayer, *, weights: Tensor, bias: Tensor | None, activates: bool
    ) -> Tensor:
        """`Convolve`. weights: [taps, C] float32; bias: [C] float32. activates: by SiLU."""

    def delta_rule(
        self, inputs: Tensor, gates: Tensor, table: Tensor, layer: StateLayer, *, rates: Tensor, bias: Tensor,
        doubles: bool,
    ) -> Tensor:  # fmt: skip
        """`DeltaRule`. rates: [Hv] float32, negative: -exp(decay); bias: as many."""

    def scan(
        self, inputs: Tensor, gates: Tensor, table: Tensor, layer: StateLayer, *, rates: Tensor, bias: Tensor,
        skips: Tensor, least: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """`SelectiveScan`. rates, bias, skips: [Hv] float32."""

    def settle(self, memory: Tensor, layers: tuple[StateLayer, ...], held: int, kept: int, staged: int) -> None:
        """`Settle` of `kv/context.py`, of the states [bytes] of one session."""


def convolved(inputs: Tensor, weights: Tensor, bias: Tensor | None, *, activates: bool) -> Tensor:
    """What `convolve` gives for all tokens of a history, [N, C]."""
    taps, channels = weights.shape
    behind = F.pad(inputs.T[None], (taps - 1, 0))
    out = F.conv1d(behind, weights.T[:, None].to(inputs.dtype), bias, groups=channels)[0].T
    return F.silu(out) if activates else out


def by_delta_rule(
    inputs: Tensor, gates: Tensor, layer: StateLayer, *, rates: Tensor, bias: Tensor, doubles: bool
) -> Tensor:
    """What `delta_rule` gives for all tokens of a history, token by token: [N, Hv · Dv]. source: Yang et al., Gated
    Delta Networks, arXiv 2412.06464, equation 10."""
    count, heads, group = len(inputs), layer.value_heads, layer.value_heads // layer.key_heads
    width = layer.key_heads * layer.key_dim
    queries, keys = (part.view(count, -1, layer.key_dim) for part in (inputs[:, :width], inputs[:, width : 2 * width]))
    queries, keys = (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (queries, keys))
    queries = queries * layer.key_dim**-0.5
    queries, keys = (each.repeat_interleave(group, dim=1) for each in (queries, keys))
    values = inputs[:, 2 * width :].view(count, heads, layer.value_dim)
    betas = gates[:, :heads].sigmoid() * (2.0 if doubles else 1.0)
    decays = (rates * F.softplus(gates[:, heads:] + bias)).exp()
    state, out = inputs.new_zeros(heads, layer.key_dim, layer.value_dim), []
    for key, query, value, beta, decay in zip(keys, queries, values, betas, decays, strict=True):
        state = state * decay[:, None, None]
        added = (value - (key[:, :, None] * state).sum(1)) * beta[:, None]
        state = state + key[:, :, None] * added[:, None]
        out.append((query[:, :, None] * state).sum(1).flatten())
    return torch.stack(out)


def by_scan(
    inputs: Tensor, gates: Tensor, layer: StateLayer, *, rates: Tensor, bias: Tensor, skips: Tensor, least: float = 0.0
) -> Tensor:
    """What `scan` gives for all tokens of a history, token by token: [N, Hv · Dv]. source: Dao and Gu, Transformers are
    SSMs, arXiv 2405.21060, equation 1."""
    count, heads, group = len(inputs), layer.value_heads, layer.value_heads // layer.key_heads
    width, keyed = heads * layer.value_dim, layer.key_heads * layer.key_dim
    values = inputs[:, :width].view(count, heads, layer.value_dim)
    both = inputs[:, width : width + keyed], inputs[:, width + keyed :]
    keys, queries = (part.view(count, -1, layer.key_dim).repeat_interleave(group, dim=1) for part in both)
    steps = F.softplus(gates + bias).clamp(min=least)
    decays = (rates * steps).exp()
    state, out = inputs.new_zeros(heads, layer.key_dim, layer.value_dim), []
    for key, query, value, step, decay in zip(keys, queries, values, steps, decays, strict=True):
        state = state * decay[:, None, None] + key[:, :, None] * (value * step[:, None])[:, None]
        out.append(((query[:, :, None] * state).sum(1) + skips[:, None] * value).flatten())
    return torch.stack(out)
