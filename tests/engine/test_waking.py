"""Sessions whose old entries are restored need room for the time of a Generate: which get it, wait, or are refused."""

from __future__ import annotations

import pytest

from inference_engine.engine import Engine
from inference_engine.errors import NoCapacity
from inference_engine.kv.strategies import make_strategy
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Finished, GenerateParams, Mode, TokenCommitted
from tests.facade import context_of, room_searches
from tests.laws.variants import drain, engine_for, generate, same, text, tokens

LIMIT = 256
RESTORED: list[KVStrategy] = [
    make_strategy("restored", sink=4, window=16),
    make_strategy("full", codec="int8", exact_window=16),
]
each_restored = pytest.mark.parametrize("strategy", RESTORED, ids=str)


def engine_with_room(strategy: KVStrategy, *, sessions: int, active: float) -> Engine:
    """An engine whose pool holds so many idle sessions, and `active` of them active."""
    with engine_for(Mode.BATCHED) as roomy:
        bound = roomy.create_session(strategy=strategy, limit_tokens=LIMIT).bound
        waking = bound.peak_bytes - bound.sustained_bytes
        geometry = context_of(roomy).geometry
        unit = geometry.alignment * geometry.itemsize
    return engine_for(
        Mode.BATCHED,
        growth="guaranteed",
        kv_bytes=sessions * bound.sustained_bytes + int(active * waking) + unit,
        default_limit_tokens=LIMIT,
    )


@each_restored
def test_a_generate_waits_until_there_is_room_to_wake_its_session(strategy: KVStrategy) -> None:
    with engine_with_room(strategy, sessions=2, active=1.5) as engine:
        alone = engine.create_session(strategy=strategy, limit_tokens=LIMIT).session_id
        engine.append(alone, text(100))
        expected = generate(engine, alone, LIMIT - 100)
        engine.close_session(alone)
        pair = [engine.create_session(strategy=strategy, limit_tokens=LIMIT).session_id for _ in range(2)]
        for session in pair:
            engine.append(session, text(100))
        # Both want regions for the whole limit, and there is room for one of them.
        running = [engine.generate(id_, GenerateParams(max_tokens=LIMIT - 100, logprobs=True)) for id_ in pair]
        for generation in running:
            events = drain(generation)
            assert isinstance(events[-1], Finished)
            assert same(tokens(events), expected, Mode.BATCHED)


@each_restored
def test_sessions_are_refused_when_none_of_them_could_wake(strategy: KVStrategy) -> None:
    with engine_with_room(strategy, sessions=2, active=1.0) as engine:
        for _ in range(2):
            engine.create_session(strategy=strategy, limit_tokens=LIMIT)
        with pytest.raises(NoCapacity, match="wake"):
            engine.create_session(strategy=strategy, limit_tokens=LIMIT)


@each_restored
def test_a_cancelled_generate_leaves_its_session_idle_and_the_next_goes_on(strategy: KVStrategy) -> None:
    with engine_for(Mode.BATCHED) as engine:
        whole, cut = (engine.create_session(strategy=strategy).session_id for _ in range(2))
        for session in (whole, cut):
            engine.append(session, text(90))
        expected = generate(engine, whole, 40)
        generation = engine.generate(cut, GenerateParams(max_tokens=400))
        next(event for event in generation if isinstance(event, TokenCommitted))
        generation.cancel()
        done = drain(generation)[-1]
        assert isinstance(done, Finished)
        info = engine.session_info(cut)
        assert info.kv_live_bytes <= info.reserved_bytes
        assert engine.info().kv_reserved_bytes == sum(engine.session_info(one).reserved_bytes for one in (whole, cut))
        more = generate(engine, cut, 40)
        kept = done.history_length - 90
        assert [token for token, _ in expected[kept:]] == [token for token, _ in more[: 40 - kept]]


def test_no_session_is_evicted_for_one_that_would_be_refused_even_then() -> None:
    restored = make_strategy("restored", sink=4, window=16)
    now = [0.0]
    with engine_for(Mode.BATCHED) as roomy:
        wide = roomy.create_session(strategy=restored, limit_tokens=500).bound
        narrow = roomy.create_session(limit_tokens=100).bound
    room = wide.peak_bytes + 3 * narrow.peak_bytes
    with engine_for(Mode.BATCHED, growth="guaranteed", kv_bytes=room + 2**12, clock=lambda: now[0]) as engine:
        engine.create_session(strategy=restored, limit_tokens=500, owner="another")
        mine = [engine.create_session(limit_tokens=100, owner="me").session_id for _ in range(2)]
        now[0] = 1000.0
        # Without my idle sessions it would fit, but the other owner's session could not wake any more.
        with pytest.raises(NoCapacity):
            engine.create_session(limit_tokens=450, owner="me")
        assert all(engine.session_info(session, owner="me").is_resident for session in mine)


@pytest.mark.parametrize(("going", "limit_tokens"), [(1, 16), (3, 48), (8, 160)])
def test_all_that_make_room_for_another_to_wake_go_together(going: int, limit_tokens: int) -> None:
    """However many that takes, room is looked for as often, and those that may stay do."""
    restored = make_strategy("restored", sink=4, window=16)
    now, count = [0.0], 10
    with engine_for(Mode.BATCHED) as roomy:
        wide = roomy.create_session(strategy=restored, limit_tokens=500).bound
        narrow = roomy.create_session(limit_tokens=16).bound
        new = roomy.create_session(limit_tokens=limit_tokens).bound
    assert (going - 1) * narrow.peak_bytes < new.peak_bytes <= going * narrow.peak_bytes
    room = wide.peak_bytes + count * narrow.peak_bytes
    with engine_for(Mode.BATCHED, growth="guaranteed", kv_bytes=room, clock=lambda: now[0]) as engine:
        engine.create_session(strategy=restored, limit_tokens=500, owner="another")
        mine = [engine.create_session(limit_tokens=16, owner="me").session_id for _ in range(count)]
        now[0] = 1000.0
        with room_searches() as searches:
            engine.create_session(limit_tokens=limit_tokens, owner="me")
        resident = [engine.session_info(session, owner="me").is_resident for session in mine]
    assert resident == [False] * going + [True] * (count - going)
    assert len(searches) <= 4
