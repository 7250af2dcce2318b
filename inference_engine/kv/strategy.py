"""The strategy interface: a frozen spec that says, per layer, which rows a session keeps and how long it can grow.

A strategy is data. The planner (`kv/plan.py`) turns its rules into one attention call for all sessions of a step;
nothing asks which strategy it has. A new one is a file in `strategies/` and its line in the registry there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import ClassVar

from inference_engine.errors import InvalidArgument
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerRule, Layout
from inference_engine.kv.pool import Demand
from inference_engine.types import Bound


@dataclass(frozen=True, kw_only=True, slots=True)
class KVStrategy(ABC):
    """A spec: its fields are its options, on the wire and the command line alike."""

    name: ClassVar[str]

    @abstractmethod
    def rule(self, layer: int, geometry: Geometry) -> LayerRule:
        """What layer number `layer` keeps."""

    def check(self, geometry: Geometry) -> None:
        """Raise InvalidArgument, naming the option, if a model of this geometry cannot be served this way."""

    def length_limit(self, geometry: Geometry) -> int | None:
        """The longest history in tokens, or None if sessions can go on for ever."""
        return geometry.trained_positions

    def options(self) -> dict[str, int]:
        return asdict(self)

    def layouts(self, geometry: Geometry, limit_tokens: int | None) -> tuple[Layout, ...]:
        """Each layer's layout for a session of at most `limit_tokens`."""
        return tuple(
            Layout.of(self.rule(index, geometry), geometry, layer.native_window, limit_tokens)
            for index, layer in enumerate(geometry.layers)
        )

    def demands(self, geometry: Geometry, limit_tokens: int | None) -> tuple[Demand, ...]:
        """Each layer's part of the slab."""
        unit = geometry.alignment
        return tuple(
            Demand(
                head_dim=layer.head_dim,
                elements=-(-layer.kv_heads * layout.lane * layer.head_dim // unit) * unit,
            )
            for layer, layout in zip(geometry.layers, self.layouts(geometry, limit_tokens), strict=True)
        )

    def bound(self, geometry: Geometry, limit_tokens: int | None) -> Bound:
        """Bytes of K/V such a session may hold. Page rounding, rings and the sink's second copy are in it.

        Rows of a running step are staged in the slab itself, so the peak is no higher than what is sustained.
        """
        elements = sum(demand.elements for demand in self.demands(geometry, limit_tokens))
        held = 2 * elements * geometry.itemsize
        return Bound(sustained_bytes=held, peak_bytes=held)

    def evicted(self, geometry: Geometry, length: int) -> int:
        """Positions among the first `length` that no layer can read any more because of the strategy.

        A model's own sliding windows are not counted: nothing is lost that full attention would have had.
        """
        lost = length
        for index in range(len(geometry.layers)):
            rule = self.rule(index, geometry)
            if rule.window is None:
                return 0
            start = length - length % geometry.segment_tokens
            lost = min(lost, max(0, start - rule.window - rule.sink))
        return lost

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options().items())
        return f"{self.name}:{options}" if options else self.name


def require(condition: bool, field: str, message: str, **limits: int) -> None:
    """Raise InvalidArgument for `field` unless `condition` holds."""
    if not condition:
        raise InvalidArgument(field, message, **limits)
