"""Layers that keep a recurrent state, in plain operations: what `kernels/states.py` says, of a step's sessions in turn.

Tokens of a session are computed in windows, as one product each (Yang et al., arXiv 2412.06464, section 3.3; Dao and
Gu, arXiv 2405.21060, section 6). S is the state before a window, c the logarithm of what decays in it, up to a token:

    added(t)   = beta(t) · (v(t) - exp(c(t)) · k(t) S - Σ exp(c(t) - c(s)) · (k(t) k(s)) · added(s)),  s before t
    output(t)  = exp(c(t)) · q(t) S + Σ exp(c(t) - c(s)) · (q(t) k(s)) · added(s),  s up to t

Of a state space, added(t) is t's value times its step. A short step reads the state and the open entries where they
lie; of a long one the state after its last whole chunk is computed. The host writes both when the step is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx
import torch
from torch import Tensor

from inference_engine.backends.mlx.bridge import as_torch
from inference_engine.kernels.states import CHUNK, ROOM, StateLayer
from inference_engine.kv.plan import StepPlan

_WINDOW = 64  # tokens
_BLOCK = 8  # tokens whose sums of each other are solved as one


@dataclass(frozen=True, slots=True, eq=False)
class OpenEntries:
    """Of tokens since a state. keys: [Hk, 1, n, Dk], values: [Hk, group, n, Dv], decays: [Hk, group, n]."""

    keys: mx.array
    values: mx.array
    decays: mx.array


@dataclass(frozen=True, slots=True, eq=False)
class RuleInputs:
    """Of tokens, float32, shaped as `OpenEntries`. decays: logarithms, each token's own. betas: None for a scan."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    decays: mx.array
    betas: mx.array | None

    def of(self, tokens: slice) -> RuleInputs:
        queries, keys, values, decays = (x[:, :, tokens] for x in (self.queries, self.keys, self.values, self.decays))
        return RuleInputs(queries, keys, values, decays, None if self.betas is None else self.betas[:, :, tokens])


