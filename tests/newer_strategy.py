"""A strategy without an arm in the wire contract, with an option of every type; registered by tests that ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerRule
from inference_engine.kv.strategies import STRATEGIES
from inference_engine.kv.strategy import KVStrategy, require


@dataclass(frozen=True, kw_only=True, slots=True)
class NewerWindow(KVStrategy):
    """The first `sink` and the last `window` entries stay; in `wide_layers` the window is `factor` times as wide."""

    name: ClassVar[str] = "newer_window"

    sink: int = 4
    window: int = 32
    factor: float = 2.0
    wide_layers: tuple[int, ...] = ()
    note: str | None = None

    def __post_init__(self) -> None:
        require(self.window >= 1, "window", f"must be ≥ 1, got {self.window}")

    def check(self, geometry: Geometry) -> None:
        count = len(geometry.layers)
        require(all(layer < count for layer in self.wide_layers), "wide_layers", f"must be below {count}")

    def rule(self, layer: int, geometry: Geometry) -> LayerRule:
        wider = self.factor if layer in self.wide_layers else 1
        return LayerRule(sink=self.sink, window=int(self.window * wider))

    def length_limit(self, geometry: Geometry) -> int | None:
        return None


@contextmanager
def registered(*kinds: type[KVStrategy], without: str | None = None, **under: type[KVStrategy]) -> Iterator[None]:
    """The strategies are known while the context lasts, each by its name, or by the one it is given `under`."""
    own = STRATEGIES.own
    known = dict(own)
    own.update({kind.name: kind for kind in kinds} | under)
    if without is not None:
        own.pop(without)
    try:
        yield
    finally:
        own.clear()
        own.update(known)
