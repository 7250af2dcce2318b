"""Sessions that are granted memory as their histories grow, and those that have all of it reserved."""

from __future__ import annotations

import itertools
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from inference_engine.engine import Engine
from inference_engine.errors import ConfigError, NoCapacity, QuotaExceeded
from inference_engine.kv.context import MOST_PIECES
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.gather import Gather
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Finished, GenerateParams, Mode, TokenCommitted
from tests.facade import drop_entries, store_of
from tests.laws.drafters import Knowing
from tests.laws.variants import LENGTH, drain, each_way, generate, same, text
from tests.tiny import TRAINED_POSITIONS, tiny_engine, tiny_forward
from tests.tiny_native import served_engine


def bytes_for(tokens: int | None = None) -> int:
    """What a session of `full` may hold with a history of so many, or of as many as can be."""
    with served_engine() as engine:
        return engine.create_session(limit_tokens=tokens).bound.sustained_bytes


def opened(engine: Engine, length: int) -> str:
    session_id = engine.create_session().session_id
    engine.append(session_id, text(length))
    return session_id


def test_an_append_without_room_changes_nothing_and_succeeds_when_there_is_some() -> None:
    with served_engine(kv_bytes=3 * bytes_for(160)) as engine:
        other = engine.create_session().session_id
        engine.append(other, text(300))
        session = engine.create_session().session_id
        assert engine.append(session, text(100)) == 100
        reserved = engine.session_info(session).reserved_bytes
        with pytest.raises(NoCapacity, match="limit_tokens") as refused:
            engine.append(session, text(100))
        assert refused.value.retry_after_seconds
        facts = engine.session_info(session)
        assert (facts.history_length, facts.reserved_bytes) == (100, reserved)
        first = generate(engine, session, 4)
        engine.close_session(other)
        assert engine.append(session, text(100)) == 204
        again = generate(engine, session, 4)
    with served_engine() as roomy:
        session = roomy.create_session().session_id
        roomy.append(session, text(100))
        assert [token for token, _ in generate(roomy, session, 4)] == [token for token, _ in first]
        roomy.append(session, text(100))
        assert [token for token, _ in generate(roomy, session, 4)] == [token for token, _ in again]


@pytest.mark.parametrize("is_appending", [True, False], ids=["append", "generate"])
def test_what_the_whole_pool_cannot_hold_is_refused_without_a_time_to_retry(is_appending: bool) -> None:
    """Waiting would not help, and clients try again for as long as they are given a time."""
    with served_engine(kv_bytes=bytes_for(64)) as engine:
        session = engine.create_session().session_id
        engine.append(session, text(60))

        def go_on() -> None:
            if is_appending:
                engine.append(session, text(100))
            else:
                drain(engine.generate(session, GenerateParams(max_tokens=100)))

        with pytest.raises(NoCapacity, match="in all") as refused:
            go_on()
        assert refused.value.retry_after_seconds is None
        assert engine.session_info(session).history_length == (60 if is_appending else 65)


def test_a_generate_that_runs_out_of_room_keeps_its_tokens_and_goes_on_later() -> None:
    with served_engine() as roomy:
        session = roomy.create_session().session_id
        roomy.append(session, text(20))
        expected = [token for token, _ in generate(roomy, session, 80)]
    with served_engine(kv_bytes=bytes_for(64) + bytes_for(320)) as engine:
        other = engine.create_session(guaranteed=True, limit_tokens=320).session_id
        session = engine.create_session().session_id
        engine.append(session, text(20))
        said: list[int] = []
        generation = engine.generate(session, GenerateParams(max_tokens=80))
        with pytest.raises(NoCapacity):
            said.extend(event.token_id for event in generation if isinstance(event, TokenCommitted))
        assert 0 < len(said) < 80
        assert engine.session_info(session).history_length == 20 + len(said)
        engine.close_session(other)
        said += [token for token, _ in generate(engine, session, 80 - len(said))]
        assert said == expected


