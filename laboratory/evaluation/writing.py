"""Sessions that write side by side, and the steps that gave their tokens: how much of each draft was right.

A session gets its first tokens in turn with others' prefill, and until the last of a group has begun no session gets a
draft. Steps count from then on, and so does the time that is called decoding.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from inference_engine.engine import Engine
from inference_engine.types import Event, Failed, Finished, GenerateParams, TokenCommitted
from laboratory.evaluation.asking import Asked
from laboratory.evaluation.sessions import append_all
from laboratory.evaluation.trials import EvaluationVoid

SIDE_BY_SIDE = 8  # few enough that the steps before all have begun are few


@dataclass(slots=True)
class Step:
    """One step of one session: draft tokens that were verified, those of them that were right, tokens committed."""

    drafted: int
    accepted: int
    tokens: int = 1

    @property
    def right(self) -> int:
        """Of the accepted draft tokens, those that became tokens: a stop id ends the text within a draft."""
        return min(self.accepted, self.tokens)

    @property
    def judged(self) -> int:
        """Of the draft tokens, those that were held against a text: not what comes after a stop id within the draft."""
        return self.tokens if self.tokens <= self.accepted else self.drafted


@dataclass(frozen=True, slots=True)
class Text:
    """What was written, a stop id at its end included, and the steps that count. drafted, accepted: in all steps."""

    token_ids: tuple[int, ...]
    steps: tuple[Step, ...]
    drafted: int
    accepted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """Texts of a group. seconds: from the first append to the last token.

    decode_seconds: from when all had their first token to the last one; decode_tokens: those that came meanwhile.
    """

    texts: tuple[Text, ...]
    seconds: float
    decode_seconds: float
    decode_tokens: int

    @property
    def tokens(self) -> int:
        return sum(len(text.token_ids) for text in self.texts)


def write_all(engine: Engine, asked: Sequence[Asked], *, tokens: int, stop_ids: Sequence[int] = ()) -> list[Text]:
    """The text after each prompt, a few at a time."""
    groups = [asked[start : start + SIDE_BY_SIDE] for start in range(0, len(asked), SIDE_BY_SIDE)]
    return [text for group in groups for text in write(engine, group, tokens=tokens, stop_ids=stop_ids).texts]


def write(engine: Engine, asked: Sequence[Asked], *, tokens: int, stop_ids: Sequence[int] = ()) -> Written:
    """Let a session go on from each prompt, all side by side, for at most `tokens` tokens.

    Raises InvalidArgument or NoCapacity if the engine cannot hold them together, what a Generate failed with, and
    EvaluationVoid if a drafter failed; no session is left open.
    """
    sessions: list[str] = []
    try:
        for one in asked:
            limit = len(one.token_ids) + tokens
            sessions.append(
                engine.create_session(strategy=one.strategy, limit_tokens=limit, guaranteed=True).session_id
            )
        return _write(engine, sessions, asked, tokens, tuple(stop_ids))
    finally:
        for session in sessions:
            engine.close_session(session)


def _write(
    engine: Engine, sessions: Sequence[str], asked: Sequence[Asked], tokens: int, stop_ids: tuple[int, ...]
) -> Written:
    group = _Group(waiting=len(sessions))
    writers = [_Writer(engine, session, group) for session in sessions]
    began = time.perf_counter()
    try:
        for session, one, writer in zip(sessions, asked, writers, strict=True):
            append_all(engine, session, one.token_ids)
            params = GenerateParams(max_tokens=tokens, sampling=one.sampling, stop_token_ids=stop_ids)
            engine.generate(session, params, listener=writer)
    finally:
        group.all_asked.set()
    endings = [writer.wait() for writer in writers]
    if any(ending.is_degraded for ending in endings):
        raise EvaluationVoid("the drafter failed while it was measured; the log says how")
    ended = max(writer.times[-1] for writer in writers)
    return Written(
        texts=tuple(
            Text(tuple(writer.token_ids), tuple(writer.steps), ending.drafted_tokens, ending.accepted_tokens)
            for writer, ending in zip(writers, endings, strict=True)
        ),
        seconds=ended - began,
        decode_seconds=ended - group.begun_at,
        decode_tokens=sum(stamp > group.begun_at for writer in writers for stamp in writer.times),
    )


@dataclass(slots=True)
class _Group:
    """waiting: sessions without a first token. begun_at: when the last of them had it."""

    waiting: int
    begun_at: float = 0.0
    all_asked: threading.Event = field(default_factory=threading.Event)


class _Writer:
    """A Generate's listener. Called on the engine's thread, which it holds up until the whole group has asked."""

    def __init__(self, engine: Engine, session_id: str, group: _Group) -> None:
        self._engine = engine
        self._session_id = session_id
        self._group = group
        self._ended = threading.Event()
        self._ending: Finished | Failed | None = None
        self._drafted = self._accepted = 0
        self._left_of_step = 0  # tokens that the step under report still gives
        self._counts = self._next_counts = False
        self.token_ids: list[int] = []
        self.times: list[float] = []
        self.steps: list[Step] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, TokenCommitted):
            self._take(event.token_id)
            self._group.all_asked.wait()
        elif isinstance(event, Finished | Failed):
            self._ending = event
            self._ended.set()

    def wait(self) -> Finished:
        """Until the Generate has ended; raises what it failed with."""
        self._ended.wait()
        if isinstance(self._ending, Failed):
            raise self._ending.error
        assert self._ending is not None
        return self._ending

    def _take(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.times.append(time.perf_counter())
        if len(self.times) == 1:
            self._group.waiting -= 1
            if not self._group.waiting:
                self._group.begun_at = self.times[0]
        if self._left_of_step:
            self._left_of_step -= 1
            if self._counts:
                self.steps[-1].tokens += 1
        else:
            self._begin_step()

    def _begin_step(self) -> None:
        info = self._engine.session_info(self._session_id)
        step = Step(info.drafted_tokens - self._drafted, info.accepted_tokens - self._accepted)
        self._drafted, self._accepted = info.drafted_tokens, info.accepted_tokens
        self._left_of_step = step.accepted
        # Drafts were given to a step if all had begun before it.
        self._counts, self._next_counts = self._next_counts, not self._group.waiting
        if self._counts:
            self.steps.append(step)
