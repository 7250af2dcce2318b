"""Codes of old entries as the operation over regions of a torch device knows them (`kernels/archived.py`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inference_engine.backends.torch_coder import TorchCoder
from inference_engine.kernels.archived import Archives, KnownArchives, LayerArchive, ReadFrom
from inference_engine.kernels.latents import Turn, operand_dtype
from inference_engine.kv.context import ArchivedLayer

logger = logging.getLogger(__name__)

NUMBERS = 512  # of a code: its room is a multiple of so many


@dataclass(frozen=True, slots=True, eq=False)
class DeviceArchive:
    """Implements OpenArchive."""

    known: KnownArchives
    read: ReadFrom
    found: Tensor

    @property
    def numbers(self) -> Sequence[int]:
        return self.known.numbers


class DeviceArchives:
    """What `KVContext.open_archive` needs of a model on a device."""

    def __init__(
        self, archives: Archives, coder: TorchCoder, dtype: torch.dtype, device: torch.device, *, trained_positions: int
    ) -> None:
        """coder: knows how codes become entries."""
        self._archives, self._coder, self._dtype, self._device = archives, coder, dtype, device
        self._trained = trained_positions
        self._turns: dict[str, Turn | None] = {}  # of all trained positions
        self._is_said = False  # where they read no archives, or not all

    def open(self, layers: Sequence[ArchivedLayer]) -> DeviceArchive | None:
        """None for keys that are rotated in another way, and on a device whose operation is too large for it."""
        if not all(self._coder.restores(layer.codes, layer.rotary) for layer in layers):
            self._say(0)
            return None
        decoding = [self._coder.decoding(layer.codes, self._dtype) for layer in layers]
        groups = [layer.codes.decoder.first_byte for layer in layers]
        begins = [layer.layer for index, layer in enumerate(layers) if not index or groups[index] != groups[index - 1]]
        read = ReadFrom(
            # Few counts, since steps are recorded for each.
            numbers=-(-max(tables.padded for tables, _ in decoding) // NUMBERS) * NUMBERS,
            tokens=0,  # said by each plan
            dtype=operand_dtype(self._dtype),
            begins=tuple(begins),
        )
        found = torch.zeros((len(layers), 2), device=self._device)
        archives = [
            LayerArchive(
                halves=layer.codes.halves,
                first=layer.codes.first,
                tables=tables,
                synthesis=synthesis,
                turn=self._turn(layer.rotary),
                found=own,
            )
            for layer, (tables, synthesis), own in zip(layers, decoding, found, strict=True)
        ]
        known = self._archives(archives)
        self._say(0 if known is None else read.most_tokens)
        return None if known is None else DeviceArchive(known, read, found)

    def _say(self, most_tokens: int) -> None:
        """Once, if sessions can have more old tokens than single tokens can read in the operation."""
        if not self._is_said and most_tokens < self._trained:
            self._is_said = True
            logger.info(
                "mode=stream: %s are decoded in chunks for each token, anew in each layer; mode=hold and mode=select "
                "decode such sessions faster",
                f"more than {most_tokens} old tokens of a session" if most_tokens else "old tokens",
            )

    def _turn(self, rotary: str) -> Turn | None:
        if rotary not in self._turns:
            self._turns[rotary] = self._coder.turn(rotary, 0, self._trained)
        return self._turns[rotary]
