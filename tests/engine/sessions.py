"""Sessions that tests open, hold in the middle of a Generate, and see at work after a fault."""

from __future__ import annotations

import queue
import threading
from typing import Any

from inference_engine.engine import Engine
from inference_engine.types import Event, Failed, Finished, Progress, TokenCommitted
from tests.laws.variants import generate, text
from tests.tiny_native import served_engine


class Clock:
    """Monotonic seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Gate:
    """A listener that holds the engine's thread at a token, so that a test can act while a Generate runs.

    at: which token, the first one being 1. of: which chunk of its prefill instead, with Progress.
    """

    def __init__(self, at: int = 1, of: type[TokenCommitted | Progress] = TokenCommitted) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self._left, self._of = at, of

    def __call__(self, event: Event) -> None:
        self.events.put(event)
        if isinstance(event, self._of):
            self._left -= 1
            if self._left == 0:
                self.reached.set()
                assert self.go_on.wait(30)

    def rest(self) -> list[Event]:
        """All events up to the last."""
        seen = [self.events.get(timeout=30)]
        while not isinstance(seen[-1], Finished | Failed):
            seen.append(self.events.get(timeout=30))
        return seen


def opened(engine: Engine, length: int = 20, **options: Any) -> str:
    """A session with so many tokens. options: those of `create_session`."""
    session_id = engine.create_session(**options).session_id
    engine.append(session_id, text(length), owner=options.get("owner", ""))
    return session_id


def still_works(engine: Engine) -> None:
    """The closing assertion of every fault: another session generates what it always did."""
    with served_engine() as fresh:
        expected = [token for token, _ in generate(fresh, opened(fresh), 8)]
    session = opened(engine)
    assert [token for token, _ in generate(engine, session, 8)] == expected
    engine.close_session(session)
