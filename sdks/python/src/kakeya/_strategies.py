"""KV strategies as frozen values: what a session keeps in memory, chosen when it is created.

A new strategy is a class here with `_to_wire` and an arm in `from_wire`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from kakeya._checks import whole_number
from kakeya.v1 import runtime_pb2 as pb


class Strategy(ABC):
    """Base of the strategies. None in place of one means the server's default."""

    @abstractmethod
    def _to_wire(self) -> pb.Strategy:
        """The strategy as a protobuf message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Full(Strategy):
    """Every row stays. The session ends at the model's trained positions."""

    def _to_wire(self) -> pb.Strategy:
        return pb.Strategy(full=pb.FullStrategy())


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkWindow(Strategy):
    """The first `sink` rows and at least the last `window` rows stay; the rest are evicted and never read again.

    None leaves a number to the server; a session's `strategy` has the numbers in force.
    """

    sink: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        if self.sink is not None:
            whole_number(self.sink, "sink", below=2**32)
        if self.window is not None:
            whole_number(self.window, "window", at_least=1, below=2**32)

    def _to_wire(self) -> pb.Strategy:
        return pb.Strategy(sink_window=pb.SinkWindowStrategy(sink=self.sink, window=self.window))


def from_wire(message: pb.Strategy) -> Strategy | None:
    """The strategy of a reply; None if it is of a kind newer than this SDK."""
    match message.WhichOneof("kind"):
        case "full":
            return Full()
        case "sink_window":
            arm = message.sink_window
            return SinkWindow(
                sink=arm.sink if arm.HasField("sink") else None,
                window=arm.window if arm.HasField("window") else None,
            )
        case _:
            return None
