"""An archive of what a drafter reads of each token, from which f_theta makes K and V of all layers.

    a token is computed   taps ── coded ── one code for all layers      kept from then on, in the exact window, too
    it leaves the window  nothing is to be done: its entries are read from its code

Taps exist only while their token is computed, so codes are of every committed token behind the sink. They lie and are
read as those of entries are (`kv/archives/latent.py`). Taps of rejected draft tokens are never given to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_engine.errors import InvalidArgument
from inference_engine.kv.archives.latent import Latent, LatentArchive, check_codec
from inference_engine.kv.archives.latent_codes import LatentCodes, LatentPlaces
from inference_engine.kv.archives.restorer import Archive, EntryBlock, KeptLayers
from inference_engine.kv.context import KVContext, TapCodec
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import Positions
from inference_engine.kv.slots import LayerSlots

# Tokens that are coded together, from a multiple of it on. Products of one size give a token the same bits however the
# history was cut into steps, and reading the matrices once for so many takes less time than computing them.
_TOGETHER = 32


@dataclass(frozen=True, slots=True)
class TappedLatent(Latent):
    """Keeps `bytes_per_token` bytes of each position behind the sink; exact: most positions in the exact window, but
    for the open segment. The other fields are those of `Latent`.
    """

    is_calibrated: ClassVar[bool] = False  # `kakeya train f-theta` makes its codec, and nothing at first use
    reads_taps: ClassVar[bool] = True

    exact: int = 0

    @classmethod
    def like(cls, latent: Latent, exact: int) -> TappedLatent:
        return cls(**{one.name: getattr(latent, one.name) for one in fields(latent)}, exact=exact)

    def waits(self, context: KVContext) -> bool:
        return context.f_theta is not None and not context.f_theta.has(self.bytes_in(context.geometry))

    def ready(self, context: KVContext) -> None:
        if context.f_theta is None:
            why = context.why_no_f_theta or "this server has no f_theta; make one with `kakeya train f-theta`"
            raise InvalidArgument("source", f"{why}; or use source latent or recompute")
        check_codec(context.f_theta, context, self.bytes_in(context.geometry), "f_theta", "kakeya train f-theta")

    def open(self, context: KVContext, kept: Sequence[KeptLayers]) -> Archive | None:
        assert context.f_theta is not None, "`ready` was not called"
        codes = LatentCodes.reserve(context, self._places(context.geometry, kept))
        if codes is None:
            return None
        return _TappedLatents(context.f_theta.at(self.bytes_in(context.geometry)), context, kept, codes)

    def _places(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> LatentPlaces:
        return LatentPlaces(
            count=kept[0].capacity + self.exact + geometry.segment_tokens,
            width=self.bytes_in(geometry),
            resident_bytes=None,
            segment=geometry.segment_tokens,
        )


class _TappedLatents(LatentArchive):
    def __init__(self, codec: TapCodec, context: KVContext, kept: Sequence[KeptLayers], codes: LatentCodes) -> None:
        super().__init__(codec, context, kept, codes)
        self._tap_codec = codec
        self._waiting: list[Tensor] = []  # taps of tokens that follow those coded, fewer than `_TOGETHER`

    def keep_taps(self, first: int, taps: Tensor) -> None:
        before_sink = max(0, self._kept[0].sink - first)
        taps = taps[before_sink:]
        if not len(taps):
            return
        place = first + before_sink - self._kept[0].sink
        assert place == self._codes.stored + sum(map(len, self._waiting)), "tokens follow those that are kept"
        found = taps.float().sum(dim=(0, 2))
        self._finite.note(self._tap_codec.tap_layers, torch.stack((found, found)), come_back=False)
        # A copy: the step's others are not held for its sake.
        self._waiting.append(taps.clone() if len(taps) < _TOGETHER else taps)
        behind = place + len(taps)
        if behind // _TOGETHER > self._codes.stored // _TOGETHER:
            self._code(behind // _TOGETHER * _TOGETHER - self._codes.stored)

    def settle(self) -> None:
        if self._waiting:
            self._code(sum(map(len, self._waiting)))

    def _code(self, count: int) -> None:
        """The first `count` of those that wait."""
        taps = torch.cat(self._waiting)
        self._waiting = [taps[count:].clone()] if len(taps) > count else []
        place = self._codes.stored
        before = place % _TOGETHER
        padded = F.pad(taps[:count], (0, 0, 0, 0, before, -(before + count) % _TOGETHER))
        blocks = padded.view(-1, _TOGETHER, *taps.shape[1:])
        codes = torch.cat([self._tap_codec.encode_taps(block) for block in blocks])
        self._codes.put(place, codes[before : before + count])

    def keep(self, blocks: Sequence[EntryBlock]) -> None:
        self.settle()

    def keep_from(self, regions: Sequence[LayerSlots], positions: Sequence[Positions]) -> None:
        self.settle()

    def take_back(self, positions: Sequence[Positions]) -> None:
        """Nothing to do: the tokens are still there, and so are their codes."""

    def save(self, positions: Sequence[Positions], length: int) -> Iterator[tuple[Tensor, ...]]:
        assert not self._waiting, "the session is idle"
        return self._codes.save(max(0, length - self._kept[0].sink))

    def rewind(self, length: int) -> None:
        self._codes.take_back(max(0, length - self._kept[0].sink))

    def forget(self) -> None:
        self._waiting = []
        super().forget()

    def held_bytes(self, counts: Sequence[int]) -> int:
        """Those of the open segment count from its first token on: within it, tokens change no bytes."""
        sink, segment, kept = self._kept[0].sink, self._context.geometry.segment_tokens, self._codes.stored
        kept += sum(map(len, self._waiting))
        return self._codes.held_bytes(((kept + sink) // segment + 1) * segment - sink) if kept else 0
