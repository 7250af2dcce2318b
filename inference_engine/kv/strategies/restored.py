"""Restored strategy: sink and window stay exact, older entries are archived and restored.

    idle     ■ ■ ■ ■ |               | ■ ■ ■ ■ ■      sink and window, and the archive of the rest
    hold     ■ ■ ■ ■ | □ □ □ □ □ □ □ | ■ ■ ■ ■ ■      the rest restored, during a Generate
    stream   ■ ■ ■ ■ |     | □ □ |   | ■ ■ ■ ■ ■      a chunk of the rest at a time, in every layer of every step

Source `latent` keeps one code of `bytes_per_token` bytes per archived position, across all layers, and restores entries
approximately. Source `recompute` keeps nothing: old entries are recomputed from the token ids. It is exact, equal to
`full` up to rounding, holds the bytes of `sink_window` between Generates, and costs a prefill of the whole history at
each Generate.

Mode `hold` restores once and holds all entries while it generates. `stream` holds only a chunk of one layer, and
decodes every archived position again in each step. It needs a source that is local in position, as `latent` is.
`resident_latent_bytes` limits the latents on the device: older ones lie in the second tier, and are read from there
when they are restored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from inference_engine.kv.archives.latent import Latent, default_bytes_per_token, exact_bytes_per_token
from inference_engine.kv.archives.restorer import Recompute, Restorer
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerRule
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy, require

_SOURCES = ("latent", "recompute")
_MODES = ("hold", "stream")


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored(KVStrategy):
    """Keeps `sink` first and `window` last positions exact; `source` restores the others."""

    name: ClassVar[str] = "restored"

    sink: int = 4
    window: int = 1024
    source: str = "recompute"
    bytes_per_token: int | None = None  # of the latent; None: a twentieth of the entries in bfloat16
    mode: str = "hold"
    resident_latent_bytes: int | None = None  # on the device; older ones go to the second tier. None: no limit

    def __post_init__(self) -> None:
        require(self.sink >= 0, "sink", f"must be ≥ 0, got {self.sink}")
        require(self.window >= 1, "window", f"must be ≥ 1, got {self.window}")
        require(
            self.source in _SOURCES, "source", f"there is no source {self.source!r}; there are {', '.join(_SOURCES)}"
        )
        require(self.mode in _MODES, "mode", f"there is no mode {self.mode!r}; there are {', '.join(_MODES)}")
        require(
            self.mode == "hold" or self.source == "latent",
            "mode",
            f"{self.mode} would be a prefill for each token with source {self.source}; use hold, or source latent",
        )
        if self.bytes_per_token is not None:
            require(self.source == "latent", "bytes_per_token", f"has no meaning with source {self.source}")
            require(self.bytes_per_token >= 1, "bytes_per_token", f"must be ≥ 1, got {self.bytes_per_token}")
        if self.resident_latent_bytes is not None:
            limit = self.resident_latent_bytes
            require(self.source == "latent", "resident_latent_bytes", f"has no meaning with source {self.source}")
            require(limit >= 0, "resident_latent_bytes", f"must be ≥ 0, got {limit}")

    def check(self, geometry: Geometry) -> None:
        SinkWindow(sink=self.sink, window=self.window).check(geometry)
        self.restorer().check(geometry, range(len(geometry.layers)))

    def resolved(self, geometry: Geometry, *, has_components: bool = False) -> Restored:
        if self.source != "latent" or self.bytes_per_token is not None:
            return self
        return replace(self, bytes_per_token=default_bytes_per_token(geometry))

    def rule(self, layer: int, geometry: Geometry) -> LayerRule:
        return LayerRule(sink=self.sink, exact=self.window)

    @classmethod
    def trials(cls, geometry: Geometry) -> tuple[Restored, ...]:
        exact = exact_bytes_per_token(geometry)
        if not exact:
            return (cls(sink=2, window=8),)
        return (
            cls(sink=2, window=8),
            cls(sink=2, window=8, source="latent", bytes_per_token=exact),
            cls(sink=2, window=8, source="latent", bytes_per_token=exact, mode="stream"),
        )

    def restorer(self) -> Restorer:
        if self.source == "recompute":
            return Recompute()
        return Latent(self.bytes_per_token, self.resident_latent_bytes, is_streamed=self.mode == "stream")
