"""Prefix sharing: entries of earlier sessions that a fork reads in place.

    parent      ■ ■ ■ ■ ■ ■ | ■ ■ ■              continues behind what it lent
    fork        · · · · · ·   □ □ □ | □          its own regions begin where the prefix ends
    its fork    · · · · · ·   · · ·   ▫ ▫        a prefix of two pieces

Attention reads the pieces in place, as views of the buffer: nothing is copied, and nothing writes to them. An
allocation stays as long as a fork borrows it, even after the session that it was reserved for has ended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kernels.reads import PREFIX_HEAD_SLOTS, PREFIX_START
from inference_engine.kernels.segmented_attention import AttentionSegment as AttentionPart
from inference_engine.kernels.segmented_attention import attend_parts
from inference_engine.kv.layout import Positions
from inference_engine.kv.memory.allocation import Allocation
from inference_engine.kv.memory.pool import KVBuffer, Mirror
from inference_engine.kv.parts.layer_part import LayerPart
from inference_engine.kv.parts.recurrent import PrefixStates
from inference_engine.kv.slots import LayerSlots
from inference_engine.kv.views import Region, Scoring, StagedQueries, StepReads, View, chunks_between

# A long prefill reads with so few queries at a time that there are no more scores than this.
_MOST_SCORES = 2**26


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The positions [first, last) in the regions of another session, whose slot 0 holds the position `base`."""

    allocation: Allocation
    region: Region
    base: int
    first: int
    last: int


class SharedPrefix:
    """The pieces of one set of layers, one after another, from position 0 on."""

    def __init__(
        self, pieces: Sequence[Piece], buffer: KVBuffer, *, entry_bytes: int, states: PrefixStates | None = None
    ) -> None:
        """entry_bytes: of one position in all its layers. states: the recurrent ones at its end, in the prefix of the
        first set of layers."""
        self.pieces = tuple(pieces)
        self.states = states
        self._buffer = buffer
        self._entry_bytes = entry_bytes

    @property
    def end(self) -> int:
        """The first position behind the prefix."""
        return self.pieces[-1].last

    @property
    def is_one_piece(self) -> bool:
        """Then regions continue it, as far as numbers go."""
        return len(self.pieces) == 1

    @property
    def nbytes(self) -> int:
        return self.end * self._entry_bytes + (0 if self.states is None else self.states.nbytes)

    @property
    def allocations(self) -> list[Allocation]:
        """Those that it is read in, and those of its states."""
        return [piece.allocation for piece in self.pieces] + ([self.states.allocation] if self.states else [])

    def borrow(self) -> None:
        for piece in self.pieces:
            piece.allocation.borrow(piece.last)
        if self.states is not None:
            self.states.allocation.borrow(self.end)

    def give_back(self) -> None:
        for allocation in self.allocations:
            allocation.give_back()

    def until(self, position: int) -> SharedPrefix:
        """Its entries of positions below this one, and its states if none of them is left out."""
        pieces = [replace(each, last=min(each.last, position)) for each in self.pieces if each.first < position]
        states = self.states if position >= self.end else None
        return SharedPrefix(pieces, self._buffer, entry_bytes=self._entry_bytes, states=states)

    def parts(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each piece, [Hkv, n, D]: views."""
        return [self.chunk(layer, piece.first, piece.last) for piece in self.pieces]

    def chunk(self, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the positions [first, last), which lie in one piece."""
        piece = next(piece for piece in self.pieces if piece.first <= first < piece.last)
        assert last <= piece.last
        slot, count = first - piece.base, last - first
        return (
            piece.region.slots(self._buffer.keys, layer, slot, count),
            piece.region.slots(self._buffer.values, layer, slot, count),
        )

    def entries(
        self, layers: Sequence[int], most: int, mirror: Mirror | None
    ) -> Iterator[tuple[Positions, Tensor, Tensor]]:
        """Positions, keys and values [layers, n, Hkv, D], `most` positions at a time. mirror: then of all ranks."""
        for piece in self.pieces:
            for chunk in chunks_between(piece.first, piece.last, most):
                states = [self.chunk(layer, chunk.start, chunk.stop) for layer in layers]
                keys, values = (
                    torch.cat(
                        [
                            torch.stack(tuple(of_rank)).transpose(1, 2)
                            for of_rank in ([by_layer] if mirror is None else mirror.collected(by_layer))
                        ],
                        dim=2,
                    )
                    for by_layer in zip(*states, strict=True)
                )
                yield np.array(chunk, dtype=np.int64), keys, values


class PrefixEntries(LayerPart):
    """A shared prefix as a part of the layers that continue behind it. Its memory belongs to other sessions."""

    def __init__(self, slots: LayerSlots, prefix: SharedPrefix) -> None:
        self._slots = slots
        self._prefix = prefix

    def has_numbers(self, queries: StagedQueries, step: StepReads) -> bool:
        return self._prefix.is_one_piece

    def read(self, queries: StagedQueries, step: StepReads) -> int:
        region, layers = self._prefix.pieces[0].region, self._slots.layer_set.layers
        starts = np.array([region.starts[layer] for layer in layers])
        step.numbers.regions[self._slots.layer_index, queries.real, PREFIX_START] = starts[:, None]
        step.numbers.regions[self._slots.layer_index, queries.real, PREFIX_HEAD_SLOTS] = region.region
        return sys.maxsize

    def stage(self, positions: Positions, generated: NDArray[np.bool_]) -> int:
        return sys.maxsize

    def view(self, queries: StagedQueries, step: StepReads, inner: Callable[[], View]) -> View:
        count = self._slots.slot_count(queries.end)
        mask = self._slots.mask(queries.positions, count, step)
        return PrefixView(region=self._slots.region, count=count, mask=mask, prefix=self._prefix)

    def can_rewind(self, at: int, length: int) -> bool:
        return at >= self._prefix.end

    def forget(self, at: int, length: int) -> None:
        """Nothing to do: other sessions own the entries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixView(View):
    """Reads the prefix and the regions behind it, the first `count` slots under a mask, with one softmax.

    mask: [T, count]; None: each query sees each key. Every query of the step is behind the prefix and sees all of it.
    """

    region: Region
    count: int
    mask: Tensor | None
    prefix: SharedPrefix

    def read(self, layer: int, queries: Tensor, buffer: KVBuffer, scoring: Scoring) -> Tensor:
        held = [AttentionPart(*states) for states in self.prefix.parts(layer)]
        keys, values = (self.region.slots(states, layer, 0, self.count) for states in (buffer.keys, buffer.values))
        count, heads, _ = queries.shape
        step = max(1, _MOST_SCORES // (heads * (self.prefix.end + self.count)))
        outs = []
        for first in range(0, count, step):
            some = slice(first, first + step)
            own = AttentionPart(keys, values, None if self.mask is None else self.mask[some])
            outs.append(
                attend_parts(
                    queries[some],
                    [*held, own],
                    scaling=scoring.scaling,
                    softcap=scoring.softcap,
                    head_sinks=scoring.head_sinks,
                )
            )
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out.to(queries.dtype)
