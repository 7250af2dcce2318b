"""Cancels at random instants: before the first step, in the middle of one, between two, and from another thread."""

from __future__ import annotations

import enum
import queue
from dataclasses import dataclass, field

import numpy as np

from inference_engine.engine import Engine
from inference_engine.engine.generation import Generation
from inference_engine.kv.strategies import make_strategy
from inference_engine.types import Event, Failed, Finished, GenerateParams, StopReason, TokenCommitted
from laboratory.scripted import Script, ScriptedForward
from tests.facade import forward_of
from tests.load.alone import Alone
from tests.load.counted import CountedForward
from tests.load.scripted import solo_of

NEIGHBOURS = 3
ASKED = 10
FULL_AT = 90
LIMIT_TOKENS = 128
STEPS = 1  # that may begin between a cancel and the end of its Generate
STRATEGIES = (
    make_strategy("full"),
    make_strategy("sink_window", sink=2, window=20),
    make_strategy("restored", sink=4, window=16),
)


class Instant(enum.Enum):
    """When a cancel comes."""

    AT_ONCE = "right after the call"
    IN_A_STEP = "in the middle of a forward"
    AT_A_TOKEN = "when a token is reported"
    ANY_TIME = "from another thread, after some of the events"


@dataclass(kw_only=True, eq=False)
class Cancelled:
    """A Generate that is cancelled at an instant, and what was seen of it."""

    session_id: str
    first: int
    instant: Instant
    after: int  # steps or tokens
    forward: ScriptedForward | CountedForward
    generation: Generation | None = None
    tokens: list[int] = field(default_factory=list)
    tokens_then: int | None = None  # at the cancel, where the engine's own thread made it
    steps_then: int | None = None
    steps_at_end: int = 0
    events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)

    def listen(self, event: Event) -> None:
        if isinstance(event, TokenCommitted):
            self.tokens.append(event.token_id)
            if self.instant is Instant.AT_A_TOKEN and len(self.tokens) >= self.after:
                self.cancel(is_exact=True)
        elif isinstance(event, Finished | Failed):
            self.steps_at_end = self.forward.steps
        self.events.put(event)

    def cancel(self, *, is_exact: bool) -> None:
        """is_exact: the engine can do nothing meanwhile, so that no token may come any more."""
        if self.generation is not None and self.steps_then is None:
            self.tokens_then = len(self.tokens) if is_exact else None
            self.generation.cancel()
            self.steps_then = self.forward.steps  # this thread may have waited for others until it was heard

    def end(self) -> Finished | Failed:
        """Waits for it; a cancel from outside comes meanwhile."""
        seen = 0
        while True:
            if self.instant is Instant.ANY_TIME and seen >= self.after:
                self.cancel(is_exact=False)
            event = self.events.get()
            seen += 1
            if isinstance(event, Finished | Failed):
                return event


class Cancels:
    """Some sessions that are used, and cancelled, again and again. alone: the law, where there is no closed form."""

    def __init__(self, engine: Engine, script: Script, *, alone: Alone | None = None) -> None:
        forward = forward_of(engine)
        assert isinstance(forward, ScriptedForward | CountedForward)
        self._engine, self._forward, self._script, self._alone = engine, forward, script, alone
        self._vocab_size = engine.info().facts.vocab_size
        self._sessions: dict[str, tuple[int, list[int]]] = {}  # id -> strategy, history
        self.count = self.tokens = self.before_the_first = 0

    def round(self, rng: np.random.Generator) -> None:
        """One Generate on each of NEIGHBOURS + 1 sessions, all cancelled. Raises AssertionError."""
        self._renew(rng)
        runs = []
        for session_id, (_, history) in self._sessions.items():
            ids = [int(token) for token in rng.integers(0, self._vocab_size, rng.integers(1, 24))]
            self._engine.append(session_id, ids)
            history.extend(ids)
            instant = list(Instant)[rng.integers(len(Instant))]
            runs.append(
                Cancelled(
                    session_id=session_id,
                    first=len(history),
                    instant=instant,
                    after=int(rng.integers(1, ASKED)),
                    forward=self._forward,
                )
            )
        began = self._forward.steps

        def on_step(number: int) -> None:
            for run in runs:
                if run.instant is Instant.IN_A_STEP and number - began >= run.after:
                    run.cancel(is_exact=True)

        self._script.on_step = on_step
        for run in runs:
            run.generation = self._engine.generate(
                run.session_id, GenerateParams(max_tokens=ASKED), listener=run.listen
            )
            if run.instant is Instant.AT_ONCE:
                run.cancel(is_exact=False)
        for run in runs:
            self._judge(run, run.end())
        self._script.on_step = None
        self._check_pool()

    def _judge(self, run: Cancelled, end: Finished | Failed) -> None:
        strategy, history = self._sessions[run.session_id]
        assert isinstance(end, Finished), end
        if run.steps_then is not None and len(run.tokens) < ASKED:
            assert end.stop_reason is StopReason.CANCELLED
            assert run.steps_at_end - run.steps_then <= STEPS, (run.steps_then, run.steps_at_end)
        if run.tokens_then is not None:
            assert len(run.tokens) == run.tokens_then, "a token was committed after the cancel"
        assert end.generated_tokens == len(run.tokens)
        history += run.tokens
        assert end.history_length == len(history)
        assert self._engine.session_info(run.session_id).history_length == len(history)
        if run.tokens:
            assert run.tokens == self._expected(run, strategy, history)
        self.count += run.steps_then is not None
        self.before_the_first += not run.tokens
        self.tokens += len(run.tokens)

    def _expected(self, run: Cancelled, strategy: int, history: list[int]) -> list[int]:
        if self._alone is None:
            return solo_of(STRATEGIES[strategy]).tokens(history[:-1], run.first)
        return self._alone.tokens(run.session_id, history, run.first, len(run.tokens))

    def _renew(self, rng: np.random.Generator) -> None:
        for session_id, (_, history) in list(self._sessions.items()):
            if len(history) >= FULL_AT:
                self._engine.close_session(session_id)
                del self._sessions[session_id]
        while len(self._sessions) <= NEIGHBOURS:
            strategy = int(rng.integers(len(STRATEGIES)))
            opened = self._engine.create_session(strategy=STRATEGIES[strategy], limit_tokens=LIMIT_TOKENS)
            self._sessions[opened.session_id] = (strategy, [])

    def _check_pool(self) -> None:
        """Nothing runs: what is reserved is what was promised, and what an active session took was returned."""
        sessions = [self._engine.session_info(session_id) for session_id in self._sessions]
        assert all(session.reserved_bytes <= session.bound.sustained_bytes for session in sessions)
        assert self._engine.info().kv_reserved_bytes == sum(session.reserved_bytes for session in sessions)
