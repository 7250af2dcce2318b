"""Idle sessions make room for others of their owner, or expire; nothing is lost for a session that is refused."""

from __future__ import annotations

from typing import Any

import pytest

from inference_engine.errors import (
    InvariantViolated,
    NoCapacity,
    QuotaExceeded,
    SessionEvicted,
    SessionNotFound,
)
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategies.tiered import Tiered
from inference_engine.types import Finished, GenerateParams, Mode
from tests.engine.sessions import Clock, Gate, opened
from tests.facade import session_of
from tests.laws.variants import drain, generate, same, text
from tests.tiny import TRAINED_POSITIONS
from tests.tiny_native import served_engine


def bytes_for(sessions: float) -> int:
    with served_engine() as engine:
        return int(sessions * engine.create_session().bound.peak_bytes)


def bytes_at(limit_tokens: int) -> int:
    with served_engine(growth="guaranteed") as engine:
        return engine.create_session(limit_tokens=limit_tokens).reserved_bytes


def test_idle_sessions_make_room_least_recently_used_first_and_never_a_busy_or_fresh_one() -> None:
    clock = Clock()
    with served_engine(clock=clock, growth="guaranteed", kv_bytes=bytes_for(3.5), stall_seconds=1000) as engine:
        old, older, busy = opened(engine), opened(engine), opened(engine)
        gate = Gate()
        engine.generate(busy, GenerateParams(max_tokens=2), listener=gate)
        assert gate.reached.wait(30)
        clock.now += 30
        engine.append(old, [1])
        with pytest.raises(NoCapacity, match="bytes"):
            engine.create_session()
        clock.now += 40  # `older` has been idle for 70 seconds, `old` for 40
        engine.create_session()
        with pytest.raises(NoCapacity):
            engine.create_session()
        gate.go_on.set()
        assert isinstance(gate.rest()[-1], Finished)
        with pytest.raises(NoCapacity):
            engine.generate(older, GenerateParams(max_tokens=1))
        assert engine.append(older, [1]) == 21
        assert len(generate(engine, old, 2)) == 2


