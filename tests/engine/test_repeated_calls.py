"""Appends, creates and closes that come again with their request id: nothing is done twice."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from inference_engine.errors import (
    HistoryLengthMismatch,
    InvalidArgument,
    InvariantViolated,
    RequestError,
    RequestIdReused,
    SessionBusy,
    SessionEvicted,
    SessionNotFound,
)
from inference_engine.session.replies import KEEP_SECONDS
from inference_engine.types import GenerateParams
from tests.engine.sessions import Clock, Gate, opened
from tests.engine.test_retries import ENDLESS, ONE, OTHER, history
from tests.facade import before_each_generate, session_of, store_of
from tests.laws.variants import drain
from tests.tiny_native import served_engine


def test_an_append_that_comes_again_does_nothing_and_is_answered_as_it_was() -> None:
    with served_engine() as engine:
        session = opened(engine)
        first = engine.append_once(session, [1, 2], request_id=ONE, expected_history_length=20)
        engine.append(session, [3])
        again = engine.append_once(session, [1, 2], request_id=ONE, expected_history_length=20)
        assert (first.tokens, first.is_replayed) == (22, False)
        assert (again.tokens, again.is_replayed) == (22, True)
        assert history(engine, session)[20:] == [1, 2, 3]


def test_an_append_with_a_used_id_and_another_content_is_refused() -> None:
    with served_engine() as engine:
        session = opened(engine)
        engine.append_once(session, [1, 2], request_id=ONE)
        for ids, expected in (([1, 3], None), ([1], None), ([1, 2], 22)):
            with pytest.raises(RequestIdReused):
                engine.append_once(session, ids, request_id=ONE, expected_history_length=expected)
        assert history(engine, session)[20:] == [1, 2]


def test_an_append_that_comes_again_does_not_wait() -> None:
    with served_engine() as engine:
        session, gate = opened(engine), Gate()
        engine.append_once(session, [1], request_id=ONE)
        engine.generate(session, GenerateParams(max_tokens=2), listener=gate)
        assert gate.reached.wait(30)
        assert engine.append_once(session, [1], request_id=ONE).is_replayed
        with pytest.raises(SessionBusy):
            engine.append_once(session, [1], request_id=OTHER)
        gate.go_on.set()
        gate.rest()


def test_of_two_equal_appends_that_race_one_appends() -> None:
    with served_engine() as engine:
        session = opened(engine)
        answers: queue.SimpleQueue[bool] = queue.SimpleQueue()

        def append() -> None:
            reported = engine.append_once(session, [1, 2, 3], request_id=ONE, wait_seconds=30)
            answers.put(reported.is_replayed)

        threads = [threading.Thread(target=append) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(answers.get_nowait() for _ in threads) == [False, True, True, True]
        assert engine.session_info(session).history_length == 23


def test_a_create_that_comes_again_opens_no_second_session() -> None:
    with served_engine() as engine:
        first = engine.create_session(limit_tokens=50, label="x", owner="me", request_id=ONE)
        reserved = engine.info().kv_reserved_bytes
        again = engine.create_session(limit_tokens=50, label="x", owner="me", request_id=ONE)
        assert again == dataclasses.replace(first, is_replayed=True)
        assert engine.info().kv_reserved_bytes == reserved
        same: dict[str, Any] = {"limit_tokens": 50, "label": "x", "owner": "me", "request_id": ONE}
        for other in ({"limit_tokens": 51}, {"label": "y"}, {"eos_token_ids": [3]}, {"strategy": ENDLESS}):
            with pytest.raises(RequestIdReused):
                engine.create_session(**{**same, **other})
        theirs = engine.create_session(limit_tokens=50, label="x", owner="you", request_id=ONE)
        assert not theirs.is_replayed
        assert theirs.session_id != first.session_id


def test_a_close_that_comes_again_is_answered_as_it_was() -> None:
    with served_engine() as engine:
        session, other = opened(engine), opened(engine)
        with pytest.raises(HistoryLengthMismatch):
            engine.close_once(session, request_id=ONE, expected_history_length=19)
        first = engine.close_once(session, request_id=ONE, expected_history_length=20)
        again = engine.close_once(session, request_id=ONE, expected_history_length=20)
        assert (first.tokens, first.is_replayed, again.tokens, again.is_replayed) == (20, False, 20, True)
        with pytest.raises(RequestIdReused):
            engine.close_once(other, request_id=ONE, expected_history_length=20)
        with pytest.raises(SessionNotFound):
            engine.close_once(session, request_id=OTHER)
        with pytest.raises(SessionNotFound):
            engine.close_once(session, request_id=ONE, owner="you", expected_history_length=20)
        assert engine.session_info(other).history_length == 20


@pytest.mark.parametrize("end", ["closed", "evicted", "failed"])
def test_what_was_done_to_a_session_is_still_answered_for_some_time_after_its_end(end: str) -> None:
    clock = Clock()
    with served_engine(clock=clock, session_idle_ttl_seconds=50) as engine:
        created = engine.create_session(request_id=ONE)
        session = created.session_id
        engine.append_once(session, [1, 2, 3], request_id=ONE)
        drain(engine.generate(session, GenerateParams(max_tokens=2), request_id=ONE))
        gone: type[RequestError]
        if end == "closed":
            engine.close_session(session)
            gone = SessionNotFound
        elif end == "evicted":
            clock.now += 60
            store_of(engine).expire()
            gone = SessionEvicted
        else:
            store_of(engine).fail(session_of(engine, session), "INV1")
            gone = InvariantViolated
        assert engine.append_once(session, [1, 2, 3], request_id=ONE).is_replayed
        assert engine.create_session(request_id=ONE) == dataclasses.replace(created, is_replayed=True)
        with pytest.raises(gone):
            engine.append_once(session, [1], request_id=OTHER)
        # Its tokens went with the session.
        with pytest.raises(gone):
            engine.generate(session, GenerateParams(max_tokens=2), request_id=ONE)
        with pytest.raises(SessionNotFound):
            engine.append_once(session, [1, 2, 3], request_id=ONE, owner="you")
        if end != "failed":
            clock.now += KEEP_SECONDS
            store_of(engine).expire()
            with pytest.raises(gone):
                engine.append_once(session, [1, 2, 3], request_id=ONE)
            assert engine.create_session(request_id=ONE).session_id != session


@pytest.mark.parametrize(("end", "gone"), [("closed", SessionNotFound), ("evicted", SessionEvicted)])
def test_taking_up_a_generate_of_a_session_that_ends_meanwhile_says_how_it_ended(
    end: str, gone: type[RequestError]
) -> None:
    clock, params = Clock(), GenerateParams(max_tokens=2)
    with served_engine(clock=clock, session_idle_ttl_seconds=50) as engine:
        session = opened(engine)
        drain(engine.generate(session, params, request_id=ONE))

        def end_it() -> None:
            """Right after the session was found."""
            if end == "closed":
                engine.close_session(session)
            else:
                clock.now += 60
                store_of(engine).expire()

        with before_each_generate(engine, end_it), pytest.raises(gone):
            engine.generate(session, params, request_id=ONE, resume_from=21)


@pytest.mark.parametrize("wrong", [b"x", b"x" * 15, b"x" * 17])
def test_an_id_of_a_wrong_length_is_refused_once_the_session_is_known_to_exist(wrong: bytes) -> None:
    with served_engine() as engine:
        session, params = opened(engine), GenerateParams(max_tokens=1)
        calls: list[Callable[[str], object]] = [
            lambda session_id: engine.append_once(session_id, [1], request_id=wrong),
            lambda session_id: engine.generate(session_id, params, request_id=wrong),
            lambda session_id: engine.close_once(session_id, request_id=wrong),
        ]
        for call in calls:
            with pytest.raises(SessionNotFound):
                call("never issued")
            with pytest.raises(InvalidArgument, match="16 bytes"):
                call(session)
        with pytest.raises(InvalidArgument, match="16 bytes"):
            engine.create_session(request_id=wrong)
        assert engine.session_info(session).history_length == 20
