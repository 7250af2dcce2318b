"""Asks an engine many prompts at once, as many sessions open at a time as its memory holds."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass

from inference_engine.engine import Engine
from inference_engine.errors import NoCapacity, Overloaded
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Event, Failed, Finished, GenerateParams, Sampling, TokenCommitted
from laboratory.evaluation.sessions import append_all

GREEDY = Sampling()


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    strategy: KVStrategy
    token_ids: tuple[int, ...]
    sampling: Sampling = GREEDY


def answer_all(
    engine: Engine,
    asked: Sequence[Asked],
    *,
    answer_tokens: int,
    stop_ids: Sequence[int],
) -> list[list[int]]:
    """The answer to each prompt, on a session of its own, without the id it stopped at.

    Sessions begin in order and run side by side; where memory or the queue is full, the next waits for one to end.
    Raises InvalidArgument or NoCapacity for a prompt that fits no session at all, and what any Generate failed with; no
    session is left open.
    """
    asking = _Asking(engine, answer_tokens, stop_ids)
    try:
        for number, one in enumerate(asked):
            asking.start(number, one)
        while asking.sessions:
            asking.wait_for_one()
    finally:
        for session in asking.sessions:
            engine.close_session(session)
    return [asking.answers[number] for number in range(len(asked))]


class _Asking:
    """Open sessions with the number of their prompt, and the answers so far."""

    def __init__(
        self,
        engine: Engine,
        answer_tokens: int,
        stop_ids: Sequence[int],
    ) -> None:
        self._engine = engine
        self._answer_tokens = answer_tokens
        self._stop_ids = stop_ids
        self._events: queue.SimpleQueue[tuple[str, Event]] = queue.SimpleQueue()
        self.sessions: dict[str, int] = {}
        self.answers: dict[int, list[int]] = {}

    def start(self, number: int, one: Asked) -> None:
        """Begin once there is room."""
        while True:
            try:
                return self._start(number, one)
            except (NoCapacity, Overloaded):
                if not self.sessions:
                    raise
            self.wait_for_one()

    def wait_for_one(self) -> None:
        """Take events until some session has ended and closed."""
        while True:
            session, event = self._events.get()
            if session not in self.sessions:
                continue  # a refused Generate: reported to the caller, and to its listener
            number = self.sessions[session]
            if isinstance(event, TokenCommitted) and event.token_id not in self._stop_ids:
                self.answers[number].append(event.token_id)
            elif isinstance(event, Failed):
                raise event.error
            elif isinstance(event, Finished):
                del self.sessions[session]
                self._engine.close_session(session)
                return

    def _start(self, number: int, one: Asked) -> None:
        limit = len(one.token_ids) + self._answer_tokens
        session = self._engine.create_session(
            strategy=one.strategy, eos_token_ids=self._stop_ids, limit_tokens=limit, guaranteed=True
        ).session_id
        self.answers[number] = []
        self.sessions[session] = number
        try:
            append_all(self._engine, session, one.token_ids)
            params = GenerateParams(max_tokens=self._answer_tokens, sampling=one.sampling)
            self._engine.generate(session, params, listener=lambda event: self._events.put((session, event)))
        except BaseException:
            del self.sessions[session]
            self._engine.close_session(session)
            raise
