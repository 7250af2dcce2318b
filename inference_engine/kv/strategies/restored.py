"""Restored strategy: sink and window stay exact, every evicted row comes back.

    asleep   ■ ■ ■ ■ |               | ■ ■ ■ ■ ■      sink and window, and what the source keeps of the rest
    awake    ■ ■ ■ ■ | □ □ □ □ □ □ □ | ■ ■ ■ ■ ■      the rest restored, for the time of a Generate

Source `latent` keeps one thin code per evicted position across all layers, `bytes_per_token` of it, and gives back rows
close to what they were. Source `recompute` keeps nothing: evicted rows are computed again from the token ids. It is
exact, equal to `full` up to rounding, holds the bytes of `sink_window` between Generates, and costs a prefill of the
whole history at each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from inference_engine.kv.geometry import Geometry
from inference_engine.kv.latent_rows import Latent, default_bytes_per_token
from inference_engine.kv.layout import LayerRule
from inference_engine.kv.restorer import Recompute, Restorer
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy, require

_SOURCES = ("latent", "recompute")


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored(KVStrategy):
    """Keeps `sink` first and `window` last positions exact; `source` says where the others come from."""

    name: ClassVar[str] = "restored"

    sink: int = 4
    window: int = 1024
    source: str = "recompute"
    bytes_per_token: int | None = None  # of the latent; None: a twentieth of the rows in bfloat16

    def __post_init__(self) -> None:
        require(self.sink >= 0, "sink", f"must be ≥ 0, got {self.sink}")
        require(self.window >= 1, "window", f"must be ≥ 1, got {self.window}")
        require(
            self.source in _SOURCES, "source", f"there is no source {self.source!r}; there are {', '.join(_SOURCES)}"
        )

        if self.bytes_per_token is not None:
            require(self.source == "latent", "bytes_per_token", f"has no meaning with source {self.source}")
            require(self.bytes_per_token >= 1, "bytes_per_token", f"must be ≥ 1, got {self.bytes_per_token}")

    def check(self, geometry: Geometry) -> None:
        SinkWindow(sink=self.sink, window=self.window).check(geometry)
        self.restorer().check(geometry, range(len(geometry.layers)))

    def resolved(self, geometry: Geometry) -> Restored:
        if self.source != "latent" or self.bytes_per_token is not None:
            return self
        return replace(self, bytes_per_token=default_bytes_per_token(geometry))

    def rule(self, layer: int, geometry: Geometry) -> LayerRule:
        return LayerRule(sink=self.sink, exact=self.window)

    def restorer(self) -> Restorer:
        return Latent(self.bytes_per_token) if self.source == "latent" else Recompute()
