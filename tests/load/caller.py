"""A client that makes one call after another, may leave before the end, and can report its last ones."""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from google.protobuf.message import Message
from google.protobuf.text_format import MessageToString

from inference_engine.engine import Engine
from kakeya.v1 import runtime_pb2 as pb
from tests.load.servicer import Context, Outcome, Servicer

T = TypeVar("T")

LAST_CALLS = 80  # that a failure reports
HANG_SECONDS = 90.0  # without an answer, or without an end of a Generate, however slow the machine is


@dataclass(kw_only=True, frozen=True)
class Called:
    """A call, and what its client saw."""

    ended_at: float
    request: Any
    seconds: float | None  # to its deadline
    outcome: Outcome
    has_left: bool

    def __str__(self) -> str:
        end = "left" if self.has_left else f"{self.outcome.reason} {self.outcome.error or ''}"
        limit = "" if self.seconds is None else f" within {self.seconds} s"
        seen = " | ".join(_in_a_line(frame) for frame in self.outcome.frames)
        return f"{self.ended_at:g} s: {type(self.request).__name__} {_in_a_line(self.request)}{limit} -> {end} {seen}"


class CutOff(Context):
    """A client that leaves when it has seen so many frames."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after
        self.left = asyncio.Event()

    async def write(self, message: Any) -> None:
        self.frames.append(message)
        if len(self.frames) >= self._after:
            self.left.set()
            await asyncio.Event().wait()


class Caller:
    """seen: calls, by method and reason, to be counted on. last: what was called last, and what was seen of it."""

    def __init__(self, engine: Engine, clock: Callable[[], float], seen: Counter[tuple[str, str]]) -> None:
        self._loop = asyncio.new_event_loop()
        # A Generate that was left ends within a step: the next call waits for that, however slow the machine is.
        self._servicer = Servicer(engine, busy_wait_seconds=30.0)
        self._clock = clock
        self._seen = seen
        self.last = deque[Called](maxlen=LAST_CALLS)

    def ask(self, request: Any, *, seconds: float | None = None) -> Outcome:
        """Make a call. seconds: until its deadline."""
        outcome = self._noted(request, self._run(self._servicer.call(request, seconds=seconds)), seconds=seconds)
        self._count(request, outcome.reason)
        return outcome

    def leave(self, request: pb.GenerateRequest, after: int) -> Outcome:
        """What the client saw until it left, after so many frames; or the refusal, if there was nothing to leave."""
        return self._run(self._leave(request, CutOff(after)))

    def ask_unseen(self, request: Message) -> Outcome:
        """A call to judge by, that is neither counted nor reported."""
        return self._run(self._servicer.call(request))

    def look(self, session_id: str) -> Outcome:
        """What became of a session."""
        return self.ask_unseen(pb.GetSessionInfoRequest(session_id=session_id))

    def settled(self, session_id: str) -> Outcome:
        """What became of a session, once no Generate runs on it."""
        began, outcome = time.monotonic(), self.look(session_id)
        while outcome.reason == "OK" and outcome.only.generating:
            if time.monotonic() - began > HANG_SECONDS:
                _hangs(f"the session still generates: {_in_a_line(outcome.only)}")
            outcome = self.look(session_id)
        return self._noted(pb.GetSessionInfoRequest(session_id=session_id), outcome)

    def close(self) -> None:
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(self._in_time(work))

    async def _in_time(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        if not (await asyncio.wait((task,), timeout=HANG_SECONDS))[0]:
            _hangs("no answer to the call after the last one")
        return task.result()

    async def _leave(self, request: pb.GenerateRequest, context: CutOff) -> Outcome:
        task = asyncio.ensure_future(self._servicer.raw("Generate", request.SerializeToString(), context=context))
        leaving = asyncio.ensure_future(context.left.wait())
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if task.done():
            self._count(request, task.result().reason)
            return self._noted(request, task.result())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._count(request, "left")
        return self._noted(request, Outcome(context.frames, None), has_left=True)

    def _count(self, request: Any, reason: str) -> None:
        self._seen[type(request).__name__.removesuffix("Request"), reason] += 1

    def _noted(
        self, request: Any, outcome: Outcome, *, seconds: float | None = None, has_left: bool = False
    ) -> Outcome:
        self.last.append(
            Called(ended_at=self._clock(), request=request, seconds=seconds, outcome=outcome, has_left=has_left)
        )
        return outcome


def _hangs(what: str) -> NoReturn:
    faulthandler.dump_traceback(sys.stderr)
    raise AssertionError(f"{what}; waited {HANG_SECONDS:g} s")


def _in_a_line(message: Any) -> str:
    return MessageToString(message, as_one_line=True)