class StepStates:
    """The states of a step's sessions, while its graph is built."""

    def __init__(self, plan: StepPlan, pool: mx.array, itemsize: int) -> None:
        """pool: [R, numbers], of so many bytes each."""
        width = pool.shape[1] * itemsize
        self._spans: list[_Span] = []
        for tokens, position, memory in plan.states:
            first, rest = divmod(memory.before.data_ptr() - plan.pool.address, width)
            count = memory.before.numel()
            rows = pool[first : first + -(-(rest + count) // width)]
            kept = mx.view(mx.view(rows.reshape(-1), mx.uint8)[rest : rest + count], mx.float32)
            self._spans.append(_Span(tokens, position, kept, memory.before, memory.after))

    def convolve(
        self, layer: StateLayer, inputs: mx.array, weights: mx.array, bias: mx.array | None, *, activates: bool
    ) -> mx.array:
        """[N, C] of inputs [N, C]. weights: [taps, C]."""
        wide, outs = inputs.astype(mx.float32), []
        for span in self._spans:
            rows = mx.concatenate([span.inputs_before(layer), wide[span.tokens]])
            span.keep_inputs(layer, rows)
            taps = (rows[tap : tap + span.count] * weights[tap] for tap in range(layer.taps))
            out = functools.reduce(mx.add, taps)
            outs.append(out if bias is None else out + bias)
        out = mx.concatenate(outs)
        return (out * mx.sigmoid(out) if activates else out).astype(inputs.dtype)

    def run(self, layer: StateLayer, given: RuleInputs) -> mx.array:
        """[N, Hv · Dv], float32."""
        outs = []
        for span in self._spans:
            out = span.run(layer, given.of(span.tokens))
            outs.append(out.transpose(2, 0, 1, 3).reshape(span.count, -1))
        return mx.concatenate(outs)

    def written(self) -> list[mx.array]:
        return [numbers for span in self._spans for _, numbers in span.writes]

    def write(self) -> None:
        """When all of `written` is computed."""
        for span in self._spans:
            for place, numbers in span.writes:
                place.copy_(as_torch(numbers))


class _Span:
    """One session's tokens."""

    def __init__(self, tokens: slice, position: int, kept: mx.array, before: Tensor, after: Tensor | None) -> None:
        """kept: what lies in `before`."""
        self.tokens, self.count = tokens, tokens.stop - tokens.start
        self._kept, self._into = kept, (before if after is None else after).view(torch.float32)
        self._is_short = after is None
        self._held = position % CHUNK  # entries that are open
        self._opens = (position + self.count) % CHUNK  # of a long step, behind it
        # Of the windows of a long step: where each begins, the one of what stays open, and the end.
        whole = self.count - self._opens
        self._cuts = [*range(0, whole, _WINDOW), whole, self.count][: None if self._opens else -1]
        self.writes: list[tuple[Tensor, mx.array]] = []

    def inputs_before(self, layer: StateLayer) -> mx.array:
        """[taps - 1, C], those of the tokens before."""
        return self._rows(_places(layer)[4], layer.channels, self._held, layer.taps - 1)

    def keep_inputs(self, layer: StateLayer, rows: mx.array) -> None:
        """rows: [taps - 1 + n, C], those before and the step's own."""
        before, at = layer.taps - 1, _places(layer)[4]
        if self._is_short:
            self._write(at, layer.channels, before + self._held, rows[before:])
        else:
            self._write(at, layer.channels, 0, rows[len(rows) - before - self._opens :])

    def run(self, layer: StateLayer, given: RuleInputs) -> mx.array:
        """[Hk, group, n, Dv]"""
        heads, group = layer.key_heads, layer.value_heads // layer.key_heads
        at, end = _places(layer)[:2]
        state = self._kept[at:end].reshape(heads, group, layer.key_dim, layer.value_dim)
        opened = self._entries(layer) if self._held else None
        if self._is_short:
            out, entries = _window(state, opened, given)
            self._keep(layer, self._held, entries)
            return out
        if opened is not None:
            state = _folded(state, opened)
        outs = []
        for first, last in pairwise(self._cuts):
            out, entries = _window(state, None, given.of(slice(first, last)))
            outs.append(out)
            if self._opens and last == self.count:
                self._keep(layer, 0, entries)
            else:
                state = _folded(state, entries)
        self.writes.append((self._into[at:end], state.reshape(-1)))
        return outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=2)

    def _entries(self, layer: StateLayer) -> OpenEntries:
        _, keys_at, values_at, decays_at, _ = _places(layer)
        heads, group, held = layer.key_heads, layer.value_heads // layer.key_heads, self._held
        keys = self._rows(keys_at, heads * layer.key_dim, 0, held).reshape(held, heads, 1, -1)
        values = self._rows(values_at, layer.value_heads * layer.value_dim, 0, held).reshape(held, heads, group, -1)
        decays = self._rows(decays_at, layer.value_heads, 0, held).reshape(held, heads, group)
        return OpenEntries(keys.transpose(1, 2, 0, 3), values.transpose(1, 2, 0, 3), decays.transpose(1, 2, 0))

    def _keep(self, layer: StateLayer, held: int, entries: OpenEntries) -> None:
        """Behind so many open ones. Decays are kept since the chunk began that each is of."""
        _, keys_at, values_at, decays_at, _ = _places(layer)
        decays, count = entries.decays, entries.decays.shape[2]
        if held + count > CHUNK:
            own = CHUNK - held  # of the chunk that is open
            decays = mx.concatenate([decays[:, :, :own], decays[:, :, own:] - decays[:, :, own - 1 : own]], axis=2)
        self._write(keys_at, layer.key_heads * layer.key_dim, held, entries.keys.transpose(2, 0, 1, 3))
        self._write(values_at, layer.value_heads * layer.value_dim, held, entries.values.transpose(2, 0, 1, 3))
        self._write(decays_at, layer.value_heads, held, decays.transpose(2, 0, 1))

    def _rows(self, at: int, width: int, first: int, count: int) -> mx.array:
        return self._kept[at + first * width : at + (first + count) * width].reshape(count, width)

    def _write(self, at: int, width: int, first: int, rows: mx.array) -> None:
        if rows.size:
            begin = at + first * width
            self.writes.append((self._into[begin : begin + rows.size], rows.reshape(-1)))


def settle(states: Tensor, layers: Sequence[StateLayer], held: int, kept: int, staged: int) -> None:
    """`Settle` of `kv/context.py`, of the states [bytes] of one session, by torch: it is between two steps."""
    numbers, entries, gone = states.view(torch.float32), held + kept, (held + kept) // CHUNK * CHUNK
    for layer in layers:
        at = _places(layer)
        heads, group = layer.key_heads, layer.value_heads // max(layer.key_heads, 1)  # no heads: a convolution alone
        widths = (heads * layer.key_dim, layer.value_heads * layer.value_dim, layer.value_heads, layer.channels)
        rooms = (ROOM, ROOM, ROOM, ROOM + layer.taps - 1)
        parts = [
            numbers[first : first + width * room].view(room, width)
            for first, width, room in zip(at[1:], widths, rooms, strict=True)
        ]
        state = numbers[at[0] : at[1]].view(heads, group, layer.key_dim, layer.value_dim)
        for first in range(0, gone if layer.value_heads else 0, CHUNK):
            keys, values, decays = (part[first : first + CHUNK] for part in parts[:3])
            decays = decays.view(CHUNK, heads, group)
            shares = (decays[-1] - decays).exp()[..., None] * values.view(CHUNK, heads, group, -1)
            added = torch.einsum("nhk,nhgv->hgkv", keys.view(CHUNK, heads, -1), shares)
            state.mul_(decays[-1].exp()[..., None, None]).add_(added)
        for part, more in zip(parts, (0, 0, 0, layer.taps - 1), strict=True):
            left = entries - gone + more
            if gone:
                part[:left] = part[gone : gone + left].clone()
            part[left : held + staged + more] = 0.0


def _places(layer: StateLayer) -> tuple[int, int, int, int, int]:
    """Where matrices, keys, values, decays and inputs begin in the states of a session; see `kernels/states.py`."""
    matrices, keys = layer.offset, layer.offset + layer.value_heads * layer.key_dim * layer.value_dim
    values = keys + ROOM * layer.key_heads * layer.key_dim
    decays = values + ROOM * layer.value_heads * layer.value_dim
    return matrices, keys, values, decays, decays + ROOM * layer.value_heads


# -- one window --------------------------------------------------------------------------------------------------------


def _window(state: mx.array, opened: OpenEntries | None, given: RuleInputs) -> tuple[mx.array, OpenEntries]:
    """Outputs [Hk, group, n, Dv] and the entries of its tokens. opened: entries between the state and the window."""
    count = given.decays.shape[2]
    decays = mx.cumsum(given.decays, axis=2)
    if opened is not None:
        decays = decays + opened.decays[:, :, -1:]

    def read(vectors: mx.array) -> mx.array:
        found = mx.exp(decays)[..., None] * (vectors @ state)
        if opened is None:
            return found
        shares = mx.exp(decays[..., None] - opened.decays[:, :, None])
        return found + ((vectors @ opened.keys.swapaxes(2, 3)) * shares) @ opened.values

    seen = mx.tri(count, dtype=mx.bool_)
    shares = mx.exp(mx.where(seen, decays[..., None] - decays[:, :, None], -mx.inf))
    added, turned = given.values, given.keys.swapaxes(2, 3)
    if given.betas is not None:
        betas = given.betas[..., None]
        before = mx.where(mx.tri(count, k=-1, dtype=mx.bool_), (given.keys @ turned) * shares * betas, 0.0)
        added = _solved(before, (added - read(given.keys)) * betas)
    out = read(given.queries) + ((given.queries @ turned) * shares) @ added
    return out, OpenEntries(given.keys, added, decays)


def _folded(state: mx.array, entries: OpenEntries) -> mx.array:
    """The state behind these entries."""
    last = entries.decays[:, :, -1:]
    shares = entries.values * mx.exp(last - entries.decays)[..., None]
    return state * mx.exp(last)[..., None] + entries.keys.swapaxes(2, 3) @ shares


def _solved(before: mx.array, values: mx.array) -> mx.array:
    """x of x + before · x = values. before: [..., n, n], of each token the shares of those before it.

    Block after block, each by the sum of the powers of what is within it, which end: not as one, for powers of more
    tokens may be too large to cancel out.
    """
    count = values.shape[2]
    found: list[mx.array] = []
    for first in range(0, count, _BLOCK):
        end = min(first + _BLOCK, count)
        own = values[:, :, first:end]
        if found:
            own = own - before[:, :, first:end, :first] @ (found[0] if len(found) == 1 else mx.concatenate(found, 2))
        power, reach = before[:, :, first:end, first:end], 1
        if end - first > 1:
            own = own - power @ own
        while (reach := 2 * reach) < end - first:
            power = power @ power
            own = own + power @ own
        found.append(own)
    return found[0] if len(found) == 1 else mx.concatenate(found, axis=2)
