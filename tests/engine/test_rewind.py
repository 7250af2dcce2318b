"""Rewinding a session: once, whole or not at all, within what the owner has, and after a kill as before it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from inference_engine.engine import Engine
from inference_engine.errors import (
    HistoryBehindClient,
    HistoryLengthMismatch,
    InvalidArgument,
    NoCapacity,
    QuotaExceeded,
    RequestIdReused,
    SessionBusy,
    SessionClosed,
    SessionNotFound,
)
from inference_engine.types import GenerateParams
from tests.engine.sessions import opened
from tests.facade import on_the_engines_thread, remembered_generates, standing_still
from tests.kept import after_a_kill, gated, keeping, saved
from tests.laws.variants import drain, text, tokens
from tests.tiny_native import served_engine

ONE, TWO = (bytes([number]) * 16 for number in (1, 2))
PARAMS = GenerateParams(max_tokens=6)


def history(engine: Engine, session_id: str) -> list[int]:
    return [int(token) for token in engine.read_history(session_id).token_ids]


def test_a_retry_gets_the_session_that_was_made_and_nothing_is_done_twice() -> None:
    with served_engine() as engine:
        session = opened(engine, 40)
        first = engine.rewind_session(session, 30, request_id=ONE)
        again = engine.rewind_session(session, 30, request_id=ONE)
        assert (again.session_id, again.is_replayed, first.is_replayed) == (first.session_id, True, False)
        assert [each.session_id for each in engine.list_sessions()] == [first.session_id]
        with pytest.raises(RequestIdReused):
            engine.rewind_session(session, 29, request_id=ONE)
        with pytest.raises(SessionNotFound):
            engine.rewind_session(session, 30, request_id=TWO)


def test_an_expected_length_that_is_another_changes_nothing() -> None:
    with served_engine() as engine:
        session = opened(engine, 40)
        for expected in (39, 41):
            with pytest.raises(HistoryLengthMismatch):
                engine.rewind_session(session, 10, expected_history_length=expected)
        assert engine.rewind_session(session, 10, expected_history_length=40).history_length == 10


def test_while_a_generate_runs_a_rewind_is_refused_as_busy_and_the_generate_goes_on() -> None:
    with served_engine() as engine:
        session = opened(engine, 40)
        with standing_still(engine):
            running = engine.generate(session, PARAMS)
            with pytest.raises(SessionBusy):
                engine.rewind_session(session, 10)
        assert len(tokens(drain(running))) == 6
        assert engine.rewind_session(session, 10, wait_seconds=10).history_length == 10


def test_a_position_amid_a_generates_tokens_keeps_those_and_its_request_id_is_not_the_new_sessions() -> None:
    with served_engine() as engine:
        session = opened(engine, 40)
        said = [token for token, _ in tokens(drain(engine.generate(session, PARAMS, request_id=ONE)))]
        new = engine.rewind_session(session, 43).session_id
        assert history(engine, new)[40:] == said[:3]
        assert not remembered_generates(engine)
        with pytest.raises(SessionNotFound):  # of the old session nothing is resumed
            engine.generate(session, PARAMS, request_id=ONE, resume_from=41)
        with pytest.raises(HistoryBehindClient):  # a client that has read more than there is
            engine.generate(new, PARAMS, request_id=ONE, resume_from=45)
        with pytest.raises(InvalidArgument, match="resume_from"):
            engine.generate(new, PARAMS, request_id=ONE, resume_from=41)
        # It is a Generate of the new session's own, and goes on from the position, as the old one had.
        again = [token for token, _ in tokens(drain(engine.generate(new, PARAMS, request_id=ONE)))]
        assert again[:3] == said[3:]
        assert len(again) == 6


def test_a_reader_of_the_old_session_gets_the_tokens_that_were_there() -> None:
    with served_engine() as engine:
        session = opened(engine, 40)
        generation = engine.generate(session, PARAMS)
        engine.rewind_session(session, 40, wait_seconds=10)
        assert len(tokens(drain(generation))) == 6


def test_neither_a_quota_that_is_used_up_nor_a_full_pool_stands_in_the_way() -> None:
    with served_engine(growth="guaranteed") as engine:
        whole = engine.create_session().bound.sustained_bytes
    limits = {"max_sessions_per_owner": 1, "kv_bytes_per_owner": whole, "history_tokens_per_owner": 40}
    for settings in (limits, {"max_sessions": 1}, {"kv_bytes": whole}):
        with served_engine(growth="guaranteed", **settings) as engine:  # type: ignore[arg-type]
            session = opened(engine, 40)
            with pytest.raises((QuotaExceeded, NoCapacity)):
                engine.fork_session(session, at_position=10)
            for at in (40, 30, 30, 0):
                session = engine.rewind_session(session, at).session_id
            engine.append(session, text(20))
            assert len(tokens(drain(engine.generate(session, PARAMS)))) == 6


def test_a_session_that_forks_read_goes_back_without_memory_and_the_next_generate_says_if_there_is_none() -> None:
    with served_engine(growth="guaranteed", windowed=False) as engine:
        whole = engine.create_session().bound.sustained_bytes
    with served_engine(growth="guaranteed", windowed=False, kv_bytes=2 * whole) as engine:
        session = opened(engine, 200)
        drain(engine.generate(session, PARAMS))
        fork = engine.fork_session(session).session_id
        with suppress(NoCapacity):
            while True:
                engine.create_session(owner="other", limit_tokens=16)
        new = engine.rewind_session(session, 100).session_id  # its memory is read by the fork, so it is not free
        on_the_engines_thread(engine)
        with pytest.raises(NoCapacity):
            engine.generate(new, PARAMS)
        assert history(engine, new) == text(200)[:100]
        for each in engine.list_sessions(owner="other"):
            engine.close_session(each.session_id, owner="other")
        engine.close_session(fork)
        assert len(tokens(drain(engine.generate(new, PARAMS)))) == 6


@pytest.mark.parametrize("is_folded", [False, True])
def test_a_kill_leaves_the_old_session_or_the_new_one_and_a_retry_gets_the_same_answer(
    tmp_path: Path, *, is_folded: bool
) -> None:
    with keeping(tmp_path / "state") as engine:
        session = engine.create_session().session_id
        engine.append(session, text(60))
        drain(engine.generate(session, PARAMS))
        if is_folded:
            saved(engine)
        before = after_a_kill(tmp_path / "state").rename(tmp_path / "before")
        rewound = engine.rewind_session(session, 63, request_id=ONE)
        saved(engine)
        kept = history(engine, rewound.session_id)
        killed = after_a_kill(tmp_path / "state")
    with keeping(before) as engine:
        engine.recall(session, request_id=ONE)
        if is_folded:
            assert engine.session_info(session).history_length == 66
            assert engine.rewind_session(session, 63, request_id=ONE).session_id != rewound.session_id
    with keeping(killed) as engine:
        engine.recall(session, request_id=ONE)
        again = engine.rewind_session(session, 63, request_id=ONE)
        assert (again.session_id, again.is_replayed) == (rewound.session_id, True)
        assert again.prefill_tokens == rewound.prefill_tokens
        with pytest.raises(SessionNotFound):
            engine.session_info(session)
        engine.recall(rewound.session_id)
        assert history(engine, rewound.session_id) == kept
        assert len(tokens(drain(engine.generate(rewound.session_id, PARAMS)))) == 6
        assert [each.session_id for each in engine.list_sessions()] == [rewound.session_id]


def test_a_rewind_that_a_full_disk_delays_is_done_when_there_is_space_and_once(tmp_path: Path) -> None:
    with gated(tmp_path) as (engine, journal):
        session = engine.create_session().session_id
        engine.append(session, text(60))
        saved(engine)
        journal.is_full_disk = True
        new = engine.rewind_session(session, 30, request_id=ONE).session_id
        saved(engine)  # from the reserve, as the close that it is
        with pytest.raises((SessionNotFound, SessionClosed)):
            engine.session_info(session)
        assert engine.journal.receipt(new).is_safe
        journal.is_full_disk = False
        assert history(engine, new) == text(60)[:30]
