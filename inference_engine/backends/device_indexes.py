"""Indexes of keys as the operation over regions of a torch device knows them (`kernels/components.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inference_engine.backends.torch_coder import TorchCoder
from inference_engine.kernels.components import IndexShape, KeyComponents, KeyIndexes
from inference_engine.kv.context import ArchivedCodes, LayerIndex, RestoreCache, TiledLayers, TileWriter
from inference_engine.kv.geometry import IMMOVABLE, UNROTATED
from inference_engine.models.seam import Seam

_SHIFTS = (1, 3, 40)  # positions by which a rotation is tried
_ROTATES_ALIKE = 1e-2  # largest difference, of numbers of size 1


class DeviceIndexes:
    """What `KVContext.open_index` and `open_tiles` need of a model on a device."""

    def __init__(
        self, seam: Seam, indexes: KeyIndexes, device: torch.device, coder: TorchCoder, *, trained_positions: int
    ) -> None:
        """coder: knows how codes of chosen tokens become entries."""
        self._seam, self._indexes, self._device, self._coder = seam, indexes, device, coder
        self._trained = trained_positions
        self._frequencies: dict[tuple[str, int], Tensor | None] = {}
        self._rows: dict[tuple[int, IndexShape], tuple[KeyComponents, Any]] = {}
        self._turns: dict[tuple[str, int, IndexShape, int], Any] = {}

    def open(self, index: LayerIndex) -> DeviceIndex | None:
        """None for keys whose rotation is not that of two halves: then queries read by views."""
        head_dim = index.components.mean.shape[-1]
        frequencies = self._frequencies_of(index.rotary, head_dim)
        if frequencies is None:
            return None
        turned = 2 * len(frequencies)
        found = self._rows.get((index.layer, index.shape))
        if found is None or found[0] is not index.components:
            rows = self._indexes.rows(index.components, index.shape, turned, self._device)
            found = self._rows[index.layer, index.shape] = (index.components, rows)
        tokens = self._trained  # few tables, for sessions of all lengths
        while tokens < index.capacity:
            tokens *= 2
        kind = (index.rotary, head_dim, index.shape, tokens)
        if kind not in self._turns:
            self._turns[kind] = self._indexes.turns(frequencies, head_dim, index.shape, tokens, self._device)
        return DeviceIndex(self._indexes, self._coder, self._seam.dtype, index, found[1], self._turns[kind])

    def open_tiles(self, layers: TiledLayers) -> TileWriter:
        numbers = torch.tensor([list(layers.numbers), list(layers.starts)], dtype=torch.int64)
        table = numbers.T.contiguous().to(self._device)

        def write(keys: Tensor, first: int, end: int) -> None:
            self._indexes.write_tiles(
                keys,
                table,
                kv_heads=layers.kv_heads,
                region=layers.region,
                first=first,
                end=end,
                shape=layers.shape,
                sink=layers.sink,
                ring=layers.ring,
            )

        return write

    def _frequencies_of(self, rotary: str, head_dim: int) -> Tensor | None:
        kind = (rotary, head_dim)
        if kind not in self._frequencies:
            self._frequencies[kind] = frequencies_of(self._seam, rotary, head_dim, self._device)
        return self._frequencies[kind]


def can_index(seam: Seam, device: torch.device) -> bool:
    """Can all keys be indexed that queries may choose from?"""
    kinds = {(layer.rotary, layer.head_dim) for layer in seam.layers if layer.native_window is None}
    return all(frequencies_of(seam, *kind, device) is not None for kind in kinds)


def frequencies_of(seam: Seam, rotary: str, head_dim: int, device: torch.device) -> Tensor | None:
    """Radians a position, if the model rotates keys as they say: two halves of a head, or of a part of it, together."""
    if rotary == IMMOVABLE or head_dim % 2:
        return None
    if rotary == UNROTATED:
        return torch.zeros(0, dtype=torch.float64)
    frequencies = torch.from_numpy(seam.rotary_frequencies(rotary)[0]).double()
    half = len(frequencies)
    keys = torch.randn(1, len(_SHIFTS), head_dim, generator=torch.Generator().manual_seed(0))
    shifts = torch.tensor(_SHIFTS)
    found = seam.rotate(keys.to(device), shifts, rotary).cpu().double()
    angles = shifts[:, None] * frequencies
    first, second, rest = torch.split(keys.double(), [half, half, head_dim - 2 * half], dim=-1)
    turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin(), rest)
    is_alike = bool((found - torch.cat(turned, dim=-1)).abs().max() < _ROTATES_ALIKE)
    return frequencies if is_alike else None


class DeviceIndex:
    """Implements OpenIndex. Its number is the address of the index's numbers on the device."""

    says_found = True
    restored_all_finite = True  # as far as the host knows

    def __init__(
        self,
        indexes: KeyIndexes,
        coder: TorchCoder,
        dtype: torch.dtype,
        index: LayerIndex,
        rows: Any,
        turns: Any,
    ) -> None:
        self._indexes, self._coder, self._dtype = indexes, coder, dtype
        self._numbers = indexes.numbers(index.halves, rows, turns)
        self._alive = (index.halves, rows, turns)
        self._archive: Tensor | None = None
        self._read: tuple[object, ...] = ()  # what the archive points to
        self._restored_numbers = 0

    @property
    def number(self) -> int:
        return self._numbers.data_ptr()

    @property
    def restored_numbers(self) -> int:
        return self._restored_numbers

    def restore_from(self, codes: ArchivedCodes | None, cache: RestoreCache | None, found: Tensor) -> bool:
        """Chosen tokens are restored anew in each step, into the operation's memory."""
        if codes is None:
            return False
        tables, synthesis = self._coder.decoding(codes, self._dtype)
        self._archive = self._indexes.archive(codes.halves, codes.first, tables, synthesis, found)
        self._read = (codes, tables, synthesis, found)
        self._restored_numbers = tables.padded
        self._indexes.name_archive(self._numbers, self._archive)
        return True

    def forget_restored(self) -> None:
        """Nothing to do: no restored entry stays between steps."""

    def add_restored(self, start: int) -> None:
        raise AssertionError("nothing stays restored here")

    def keep_restored(self, rooms: int) -> None:
        raise AssertionError("nothing stays restored here")

    def restore_no_more(self) -> None:
        self._indexes.name_archive(self._numbers, None)
        self._archive = None
        self._read = ()
        self._restored_numbers = 0