@pytest.mark.parametrize("setting", ["kv_bytes", "kv_bytes_per_owner"])
def test_as_many_idle_sessions_make_room_as_are_needed_and_no_more(setting: str) -> None:
    clock, room = Clock(), bytes_for(1.0)
    settings: dict[str, Any] = {"kv_bytes": 10 * room, setting: room}
    with served_engine(clock=clock, growth="guaranteed", **settings) as engine:
        first = engine.create_session(limit_tokens=16)
        small = first.reserved_bytes
        room = min(room, engine.info().kv_capacity_bytes)
        idle = [first.session_id]
        idle += [engine.create_session(limit_tokens=16).session_id for _ in range(room // small - 1)]
        clock.now += 70
        large = engine.create_session(limit_tokens=TRAINED_POSITIONS // 3).reserved_bytes
        dropped = -(-(small * len(idle) + large - room) // small)
        assert 3 < dropped < len(idle)
        stay = [engine.session_info(each).is_resident for each in idle]
        assert stay == [False] * dropped + [True] * (len(idle) - dropped)


def test_entries_that_made_room_are_computed_again_and_nothing_else_is_lost() -> None:
    clock = Clock()
    with served_engine() as plain:
        expected = generate(plain, opened(plain), 8)
    with served_engine(clock=clock, growth="guaranteed", kv_bytes=bytes_for(1.5)) as engine:
        session = opened(engine)
        said = generate(engine, session, 4)
        clock.now += 70
        other = opened(engine)
        facts = engine.session_info(session)
        assert (facts.history_length, facts.cached_tokens, facts.kv_live_bytes) == (24, 0, 0)
        assert engine.info().kv_reserved_bytes == facts.bound.sustained_bytes  # those of the other one
        clock.now += 70
        assert same([*said, *generate(engine, session, 4)], expected, Mode.BATCHED)
        assert engine.session_info(other).history_length == 20


def test_a_session_of_a_call_that_goes_on_makes_no_room() -> None:
    """It is idle between the pieces of its prompt."""
    with served_engine(
        growth="guaranteed", kv_bytes=bytes_for(1.5), max_sessions=2, session_evictable_seconds=0
    ) as engine:
        for_a_call = opened(engine, is_transient=True)
        with pytest.raises(NoCapacity):
            engine.create_session()
        small = opened(engine, strategy=SinkWindow(sink=1, window=8))
        engine.create_session(strategy=SinkWindow(sink=1, window=8))
        with pytest.raises(SessionEvicted):
            engine.session_info(small)
        assert engine.session_info(for_a_call).history_length == 20


def test_the_sessions_of_one_owner_never_make_room_for_those_of_another() -> None:
    clock = Clock()
    with served_engine(clock=clock, growth="guaranteed", kv_bytes=bytes_for(1.5), max_sessions=2) as engine:
        mine = engine.create_session(owner="me").session_id
        engine.append(mine, text(20), owner="me")
        drain(engine.generate(mine, GenerateParams(max_tokens=2), owner="me"))
        clock.now += 1000
        for _ in range(2):
            with pytest.raises(NoCapacity):
                engine.create_session(owner="you")
        assert engine.session_info(mine, owner="me").cached_tokens == 21


def test_an_idle_session_is_evicted_where_there_are_too_many() -> None:
    clock = Clock()
    with served_engine(clock=clock, max_sessions=2) as engine:
        oldest, newer = opened(engine), opened(engine)
        with pytest.raises(NoCapacity, match="maximum"):
            engine.create_session()
        clock.now += 70
        engine.create_session()
        with pytest.raises(SessionEvicted, match="lru"):
            engine.append(oldest, [1])
        assert engine.session_info(newer).history_length == 20


@pytest.mark.parametrize(
    ("quota", "opens"),
    [({"max_sessions_per_owner": 2}, 2), ({"kv_bytes_per_owner": bytes_for, "growth": "guaranteed"}, 2)],
    ids=["N", "bytes"],
)
def test_an_owner_at_its_quota_makes_room_for_itself_or_is_refused_and_others_are_not(
    quota: dict[str, Any], opens: int
) -> None:
    clock = Clock()
    quota = {name: value(2.5) if callable(value) else value for name, value in quota.items()}
    with served_engine(clock=clock, **quota) as engine:
        for _ in range(opens):
            engine.create_session(owner="me")
        with pytest.raises(QuotaExceeded) as refused:
            engine.create_session(owner="me")
        assert refused.value.metadata["quota"] in quota
        assert engine.create_session(owner="you").session_id
        clock.now += 70
        assert engine.create_session(owner="me").session_id


@pytest.mark.parametrize("places", [{}, {"max_sessions": 16}], ids=["bytes", "places"])
def test_no_session_is_dropped_for_one_whose_memory_would_lie_in_pieces(places: dict[str, Any]) -> None:
    """Every other session is another owner's: what the owner's give back is enough, and nowhere in one run."""
    clock = Clock()
    with served_engine(
        clock=clock, growth="guaranteed", default_limit_tokens=16, kv_bytes=16 * bytes_at(16), **places
    ) as engine:
        mine = [engine.create_session(limit_tokens=16, owner="ab"[each % 2]).session_id for each in range(16)][::2]
        clock.now += 1000
        for _ in range(2):
            with pytest.raises(NoCapacity, match="free"):
                engine.create_session(limit_tokens=128, owner="a")
        assert [engine.session_info(each, owner="a").is_resident for each in mine] == [True] * 8
        assert engine.create_session(limit_tokens=16, owner="a").session_id


def test_as_many_make_room_as_long_runs_take_and_no_more() -> None:
    """Of the sessions that are dropped first each lies alone, and takes no whole layer; of the others neighbours do."""
    clock = Clock()
    with served_engine(clock=clock, growth="guaranteed", default_limit_tokens=16, kv_bytes=16 * bytes_at(16)) as engine:
        whose = "abababab" + "a" * 8
        idle = [engine.create_session(limit_tokens=16, owner=owner).session_id for owner in whose]
        clock.now += 1000
        engine.create_session(limit_tokens=64, owner="a")
        stay = [engine.session_info(each, owner=owner).is_resident for each, owner in zip(idle, whose, strict=True)]
        # Two layers take four times a layer of a small session each, which has three. That with a window fits anywhere.
        assert stay == [owner == "b" for owner in whose[:8]] + [False] * 3 + [True] * 5


@pytest.mark.parametrize(
    "limits",
    [{"max_sessions": 2}, {"max_sessions_per_owner": 1}, {"max_sessions": 2, "kv_bytes_per_owner": bytes_for(0.5)}],
    ids=str,
)
def test_no_session_gives_its_place_to_one_that_there_is_no_memory_for(limits: dict[str, Any]) -> None:
    clock = Clock()
    with served_engine(clock=clock, growth="guaranteed", kv_bytes=bytes_for(1.5), **limits) as engine:
        is_small = "kv_bytes_per_owner" in limits
        engine.create_session(owner="another", strategy=SinkWindow(sink=1, window=8) if is_small else Full())
        mine = opened(engine, strategy=SinkWindow(sink=1, window=8))
        clock.now += 1000
        for _ in range(2):
            with pytest.raises((NoCapacity, QuotaExceeded)):
                engine.create_session(strategy=Full())
        assert engine.session_info(mine).history_length == 20
        assert engine.create_session(strategy=SinkWindow(sink=1, window=8)).session_id
        with pytest.raises(SessionEvicted):
            engine.session_info(mine)


def test_no_session_gives_its_place_to_one_that_the_second_tier_has_no_room_for() -> None:
    clock, tiered = Clock(), Tiered(block=4, sink=4, window=16, budget=48, resident_tokens=16)
    with served_engine(tier_bytes=1 << 24) as engine:
        tier_bytes = engine.create_session(strategy=tiered).bound.tier_bytes
    with served_engine(clock=clock, max_sessions=2, tier_bytes=tier_bytes * 3 // 2) as engine:
        engine.create_session(owner="another", strategy=tiered)
        mine = opened(engine, strategy=SinkWindow(sink=1, window=8))
        clock.now += 1000
        for _ in range(2):
            with pytest.raises(NoCapacity, match="more tier_bytes"):
                engine.create_session(strategy=tiered)
        assert engine.session_info(mine).history_length == 20


def test_a_failed_session_answers_for_itself_even_when_room_is_needed() -> None:
    clock = Clock()
    with served_engine(clock=clock, growth="guaranteed", kv_bytes=bytes_for(1.5)) as engine:
        failed = opened(engine)
        session_of(engine, failed).cached_tokens += 100
        with pytest.raises(InvariantViolated):
            drain(engine.generate(failed, GenerateParams(max_tokens=1)))
        clock.now += 70
        held = opened(engine)
        clock.now += 70
        opened(engine)  # takes the place of `held`
        with pytest.raises(NoCapacity):
            engine.generate(held, GenerateParams(max_tokens=1))
        assert engine.session_info(failed).failure_reason == "INV2"


def test_idle_sessions_expire_on_their_own() -> None:
    clock = Clock()
    with served_engine(clock=clock, session_idle_ttl_seconds=100) as engine:
        idle, used = opened(engine), opened(engine)
        clock.now += 99
        engine.append(used, [1])
        clock.now += 2
        generate(engine, used, 1)  # the loop comes round
        with pytest.raises(SessionEvicted, match="ttl"):
            engine.session_info(idle)
        assert engine.session_info(used).history_length == 22
        with pytest.raises(SessionNotFound):
            engine.session_info(idle, owner="another")
