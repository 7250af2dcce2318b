"""Old entries that a query reads from their codes, beside the entries of its region: `kernels/ragged_attention.py`.

    codes ── units ──▶ numbers of a group ── entries ──▶ keys, rotated, and values of a tile ── attend ──▶ states

A line that reads slots may have an `archive`: the number by which a device's operation knows the codes of the layer's
old entries, those of the positions from the sink up to the line's floor. The query attends to all of them, as well as
to what it sees in its region. An entry has the bits that `Entries` of `kernels/latents.py` gives it, up to the order
in which an operation multiplies; it is read and gone.

The layers of a group share their numbers, so the first of them has these unpacked, and the others read them again.

This is the reference, which decodes anew in each layer; `triton/archived.py` has the operation for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from inference_engine.kernels.latents import PLAIN, CodeTables, MadeLayer, Synthesis, Turn

MOST_QUERIES = 64  # of a step in which some read archives
MOST_BYTES = 2**28  # of numbers that a step holds; with more queries than that, they take turns
LEAST_ROOM = 1024  # tokens

_numbers = count(1)
_known: WeakValueDictionary[int, LayerArchive] = WeakValueDictionary()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadFrom:
    """What steps whose queries read archives have in common, so that they are recorded once.

    numbers: the most that a token's code has, padded, each a `dtype`. tokens: so many there is room for; a query behind
    more cannot read so. begins: the layers with which a group begins.
    """

    numbers: int
    tokens: int
    dtype: torch.dtype
    begins: tuple[int, ...]

    @property
    def query_bytes(self) -> int:
        """Of one query's numbers."""
        return self.tokens * self.numbers * self.dtype.itemsize

    @property
    def fits(self) -> bool:
        """Is there room for them?"""
        return self.query_bytes <= MOST_BYTES

    @property
    def most_tokens(self) -> int:
        """For so many there can be room, 0 for none: one of the sizes of `room_for`."""
        most = MOST_BYTES // (self.numbers * self.dtype.itemsize)
        return 0 if most < LEAST_ROOM else 1 << (most.bit_length() - 1)

    def beside(self, other: ReadFrom | None) -> ReadFrom:
        """What both need."""
        if other is None or other == self:
            return self
        begins = tuple(sorted({*self.begins, *other.begins}))
        numbers, tokens = max(self.numbers, other.numbers), max(self.tokens, other.tokens)
        return ReadFrom(numbers=numbers, tokens=tokens, dtype=self.dtype, begins=begins)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Unpacked:
    """Room for numbers of a step's queries, [queries, tokens, numbers], and whether a layer has them unpacked first.

    Fewer rooms than queries: they take turns, and have them unpacked in every layer. Padded numbers that a code does
    not have, and tokens behind a query's last, are undefined.
    """

    units: Tensor
    is_first: bool


def open_room(read: ReadFrom, *, queries: int, device: torch.device) -> Tensor:
    """`Unpacked.units` of a step."""
    rooms = max(1, min(queries, MOST_BYTES // read.query_bytes))
    return torch.empty((rooms, read.tokens, read.numbers), dtype=read.dtype, device=device)


def room_for(tokens: int) -> int:
    """Of how many tokens the room for a history of `tokens` is: few sizes, since steps are recorded for each."""
    return max(LEAST_ROOM, 1 << (tokens - 1).bit_length())


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True, eq=False)
class LayerArchive:
    """The codes of one layer's old entries in one session.

    halves: uint8 [places, half] each; place i is that of position `first` + i. turn: of all positions, counted from 0,
    by which keys are rotated; None: they are not. found: float32 [2], becomes NaN where one of the keys, or of the
    values, that are read is not finite.
    """

    halves: tuple[Tensor, Tensor]
    first: int
    tables: CodeTables
    synthesis: Synthesis
    turn: Turn | None
    found: Tensor

    def entries_before(self, floor: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the positions before `floor`, [Hkv, n, D] each, in the dtype of `like`."""
        tokens = max(0, floor - self.first)
        heads, width = self.synthesis.means.shape
        keys, values = (like.new_empty((heads, tokens, width // 2)) for _ in range(2))
        low, high = (half[:tokens] for half in self.halves)
        own = slice(self.first, self.first + tokens)
        turn = None if self.turn is None else (self.turn[0][own], self.turn[1][own])
        units = PLAIN.units(low, high, self.tables, self.synthesis.matrix.dtype)
        PLAIN.entries(units, [MadeLayer(self.synthesis, keys, values, self.found)], turn=turn)
        return keys, values


class KnownArchives(Protocol):
    """What a device's operation keeps of some layers' archives, for as long as plan lines may name them."""

    @property
    def numbers(self) -> Sequence[int]:
        """The `archive` of plan lines, by layer; never 0."""


class Archives(Protocol):
    """Makes archives known to the device's operation over regions; None if it cannot read them."""

    def __call__(self, archives: Sequence[LayerArchive]) -> KnownArchives | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """Implements KnownArchives."""

    archives: tuple[LayerArchive, ...]
    numbers: tuple[int, ...]


def open_archives(archives: Sequence[LayerArchive]) -> KnownArchives:
    """Implements Archives, for the reference."""
    known = _Known(tuple(archives), tuple(next(_numbers) for _ in archives))
    _known.update(zip(known.numbers, known.archives, strict=True))
    return known


def entries_before(number: int, floor: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """`LayerArchive.entries_before` of a line's archive."""
    return _known[number].entries_before(floor, like)


def numbers_of(number: int) -> int:
    """How many numbers a token's code has in a line's archive, padded."""
    return _known[number].tables.padded
