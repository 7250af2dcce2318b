"""Copies of idle sessions' K/V in files: more sessions than memory, budgets, and what takes a file away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from unittest.mock import patch

from inference_engine.engine import Engine
from inference_engine.kv.part import Saved
from inference_engine.session.copy_file import read_copy
from inference_engine.types import Finished, GenerateParams, TokenCommitted
from tests.facade import (
    drop_entries,
    half_saved,
    measured_read_bytes,
    on_the_engines_thread,
    save_copies,
    speeds,
)
from tests.kept import keeping, saved
from tests.laws.variants import drain, generate, text
from tests.tiny_native import served_engine

FEW, MANY = 3, 12
LENGTH = 90
LONG = 30_000  # more tokens than any machine generates meanwhile


def made(**settings: object) -> Callable[..., Engine]:
    return lambda **more: served_engine(
        **{"hibernate": "always", "hibernate_after_seconds": 3600.0, **settings, **more}
    )


def talked(engine: Engine, seed: int, **settings: object) -> str:
    session = engine.create_session(**settings).session_id  # type: ignore[arg-type]
    engine.append(session, text(LENGTH, seed=seed), owner=str(settings.get("owner", "")))
    drain(engine.generate(session, GenerateParams(max_tokens=4), owner=str(settings.get("owner", ""))))
    return session


def cached(engine: Engine, session: str, owner: str = "") -> int:
    """How many tokens of its history had K/V when its next Generate began."""
    last = drain(engine.generate(session, GenerateParams(max_tokens=1), owner=owner))[-1]
    assert isinstance(last, Finished)
    return last.cached_tokens


def test_more_sessions_than_fit_take_turns_and_only_what_came_since_is_prefilled(tmp_path: Path) -> None:
    with served_engine() as engine:
        one = engine.session_info(talked(engine, 0)).reserved_bytes
    room = {"kv_bytes": int((FEW + 1.9) * one), "session_evictable_seconds": 0.0}
    with keeping(tmp_path, make=made(hibernate_after_seconds=0.001, **room)) as engine:
        sessions = []
        for seed in range(MANY):
            sessions.append(talked(engine, seed))
            save_copies(engine, tmp_path)
        assert sum(engine.session_info(one).kv_live_bytes > 0 for one in sessions) <= FEW + 1
        for session in sessions:
            engine.recall(session)
            engine.append(session, text(9, seed=77))
            assert cached(engine, session) == LENGTH + 3
            save_copies(engine, tmp_path)


def test_beyond_a_budget_the_file_of_the_session_used_longest_ago_goes(tmp_path: Path) -> None:
    with keeping(tmp_path / "a", make=made()) as engine:
        talked(engine, 0)
        (file,) = save_copies(engine, tmp_path / "a")
        each = file.stat().st_size
    limits = {"state_bytes": int(3.5 * each), "state_bytes_per_owner": int(2.5 * each)}
    with keeping(tmp_path / "b", make=made(**limits)) as engine:
        sessions: list[tuple[str, str]] = []
        for owner in ("ann", "ann", "ben", "ann", "ben"):
            sessions.append((talked(engine, len(sessions), owner=owner), owner))
            save_copies(engine, tmp_path / "b")
        assert len(save_copies(engine, tmp_path / "b")) == 3
        for session, owner in sessions:
            drop_entries(engine, session, owner)
        # The first was one too many of ann's, the second of all.
        assert [cached(engine, *one) for one in sessions] == [0, 0, LENGTH + 3, LENGTH + 3, LENGTH + 3]


def test_a_session_that_is_used_while_it_is_saved_leaves_no_file_and_one_that_is_closed_neither(tmp_path: Path) -> None:
    with keeping(tmp_path, make=made()) as engine:
        session = talked(engine, 0)
        with half_saved(engine, session):
            assert list((tmp_path / "copies").iterdir())
            generate(engine, session, 2)
        on_the_engines_thread(engine)
        files = save_copies(engine, tmp_path)
        assert len(files) == 1
        assert list((tmp_path / "copies").iterdir()) == files, "what was begun is removed"
        assert engine.metrics.copies_saved.labels("given_up")._value.get() == 1
        assert files[0].stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "copies").stat().st_mode & 0o777 == 0o700
        engine.close_session(session)
        saved(engine)
        assert not list((tmp_path / "copies").iterdir())


def test_a_restarted_engine_knows_its_files_and_removes_those_of_no_session(tmp_path: Path) -> None:
    with keeping(tmp_path, make=made()) as engine:
        session = talked(engine, 0)
    (file,) = (tmp_path / "copies").iterdir()  # a stop in order saves
    stray = file.with_name("stray.kv")
    stray.write_bytes(b"left by a kill")
    with keeping(tmp_path, make=made()) as engine:
        assert not stray.exists()
        engine.recall(session)
        assert cached(engine, session) == LENGTH + 3


def test_auto_writes_and_reads_a_file_only_where_that_is_faster_than_a_prefill(tmp_path: Path) -> None:
    with keeping(tmp_path, make=made(hibernate="auto")) as engine:
        assert 1e6 < measured_read_bytes(engine) < 1e12
        session = talked(engine, 0)
        saved_by, read_by = engine.metrics.copies_saved, engine.metrics.copies_read
        with speeds(engine, prefill_tokens=1e9, read_bytes=1e6):
            assert save_copies(engine, tmp_path) == []
            assert saved_by.labels("slower")._value.get() == 1
        with speeds(engine, prefill_tokens=1.0, read_bytes=1e9):
            assert len(save_copies(engine, tmp_path)) == 1
        drop_entries(engine, session)
        with speeds(engine, prefill_tokens=1e9, read_bytes=1e6):
            assert cached(engine, session) == 0
            assert read_by.labels("slower")._value.get() == 1
        drop_entries(engine, session)
        with speeds(engine, prefill_tokens=1.0, read_bytes=1e9):
            assert cached(engine, session) == LENGTH + 3
            assert read_by.labels("used")._value.get() == 1


def test_copies_read_for_generates_that_may_not_begin_keep_no_other_owner_waiting(tmp_path: Path) -> None:
    is_read = Event()

    def read_later(path: Path, expected: Mapping[str, str], header_crc: int) -> Saved:
        assert is_read.wait(30)
        return read_copy(path, expected, header_crc)

    settings = {"max_running": 3, "windowed": False, "strategy": "sink_window:sink=4,window=32"}
    with keeping(tmp_path, make=made(**settings)) as engine:
        owners = ["ann", "ann", "ben", "cid"]
        waiting = [(talked(engine, seed, owner=owner), owner) for seed, owner in enumerate(owners)]
        running = talked(engine, 9, owner="ann")
        save_copies(engine, tmp_path)
        for session, owner in waiting:
            drop_entries(engine, session, owner)
        with patch("inference_engine.session.hibernation.read_copy", read_later):
            long = engine.generate(running, GenerateParams(max_tokens=LONG), owner="ann")
            assert any(isinstance(event, TokenCommitted) for event in long)
            params, begun = GenerateParams(max_tokens=2), []
            for session, owner in waiting:
                begun.append(engine.generate(session, params, owner=owner))
                on_the_engines_thread(engine)
            is_read.set()
            for other in reversed(begun):  # those of owners with none running, then ann's
                last = drain(other)[-1]
                assert isinstance(last, Finished)
                assert last.cached_tokens == LENGTH + 3
                assert engine.session_info(running, owner="ann").history_length < LENGTH + LONG, "ann's ended first"
            long.cancel()
            drain(long)
