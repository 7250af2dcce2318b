"""Limits of token ids, of a session and of an owner's sessions. A call that passes one is refused and loses nothing."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

from inference_engine.backends.base import Step
from inference_engine.engine import Engine
from inference_engine.engine.generation import Generation
from inference_engine.errors import HistoryLimit, QuotaExceeded, RequestError
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.session.history import BRANCH_TOKENS, LEAF_TOKENS
from inference_engine.session.journal import MemoryJournal
from inference_engine.session.replies import MOST_PER_SESSION
from inference_engine.types import Event, Finished, GenerateParams, Mark, Sampling, StopReason, TokenCommitted
from tests.facade import no_memory_for_histories, remembered_appends, session_of, store_of
from tests.further import further
from tests.laws.variants import drain, text, tokens
from tests.load.scripted import scripted_engine
from tests.session.test_history import SMALL_LEAF_TOKENS, small_leaves
from tests.tiny_native import served_engine

ENDLESS = SinkWindow(sink=4, window=32)
PENALTY = Sampling(temperature=0.8, repetition_penalty=1.5, seed=7)


def opened(engine: Engine, length: int = 0, *, owner: str = "", **options: Any) -> str:
    session = engine.create_session(strategy=ENDLESS, owner=owner, **options).session_id
    if length:
        engine.append(session, text(length), owner=owner)
    return session


def long(engine: Engine, tokens: int, owner: str = "") -> str:
    """A session with a long history, none of which has K/V. Put there as an append does it."""
    session = session_of(engine, opened(engine, owner=owner), owner)
    ids = np.array(text(BRANCH_TOKENS)[: engine.config.max_append_tokens], dtype=np.uint32)
    with store_of(engine).locked():
        while (missing := tokens - len(session.history)) > 0:
            session.record(ids[:missing], Mark.APPENDED)
    return session.session_id


def said(engine: Engine, session: str, count: int = 8, **options: Any) -> list[int]:
    return [token for token, _ in tokens(drain(engine.generate(session, GenerateParams(max_tokens=count, **options))))]


def received(generation: Generation) -> tuple[list[int], RequestError | None]:
    """Its tokens, and the error that ended it, if one did."""
    events: list[Event] = []
    try:
        events.extend(generation)
    except RequestError as error:
        return [token for token, _ in tokens(events)], error
    return [token for token, _ in tokens(events)], None


# -- a session's cap --------------------------------------------------------------------------------------------------


def test_tokens_are_in_the_journal_before_the_history_and_in_neither_if_one_fails() -> None:
    class Journal(MemoryJournal):
        """Notes how long the history was when more was recorded."""

        fails = False

        def append(self, session_id: str, *args: Any, **options: Any) -> None:
            if self.fails:
                raise RuntimeError("the journal fails")
            lengths.append(len(session_of(engine, session_id).history))
            super().append(session_id, *args, **options)

        def ids(self) -> list[int]:
            return [token for record in self.read(session)[1] for token in record.token_ids.tolist()]

    lengths: list[int] = []
    journal = Journal()
    with scripted_engine(journal=journal) as engine:
        session = opened(engine, 10)
        engine.append(session, text(5))
        assert lengths == [0, 10]
        history = [*text(10), *text(5)]
        with no_memory_for_histories(), pytest.raises(MemoryError):
            engine.append(session, text(2 * LEAF_TOKENS))
        assert lengths == [0, 10]  # room is made first
        journal.fails = True
        with pytest.raises(RuntimeError):
            engine.append(session, text(3))
        assert journal.ids() == session_of(engine, session).history.ids().tolist() == history
        journal.fails = False
        engine.append(session, text(3))
        assert journal.ids() == session_of(engine, session).history.ids().tolist() == [*history, *text(3)]


def test_an_append_past_the_cap_of_a_session_is_refused_and_the_session_goes_on() -> None:
    with scripted_engine(history_tokens_per_session=100) as engine:
        session = opened(engine, 90)
        with pytest.raises(HistoryLimit, match="history_tokens_per_session") as refused:
            engine.append(session, text(11))
        assert refused.value.metadata == {
            "history_length": "90",
            "limit_tokens": "100",
            "setting": "history_tokens_per_session",
        }
        assert engine.append(session, text(5)) == 95
        assert len(said(engine, session, 3)) == 3


def test_a_generate_that_reaches_the_cap_ends_there_and_the_next_is_refused() -> None:
    with scripted_engine(history_tokens_per_session=100) as engine:
        session = opened(engine, 95)
        events = drain(engine.generate(session, GenerateParams(max_tokens=20)))
        assert len(tokens(events)) == 5
        assert isinstance(events[-1], Finished)
        assert events[-1].stop_reason is StopReason.TRUNCATED
        with pytest.raises(HistoryLimit, match="history_tokens_per_session"):
            engine.generate(session, GenerateParams(max_tokens=1))
        assert engine.session_info(session).history_length == 100
        assert engine.fork_session(session).history_length == 100
        assert engine.close_session(session) == 100


# -- an owner's -------------------------------------------------------------------------------------------------------


def test_an_append_past_the_quota_of_an_owner_is_refused_until_a_session_is_closed() -> None:
    with scripted_engine(history_tokens_per_owner=100) as engine:
        first, second = opened(engine, 60, owner="a"), opened(engine, 30, owner="a")
        with pytest.raises(QuotaExceeded, match="history_tokens_per_owner") as refused:
            engine.append(second, text(11), owner="a")
        assert refused.value.metadata == {"quota": "history_tokens_per_owner", "limit": "100"}
        assert engine.history_tokens_of("a") == 90
        assert engine.append(second, text(10), owner="a") == 40
        assert engine.append(opened(engine, owner="b"), text(100), owner="b") == 100  # others have their own
        engine.close_session(first, owner="a")
        assert engine.history_tokens_of("a") == 40
        assert engine.append(second, text(60), owner="a") == 100


def test_a_fork_counts_what_it_does_not_share() -> None:
    with scripted_engine(history_tokens_per_owner=2 * LEAF_TOKENS + 300) as engine:
        session = long(engine, 2 * LEAF_TOKENS + 100)
        forks = [engine.fork_session(session).session_id for _ in range(2)]
        assert engine.history_tokens_of("") == 2 * LEAF_TOKENS + 300
        with pytest.raises(QuotaExceeded, match="fork less"):
            engine.fork_session(session)
        with pytest.raises(QuotaExceeded):
            engine.append(forks[0], [1])
        engine.close_session(session)
        assert engine.history_tokens_of("") == 2 * LEAF_TOKENS + 200
        assert engine.append(forks[0], [1]) == 2 * LEAF_TOKENS + 101
        for fork in forks:
            engine.close_session(fork)
        assert engine.history_tokens_of("") == 0


def test_a_generate_that_reaches_the_quota_ends_typed_keeps_its_tokens_and_goes_on_when_there_is_room() -> None:
    with scripted_engine() as calm:
        expected = said(calm, opened(calm, 40), 20)
    with scripted_engine(history_tokens_per_owner=100) as engine:
        other, session = opened(engine, 50), opened(engine, 40)
        params, request_id = GenerateParams(max_tokens=20), b"r" * 16
        first, error = received(engine.generate(session, params, request_id=request_id))
        assert first == expected[:10]
        assert isinstance(error, QuotaExceeded)
        assert (engine.session_info(session).history_length, engine.history_tokens_of("")) == (50, 100)
        for again in (b"", request_id):
            with pytest.raises(QuotaExceeded):
                engine.generate(session, params, request_id=again)
        engine.close_session(other)
        assert received(engine.generate(session, params, request_id=request_id, resume_from=50)) == (
            expected[10:],
            None,
        )


def test_many_generates_of_an_owner_never_pass_the_quota_together() -> None:
    with scripted_engine(history_tokens_per_owner=301) as engine:
        sessions = [opened(engine, 40) for _ in range(7)]
        running = [engine.generate(session, GenerateParams(max_tokens=30)) for session in sessions]
        assert all(isinstance(received(generation)[1], QuotaExceeded) for generation in running)
        assert engine.history_tokens_of("") == 301
        assert sum(engine.session_info(session).history_length for session in sessions) == 301


def test_an_append_has_the_places_that_a_generate_was_granted_and_has_not_used() -> None:
    with scripted_engine(history_tokens_per_owner=200) as engine:
        other, session = opened(engine, 40), opened(engine, 40)
        granted, left = list[int](), list[int]()

        def on_event(event: Event) -> None:
            if isinstance(event, TokenCommitted) and event.position == 45:
                granted.append(session_of(engine, session).granted_length)
                left.append(200 - engine.history_tokens_of(""))
                engine.append(other, text(left[0]))

        running = engine.generate(session, GenerateParams(max_tokens=60), listener=on_event)
        generated, error = received(running)
        assert isinstance(error, QuotaExceeded)
        assert granted[0] > 46, "the Generate had places for later tokens"
        assert (len(generated), engine.history_tokens_of("")) == (6, 200)


def test_a_score_whose_places_were_taken_meanwhile_ends_typed_and_adds_nothing() -> None:
    began: list[str] = []

    def takes_the_places(step: Step) -> None:
        if step.logit_queries and not began:
            began.append(engine.create_session(strategy=ENDLESS).session_id)
            engine.append(began[0], text(45))

    with served_engine(history_tokens_per_owner=100, on_step=takes_the_places) as engine:
        session = opened(engine, 50)
        scoring = engine.score(session, text(20), lambda *_: None)
        with pytest.raises(QuotaExceeded, match="hold 95 tokens"):
            list(scoring)
        assert engine.history_tokens_of("") == 95
        engine.close_session(began[0])
        drain(engine.score(session, text(20), lambda *_: None))
        assert engine.session_info(session).history_length == 70


def test_a_session_that_fails_or_is_evicted_gives_its_tokens_back() -> None:
    now = 0.0
    with scripted_engine(clock=lambda: now, session_idle_ttl_seconds=10.0, stall_seconds=1e6) as engine:
        session = session_of(engine, long(engine, BRANCH_TOKENS + 50))
        opened(engine, 60)
        store_of(engine).fail(session, "INV1")
        assert engine.session_info(session.session_id).history_bytes == 0
        assert engine.history_tokens_of("") == 60
        now = 11.0
        store_of(engine).expire()
        assert engine.history_tokens_of("") == 0


# -- what they take ---------------------------------------------------------------------------------------------------


def test_a_fork_has_no_part_in_what_is_remembered_of_calls_on_its_parent() -> None:
    with scripted_engine() as engine:
        session = opened(engine)
        for number in range(2 * MOST_PER_SESSION):
            engine.append_once(session, [1], request_id=number.to_bytes(16, "big"))
        assert remembered_appends(engine) == MOST_PER_SESSION
        engine.fork_session(session)
        assert remembered_appends(engine) == MOST_PER_SESSION


def generated(engine: Engine, session: str, count: int, **options: Any) -> Generation:
    """A Generate that is through, of which nothing was read yet."""
    generation = engine.generate(session, GenerateParams(max_tokens=count), **options)
    is_free = threading.Event()
    engine.when_free(session, is_free.set)
    assert is_free.wait(60)
    return generation


@pytest.mark.parametrize("end", ["closed", further("failed"), further("evicted")])
def test_what_generates_said_is_read_after_later_appends_generates_and_the_sessions_end(end: str) -> None:
    now = 0.0
    options: dict[str, Any] = {"session_idle_ttl_seconds": 10.0, "stall_seconds": 1e6, "max_generate_tokens": 400}
    with small_leaves(), scripted_engine(clock=lambda: now, **options) as engine:
        session = long(engine, 3 * SMALL_LEAF_TOKENS - 5)
        generations, counts = [], (10, 301, 12)  # the first fills a leaf, and one read does not give all of the second
        for count in counts:
            generations.append(generated(engine, session, count))
            engine.append(session, text(SMALL_LEAF_TOKENS))
        expected = session_of(engine, session).history.ids().tolist()
        began = generations[1].read()
        assert 0 < len(tokens(began)) < 301
        match end:
            case "closed":
                engine.close_session(session)
            case "failed":
                store_of(engine).fail(session_of(engine, session), "INV1")
            case _:
                now = 11.0
                store_of(engine).expire()
        for count, generation in zip(counts, generations, strict=True):
            events = [*(began if generation is generations[1] else []), *drain(generation)]
            assert isinstance(events[-1], Finished)
            first = generation.position - count
            assert [token for token, _ in tokens(events)] == expected[first : generation.position]


def test_what_readers_of_a_closed_session_have_still_to_read_counts_until_they_have_or_are_gone() -> None:
    with scripted_engine(history_tokens_per_owner=100) as engine:
        session = opened(engine, 30)
        read, left, gone = (generated(engine, session, count) for count in (10, 20, 5))
        engine.close_session(session)
        assert engine.history_tokens_of("") == store_of(engine).held_history().tokens == 35
        assert store_of(engine).held_history().nbytes > 0
        other = opened(engine, 60)
        with pytest.raises(QuotaExceeded, match="still to send"):
            engine.append(other, text(6))
        assert len(tokens(drain(read))) == 10
        assert engine.history_tokens_of("") == 85
        left.leave()
        assert engine.append(other, text(6)) == 66
        assert left.read() == []
        del gone
        assert engine.history_tokens_of("") == 66
        engine.close_session(other)
        assert store_of(engine).held_history().tokens == 0


# -- penalties --------------------------------------------------------------------------------------------------------


def test_a_penalty_of_a_grown_forked_and_cancelled_history_is_that_of_its_tokens() -> None:
    """Held against a session that is given the same ids in one append, whose penalty has nothing to remember."""
    rng = random.Random(3)
    journal = MemoryJournal()
    with served_engine(journal=journal, history_tokens_per_owner=0) as engine:
        session = opened(engine, 20)
        for turn in range(8):
            engine.append(session, text(rng.randint(1, 30), seed=turn))
            params = GenerateParams(max_tokens=rng.randint(1, 12), sampling=PENALTY)
            match rng.choice(["whole", "cancelled", "retried", "forked"]):
                case "cancelled":
                    generation = engine.generate(session, params)
                    next(iter(generation))
                    generation.cancel()
                    drain(generation)
                case "retried":
                    for _ in range(2):
                        drain(engine.generate(session, params, request_id=turn.to_bytes(16, "big")))
                case "forked":
                    session = engine.fork_session(session).session_id
                case _:
                    drain(engine.generate(session, params))
            ids = [token for one in journal.read(session)[1] for token in one.token_ids.tolist()]
            fresh = opened(engine)
            engine.append(fresh, ids)
            fork = engine.fork_session(session).session_id
            assert said(engine, fork, 12, sampling=PENALTY) == said(engine, fresh, 12, sampling=PENALTY)
