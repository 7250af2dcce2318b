"""Entries that forks read where others hold them: which sessions share, what is reserved, what stays at their end."""

from __future__ import annotations

from typing import Any

import pytest

from inference_engine.engine import Engine
from inference_engine.engine.results import SessionForked
from inference_engine.kv.context import MOST_PIECES
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.layer_window import LayerWindow
from inference_engine.session.journal import MemoryJournal
from inference_engine.types import Mode
from tests.facade import rebuild_session, session_of, store_of
from tests.laws.variants import all_strategies, generate, mechanism, same, text
from tests.tiny_native import served_engine

ENTRY_BYTES = 3 * 2 * 2 * 16 * 4  # TinyModel's layers, K and V, KV heads, their size, float32


def sharing_engine(**settings: Any) -> Engine:
    """Every session's memory is reserved at creation, so that numbers are those of bounds."""
    return served_engine(**{"windowed": False, "growth": "guaranteed", **settings})


def parent_of(engine: Engine, length: int = 100, **options: object) -> str:
    session = engine.create_session(**options).session_id  # type: ignore[arg-type]
    engine.append(session, text(length))
    generate(engine, session, 5)
    return session


def grown(engine: Engine, session_id: str, seed: int, length: int = 30) -> list[tuple[int, float | None]]:
    engine.append(session_id, text(length, seed=seed))
    return generate(engine, session_id, 5)


def alone(engine: Engine, journal: MemoryJournal, fork: SessionForked, seed: int) -> list[tuple[int, float | None]]:
    """What a session built from scratch with the fork's history says."""
    return grown(engine, rebuild_session(engine, *journal.read(fork.session_id)).session_id, seed)


def test_a_fork_reserves_what_it_adds_and_reads_the_rest_where_it_is() -> None:
    with sharing_engine() as engine:
        parent = parent_of(engine, limit_tokens=200)
        whole = engine.info().kv_reserved_bytes
        forks = [engine.fork_session(parent) for _ in range(5)]
        for seed, fork in enumerate(forks):
            assert fork.shared_bytes == 104 * ENTRY_BYTES  # the last token has no entry yet
            assert fork.bound.sustained_bytes == (200 - 104) * ENTRY_BYTES
            grown(engine, fork.session_id, seed)
            assert engine.session_info(fork.session_id).kv_live_bytes == 36 * ENTRY_BYTES  # of 140 tokens, in pages
        assert engine.info().kv_reserved_bytes == whole + 5 * (200 - 104) * ENTRY_BYTES


def test_entries_are_shared_only_where_every_entry_stays_as_it_is(subtests: pytest.Subtests) -> None:
    for strategy in {mechanism(strategy): strategy for strategy in reversed(all_strategies())}.values():
        with subtests.test(str(strategy)):
            is_shared = strategy == Full()
            with sharing_engine() as engine:
                assert bool(engine.fork_session(parent_of(engine, strategy=strategy)).shared_bytes) is is_shared
            with sharing_engine(windowed=True) as engine:
                assert not engine.fork_session(parent_of(engine, strategy=strategy)).shared_bytes
            if is_shared:
                with sharing_engine(mode=Mode.FIXED_SHAPE) as engine:
                    assert not engine.fork_session(parent_of(engine, strategy=strategy)).shared_bytes
                with sharing_engine() as engine:
                    few = parent_of(engine, 7)
                    assert not engine.fork_session(few).shared_bytes
                    full_layers = parent_of(engine, strategy=LayerWindow(window=16, full_layers=(0, 1, 2)))
                    assert engine.fork_session(full_layers).shared_bytes


def test_sharing_can_be_switched_off_and_changes_what_is_reserved_but_no_token() -> None:
    said: list[list[tuple[int, float | None]]] = []
    reserved: list[int] = []
    for share_forks in (True, False):
        with sharing_engine(share_forks=share_forks) as engine:
            fork = engine.fork_session(parent_of(engine))
            reserved.append(engine.info().kv_reserved_bytes)
            said.append(grown(engine, fork.session_id, 1))
    assert same(said[0], said[1], Mode.BATCHED)
    assert reserved[0] < reserved[1]


@pytest.mark.parametrize("ending", ["closed", "evicted", "failed"])
def test_entries_stay_until_the_last_fork_is_gone_however_their_session_ended(ending: str) -> None:
    now, journal = 0.0, MemoryJournal()
    with sharing_engine(clock=lambda: now, journal=journal, stall_seconds=1e6) as engine:
        parent = parent_of(engine, limit_tokens=200)
        first, second = (engine.fork_session(parent) for _ in range(2))
        with_parent = engine.info().kv_reserved_bytes
        if ending == "closed":
            engine.close_session(parent)
        elif ending == "failed":
            store_of(engine).fail(session_of(engine, parent), "INV1")
        else:
            now += 1500.0
            for fork in (first, second):
                engine.append(fork.session_id, [])
            now += 1000.0
            store_of(engine).expire()
        assert engine.info().kv_reserved_bytes == with_parent
        if ending != "failed":  # which is there, and answers for itself
            kept = engine.metrics.registry.get_sample_value("kakeya_session_kv_kept_for_forks_bytes")
            assert kept == 200 * ENTRY_BYTES
        neighbours = [parent_of(engine, 150, limit_tokens=200) for _ in range(3)]
        expected = alone(engine, journal, first, 3)
        assert same(grown(engine, first.session_id, 3), expected, Mode.BATCHED)
        for session in neighbours:
            engine.close_session(session)
        engine.close_session(first.session_id)
        expected = alone(engine, journal, second, 4)
        assert same(grown(engine, second.session_id, 4), expected, Mode.BATCHED)


def test_a_chain_of_forks_shares_up_to_a_number_of_pieces_and_copies_beyond() -> None:
    journal = MemoryJournal()
    with sharing_engine(journal=journal) as engine:
        session, shared = parent_of(engine, 40), []
        for generation in range(MOST_PIECES + 2):
            fork = engine.fork_session(session)
            shared.append(fork.shared_bytes // ENTRY_BYTES)
            assert same(
                alone(engine, journal, fork, generation), grown(engine, fork.session_id, generation), Mode.BATCHED
            )
            session = fork.session_id
        # Each adds 35 tokens; the last of them has no entry yet when the fork is made.
        assert shared == [44, 79, 114, 149, 149, 149]


def test_neither_a_session_with_forks_nor_a_fork_drops_shared_entries() -> None:
    """As after a step that ran out of memory: entries that others read are there, and are right."""
    journal = MemoryJournal()
    with sharing_engine(journal=journal) as engine:
        parent = parent_of(engine)
        fork = engine.fork_session(parent)
        twins = [rebuild_session(engine, *journal.read(parent)).session_id for _ in range(2)]
        for session_id, twin, seed in zip((parent, fork.session_id), twins, (1, 3), strict=True):
            assert same(grown(engine, session_id, seed), grown(engine, twin, seed), Mode.BATCHED)
            session = session_of(engine, session_id)
            session.forget_entries()
            assert session.cached_tokens == 104
            assert same(grown(engine, session_id, 2), grown(engine, twin, 2), Mode.BATCHED)
