"""Rows kept as one thin latent per token, across all layers.

A row's code needs the row of every layer, so it exists only when the last layer has run: rows are coded when they leave
the exact window, a segment boundary, never earlier. Layers with a window of the model's own keep their rows and are not
in the latent. The code itself comes from outside (`TokenCodec`); what is kept here is its bytes.

    arena of K [capacity, first half of the bytes]    arena of V [capacity, the rest]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from inference_engine.errors import InvalidArgument
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import Positions
from inference_engine.kv.pool import Demand
from inference_engine.kv.restorer import Archive, KeptLayers, Restorer, RowBlock
from inference_engine.kv.token_codec import TokenCodec

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
    """Keeps `bytes_per_token` of each evicted position (None: a twentieth of its rows in bfloat16)."""

    bytes_per_token: int | None = None

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
        if not kept or not kept[0].capacity:
            return ()
        half = -(-self.bytes_in(geometry) // 2)
        elements = -(-kept[0].capacity * half // geometry.itemsize)
        unit = geometry.alignment
        return (Demand(head_dim=kept[0].layers.head_dim, elements=-(-elements // unit) * unit),)

    def open(self, context: KVContext, kept: Sequence[KeptLayers]) -> Archive | None:
        assert context.latent is not None, "`ready` was not asked"
        demands = self.demands(context.geometry, kept)
        starts = context.pool.reserve(demands)
        if starts is None:
            return None
        codec = context.latent.at(self.bytes_in(context.geometry))
        return _LatentArchive(codec, context, kept, demands, starts)


class _LatentArchive(Archive):
    def __init__(
        self,
        codec: TokenCodec,
        context: KVContext,
        kept: Sequence[KeptLayers],
        demands: Sequence[Demand],
        starts: Sequence[int],
    ) -> None:
        self._codec = codec
        self._context = context
        self._kept = kept
        self._demands = demands
        self._starts = starts
        # In which block, and where in it, each of the codec's layers is.
        places = {
            layer: (index, place) for index, group in enumerate(kept) for place, layer in enumerate(group.layers.layers)
        }
        self._places = [places[layer] for layer in codec.layers]
        self._halves = [self._bytes_from(arena) for arena in self._arenas()] if demands else []

    def _arenas(self) -> tuple[Tensor, Tensor]:
        arena = self._context.pool.arenas[self._demands[0].head_dim]
        return arena.keys, arena.values

    def _bytes_from(self, states: Tensor) -> Tensor:
        """[capacity, half of the bytes] of the archive's memory in one arena."""
        half = -(-self._codec.bytes_per_token // 2)
        first = self._starts[0] * states.shape[-1] * states.itemsize
        count = self._kept[0].capacity * half
        return states.view(torch.uint8).view(-1)[first : first + count].view(self._kept[0].capacity, half)

    def begin(self, blocks: Sequence[RowBlock]) -> None:
        pass

    def keep(self, blocks: Sequence[RowBlock]) -> Sequence[RowBlock]:
        positions = blocks[0].positions
        codes = self._codec.encode(
            [blocks[index].keys[place] for index, place in self._places],
            [blocks[index].values[place] for index, place in self._places],
        )
        slots = self._slots(positions)
        half = self._halves[0].shape[1]
        self._halves[0].index_copy_(0, slots, codes[:, :half])
        self._halves[1][:, : codes.shape[1] - half].index_copy_(0, slots, codes[:, half:])
        return self._decoded(positions, codes)

    def restore(self, positions: Sequence[Positions]) -> Sequence[RowBlock]:
        wanted = positions[0]
        if not len(wanted):
            return [RowBlock(wanted, *self._empty(group)) for group in self._kept]
        slots = self._slots(wanted)
        rest = self._codec.bytes_per_token - self._halves[0].shape[1]
        codes = torch.cat([self._halves[0][slots], self._halves[1][slots, :rest]], dim=1)
        return self._decoded(wanted, codes)

    def _decoded(self, positions: Positions, codes: Tensor) -> list[RowBlock]:
        geometry = self._context.geometry
        if geometry.row_quantum > 1:
            # Rows are decoded as many at a time when they leave and when they come back, or bits would differ.
            codes = F.pad(codes, (0, 0, 0, -len(codes) % geometry.segment_tokens))
        keys, values = ([rows[: len(positions)] for rows in states] for states in self._codec.decode(codes))
        by_layer = {layer: place for place, layer in enumerate(self._codec.layers)}
        return [
            RowBlock(
                positions,
                torch.stack([keys[by_layer[layer]] for layer in group.layers.layers]),
                torch.stack([values[by_layer[layer]] for layer in group.layers.layers]),
            )
            for group in self._kept
        ]

    def _empty(self, group: KeptLayers) -> tuple[Tensor, Tensor]:
        layers = group.layers
        rows = torch.zeros((len(layers.layers), 0, layers.kv_heads, layers.head_dim), device=self._context.device)
        return rows, rows

    def held_bytes(self, counts: Sequence[int]) -> int:
        page = self._context.geometry.page_tokens
        rows = min(self._kept[0].capacity, -(-counts[0] // page) * page)
        return rows * 2 * -(-self._codec.bytes_per_token // 2)

    def release(self) -> None:
        self._context.pool.release(self._demands, self._starts)

    def _slots(self, positions: Positions) -> Tensor:
        slots = np.ascontiguousarray(self._kept[0].slots(positions))
        return torch.from_numpy(slots).to(self._context.device)
