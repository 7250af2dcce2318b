"""An archive of one small latent per token, across all layers.

A latent needs the entries of every layer, so it exists only when the last layer has run: entries are coded when they
leave the exact window, at a segment boundary, never earlier. Layers with a native window keep their entries and are
not in the latent. A `TokenCodec` makes the codes; `kv/archives/latent_codes.py` stores their bytes. Codes that are made
of something else than entries (`kv/archives/tapped.py`) are read alike: `LatentArchive`.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from inference_engine.errors import InvalidArgument, ModelError
from inference_engine.kv.archives.finite import FiniteCheck
from inference_engine.kv.archives.latent_codes import LatentCodes, LatentPlaces
from inference_engine.kv.archives.restorer import Archive, ArchivedPart, EntryBlock, KeptLayers, Pair, Restorer
from inference_engine.kv.context import (
    ArchivedCodes,
    BatchFunction,
    GroupAnalyser,
    HeldEntries,
    KVContext,
    ReadLayer,
    RestoredLayer,
    TokenCodec,
    TokenDecoder,
)
from inference_engine.kv.geometry import EntryShape, Geometry
from inference_engine.kv.layout import Positions
from inference_engine.kv.memory.pool import Demand, Run
from inference_engine.kv.slots import LayerSlots, neighbours

logger = logging.getLogger(__name__)

# By default, a latent is smaller than the entries in bfloat16 by this factor.
DEFAULT_COMPRESSION = 20
_HELD_CHOICES = 2  # by default, decoded entries of so many choices are held
_BFLOAT16_BYTES = 2
_FLOAT32_BYTES = 4


def latent_layers(geometry: Geometry) -> tuple[int, ...]:
    """The layers a latent covers: those without a native window."""
    return tuple(index for index, layer in enumerate(geometry.layers) if layer.native_window is None)


def exact_bytes_per_token(geometry: Geometry) -> int:
    """Bytes of a latent's entries in float32; 0 if it would cover no layer."""
    return sum(geometry.layers[index].entry_bytes(_FLOAT32_BYTES) for index in latent_layers(geometry))


