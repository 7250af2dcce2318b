"""The laws of entries that go: an ended session's are zeroed, and a session that dropped its own computes the same.

Over every registered strategy, through the engine, on TinyModel.
"""

from __future__ import annotations

import torch

from inference_engine.engine import Engine
from inference_engine.kv.strategy import KVStrategy
from inference_engine.session.journal import MemoryJournal
from inference_engine.types import GenerateParams, Mode
from tests.facade import is_anything_held, on_the_engines_thread, rebuild_session, session_of
from tests.laws.variants import MODES, drain, each_mechanism, each_strategy_with, engine_for, generate, text


def used(engine: Engine, strategy: KVStrategy) -> str:
    session_id = engine.create_session(strategy=strategy).session_id
    for turn in range(2):
        engine.append(session_id, text(45, seed=turn))
        generate(engine, session_id, 5)
    return session_id


@each_strategy_with(mode=MODES)
def test_nothing_of_an_ended_session_is_left_in_memory(strategy: KVStrategy, mode: Mode) -> None:
    with engine_for(mode, kv_bytes=12 * 2**20, max_sessions=2) as engine:  # few addresses: all are looked through
        session_id = used(engine, strategy)
        on_the_engines_thread(engine)
        assert is_anything_held(engine)
        engine.close_session(session_id)
        for _ in range(2):  # what was released is cleaned behind the first task
            on_the_engines_thread(engine)
        assert not is_anything_held(engine)


@each_mechanism
def test_a_session_that_dropped_its_entries_goes_on_as_one_that_did_not(strategy: KVStrategy) -> None:
    journal = MemoryJournal()
    with engine_for(Mode.FIXED_SHAPE, journal=journal) as engine:
        session_id = used(engine, strategy)
        twin = rebuild_session(engine, *journal.read(session_id)).session_id
        session = session_of(engine, session_id)
        on_the_engines_thread(engine, session.forget_entries)
        info = engine.session_info(session_id)
        assert (info.cached_tokens, info.kv_live_bytes, info.tier_live_bytes) == (0, 0, 0)
        for each in (session_id, twin):
            engine.append(each, text(20, seed=5))
        assert generate(engine, session_id) == generate(engine, twin)


@each_mechanism
def test_a_session_that_dropped_its_entries_reads_none_of_them_again(strategy: KVStrategy) -> None:
    """Not in the regions, nor in second copies, bounds of blocks or rings of past queries."""
    with engine_for(Mode.BATCHED) as engine:
        session_id = used(engine, strategy)
        session = session_of(engine, session_id)
        on_the_engines_thread(engine, session.forget_entries)
        assert not any(session.kv.footprint().by_kind.values())
        for group in session.kv.groups:
            assert int((group.held >= 0).sum()) == 0
            vectors = torch.from_numpy(
                group.starts[:, None] + torch.arange(group.kv_heads * group.layout.region).numpy()
            )
            for states in (group.buffer.keys, group.buffer.values):
                assert not states[vectors.reshape(-1)].any()
        assert len(drain(engine.generate(session_id, GenerateParams(max_tokens=2)))) > 2
