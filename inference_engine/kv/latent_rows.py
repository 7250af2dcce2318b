"""Rows kept as one thin latent per token, across all layers.

A row's code needs the row of every layer, so it exists only when the last layer has run: rows are coded when they leave
the exact window, a segment boundary, never earlier. Layers with a window of the model's own keep their rows and are not
in the latent. The code itself comes from outside (`TokenCodec`); its bytes are kept by `kv/latent_codes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from inference_engine.errors import InvalidArgument, NonFiniteRows
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.latent_codes import LatentCodes, LatentPlaces
from inference_engine.kv.layout import Positions
from inference_engine.kv.pool import Demand
from inference_engine.kv.restorer import Archive, KeptLayers, Restorer, RowBlock
from inference_engine.kv.token_codec import TokenCodec
from inference_engine.kv.transfers import TransferTotals

# Without a number of bytes, a latent takes this part of what the rows take in bfloat16.
DEFAULT_COMPRESSION = 20
_BFLOAT16_BYTES = 2


def latent_layers(geometry: Geometry) -> tuple[int, ...]:
    """The layers a latent covers: those without a window of the model's own."""
    return tuple(index for index, layer in enumerate(geometry.layers) if layer.native_window is None)


def default_bytes_per_token(geometry: Geometry) -> int:
    rows = sum(geometry.layers[index].row_bytes(_BFLOAT16_BYTES) for index in latent_layers(geometry))
    return max(1, rows // DEFAULT_COMPRESSION)


@dataclass(frozen=True, slots=True)
class Latent(Restorer):
    """Keeps `bytes_per_token` of each evicted position (None: a twentieth of its rows in bfloat16).

    resident_bytes: of a session's latents that stay on the device, at most; those before them go to the second tier.
    is_streamed: rows are decoded in attention, chunk by chunk.
    """

    bytes_per_token: int | None = None
    resident_bytes: int | None = None
    is_streamed: bool = False

    @property
    def streams(self) -> bool:
        return self.is_streamed

    def bytes_in(self, geometry: Geometry) -> int:
        return default_bytes_per_token(geometry) if self.bytes_per_token is None else self.bytes_per_token

    def check(self, geometry: Geometry, layers: Sequence[int]) -> None:
        if not latent_layers(geometry):
            raise InvalidArgument("source", "every layer of this model has a window of its own: nothing is evicted")

    def ready(self, context: KVContext) -> None:
        geometry = context.geometry
        if context.latent is None:
            raise InvalidArgument(
                "source",
                "no latent codec is loaded; calibrate one with `kakeya train latent` and start with --latent FILE",
            )
        expected = latent_layers(geometry)
        if context.latent.layers != expected:
            raise InvalidArgument(
                "source", f"the latent codec covers layers {context.latent.layers}, this model needs {expected}"
            )
        asked, most = self.bytes_in(geometry), context.latent.bytes_per_token
        least = context.latent.least_bytes_per_token
        if not least <= asked <= most:
            raise InvalidArgument(
                "bytes_per_token",
                f"the loaded latent codec gives from {least} to {most}, got {asked}",
                least=least,
                most=most,
            )

    def demands(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> tuple[Demand, ...]:
        return (self._places(geometry, kept).demand(geometry),)

    def tier_bytes(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> int:
        shape = self._places(geometry, kept).chunks(geometry)
        return 0 if shape is None else shape.chunks * shape.chunk_bytes

    def open(self, context: KVContext, kept: Sequence[KeptLayers]) -> Archive | None:
        assert context.latent is not None, "`ready` was not asked"
        codes = LatentCodes.reserve(context, self._places(context.geometry, kept))
        if codes is None:
            return None
        return _LatentArchive(context.latent.at(self.bytes_in(context.geometry)), context, kept, codes)

    def _places(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> LatentPlaces:
        return LatentPlaces(
            count=kept[0].capacity,
            width=self.bytes_in(geometry),
            resident_bytes=self.resident_bytes,
            head_dim=kept[0].layers.head_dim,
            segment=geometry.segment_tokens,
        )


class _LatentArchive(Archive):
    def __init__(self, codec: TokenCodec, context: KVContext, kept: Sequence[KeptLayers], codes: LatentCodes) -> None:
        self._codec = codec
        self._context = context
        self._kept = kept
        self._codes = codes
        # In which block, and where in it, each of the codec's layers is.
        places = {
            layer: (index, place) for index, group in enumerate(kept) for place, layer in enumerate(group.layers.layers)
        }
        self._places = [places[layer] for layer in codec.layers]

    def begin(self, blocks: Sequence[RowBlock]) -> None:
        pass

    def keep(self, blocks: Sequence[RowBlock]) -> None:
        codes = self._codec.encode(
            [blocks[index].keys[place] for index, place in self._places],
            [blocks[index].values[place] for index, place in self._places],
        )
        self._codes.put(self._place(blocks[0].positions[0]), codes)

    def restore(self, positions: Sequence[Positions]) -> Sequence[RowBlock]:
        wanted = positions[0]
        if not len(wanted):
            return [RowBlock(wanted, *self._empty(group)) for group in self._kept]
        codes = self._codes_of(wanted)
        if self._context.geometry.row_quantum > 1:
            # Rows are decoded as many at a time when they leave and when they come back, or bits would differ.
            codes = F.pad(codes, (0, 0, 0, -len(codes) % self._context.geometry.segment_tokens))
        keys, values = ([rows[: len(wanted)] for rows in states] for states in self._codec.decode(codes))
        by_layer = {layer: place for place, layer in enumerate(self._codec.layers)}
        blocks = []
        for group in self._kept:
            own = [by_layer[layer] for layer in group.layers.layers]
            stacked = [torch.stack([rows[place] for place in own]) for rows in (keys, values)]
            _require_finite(group.layers.layers, *stacked)
            blocks.append(RowBlock(wanted, *stacked))
        return blocks

    def restore_layer(self, layer: int, positions: Positions) -> tuple[Tensor, Tensor]:
        keys, values = self._codec.decode(self._codes_of(positions), [layer])
        _require_finite([layer], keys[0][None], values[0][None])
        return keys[0], values[0]

    def _codes_of(self, positions: Positions) -> Tensor:
        """Of consecutive positions."""
        return self._codes.get(self._place(positions[0]), self._place(positions[-1]) + 1)

    def _place(self, position: np.int64) -> int:
        return int(position) - self._kept[0].sink

    def _empty(self, group: KeptLayers) -> tuple[Tensor, Tensor]:
        layers = group.layers
        rows = torch.zeros((len(layers.layers), 0, layers.kv_heads, layers.head_dim), device=self._context.device)
        return rows, rows

    def copy_from(self, other: Self, positions: Sequence[Positions]) -> None:
        self._codes.copy_from(other._codes)

    def commit(self, length: int) -> None:
        self._codes.commit(length)

    def forget(self) -> None:
        self._codes.clear()

    def held_bytes(self, counts: Sequence[int]) -> int:
        return self._codes.held_bytes(counts[0])

    def tier_bytes(self, counts: Sequence[int]) -> int:
        return self._codes.tier_bytes(counts[0])

    def transfers(self) -> TransferTotals:
        return self._codes.transfers()

    def release(self) -> None:
        self._codes.release()


def _require_finite(layers: Sequence[int], keys: Tensor, values: Tensor) -> None:
    """Raise NonFiniteRows, naming the layer, if any of [L, n, Hkv, D] is not: read, they would spoil what follows."""
    are_finite = torch.stack([rows.isfinite().flatten(1).all(1) for rows in (keys, values)])
    # Asked once of the device for all of these layers.
    for part, of_layers in zip(("keys", "values"), are_finite.tolist(), strict=True):
        if not all(of_layers):
            raise NonFiniteRows(layers[of_layers.index(False)], part, come_back=True)