def bytes_of_position(geometry: Geometry) -> int:
    """Bytes of the entries that a latent stands for."""
    return max(1, exact_bytes_per_token(geometry) // _FLOAT32_BYTES * geometry.itemsize)


def default_bytes_per_token(geometry: Geometry) -> int:
    nbytes = sum(geometry.layers[index].entry_bytes(_BFLOAT16_BYTES) for index in latent_layers(geometry))
    return max(1, nbytes // DEFAULT_COMPRESSION)


@dataclass(frozen=True, slots=True)
class Latent(Restorer):
    """Keeps `bytes_per_token` bytes of each archived position (None: a twentieth of its entries in bfloat16).

    resident_bytes: the most bytes of a session's latents on the device; older ones go to the second tier.
    entries: the part that reads them. chosen: if a generated token has some decoded, those of its choice, so many of
    each KV head; all_choose: and so has an appended one. awake_bytes: of decoded ones that
    stay so between steps; None: of twice `chosen`.
    """

    is_calibrated: ClassVar[bool] = True

    entries: type[ArchivedPart]
    bytes_per_token: int | None = None
    resident_bytes: int | None = None
    chosen: int = 0
    all_choose: bool = False
    awake_bytes: int | None = None

    @property
    def reads_chunks(self) -> bool:
        return not self.all_choose

    @property
    def choice(self) -> int:
        return self.chosen

    def held(self, geometry: Geometry) -> int:
        if self.awake_bytes is None:
            return _HELD_CHOICES * self.chosen
        return self.awake_bytes // bytes_of_position(geometry)

    def bytes_in(self, geometry: Geometry) -> int:
        return default_bytes_per_token(geometry) if self.bytes_per_token is None else self.bytes_per_token

    def takes(self, entry: EntryShape) -> bool:
        return entry.has_one_size

    def check(self, geometry: Geometry, layers: Sequence[int]) -> None:
        if not latent_layers(geometry):
            raise InvalidArgument("source", "every layer of this model has a window of its own: nothing is evicted")

    def waits(self, context: KVContext) -> bool:
        return context.latent is not None and not context.latent.has(self.bytes_in(context.geometry))

    def ready(self, context: KVContext) -> None:
        if context.latent is None:
            raise InvalidArgument(
                "source",
                "no latent codec is loaded; start the server with --calibrate all, or calibrate one with "
                "`kakeya train latent` and start it again",
            )
        check_codec(context.latent, context, self.bytes_in(context.geometry), "the latent codec", "kakeya train latent")

    def demands(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> tuple[Demand, ...]:
        return (self._places(geometry, kept).demand(geometry),)

    def tier_bytes(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> int:
        shape = self._places(geometry, kept).chunks(geometry)
        return shape.chunks * shape.chunk_bytes

    def open(self, context: KVContext, kept: Sequence[KeptLayers]) -> Archive | None:
        assert context.latent is not None, "`ready` was not called"
        codes = LatentCodes.reserve(context, self._places(context.geometry, kept))
        if codes is None:
            return None
        return _EntryLatents(context.latent.at(self.bytes_in(context.geometry)), context, kept, codes)

    def _places(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> LatentPlaces:
        return LatentPlaces(
            count=kept[0].capacity,
            width=self.bytes_in(geometry),
            resident_bytes=self.resident_bytes,
            segment=geometry.segment_tokens,
        )


def check_codec(codec: TokenDecoder, context: KVContext, bytes_per_token: int, what: str, command: str) -> None:
    """Raise InvalidArgument if it does not fit the model, gives no such rate, or is damaged. Its tensors are read."""
    expected = latent_layers(context.geometry)
    if codec.layers != expected:
        raise InvalidArgument("source", f"{what} covers layers {codec.layers}, this model needs {expected}")
    least, most = codec.least_bytes_per_token, codec.bytes_per_token
    if not least <= bytes_per_token <= most:
        raise InvalidArgument(
            "bytes_per_token",
            f"the loaded {what.removeprefix('the ')} gives from {least} to {most}, got {bytes_per_token}",
            least=least,
            most=most,
        )
    try:
        codec.at(bytes_per_token)
    except ModelError as error:
        logger.error("sessions that need %s are refused: %s", what, error)
        raise InvalidArgument(
            "source",
            f"{what} on the server's disk is damaged, as its log says; make it again with `{command}` and start the "
            "server again, or use source recompute",
        ) from error


class LatentArchive(Archive):
    """Codes of tokens, and how entries come back from them; not where codes come from."""

    def __init__(self, codec: TokenDecoder, context: KVContext, kept: Sequence[KeptLayers], codes: LatentCodes) -> None:
        self._codec = codec
        self._context = context
        self._kept = kept
        self._codes = codes
        self._finite = FiniteCheck()
        self._came_back: Tensor | None = None  # of what the device restored: NaN by layer, in keys and in values
        self._has_restored = False  # since the last question
        self._rows = {layer: row for row, layer in enumerate(codec.layers)}
        # For each of the codec's layers: its block, and its index there.
        places = {
            layer: (index, place) for index, group in enumerate(kept) for place, layer in enumerate(group.layers.layers)
        }
        self._places = tuple(places[layer] for layer in codec.layers)

    def begin(self, blocks: Sequence[EntryBlock]) -> None:
        pass

    def restore(self, positions: Sequence[Positions]) -> Sequence[EntryBlock]:
        wanted = positions[0]
        if not len(wanted):
            return [EntryBlock(wanted, *self._empty(group)) for group in self._kept]
        codes = self._codes_of(wanted)
        if self._context.geometry.token_quantum > 1:
            # Entries are decoded in batches of the same size when they leave and when they come back, or bits would
            # differ.
            codes = F.pad(codes, (0, 0, 0, -len(codes) % self._context.geometry.segment_tokens))
        groups = tuple(group.layers.layers for group in self._kept)
        found = self._compute("decode", partial(_decode, self._codec, groups), [codes])
        states = [entries[: len(wanted)].transpose(0, 1) for entries in found]
        blocks = [EntryBlock(wanted, *pair) for pair in zip(states[::2], states[1::2], strict=True)]
        for layers, block in zip(groups, blocks, strict=True):
            self._finite.ask(layers, block.keys, block.values, come_back=True)
        return blocks

    def restores_directly(self, layer: int, rotary: str) -> bool:
        codes = self.decoded_by(layer)
        return codes is not None and self._context.coder.restores(codes, rotary)

    def restore_into(self, regions: Sequence[LayerSlots], positions: Sequence[Positions]) -> None:
        wanted = positions[0]
        if not len(wanted) or not self.restores_all_directly(regions):
            super().restore_into(regions, positions)
            return
        for slots in regions:
            assert wanted[0] >= slots.layout.spare, "keys of the sink have been moved"
            own, layers = slots.layout.slots(wanted), slots.layer_set.layers
            first = int(wanted[0])
            for begin, end in neighbours(own):
                places = [slots.region.pair(slots.buffer, layer, begin, end - begin) for layer in layers]
                self.restore_to(layers, slots.layer_set.rotary, places, first)
                first += end - begin
            slots.held[own] = wanted

    def restore_to(
        self, layers: Sequence[int], rotary: str, places: Sequence[Pair], first: int, held: HeldEntries | None = None
    ) -> None:
        restored = []
        for layer, (keys, values) in zip(layers, places, strict=True):
            codes = self.decoded_by(layer)
            assert codes is not None, "restores_directly was not asked"
            restored.append(RestoredLayer(codes=codes, rotary=rotary, keys=keys, values=values, held=held))
        self._context.coder.restore(restored, first, self._found_in(layers))

    def _found_in(self, layers: Sequence[int]) -> Tensor:
        """[layers, 2], for what is found in entries of these: a part of one tensor of all layers, which is asked once
        for all that is restored in a step."""
        rows = [self._rows[layer] for layer in layers]
        if rows != list(range(rows[0], rows[0] + len(rows))):
            own = torch.zeros((len(rows), 2), device=self._context.device)
            self._finite.note(layers, own.T, come_back=True)
            return own
        if self._came_back is None:
            self._came_back = torch.zeros((len(self._rows), 2), device=self._context.device)
        self._has_restored = True
        return self._came_back[rows[0] : rows[0] + len(rows)]

    def restore_layer(self, layer: int, positions: Positions) -> tuple[Tensor, Tensor]:
        codes = self._codes_of(positions)
        keys, values = self._compute(layer, partial(_decode_layer, self._codec, layer), [codes])
        self._finite.ask([layer], keys[None], values[None], come_back=True)
        return keys, values

    def restore_some(self, layer: int, positions: Positions) -> tuple[Tensor, Tensor]:
        places = torch.from_numpy(positions - self._kept[0].sink).to(self._context.device)
        function = partial(_decode_layer, self._codec, layer)
        keys, values = self._compute(layer, function, [self._codes.pick(places)])
        self._finite.ask([layer], keys[None], values[None], come_back=True)
        return keys, values

    def decoded_by(self, layer: int) -> ArchivedCodes | None:
        decoder, halves = self._codec.decoder(layer), self._codes.halves
        if decoder is None or halves is None:
            return None
        return ArchivedCodes(halves=halves, first=self._kept[0].sink, decoder=decoder)

    def _compute(self, what: Hashable, function: BatchFunction, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """what: names the function, together with the codec and the sets of layers."""
        return self._context.compute(("latent", self._codec, self._places, what), function, tensors)

    def ask_finite(self) -> int:
        if self._has_restored and self._came_back is not None:
            self._finite.note(self._codec.layers, self._came_back.T, come_back=True)
            self._has_restored = False
        return self._finite.send()

    def require_finite(self, upto: int | None = None) -> None:
        self._finite.require(upto)

    def dismiss(self) -> None:
        self._finite.forget()
        self._came_back, self._has_restored = None, False

    def _codes_of(self, positions: Positions) -> Tensor:
        """The codes of consecutive positions."""
        return self._codes.get(self._place(positions[0]), self._place(positions[-1]) + 1)

    def _place(self, position: np.int64) -> int:
        return int(position) - self._kept[0].sink

    def _empty(self, group: KeptLayers) -> tuple[Tensor, Tensor]:
        layers = group.layers
        entries = torch.zeros((len(layers.layers), 0, layers.kv_heads, layers.head_dim), device=self._context.device)
        return entries, entries

    def save(self, positions: Sequence[Positions], length: int) -> Iterator[tuple[Tensor, ...]]:
        return self._codes.save()

    def load(self, positions: Sequence[Positions], saved: Iterable[tuple[Tensor, ...]]) -> None:
        self._codes.load(saved)

    @property
    def gives_back(self) -> bool:
        return not self._codes.has_tier

    def forget(self) -> None:
        self._codes.clear()
        self.dismiss()

    def held_bytes(self, counts: Sequence[int]) -> int:
        return self._codes.held_bytes(counts[0])

    def tier_bytes(self, counts: Sequence[int]) -> int:
        return self._codes.tier_bytes(counts[0])

    @property
    def runs(self) -> Sequence[Run]:
        return self._codes.runs

    def release(self) -> None:
        self._codes.release()


class _EntryLatents(LatentArchive):
    """Codes of the entries themselves."""

    _codec: TokenCodec

    def keep(self, blocks: Sequence[EntryBlock]) -> None:
        for group, block in zip(self._kept, blocks, strict=True):
            self._finite.ask(group.layers.layers, block.keys, block.values, come_back=False)
        entries = [states.transpose(0, 1) for block in blocks for states in (block.keys, block.values)]
        [codes] = self._compute("encode", partial(_encode, self._codec, self._places), entries)
        self._codes.put(self._place(blocks[0].positions[0]), codes)

    def keep_from(self, regions: Sequence[LayerSlots], positions: Sequence[Positions]) -> None:
        leaving, analysers, coder = positions[0], self._codec.analysers(), self._context.coder
        runs = {tuple(neighbours(slots.layout.slots(leaving))) for slots in regions}
        if (
            analysers is None
            or len(runs) > 1
            or not all(coder.analyses(slots.layer_set.rotary, slots.head_dim, len(leaving)) for slots in regions)
        ):
            super().keep_from(regions, positions)
            return
        assert leaving[0] >= max(slots.layout.spare for slots in regions), "keys of the sink have been moved"
        slots_of = {layer: slots for slots in regions for layer in slots.layer_set.layers}
        numbers = [self._numbers(analyser, slots_of, int(leaving[0]), *runs) for analyser in analysers]
        self._codes.put(self._place(leaving[0]), self._codec.encode_numbers(numbers))

    def take_back(self, positions: Sequence[Positions]) -> None:
        self._codes.take_back(self._place(positions[0][0]))

    def _numbers(
        self, analyser: GroupAnalyser, slots_of: Mapping[int, LayerSlots], first: int, runs: Sequence[tuple[int, int]]
    ) -> Tensor:
        """Of a group's entries at consecutive positions, from `first` on, in these runs of slots: float32 [n, C]."""
        parts = []
        for begin, end in runs:
            layers = []
            for layer in analyser.layers:
                slots = slots_of[layer]
                keys, values = slots.region.pair(slots.buffer, layer, begin, end - begin)
                layers.append(ReadLayer(rotary=slots.layer_set.rotary, keys=keys, values=values))
            numbers, found = self._context.coder.analyse(analyser, layers, first)
            self._finite.note(analyser.layers, found, come_back=False)
            parts.append(numbers)
            first += end - begin
        return parts[0] if len(parts) == 1 else torch.cat(parts)


# These functions hold nothing of a session, because recordings of them outlive it.


def _encode(codec: TokenCodec, places: Sequence[tuple[int, int]], entries: Sequence[Tensor]) -> Sequence[Tensor]:
    """Keys and values of each set of layers in turn, [n, L, Hkv, D] → their codes [n, bytes]."""
    keys = [entries[2 * index][:, place] for index, place in places]
    values = [entries[2 * index + 1][:, place] for index, place in places]
    return [codec.encode(keys, values)]


def _decode(codec: TokenDecoder, groups: Sequence[Sequence[int]], codes: Sequence[Tensor]) -> Sequence[Tensor]:
    """The inverse of `_encode`, for the layers of each set."""
    by_layer = dict(zip(codec.layers, zip(*codec.decode(codes[0]), strict=True), strict=True))
    return [torch.stack([by_layer[layer][part] for layer in layers], dim=1) for layers in groups for part in (0, 1)]


def _decode_layer(codec: TokenDecoder, layer: int, codes: Sequence[Tensor]) -> Sequence[Tensor]:
    """Keys and values of one layer, [n, Hkv, D]."""
    keys, values = codec.decode(codes[0], [layer])
    return [keys[0], values[0]]
