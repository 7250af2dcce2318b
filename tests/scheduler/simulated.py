"""Generates that come at their times to a real engine on the scripted model, under a clock that its steps move.

Nothing waits: a step takes as long as it is said to, and what is due meanwhile comes while it runs, so that a minute
under load is played in seconds, and alike each time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from inference_engine.backends.base import Result, Step
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.errors import Overloaded
from inference_engine.types import Event, Failed, Finished, GenerateParams, TokenCommitted
from laboratory.scripted import ScriptedForward, ScriptedModel
from tests.facade import soon


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A Generate that comes `at` seconds after the beginning."""

    at: float
    owner: str = ""
    prompt_tokens: int = 8
    max_tokens: int = 24
    says_tokens: int = 0  # 0: all that it asks for; else it is cancelled after so many


@dataclass(slots=True)
class Seen:
    """What became of an arrival. Seconds, from when it came."""

    arrival: Arrival
    first_token: float | None = None
    tokens: int = 0
    ended: float | None = None
    retry_after: float | None = None  # of one that was refused

    @property
    def is_refused(self) -> bool:
        return self.retry_after is not None


@dataclass
class Simulation:
    """step_seconds: of every step; token_seconds: what each token adds."""

    settings: dict[str, object]
    step_seconds: float = 1 / 30
    token_seconds: float = 0.0
    now: float = 0.0
    seen: list[Seen] = field(default_factory=list)
    tokens_at: list[float] = field(default_factory=list)
    _due: deque[Arrival] = field(default_factory=deque)
    _open: int = 0  # that were taken and are not over

    def play(self, arrivals: Iterable[Arrival]) -> list[Seen]:
        """What becomes of each, once all are over."""
        self._due.extend(sorted(arrivals, key=lambda one: one.at))
        is_over = threading.Event()
        with Engine(_Clocked(self), EngineConfig(**self.settings), clock=lambda: self.now) as engine:  # type: ignore[arg-type]
            self._engine = engine

            def go_on() -> None:
                """On the engine's thread, without work: the clock stands at the next arrival."""
                if self._open:
                    return
                if not self._due:
                    is_over.set()
                    return
                self.now = max(self.now, self._due[0].at)
                self._arrive()

            self._go_on = go_on
            soon(engine, go_on)
            assert is_over.wait(300)
        return self.seen

    def tokens_per_second(self, since: float, until: float) -> float:
        return sum(since <= at < until for at in self.tokens_at) / (until - since)

    def step(self, tokens: int) -> None:
        """A step takes its time; arrivals in it are received at once."""
        until = self.now + self.step_seconds + self.token_seconds * tokens
        while self._due and self._due[0].at <= until:
            self.now = max(self.now, self._due[0].at)
            self._arrive(most=1)
        self.now = until

    def _arrive(self, most: int | None = None) -> None:
        while self._due and self._due[0].at <= self.now and most != 0:
            most = None if most is None else most - 1
            self._begin(self._due.popleft())

    def _begin(self, arrival: Arrival) -> None:
        engine, seen = self._engine, Seen(arrival)
        self.seen.append(seen)
        session = engine.create_session(owner=arrival.owner, limit_tokens=2048).session_id
        engine.append(session, [len(self.seen) % 256] * arrival.prompt_tokens, owner=arrival.owner)

        def receive(event: Event) -> None:
            if isinstance(event, TokenCommitted):
                seen.tokens += 1
                self.tokens_at.append(self.now)
                if seen.first_token is None:
                    seen.first_token = self.now - arrival.at
                if seen.tokens == arrival.says_tokens:
                    seen.ended = self.now - arrival.at
                    engine.close_session(session, owner=arrival.owner)
            elif isinstance(event, Finished | Failed):
                if isinstance(event, Failed) and isinstance(event.error, Overloaded):
                    return
                if seen.ended is None:
                    seen.ended = self.now - arrival.at
                    engine.close_session(session, owner=arrival.owner)
                self._open -= 1
                if not self._open:
                    soon(engine, self._go_on)

        self._open += 1
        params = GenerateParams(max_tokens=arrival.max_tokens)
        try:
            engine.generate(session, params, owner=arrival.owner, listener=receive, refuse_late=True)
        except Overloaded as refused:
            self._open -= 1
            seen.retry_after = refused.retry_after_seconds or 0.0
            engine.close_session(session, owner=arrival.owner)


class _Clocked(ScriptedForward):
    def __init__(self, simulation: Simulation) -> None:
        super().__init__(ScriptedModel())
        self._simulation = simulation

    def run(self, step: Step) -> Result:
        result = super().run(step)
        self._simulation.step(len(step.token_ids))
        return result
