"""Layer-window strategy: most layers keep a sink and a window, a chosen few keep every entry.

    layer       0 1 2 3 4 [5] 6 … 10 [11] 12 …       full_layers = (5, 11)
    keeps       w w w w w  all w … w  all  w …       w = sink ∪ window

Few layers retrieve. If enough of them are kept full, facts far behind the window are found, at the bytes of those
layers alone; with too few, they are lost as under `sink_window`. How many layers, and which, depends on the model and
is measured. Layers with a native sliding window stay as they are, whatever `window` says.

The windowed layers work as under `sink_window`, also in the distance of the sink: after eviction, its keys are moved
to right before the window. True distances would stay within the trained range here, because full layers end the
session there; but a windowed layer is to be the same under both strategies. Full layers read every key at its true
distance. Until the first eviction nothing is moved, and the session equals `full`.

Sources: Wu et al., Retrieval Head, arXiv 2404.15574 (few heads retrieve, in every model); Xiao et al., DuoAttention,
arXiv 2410.10819 (those heads full, the others sink and window). Here the unit is the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerRule
from inference_engine.kv.strategies.codec_options import CodecStrategy, listed
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import require


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWindow(CodecStrategy):
    """Keeps every entry in `full_layers`, which must be given; `sink` and `window` positions in the others."""

    name: ClassVar[str] = "layer_window"

    sink: int = 4
    window: int = 1024
    full_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        CodecStrategy.__post_init__(self)
        self._windowed()  # checks its options
        layers = self.full_layers
        require(
            len(layers) >= 1,
            "full_layers",
            "must name at least one layer, such as layer_window:full_layers=5+11, got none; `kakeya evaluate backstop` "
            "finds those that a model needs, and a session that keeps no layer full is sink_window",
            at_least=1,
        )
        require(min(layers) >= 0, "full_layers", f"layers are numbered from 0, got {listed(layers)}", at_least=0)
        twice = sorted({layer for layer in layers if layers.count(layer) > 1})
        require(not twice, "full_layers", f"must name each layer once, got {listed(twice)} more than once")

    def check(self, geometry: Geometry) -> None:
        CodecStrategy.check(self, geometry)
        self._windowed().check(geometry)
        count = len(geometry.reads)
        absent = [layer for layer in self.full_layers if layer >= count]
        require(
            not absent,
            "full_layers",
            f"the model has {count} layers, 0 to {count - 1}; got {listed(absent)}",
            layers=count,
        )
        # Accepting them would promise a reach that they do not have.
        able = _able(geometry)
        sliding = [layer for layer in self.full_layers if layer not in able]
        require(
            not sliding,
            "full_layers",
            f"got {listed(sliding)}, where the model itself looks no further back than a sliding window; "
            f"layers that can be kept full: {listed(able) or 'none'}",
            layers=count,
        )

    def rule(self, layer: int, geometry: Geometry) -> LayerRule:
        if layer in geometry.read_by(self.full_layers) or geometry.layers[layer].native_window is not None:
            return self.coded(LayerRule(), layer, geometry)
        return self.coded(LayerRule(sink=self.sink, window=self.window), layer, geometry)

    @classmethod
    def trials(cls, geometry: Geometry) -> tuple[LayerWindow, ...]:
        return tuple(cls(sink=2, window=8, full_layers=(layer,)) for layer in _able(geometry)[:1])

    def _windowed(self) -> SinkWindow:
        """The strategy of the windowed layers."""
        return SinkWindow(sink=self.sink, window=self.window)


def _able(geometry: Geometry) -> list[int]:
    """The model's layers whose queries may read every entry."""
    return [
        number
        for number, read in enumerate(geometry.reads)
        if read is not None and geometry.layers[read].native_window is None
    ]
