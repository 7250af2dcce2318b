"""Copies of sessions in files serve others of their owner that begin alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference_engine.engine import Engine
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies import make_strategy
from inference_engine.types import Finished, GenerateParams
from tests.facade import copies_known, let_leave, save_copies, speeds, store_of
from tests.kept import keeping
from tests.laws.variants import drain, text
from tests.tiny_native import served_engine

SEGMENT, COMMON = 16, 200
WHOLE = COMMON // SEGMENT * SEGMENT
PARAMS = GenerateParams(max_tokens=6)


def sharing_engine(**settings: Any) -> Engine:
    shared = {"share_prefixes": "owner", "hibernate": "always", "hibernate_after_seconds": 3600.0}
    return served_engine(windowed=False, **{**shared, **settings})


def begun(engine: Engine, ids: list[int], **options: Any) -> tuple[str, Finished]:
    session = engine.create_session(**options).session_id
    engine.append(session, ids, owner=options.get("owner", ""))
    done = drain(engine.generate(session, PARAMS, owner=options.get("owner", "")))[-1]
    assert isinstance(done, Finished)
    return session, done


def own(number: int) -> list[int]:
    return [number, *text(6, seed=number + 1)]


def read(engine: Engine, outcome: str) -> float:
    return float(engine.metrics.copies_read.labels(outcome)._value.get())


def copied(folder: Path, **options: Any) -> list[Path]:
    """A server has a session in this folder, longer than what others will begin with."""
    with keeping(folder, make=sharing_engine) as engine:
        begun(engine, [*text(COMMON), *text(50, seed=9)], **options)
        return save_copies(engine, folder)


def test_what_a_copy_begins_with_is_read_once_for_all_that_begin_so(tmp_path: Path) -> None:
    copied(tmp_path)
    with served_engine(windowed=False) as alone:
        expected = [alone.read_history(begun(alone, [*text(COMMON), *own(number)])[0]).token_ids for number in range(3)]
    with keeping(tmp_path, make=sharing_engine) as engine:
        copies_known(engine)
        sessions = [begun(engine, [*text(COMMON), *own(number)]) for number in range(3)]
        # The first one finds whole segments alone; the next ones go on from it, which has all.
        assert [done.cached_tokens for _, done in sessions] == [WHOLE, COMMON, COMMON]
        assert (read(engine, "shared"), read(engine, "used")) == (1, 0)
        for (session, _), ids in zip(sessions, expected, strict=True):
            assert engine.read_history(session).token_ids.tolist() == ids.tolist()
        assert engine.info().kv_reserved_bytes == sum(
            engine.session_info(session).reserved_bytes for session, _ in sessions
        )


def test_a_copy_is_not_read_where_memory_has_as_much_or_a_prefill_is_faster(tmp_path: Path) -> None:
    copied(tmp_path)
    with keeping(tmp_path, make=sharing_engine, hibernate="auto") as engine:
        copies_known(engine)
        with speeds(engine, prefill_tokens=1e9, read_bytes=1e6):
            assert begun(engine, [*text(COMMON), *own(1)])[1].cached_tokens == 0
        with speeds(engine, prefill_tokens=1.0, read_bytes=1e9):
            assert begun(engine, [*text(COMMON), *own(2)])[1].cached_tokens == COMMON
        assert read(engine, "shared") == 0


def test_a_session_that_comes_back_reads_no_file_for_what_is_still_in_memory(tmp_path: Path) -> None:
    with keeping(tmp_path, make=sharing_engine) as engine:
        session, _ = begun(engine, text(COMMON))
        save_copies(engine, tmp_path)
        let_leave(engine, session)
        engine.recall(session)
        done = drain(engine.generate(session, PARAMS))[-1]
        assert isinstance(done, Finished)
        assert (done.prefilled_tokens, read(engine, "used"), read(engine, "shared")) == (1, 0, 0)


@pytest.mark.parametrize("unlike", ["owner", "strategy", "damaged", "off", "no room"])
def test_a_copy_that_cannot_be_used_costs_a_prefill_and_nothing_else(tmp_path: Path, unlike: str) -> None:
    strategy = make_strategy("sink_window", sink=2, window=40) if unlike == "strategy" else None
    (file,) = copied(tmp_path, strategy=strategy)
    if unlike == "damaged":
        with file.open("r+b") as writable:
            writable.seek(-100, 2)
            writable.write(bytes(range(100)))
    of_case: dict[str, dict[str, Any]] = {"off": {"share_prefixes": "off"}, "no room": {"prefix_bytes": 1000}}
    settings = of_case.get(unlike, {})
    with keeping(tmp_path, make=sharing_engine, **settings) as engine:
        if unlike != "off":
            copies_known(engine)
        owner = "bob" if unlike == "owner" else ""
        for number in range(2):
            _, done = begun(engine, text(COMMON, seed=0) + own(number), owner=owner, strategy=strategy)
            assert done.cached_tokens == 0 or number
        assert read(engine, "shared") == 0
        assert read(engine, "damaged") == (unlike == "damaged")


def test_memory_that_is_needed_while_a_copy_is_put_there_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied(tmp_path)
    with served_engine(windowed=False) as alone:
        expected = alone.read_history(begun(alone, [*text(COMMON), *own(1)])[0]).token_ids
    with keeping(tmp_path, make=sharing_engine) as engine:
        copies_known(engine)
        load = SessionKV.load

        def late(kv: SessionKV, length: int, saved: Any) -> None:
            assert store_of(engine).kept_prefixes.give_back()  # as another thread does, for a session of its own
            load(kv, length, saved)

        monkeypatch.setattr(SessionKV, "load", late)
        session, done = begun(engine, [*text(COMMON), *own(1)])
        assert (done.cached_tokens, read(engine, "no_room")) == (0, 1)
        assert engine.read_history(session).token_ids.tolist() == expected.tolist()
        engine.close_session(session)
        assert engine.info().kv_reserved_bytes == 0
