"""The base of strategies with an optional codec: older entries may be kept in compressed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inference_engine.kv.archives.coded import Coded
from inference_engine.kv.archives.restorer import NoRestorer, Restorer
from inference_engine.kv.compressors import make_compressor
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerRule
from inference_engine.kv.parts.restored_entries import RestoredEntries
from inference_engine.kv.strategy import KVStrategy, require

DEFAULT_EXACT_WINDOW = 128
# The first entries draw much of every query's attention: a coded layer never codes them.
EXACT_SINK = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecStrategy(KVStrategy):
    """codec: the compressor of entries older than `exact_window` positions; None: entries stay as they are.

    exact_layers: layers of the model; the entries that they read are never coded.
    """

    codec: str | None = None
    exact_window: int | None = None
    exact_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.codec is None:
            require(
                self.exact_window is None, "exact_window", f"has no meaning without a codec, got {self.exact_window}"
            )
            require(not self.exact_layers, "exact_layers", f"has no meaning without a codec, got {self.exact_layers}")
            return
        make_compressor(self.codec)
        twice = sorted({layer for layer in self.exact_layers if self.exact_layers.count(layer) > 1})
        require(not twice, "exact_layers", f"must name each layer once, got {listed(twice)} more than once")
        if self.exact_window is None:
            # The default is filled in, so that the strategy's text shows it.
            object.__setattr__(self, "exact_window", DEFAULT_EXACT_WINDOW)
        assert self.exact_window is not None
        require(self.exact_window >= 1, "exact_window", f"must be ≥ 1, got {self.exact_window}")

    def check(self, geometry: Geometry) -> None:
        count = len(geometry.reads)
        for layer in self.exact_layers:
            require(
                0 <= layer < count,
                "exact_layers",
                f"the model has layers 0 to {count - 1}, got {layer}",
                layers=count,
            )
        exact = geometry.read_by(self.exact_layers)
        self.restorer().check(geometry, [index for index in range(len(geometry.layers)) if index not in exact])

    def restorer(self) -> Restorer:
        return NoRestorer() if self.codec is None else Coded(RestoredEntries, make_compressor(self.codec))

    def coded(self, rule: LayerRule, layer: int, geometry: Geometry) -> LayerRule:
        """`rule` with older entries coded, if there is a codec, the layer is not exact and the window long enough."""
        if self.codec is None or layer in geometry.read_by(self.exact_layers):
            return rule
        assert self.exact_window is not None
        if rule.window is not None and rule.window <= self.exact_window:
            return rule
        sink = rule.sink if rule.window is not None else max(rule.sink, EXACT_SINK)
        return LayerRule(sink=sink, window=rule.window, exact=self.exact_window)


def listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))