def test_a_session_with_a_guarantee_is_served_whatever_its_neighbours_take() -> None:
    with served_engine(kv_bytes=2 * bytes_for()) as engine:
        kept = engine.create_session(guaranteed=True, owner="me")
        assert kept.reserved_bytes == kept.bound.sustained_bytes
        grown = engine.create_session(owner="you").session_id
        engine.append(grown, text(TRAINED_POSITIONS - 50), owner="you")
        another = engine.create_session(owner="you").session_id
        with pytest.raises(NoCapacity):
            engine.append(another, text(TRAINED_POSITIONS - 50), owner="you")
        engine.append(kept.session_id, text(TRAINED_POSITIONS - 40), owner="me")
        events = drain(engine.generate(kept.session_id, GenerateParams(max_tokens=40), owner="me"))
        assert isinstance(events[-1], Finished)


@pytest.mark.parametrize(
    ("settings", "way_out"),
    [
        ({"kv_bytes": 1000}, "kv_bytes"),
        ({"growth": "guaranteed", "kv_bytes": 100_000}, "default_limit_tokens"),
    ],
)
def test_a_pool_too_small_for_one_default_session_refuses_to_start(settings: dict[str, Any], way_out: str) -> None:
    with pytest.raises(ConfigError, match=way_out):
        served_engine(**settings)
    with served_engine(growth="guaranteed", kv_bytes=100_000, default_limit_tokens=50) as engine:
        assert engine.create_session().limit_tokens == 50


def test_a_pool_beyond_the_memory_that_is_free_is_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    enough = bytes_for()
    monkeypatch.setattr(type(tiny_forward()), "free_bytes", lambda _: enough)
    with tiny_engine(kv_bytes=enough):
        assert "kv_bytes" not in caplog.text
    with tiny_engine(kv_bytes=enough + 1):
        assert f"kv_bytes is {enough + 1}, and {enough} bytes of memory are free" in caplog.text


@each_way
def test_a_session_that_grows_says_what_one_with_a_guarantee_says(strategy: KVStrategy) -> None:
    """Also after its K/V was dropped for another session, when it is granted memory for its history so far."""
    now, said = 0.0, []
    for guaranteed in (True, False):
        with served_engine(clock=lambda: now, stall_seconds=1e6) as engine:
            session = engine.create_session(strategy=strategy, guaranteed=guaranteed).session_id
            received = []
            for turn in range(3):
                engine.append(session, text(40, seed=turn))
                received += generate(engine, session, 9)
                if turn == 1 and not guaranteed:
                    drop_entries(engine, session)
                    assert engine.session_info(session).reserved_bytes == 0
            said.append(received)
    assert same(said[0], said[1], Mode.BATCHED)


@each_way
def test_what_is_held_never_exceeds_what_is_granted(strategy: KVStrategy) -> None:
    """At every step of a history that grows by appends, generated tokens and forks."""
    with served_engine(mode=Mode.BATCHED) as engine:
        sessions = [engine.create_session(strategy=strategy).session_id]

        def check() -> None:
            granted = 0
            for session in sessions:
                facts = engine.session_info(session)
                assert facts.kv_live_bytes <= facts.reserved_bytes <= facts.bound.sustained_bytes
                granted += facts.reserved_bytes
            assert engine.info().kv_reserved_bytes <= granted

        check()
        for length in (1, 15, 30, LENGTH):
            engine.append(sessions[0], text(length, seed=length))
            check()
            generate(engine, sessions[0], 5)
            check()
        sessions.append(engine.fork_session(sessions[0]).session_id)
        for session in sessions:
            engine.append(session, text(40))
            generate(engine, session, 5)
            check()
        for session in sessions:
            engine.close_session(session)
        assert engine.info().kv_reserved_bytes == 0


