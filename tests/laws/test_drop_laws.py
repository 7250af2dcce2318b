"""The law of dropping, over every registered strategy and both modes: what made room goes on as if it never had."""

from __future__ import annotations

import pytest

from inference_engine.errors import NoCapacity, QuotaExceeded
from inference_engine.kv.strategy import KVStrategy
from inference_engine.session.journal import MemoryJournal
from inference_engine.types import GenerateParams, Mode
from tests.facade import rebuild_session
from tests.laws.variants import MODES, each_mechanism, each_strategy_with, engine_for, generate, same, text

LONG_AGO = 1000.0


@each_strategy_with(mode=MODES)
def test_a_session_whose_entries_were_dropped_goes_on_as_one_that_kept_them(strategy: KVStrategy, mode: Mode) -> None:
    now, journal = 0.0, MemoryJournal()
    with engine_for(mode) as engine:
        needed = engine.create_session(strategy=strategy).bound.sustained_bytes
    with engine_for(
        mode, clock=lambda: now, journal=journal, growth="guaranteed", kv_bytes_per_owner=needed, stall_seconds=1e6
    ) as engine:
        session = engine.create_session(strategy=strategy).session_id
        for turn in range(2):
            engine.append(session, text(40, seed=turn))
            generate(engine, session, 11)
        now += LONG_AGO
        other = engine.create_session(strategy=strategy).session_id  # takes the room of the first
        facts = engine.session_info(session)
        assert (facts.history_length, facts.cached_tokens, facts.kv_live_bytes, facts.tier_live_bytes) == (102, 0, 0, 0)
        assert engine.info().kv_reserved_bytes == needed
        with pytest.raises(QuotaExceeded):
            engine.generate(session, GenerateParams(max_tokens=1))
        engine.append(session, text(5))
        engine.close_session(other)
        said = generate(engine, session)
        began, records = journal.read(session)
        now += LONG_AGO
        rebuilt = rebuild_session(engine, began, records[:-1]).session_id  # and now the first makes room again
        assert same(generate(engine, rebuilt), said, mode)


@each_mechanism
def test_a_fork_of_a_dropped_session_computes_the_entries_itself(strategy: KVStrategy) -> None:
    now, journal = 0.0, MemoryJournal()
    with engine_for(Mode.BATCHED) as engine:
        needed = engine.create_session(strategy=strategy).bound.sustained_bytes
    with engine_for(
        Mode.BATCHED,
        clock=lambda: now,
        journal=journal,
        growth="guaranteed",
        kv_bytes_per_owner=needed,
        stall_seconds=1e6,
    ) as engine:
        parent = engine.create_session(strategy=strategy).session_id
        engine.append(parent, text(60))
        generate(engine, parent, 5)
        with pytest.raises((QuotaExceeded, NoCapacity)):
            engine.fork_session(parent)
        now += LONG_AGO
        engine.close_session(engine.create_session(strategy=strategy).session_id)
        fork = engine.fork_session(parent)
        assert fork.shared_bytes == 0
        said = generate(engine, fork.session_id)
        began, records = journal.read(parent)
        engine.close_session(fork.session_id)
        assert same(generate(engine, rebuild_session(engine, began, records).session_id), said, Mode.BATCHED)
