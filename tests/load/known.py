"""What a model of the histories knows of one session, where calls that were cut off may have happened or not."""

from __future__ import annotations

from dataclasses import dataclass, field

from inference_engine.kv.strategy import KVStrategy
from tests.load.alone import AloneSolo
from tests.load.solo import Solo

LIMIT_TOKENS = 64  # of every session


@dataclass(kw_only=True)
class Known:
    """Its history as far as it is certain, and what may come after that."""

    session_id: str
    strategy: KVStrategy
    solo: Solo | AloneSolo
    history: list[int] = field(default_factory=list)
    possible: list[int] = field(default_factory=list)  # tokens of which any number may have been added since
    used_at: float = 0.0

    def continued(self, count: int, seed: int | None = None) -> list[int] | None:
        """What follows, up to the limit; None where rounding may decide, as entries are summed in float32."""
        count = min(count, LIMIT_TOKENS - len(self.history))
        if not self.history or not count:
            return []
        tokens = self.solo.continued(self.history, count, seed=seed)
        return tokens if self.solo.is_certain(self.history + tokens, len(self.history)) else None

    def reported(self, length: int) -> None:
        """The server said how long the history is."""
        added = length - len(self.history)
        assert 0 <= added <= len(self.possible), (length, len(self.history), self.possible)
        self.history += self.possible[:added]
        self.possible = []