def test_an_owner_within_its_share_of_memory_leaves_addresses_for_all_others() -> None:
    """Though its sessions may become long, and those of the default strategy are short."""
    whole = bytes_for()
    with served_engine(
        kv_bytes=2 * whole, kv_bytes_per_owner=whole, max_sessions=64, strategy="sink_window:sink=4,window=32"
    ) as engine:
        longest = [Full(), Gather(block=4, sink=4, window=16, budget=64)]
        with suppress(QuotaExceeded):
            for strategy in itertools.cycle(longest):
                engine.create_session(strategy=strategy, owner="many")
        info = engine.info()
        assert info.kv_reserved_bytes <= info.kv_capacity_bytes // 2
        for asked in (None, *longest):
            session = engine.create_session(strategy=asked, owner="other").session_id
            engine.append(session, text(60), owner="other")
            assert len(drain(engine.generate(session, GenerateParams(max_tokens=2), owner="other"))) > 2


@pytest.mark.parametrize("share_forks", [True, False])
def test_an_owner_that_forks_and_closes_leaves_addresses_for_all_others(share_forks: bool) -> None:
    """A fork reads entries of sessions that ended; each of these took addresses for all it might become."""
    most = 6
    with served_engine(
        windowed=False,
        kv_bytes=bytes_for(),
        max_sessions=most,
        max_sessions_per_owner=most - 1,
        share_forks=share_forks,
    ) as engine:
        for seed in range(most - 1):
            session = engine.create_session(owner="many").session_id
            for piece in range(MOST_PIECES + 1):
                engine.append(session, text(4, seed=10 * seed + piece), owner="many")
                drain(engine.generate(session, GenerateParams(max_tokens=2), owner="many"))
                if len([one for one in store_of(engine).sessions() if one.owner == "many"]) == most - 1:
                    break  # the last one has no place for its fork
                fork = engine.fork_session(session, owner="many").session_id
                engine.close_session(session, owner="many")
                session = fork
        kept = engine.metrics.registry.get_sample_value("kakeya_session_kv_kept_for_forks_bytes")
        assert kept is not None
        assert (kept > 0) is share_forks
        session = engine.create_session(owner="other").session_id
        engine.append(session, text(60), owner="other")
        assert len(drain(engine.generate(session, GenerateParams(max_tokens=2), owner="other"))) > 2


@pytest.mark.parametrize("has_drafter", [False, True])
def test_room_for_draft_tokens_drops_no_sessions_entries(has_drafter: bool) -> None:
    """Also of a Generate that ends before it needs the room."""
    with served_engine() as roomy:
        expected = [token for token, _ in generate(roomy, opened(roomy, 20), 40)]
    now = 0.0
    drafter: dict[str, Any] = {"drafter": Knowing(text=[*text(20), *expected])} if has_drafter else {}
    patient: dict[str, Any] = {"clock": lambda: now, "stall_seconds": 1e6, "session_evictable_seconds": 1}
    with served_engine(kv_bytes=bytes_for(16) + bytes_for(32), **patient, **drafter) as engine:
        idle = opened(engine, 10)
        generate(engine, idle, 1)
        session = opened(engine, 20)
        now = 10.0
        params = GenerateParams(max_tokens=40, stop_token_ids=(expected[6],))
        drain(engine.generate(session, params))
        assert 20 < engine.session_info(session).history_length <= 27
        assert engine.session_info(idle).cached_tokens == 10
        drain(engine.generate(session, GenerateParams(max_tokens=20)))  # what is needed is granted for theirs
        assert engine.session_info(idle).cached_tokens == 0


def test_sessions_that_come_and_go_leave_no_memory_behind() -> None:
    """What the system has given the process stays near the grants, though address space is used all over."""

    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    def turn(engine: Engine, length: int) -> None:
        session = opened(engine, length)
        generate(engine, session, 1)
        engine.close_session(session)

    most = bytes_for()
    with served_engine(kv_bytes=16 * most) as engine:
        for _ in range(3):
            turn(engine, 400)
        before = resident()
        for _ in range(12):
            held = [engine.create_session().session_id for _ in range(3)]
            for session in held:
                engine.append(session, text(400))
                generate(engine, session, 1)
            for session in held:
                engine.close_session(session)
        assert resident() - before < 20 * most
