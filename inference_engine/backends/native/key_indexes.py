"""Indexes of keys as the native library reads them (`native/src/selection.h`): addresses, and tables of rotations."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from inference_engine.backends.native.decoders import RotationTables, native_codes, native_decoder
from inference_engine.kernels.components import LANES, RUNS_OF_TILE, IndexShape, KeyComponents
from inference_engine.kv.context import ArchivedCodes, LayerIndex, RestoreCache
from inference_engine.native.library import KeyIndex, NativeArchive, ProductIdentity

Floats = NDArray[np.float32]
# Radians from a tile's middle to its end up to which a frequency is taken as slow, and as very slow.
_SLOW, _CRAWLING = 0.25, 0.01
_BEGINNING = 2**30  # of a clock of tokens: what was chosen at 0 was chosen long ago


class Rotation(Protocol):
    """A rotation table: angles per position, float32 [turned / 2]."""

    @property
    def frequencies(self) -> Floats: ...


@dataclass(frozen=True, slots=True, eq=False)
class RunTables:
    """Tables for the rotations of runs of positions. middles: [tiles, 2, half]; tables: [2, fast + 2, 16]; frequencies:
    [half]. Frequencies from `fast` on are a series, from `crawling` on of two terms.
    """

    middles: Floats
    tables: Floats
    frequencies: Floats
    fast: int
    crawling: int


@dataclass(frozen=True, eq=False)
class _Matrices:
    """What codes of a layer are multiplied with, by channel, padded to whole vectors: [Hkv, D, ≥ r + 1] float32."""

    components: KeyComponents
    by_channel: Tensor

    @staticmethod
    def of(components: KeyComponents, shape: IndexShape) -> _Matrices:
        by_channel = components.rows(shape).mT
        return _Matrices(components, pad(by_channel, (0, -by_channel.shape[-1] % LANES)).contiguous())


class NativeIndexes:
    """What `KVContext.open_index` needs of a native model."""

    def __init__(
        self,
        rotaries: Mapping[str, Rotation],
        turns: Mapping[str, RotationTables],
        identity: ProductIdentity,
        *,
        slow: float = _SLOW,
    ) -> None:
        """slow: radians up to which a frequency is taken as slow; 0: none is, and each has a table."""
        self._turns, self._identity, self._slow = turns, identity, slow
        self._frequencies = {name: np.asarray(table.frequencies, np.float64) for name, table in rotaries.items()}
        # Sessions share them: they are in no bound. As long as an index has them, the components they are of live.
        self._matrices: WeakValueDictionary[tuple[int, IndexShape], _Matrices] = WeakValueDictionary()

    def open(self, index: LayerIndex) -> NativeIndex | None:
        """None for heads that are no whole vectors, and keys whose rotation is not in the tables."""
        found = self._frequencies.get(index.rotary)
        if found is None or index.components.mean.shape[-1] % LANES:
            return None
        tiles = index.capacity // index.shape.tile
        tables = run_tables(tuple(found.tolist()), index.shape.run, tiles, slow=self._slow, crawling=_CRAWLING)
        kind = (id(index.components), index.shape)
        matrices = self._matrices.get(kind)
        if matrices is None:
            matrices = self._matrices[kind] = _Matrices.of(index.components, index.shape)
        return NativeIndex(index, matrices, tables, self._turns[index.rotary], self._identity)


@dataclass(frozen=True, slots=True, eq=False)
class _CacheTables:
    """What a restore cache holds, by KV head. Zeros, which take no memory until they are written, stand for nothing.

    held: 1 + the position in each slot; slot_of: 1 + the slot of each position from `first` on. until, clocks, known,
    rooms: as in `native/src/types.h`.
    """

    held: NDArray[np.int32]
    until: NDArray[np.uint32]
    slot_of: NDArray[np.integer[Any]]
    clocks: NDArray[np.uint32]
    known: NDArray[np.int32]
    rooms: NDArray[np.int64]
    first: int

    @staticmethod
    def of(codes: ArchivedCodes, cache: RestoreCache, heads: int) -> _CacheTables:
        most = cache.slots + cache.most_rooms * cache.each
        rooms = np.zeros(1 + cache.most_rooms, np.int64)
        rooms[0] = cache.start
        return _CacheTables(
            held=np.zeros((heads, most), np.int32),
            until=np.zeros((heads, most), np.uint32),
            slot_of=np.zeros((heads, len(codes.halves[0])), np.uint16 if most < 2**16 else np.int32),
            clocks=np.full(heads, _BEGINNING, np.uint32),
            known=np.full(heads, cache.slots, np.int32),
            rooms=rooms,
            first=codes.first,
        )

    def forget(self, first: int, end: int) -> None:
        """What the slots [first, end) hold."""
        for held, until, slot_of in zip(self.held, self.until, self.slot_of, strict=True):
            own = held[first:end]
            slot_of[own[own > 0] - 1 - self.first] = 0
            own[:] = 0
            until[first:end] = 0


class NativeIndex:
    """Implements OpenIndex. Its number is the address of the library's structure."""

    says_found = False

    def __init__(
        self,
        index: LayerIndex,
        matrices: _Matrices,
        tables: RunTables,
        turns: RotationTables,
        identity: ProductIdentity,
    ) -> None:
        self._turns, self._identity = turns, identity
        self._heads = len(index.components.mean)
        even, odd = index.halves
        self._alive = (matrices, tables, index.halves)
        self._archive: NativeArchive | None = None
        self._read: tuple[object, ...] | None = None  # what the archive points to
        self._tables: _CacheTables | None = None
        self._structure = KeyIndex(
            even=even.data_ptr(),
            odd=odd.data_ptr(),
            rows=matrices.by_channel.data_ptr(),
            middles=tables.middles.ctypes.data,
            tables=tables.tables.ctypes.data,
            frequencies=tables.frequencies.ctypes.data,
            rank=index.shape.rank,
            bits=index.shape.bits,
            run=index.shape.run,
            words=index.shape.words,
            turned=2 * len(tables.frequencies),
            fast=tables.fast,
            crawling=tables.crawling,
        )

    @property
    def number(self) -> int:
        return ctypes.addressof(self._structure)

    def restore_from(self, codes: ArchivedCodes | None, cache: RestoreCache | None, found: Tensor) -> bool:
        if codes is None or cache is None:
            return False
        decoder, tables = native_decoder(codes.decoder, self._identity), _CacheTables.of(codes, cache, self._heads)
        self._archive = NativeArchive(
            codes=native_codes(codes),
            turning=self._turns.structure,
            decoder=ctypes.addressof(decoder.structure),
            held=tables.held.ctypes.data,
            until=tables.until.ctypes.data,
            clocks=tables.clocks.ctypes.data,
            slot_of=tables.slot_of.ctypes.data,
            known=tables.known.ctypes.data,
            rooms=tables.rooms.ctypes.data,
            most=tables.held.shape[1],
            tokens=tables.slot_of.shape[1],
            first=cache.slots,
            each=max(1, cache.each),
            slots=cache.slots,
            is_wide=tables.slot_of.dtype == np.int32,
        )
        self._read, self._tables = (codes, decoder), tables
        self._structure.archive = ctypes.addressof(self._archive)
        return True

    def forget_restored(self) -> None:
        if self._archive is not None and self._tables is not None:
            self._tables.forget(0, self._archive.first)

    def add_restored(self, start: int) -> None:
        archive, tables = self._archive, self._tables
        assert archive is not None and tables is not None
        tables.forget(archive.slots, tables.held.shape[1])  # what a room had that was taken back
        tables.rooms[1 + (archive.slots - archive.first) // archive.each] = start
        tables.known[:] = archive.slots + archive.each
        archive.slots += archive.each

    def keep_restored(self, rooms: int) -> None:
        if (archive := self._archive) is not None:
            archive.slots = archive.first + rooms * archive.each

    def restore_no_more(self) -> None:
        self._structure.archive = None
        self._archive = self._read = self._tables = None

    @property
    def restored_numbers(self) -> int:
        return 0

    @property
    def restored_all_finite(self) -> bool:
        return self._archive is None or not self._archive.is_broken


@lru_cache(maxsize=16)
def run_tables(frequencies: tuple[float, ...], run: int, tiles: int, *, slow: float, crawling: float) -> RunTables:
    """Tables for runs of `run` positions in `tiles` tiles. slow, crawling: radians, see `RunTables`.

    A run has the mean rotation of its positions: that of its middle, shrunk by the mean cosine of its offsets.
    """
    speeds = np.array(frequencies)
    distances = (np.arange(LANES) + 0.5) * run
    offsets = np.arange(run) - (run - 1) / 2
    shrunk = np.cos(offsets[:, None] * speeds).mean(0)
    middles = (np.arange(tiles)[:, None] + 0.5) * RUNS_OF_TILE * run - 0.5
    turns = middles * speeds
    reach = np.abs(speeds) * distances[-1]
    # Frequencies fall, so those that are slow come last; where they do not, later fast ones make all before them fast.
    fast = int(np.flatnonzero(reach > slow)[-1]) + 1 if (reach > slow).any() else 0
    last = int(np.flatnonzero(reach > crawling)[-1]) + 1 if (reach > crawling).any() else 0
    quick = speeds[:fast, None] * distances
    one = np.ones((1, LANES))
    even = np.concatenate([np.cos(quick), one, -(distances[None] ** 2) / math.factorial(2)])
    odd = np.concatenate([np.sin(quick), distances[None], -(distances[None] ** 3) / math.factorial(3)])
    return RunTables(
        middles=np.stack([np.cos(turns) * shrunk, np.sin(turns) * shrunk], axis=1).astype(np.float32),
        tables=np.stack([even, odd]).astype(np.float32),
        frequencies=speeds.astype(np.float32),
        fast=fast,
        crawling=max(fast, last),
    )
