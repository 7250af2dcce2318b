"""What a restore cache holds changes no token: over every strategy with one, with any room for it, which may be taken
back while it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inference_engine.backends.base import Result, Step
from inference_engine.backends.native.key_indexes import NativeIndex
from inference_engine.engine import Engine
from inference_engine.errors import NoCapacity
from inference_engine.kv.parts.selected import SelectedEntries
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Mode
from tests.facade import (
    context_of,
    drop_entries,
    forward_of,
    is_anything_held,
    kv_of,
    on_the_engines_thread,
    save_copies,
    steps_run_by,
    take_rooms_back,
)
from tests.kept import keeping
from tests.laws.variants import all_strategies, engine_for, generate, text
from tests.tiny_native import library

Said = list[tuple[int, float | None]]
each_choosing = pytest.mark.parametrize(
    "strategy", [one for one in all_strategies() if one.options().get("mode") == "select"], ids=str
)


def made_in(**settings: Any) -> Engine:
    library()  # where nothing restores chosen entries by itself, none stay restored
    return engine_for(Mode.BATCHED, **settings)


@contextmanager
def rooms_taken_back(engine: Engine, *, every: int) -> Iterator[None]:
    """Before some steps are run, and after they were planned, rooms are given to others, which write there."""
    run, count = forward_of(engine).run, 0

    def watched(step: Step) -> Result:
        nonlocal count
        count += 1
        if every and not count % every:
            take_rooms_back(engine, 1 + count % 3)
        return run(step)

    with steps_run_by(engine, watched):
        yield


def conversation(engine: Engine, strategy: KVStrategy, folder: Path) -> list[Said]:
    """Turns, a fork, a rewind, a drop, a copy in a file: what is said in all of them, with log-probabilities."""
    session = engine.create_session(strategy=strategy).session_id
    said = []
    for turn in range(3):
        engine.append(session, text(31 + turn, seed=turn))
        said.append(generate(engine, session, 19))
    fork = engine.fork_session(session).session_id
    said += [generate(engine, fork, 5), generate(engine, session, 5)]
    session = engine.rewind_session(session, engine.session_info(session).history_length - 3).session_id
    said.append(generate(engine, session, 9))
    session = engine.rewind_session(session, 100).session_id
    engine.append(session, text(3))
    said.append(generate(engine, session, 9))
    save_copies(engine, folder)
    drop_entries(engine, session)
    return [*said, generate(engine, session, 9), generate(engine, fork, 6)]


@each_choosing
def test_tokens_are_equal_with_any_room_and_while_it_is_taken_back(strategy: KVStrategy, tmp_path: Path) -> None:
    found = {}
    for choices, every in ((0, 0), (1, 0), (2, 5), (4, 0), (4, 3), (99, 0), (99, 2)):
        folder = tmp_path / f"{choices} {every}"
        with (
            keeping(folder, make=made_in, hibernate="always", restore_cache_choices=choices) as engine,
            rooms_taken_back(engine, every=every),
        ):
            found[choices, every] = conversation(engine, strategy, folder)
    expected = found.pop((0, 0))
    assert all(said == expected for said in found.values()), [key for key, said in found.items() if said != expected]


@each_choosing
def test_what_stays_restored_is_beyond_the_bound_and_goes_with_its_session(strategy: KVStrategy) -> None:
    with made_in(restore_cache_choices=4) as engine:
        opened = engine.create_session(strategy=strategy)
        session, bound, rooms = opened.session_id, opened.bound, context_of(engine).pool.rooms
        engine.append(session, text())
        for _ in range(2):
            generate(engine, session)
            info = engine.session_info(session)
            assert rooms.nbytes == info.spare_live_bytes > 0
            assert info.kv_live_bytes <= engine.info().kv_reserved_bytes <= bound.sustained_bytes
        engine.close_session(session)
        for _ in range(2):  # what was released is cleaned behind the first task
            on_the_engines_thread(engine)
        assert not rooms.nbytes and not is_anything_held(engine)


@each_choosing
def test_what_leaves_the_window_is_restored_as_it_leaves_where_there_is_room(strategy: KVStrategy) -> None:
    """Or each of the next tokens would restore some of it."""
    with made_in(restore_cache_choices=99) as engine:
        session = engine.create_session(strategy=strategy).session_id
        engine.append(session, text())
        generate(engine, session, 3 * context_of(engine).geometry.segment_tokens)
        length = engine.session_info(session).history_length
        part = next(one for one in kv_of(engine, session).parts if isinstance(one, SelectedEntries))
        for index in part._indexes:
            layout = index._slots.layout
            archived = set(range(layout.sink, layout.horizon(length)))
            for opened in index._opened:
                assert isinstance(opened, NativeIndex) and opened._tables is not None
                for held in opened._tables.held:
                    assert not archived or set(held[held > 0] - 1) <= archived
                    if strategy.options().get("appended") != "select":
                        assert set(held[held > 0] - 1) == archived


@each_choosing
def test_no_session_is_refused_for_what_stays_restored(strategy: KVStrategy) -> None:
    def admitted(choices: int) -> int:
        with made_in(restore_cache_choices=choices, kv_bytes=2**20) as engine:
            for count in range(100):
                try:
                    session = engine.create_session(strategy=strategy, limit_tokens=300).session_id
                    engine.append(session, text())
                except NoCapacity:
                    return count
                assert generate(engine, session)
        raise AssertionError("a small pool is full at some time")

    assert admitted(99) == admitted(0) > 1
