"""What a drafter remembers of a session: bytes of the pool like everything else a session holds, told and counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from inference_engine.kv.geometry import Geometry
from inference_engine.kv.pool import Demand

if TYPE_CHECKING:
    from inference_engine.kv.context import KVContext


class DraftMemory(Protocol):
    """What a drafter remembers of one session, reserved for the session's life."""

    def held_bytes(self) -> int:
        """Bytes in use, at most what was demanded."""

    def forget(self) -> None:
        """Go back to an empty history."""

    def release(self) -> None:
        """Give the memory back. Safe to call twice."""


class DraftMemories(Protocol):
    """Where sessions get theirs."""

    def demands(self, geometry: Geometry) -> tuple[Demand, ...]:
        """What one session's memory takes of the pool; () if nothing is remembered."""

    def open(self, context: KVContext) -> DraftMemory | None:
        """Reserve one session's memory; None, and nothing taken, if there is no room.

        Not called if nothing is demanded.
        """
