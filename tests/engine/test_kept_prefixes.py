"""What closed sessions leave for later ones of their owner: it spares prefill, and no session is refused for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from inference_engine.engine import Engine
from inference_engine.errors import NoCapacity
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies import make_strategy
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Finished, GenerateParams
from tests.engine.sessions import Clock, Gate
from tests.facade import let_leave, store_of
from tests.further import first_of_each, further, in_turn
from tests.kept import keeping
from tests.laws.variants import all_strategies, drain, mechanism, text
from tests.tiny_native import served_engine

COMMON = 200
MECHANISMS = first_of_each(all_strategies(), mechanism)
FIRST = first_of_each(MECHANISMS, lambda one: one.name)
SOME = GenerateParams(max_tokens=6)


def sharing_engine(**settings: Any) -> Engine:
    return served_engine(windowed=False, **{"share_prefixes": "owner", **settings})


def talk(engine: Engine, ids: list[int], *, max_tokens: int = 6, close: bool = True, **options: Any) -> Finished:
    """Of a session that is given these ids: how its Generate ended."""
    owner = options.get("owner", "")
    session = engine.create_session(**options).session_id
    engine.append(session, ids, owner=owner)
    done = drain(engine.generate(session, GenerateParams(max_tokens=max_tokens), owner=owner))[-1]
    assert isinstance(done, Finished)
    if close:
        engine.close_session(session, owner=owner)
    return done


def own(number: int, count: int = 7) -> list[int]:
    return [number % 50, *text(count - 1, seed=number)]


def kept_bytes(engine: Engine, owner: str = "") -> int:
    return engine.prefix_bytes_of(owner)


@pytest.mark.parametrize("rounds", [100, further(1000)])
def test_sessions_that_open_and_close_one_after_another_compute_their_own_tokens_alone(rounds: int) -> None:
    with sharing_engine() as engine:
        common = text(COMMON)
        done = [talk(engine, [*common, *own(number)], max_tokens=1) for number in range(rounds)]
        assert done[0].prefilled_tokens == COMMON + 7
        assert all(one.prefilled_tokens <= 7 <= one.prefilled_tokens + one.cached_tokens - COMMON for one in done[1:])
        assert engine.info().kv_reserved_bytes == 0
        # None has a whole segment more than the first.
        assert engine.metrics.prefixes_kept._value.get() == 1


def kept_bytes_of_one(engine: Engine) -> int:
    session = engine.create_session().session_id
    engine.append(session, text(COMMON + 8, seed=77))
    reserved = engine.session_info(session).reserved_bytes
    engine.close_session(session)
    return reserved


def test_a_conversation_that_is_sent_whole_each_time_goes_on_from_what_is_kept() -> None:
    with sharing_engine() as engine:
        sent, computed = text(20), []
        for turn in range(8):
            session = engine.create_session().session_id
            engine.append(session, sent)
            done = drain(engine.generate(session, SOME))[-1]
            assert isinstance(done, Finished)
            computed.append(done.prefilled_tokens)
            sent = [*engine.read_history(session).token_ids.tolist(), *text(9, seed=turn)]
            engine.close_session(session)
        # The last token that a session said has no entries when it closes; fewer than 32 tokens are not kept.
        assert computed == [20, 35] + 6 * [10]
        # Of all that closed one has everything.
        assert engine.metrics.prefixes_kept._value.get() == 1


@pytest.mark.parametrize("ended", ["closed", "expired", "left"])
def test_however_a_session_leaves_memory_its_entries_are_found(ended: str, tmp_path: Any) -> None:
    clock = Clock()
    with keeping(tmp_path, make=sharing_engine, clock=clock, hibernate="never") as engine:
        common = text(COMMON)
        session = engine.create_session().session_id
        engine.append(session, common)
        drain(engine.generate(session, SOME))
        if ended == "closed":
            engine.close_session(session)
        else:
            let_leave(engine, session)
        if ended == "left":
            engine.recall(session)
            done = drain(engine.generate(session, SOME))[-1]
            assert isinstance(done, Finished)
            assert done.prefilled_tokens == 1
        assert talk(engine, [*common, *own(1)]).prefilled_tokens == 7


def filled(engine: Engine, strategy: KVStrategy | None = None) -> None:
    for number in range(20):
        talk(engine, text(90 + number, seed=100 + number), max_tokens=1, strategy=strategy)


@pytest.mark.parametrize(
    ("strategy", "guaranteed"),
    [
        *in_turn(FIRST, (True, False)),
        *(further(one, guaranteed) for one in MECHANISMS if one not in FIRST for guaranteed in (True, False)),
    ],
    ids=str,
)
def test_no_session_is_refused_memory_for_what_is_kept(strategy: KVStrategy, guaranteed: bool) -> None:
    asked: dict[str, Any] = {"strategy": strategy, "limit_tokens": 300, "guaranteed": guaranteed}

    def opened(engine: Engine) -> int:
        count = 0
        with suppress(NoCapacity):
            while True:
                session = engine.create_session(**asked).session_id
                engine.append(session, text(60, seed=count))
                done = drain(engine.generate(session, GenerateParams(max_tokens=2)))[-1]
                assert isinstance(done, Finished)
                count += 1
        return count

    with served_engine() as engine:
        bound = engine.create_session(**{**asked, "guaranteed": True}).bound
    settings: dict[str, Any] = {"kv_bytes": max(6 * bound.peak_bytes, 2**19), "tier_bytes": 6 * bound.tier_bytes}
    with served_engine(**settings) as engine:
        alone = opened(engine)
    with served_engine(**settings, share_prefixes="owner", prefix_bytes=2**30) as engine:
        filled(engine)
        assert kept_bytes(engine) > 0
        assert opened(engine) == alone
        info = engine.info()
        assert info.kv_reserved_bytes + kept_bytes(engine) <= info.kv_capacity_bytes


def test_idle_sessions_keep_their_entries_before_closed_ones_do() -> None:
    with sharing_engine(kv_bytes=2**20, session_evictable_seconds=0.0, prefix_bytes=2**30) as engine:
        idle = engine.create_session().session_id
        engine.append(idle, text(COMMON))
        drain(engine.generate(idle, SOME))
        filled(engine)
        assert engine.session_info(idle).is_resident
        assert engine.metrics.dropped._value.get() == 0


def test_what_is_kept_stays_within_its_setting_and_goes_when_it_is_not_used() -> None:
    clock = Clock()
    with sharing_engine(clock=clock, session_idle_ttl_seconds=100.0) as engine:
        most = 3 * kept_bytes_of_one(engine)
    with sharing_engine(clock=clock, session_idle_ttl_seconds=100.0, prefix_bytes=most) as engine:
        first = text(COMMON, seed=1)
        for number in range(10):
            talk(engine, [*first, *own(number)])  # its use keeps it
            talk(engine, text(COMMON, seed=1000 + number))
            assert kept_bytes(engine) <= most
        assert talk(engine, [*first, *own(99)]).cached_tokens == COMMON
        clock.now += 101.0
        with store_of(engine).locked():
            store_of(engine).expire()
        assert kept_bytes(engine) == 0
        assert talk(engine, [*first, *own(99)]).cached_tokens == 0
    with sharing_engine(prefix_bytes=1) as engine:
        assert [talk(engine, text(COMMON)).cached_tokens for _ in range(2)] == [0, 0]


def test_an_owner_finds_only_its_own_and_one_with_less_than_its_share_loses_none_to_others() -> None:
    with sharing_engine() as engine:
        most = 4 * kept_bytes_of_one(engine)
    with sharing_engine(prefix_bytes=most) as engine:
        talk(engine, text(COMMON), owner="alice")
        assert talk(engine, text(COMMON), owner="bob").cached_tokens == 0
        for number in range(20):
            talk(engine, text(COMMON, seed=50 + number), owner="bob")
        assert talk(engine, text(COMMON), owner="alice").cached_tokens == COMMON - 1
        # One that is larger than what is left beside others' goes at once.
        talk(engine, text(2 * COMMON, seed=7), owner="carol")
        assert sum(kept_bytes(engine, owner) for owner in ("alice", "bob", "carol")) <= most


def test_memory_that_is_given_back_while_it_is_copied_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with served_engine(windowed=False) as engine:
        expected = said(engine)
    with sharing_engine() as engine:
        talk(engine, text(COMMON))
        copy_from = SessionKV.copy_from

        def late(kv: SessionKV, other: SessionKV, at: int) -> None:
            assert store_of(engine).kept_prefixes.give_back()  # as another thread does, for a session of its own
            engine.create_session(limit_tokens=COMMON, guaranteed=True)
            copy_from(kv, other, at)

        monkeypatch.setattr(SessionKV, "copy_from", late)
        assert said(engine) == expected
        assert engine.metrics.kept_prefix_tokens._value.get() == COMMON - 1


def said(engine: Engine) -> list[int]:
    session = engine.create_session().session_id
    engine.append(session, text(COMMON))
    drain(engine.generate(session, SOME))
    ids: list[int] = engine.read_history(session, first=COMMON).token_ids.tolist()
    return ids


def test_a_session_whose_entries_forks_read_or_that_closes_amid_a_generate_leaves_nothing() -> None:
    with sharing_engine() as engine:
        parent = engine.create_session().session_id
        engine.append(parent, text(COMMON))
        drain(engine.generate(parent, SOME))
        fork = engine.fork_session(parent)
        assert fork.shared_bytes
        engine.close_session(parent)
        assert kept_bytes(engine) == 0
        assert talk(engine, [*text(COMMON), *own(1)], close=False).cached_tokens == COMMON  # from the fork
        with running(engine) as session:
            engine.close_session(session)
        assert kept_bytes(engine) == 0


@contextmanager
def running(engine: Engine) -> Iterator[str]:
    session = engine.create_session().session_id
    engine.append(session, text(COMMON, seed=9))
    gate = Gate(2)
    engine.generate(session, GenerateParams(max_tokens=50), listener=gate)
    assert gate.reached.wait(30)
    yield session
    gate.go_on.set()
    gate.rest()


def test_a_window_keeps_what_it_can_go_on_from() -> None:
    with sharing_engine() as engine:
        strategy = make_strategy("sink_window", sink=2, window=40)
        talk(engine, text(COMMON), strategy=strategy, max_tokens=0)
        assert talk(engine, [*text(COMMON), *own(1)], strategy=strategy).cached_tokens == COMMON - 1
        # Entries have left since: nothing of it can be cut there.
        talk(engine, [*text(COMMON), *text(60, seed=5)], strategy=strategy)
        assert talk(engine, [*text(COMMON)[:150], *own(2)], strategy=strategy).cached_tokens == 0
