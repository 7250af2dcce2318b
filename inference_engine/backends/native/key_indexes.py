"""Indexes of keys as the native library reads them (`native/src/selection.h`): addresses, and tables of rotations."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol
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
        self._held: NDArray[np.int32] | None = None  # the token in each of its slots, -1 for none
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
        decoder = native_decoder(codes.decoder, self._identity)
        held = np.full((self._heads, cache.slots), -1, np.int32)
        until, clocks = np.zeros((self._heads, cache.slots), np.uint32), np.zeros(self._heads, np.uint32)
        self._archive = NativeArchive(
            codes=native_codes(codes),
            turning=self._turns.structure,
            decoder=ctypes.addressof(decoder.structure),
            held=held.ctypes.data,
            until=until.ctypes.data,
            clocks=clocks.ctypes.data,
            start=cache.start,
            slots=cache.slots,
        )
        self._read, self._held = (codes, decoder, until, clocks), held
        self._structure.archive = ctypes.addressof(self._archive)
        return True

    def forget_restored(self) -> None:
        if self._held is not None:
            self._held.fill(-1)

    def restore_no_more(self) -> None:
        self._structure.archive = None
        self._archive = self._read = self._held = None

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
