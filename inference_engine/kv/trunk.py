"""A trunk: the rows that a fork reads where the sessions before it hold them.

    parent      ■ ■ ■ ■ ■ ■ | ■ ■ ■              goes on behind what it lent
    fork        · · · · · ·   □ □ □ | □          its own lanes begin where the trunk ends
    its fork    · · · · · ·   · · ·   ▫ ▫        a trunk of two pieces

Attention reads the pieces where they are (`kv/trunk_view.py`): views of the arena, of which nothing is copied, and to
which nothing writes. Rows stay where they are as long as a fork borrows the slab they lie in, whatever becomes of the
session it was reserved for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from inference_engine.kv.pool import Arena
from inference_engine.kv.slab import Slab
from inference_engine.kv.views import Lane

# Each piece is an operation in each layer of each step: a fork of many generations copies instead.
MOST_PIECES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The positions [first, last) in the lanes of another session, whose slot 0 holds the position `base`."""

    slab: Slab
    lane: Lane
    base: int
    first: int
    last: int


class Trunk:
    """The pieces of one set of layers, one after another, from position 0 on: a `RowSource`."""

    def __init__(self, pieces: Sequence[Piece], arena: Arena, *, row_bytes: int) -> None:
        """row_bytes: of a position in all its layers."""
        self.pieces = tuple(pieces)
        self._arena = arena
        self._row_bytes = row_bytes

    @property
    def end(self) -> int:
        """The first position that is not in it."""
        return self.pieces[-1].last

    @property
    def nbytes(self) -> int:
        return self.end * self._row_bytes

    def borrow(self) -> None:
        for piece in self.pieces:
            piece.slab.borrow(piece.last)

    def give_back(self) -> None:
        for piece in self.pieces:
            piece.slab.give_back()

    def parts(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each piece, [Hkv, n, D]: views."""
        return [self.chunk(layer, piece.first, piece.last) for piece in self.pieces]

    def chunk(self, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the positions [first, last), which lie in one piece."""
        piece = next(piece for piece in self.pieces if piece.first <= first < piece.last)
        assert last <= piece.last
        slot, count = first - piece.base, last - first
        return (
            piece.lane.slots(self._arena.keys, layer, slot, count),
            piece.lane.slots(self._arena.values, layer, slot, count),
        )
