"""Sessions through the engine: histories, holding, stopping, making room, and what is left after each fault."""

from __future__ import annotations

import queue
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from inference_engine.backends.base import Result, Step
from inference_engine.engine import Engine
from inference_engine.engine.generation import Generation
from inference_engine.errors import (
    AppendTooLarge,
    DeadlineExceeded,
    Draining,
    HistoryLengthMismatch,
    HistoryLimit,
    InternalError,
    InvalidArgument,
    InvariantViolated,
    NoCapacity,
    NonFiniteLogits,
    Overloaded,
    QuotaExceeded,
    SessionBusy,
    SessionClosed,
    SessionEvicted,
    SessionNotFound,
    TokenOutOfRange,
)
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategies.tiered import Tiered
from inference_engine.session.history import TokenIds
from inference_engine.session.journal import GenerateRecord, Logprobs, MemoryJournal
from inference_engine.types import Event, Failed, Finished, GenerateParams, Mark, Mode, StopReason, TokenCommitted
from tests.facade import forward_of, session_of, steps_run_by
from tests.laws.variants import drain, generate, same, text, tokens
from tests.tiny import TRAINED_POSITIONS, VOCABULARY, tiny_engine, tiny_forward
from tests.tiny_native import served_engine


class Clock:
    """Monotonic seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Gate:
    """A listener that holds the engine's thread at the first token, so that a test can act while a Generate runs."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.put(event)
        if isinstance(event, TokenCommitted) and not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(30)

    def rest(self) -> list[Event]:
        """All events up to the last."""
        seen = [self.events.get(timeout=30)]
        while not isinstance(seen[-1], Finished | Failed):
            seen.append(self.events.get(timeout=30))
        return seen


def opened(engine: Engine, length: int = 20, **options: object) -> str:
    session_id = engine.create_session(**options).session_id  # type: ignore[arg-type]
    engine.append(session_id, text(length))
    return session_id


def still_works(engine: Engine) -> None:
    """The closing assertion of every fault: another session generates what it always did."""
    with served_engine() as fresh:
        expected = [token for token, _ in generate(fresh, opened(fresh), 8)]
    session = opened(engine)
    assert [token for token, _ in generate(engine, session, 8)] == expected
    engine.close_session(session)


# -- histories --------------------------------------------------------------------------------------------------------


def test_generated_tokens_are_part_of_the_history_eos_included() -> None:
    with served_engine() as engine:
        plain = [token for token, _ in generate(engine, opened(engine), 6)]
        session = opened(engine, eos_token_ids=[plain[2]])
        events = drain(engine.generate(session, GenerateParams(max_tokens=6)))
        assert [token for token, _ in tokens(events)] == plain[: plain.index(plain[2]) + 1]
        done = events[-1]
        assert isinstance(done, Finished)
        assert done.stop_reason is StopReason.EOS
        assert engine.session_info(session).history_length == 20 + done.generated_tokens == done.history_length


def test_stop_ids_of_a_request_end_it_like_the_sessions_own() -> None:
    with served_engine() as engine:
        plain = [token for token, _ in generate(engine, opened(engine), 6)]
        events = drain(engine.generate(opened(engine), GenerateParams(max_tokens=6, stop_token_ids=(plain[1],))))
        assert [token for token, _ in tokens(events)] == plain[: plain.index(plain[1]) + 1]
        assert isinstance(events[-1], Finished)
        assert events[-1].stop_reason is StopReason.EOS


def test_an_empty_append_changes_nothing_but_refreshes_the_idle_clock() -> None:
    clock = Clock()
    with served_engine(clock=clock) as engine:
        session = opened(engine)
        clock.now += 10
        assert engine.session_info(session).idle_seconds == 10
        assert engine.read_history(session).history_length == 20
        assert engine.session_info(session).idle_seconds == 10, "a look is no use"
        assert engine.append(session, []) == 20
        assert engine.session_info(session).idle_seconds == 0


@pytest.mark.parametrize("wrong", [-1, VOCABULARY, 2**32 - 1])
def test_one_id_out_of_the_vocabulary_rejects_the_whole_append(wrong: int) -> None:
    with served_engine() as engine:
        session = opened(engine)
        with pytest.raises(TokenOutOfRange, match=str(wrong)):
            engine.append(session, [1, 2, wrong])
        assert engine.session_info(session).history_length == 20
        with pytest.raises(TokenOutOfRange):
            engine.create_session(eos_token_ids=[wrong])
        with pytest.raises(TokenOutOfRange):
            engine.generate(session, GenerateParams(max_tokens=1, stop_token_ids=(wrong,)))
        still_works(engine)


def test_what_is_wrong_with_a_call_is_said_before_anything_happens() -> None:
    with served_engine(max_append_tokens=30, max_generate_tokens=50) as engine:
        session = opened(engine)
        with pytest.raises(AppendTooLarge):
            engine.append(session, [1] * 31)
        with pytest.raises(HistoryLengthMismatch, match="20 tokens"):
            engine.append(session, [1], expected_history_length=19)
        with pytest.raises(HistoryLengthMismatch):
            engine.generate(session, GenerateParams(max_tokens=1, expected_history_length=21))
        with pytest.raises(InvalidArgument, match="50"):
            engine.generate(session, GenerateParams(max_tokens=51))
        with pytest.raises(InvalidArgument, match=r"^history: it is empty; append tokens to the session"):
            engine.generate(engine.create_session().session_id, GenerateParams(max_tokens=1))
        with pytest.raises(InvalidArgument, match="limit_tokens"):
            engine.create_session(limit_tokens=TRAINED_POSITIONS + 1)
        with pytest.raises(InvalidArgument, match="limit_tokens"):
            engine.create_session(limit_tokens=0)
        with pytest.raises(InvalidArgument, match=r"printable characters, got '\\n' at index 1"):
            engine.create_session(label="a\nb")
        with pytest.raises(InvalidArgument, match="at most 128 characters, got 129"):
            engine.create_session(label="x" * 129)
        assert engine.append(session, [5], expected_history_length=20) == 21
        still_works(engine)


def test_no_id_looks_like_an_option_of_a_command() -> None:
    drawn = ["-" + "a" * 31, "-" * 32, "b" * 32]
    with served_engine() as engine, patch.object(secrets, "token_urlsafe", side_effect=drawn):
        assert engine.create_session().session_id == "b" * 32


def test_a_session_ends_at_its_limit_and_says_so() -> None:
    with served_engine() as engine:
        session = opened(engine, limit_tokens=26)
        with pytest.raises(HistoryLimit, match="26"):
            engine.append(session, [1] * 7)
        events = drain(engine.generate(session, GenerateParams(max_tokens=50)))
        done = events[-1]
        assert isinstance(done, Finished)
        assert (done.stop_reason, done.generated_tokens, done.history_length) == (StopReason.TRUNCATED, 6, 26)
        again = drain(engine.generate(session, GenerateParams(max_tokens=5)))[-1]
        assert isinstance(again, Finished)
        assert (again.stop_reason, again.generated_tokens) == (StopReason.TRUNCATED, 0)
        assert again.prefilled_tokens == 0


def test_each_generate_prefills_only_what_is_new() -> None:
    with served_engine() as engine:
        session = opened(engine, 40)
        first = drain(engine.generate(session, GenerateParams(max_tokens=5)))[-1]
        engine.append(session, text(7))
        second = drain(engine.generate(session, GenerateParams(max_tokens=5)))[-1]
        assert isinstance(first, Finished)
        assert isinstance(second, Finished)
        assert (first.prefilled_tokens, first.cached_tokens) == (40, 0)
        # The last token generated before has no entry yet.
        assert (second.prefilled_tokens, second.cached_tokens) == (8, 44)


# -- one operation at a time ------------------------------------------------------------------------------------------


def test_a_second_operation_on_a_busy_session_is_refused_and_facts_never_wait() -> None:
    with served_engine() as engine:
        session, gate = opened(engine), Gate()
        engine.generate(session, GenerateParams(max_tokens=3), listener=gate)
        assert gate.reached.wait(30)
        with pytest.raises(SessionBusy):
            engine.append(session, [1])
        with pytest.raises(SessionBusy):
            engine.generate(session, GenerateParams(max_tokens=1), wait_seconds=0.01)
        info = engine.session_info(session)
        assert info.is_generating
        assert info.history_length == 21
        gate.go_on.set()
        assert engine.append(session, [1], wait_seconds=30) == 24
        assert isinstance(gate.rest()[-1], Finished)


def test_cancelling_keeps_what_was_committed_and_the_session() -> None:
    with served_engine() as engine:
        expected = [token for token, _ in generate(engine, opened(engine), 10)]
        session, gate = opened(engine), Gate()
        generation = engine.generate(session, GenerateParams(max_tokens=400), listener=gate)
        assert gate.reached.wait(30)
        generation.cancel()
        generation.expire()  # the first stop wins
        gate.go_on.set()
        done = gate.rest()[-1]
        assert isinstance(done, Finished)
        assert (done.stop_reason, done.generated_tokens) == (StopReason.CANCELLED, 1)
        assert engine.session_info(session).history_length == 21
        assert [token for token, _ in generate(engine, session, 9)] == expected[1:]


@pytest.mark.parametrize("at_step", [1, 2, 5])
def test_a_stop_that_comes_while_a_step_runs_loses_nothing(at_step: int) -> None:
    """The step's token is not kept, and the next Generate samples it again."""
    with served_engine() as engine:
        expected = [token for token, _ in generate(engine, opened(engine), 10)]
        session = opened(engine)
        started: queue.SimpleQueue[Generation] = queue.SimpleQueue()
        run, steps = forward_of(engine).run, 0

        def stopping(step: Step) -> Result:
            nonlocal steps
            steps += 1
            if steps == at_step + 1:  # the history takes two chunks
                started.get(timeout=30).cancel()
            return run(step)

        with steps_run_by(engine, stopping):
            generation = engine.generate(session, GenerateParams(max_tokens=400))
            started.put(generation)
            events = drain(generation)
        assert isinstance(events[-1], Finished)
        assert events[-1].stop_reason is StopReason.CANCELLED
        kept = [token for token, _ in tokens(events)]
        assert engine.session_info(session).history_length == 20 + len(kept)
        assert kept + [token for token, _ in generate(engine, session, 10 - len(kept))] == expected


def test_a_deadline_ends_the_call_and_not_the_session() -> None:
    with served_engine() as engine:
        session, gate = opened(engine), Gate()
        generation = engine.generate(session, GenerateParams(max_tokens=400), listener=gate)
        assert gate.reached.wait(30)
        generation.expire()
        gate.go_on.set()
        failed = gate.rest()[-1]
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, DeadlineExceeded)
        assert generate(engine, session, 3)


def test_closing_a_running_session_ends_its_generate_and_frees_its_memory() -> None:
    with served_engine() as engine:
        session, gate = opened(engine), Gate()
        engine.generate(session, GenerateParams(max_tokens=400), listener=gate)
        assert gate.reached.wait(30)
        assert engine.close_session(session) == 21
        with pytest.raises(SessionNotFound):
            engine.session_info(session)
        gate.go_on.set()
        failed = gate.rest()[-1]
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, SessionClosed)
        assert engine.info().kv_reserved_bytes == 0
        still_works(engine)


def test_draining_lets_running_generates_end_and_refuses_new_work() -> None:
    with served_engine() as engine:
        session, gate = opened(engine), Gate()
        engine.generate(session, GenerateParams(max_tokens=4), listener=gate)
        assert gate.reached.wait(30)
        drainer = threading.Thread(target=engine.drain, args=(30.0,))
        drainer.start()
        while True:
            try:
                engine.close_session(engine.create_session().session_id)
            except Draining:
                break
        gate.go_on.set()
        drainer.join(30)
        done = gate.rest()[-1]
        assert isinstance(done, Finished)
        assert done.generated_tokens == 4
        with pytest.raises(Draining):
            engine.generate(session, GenerateParams(max_tokens=1))


def test_draining_without_grace_ends_running_generates_typed() -> None:
    with served_engine() as engine:
        session, gate = opened(engine), Gate()
        engine.generate(session, GenerateParams(max_tokens=400), listener=gate)
        assert gate.reached.wait(30)
        drainer = threading.Thread(target=engine.drain, args=(0.0,))
        drainer.start()
        gate.go_on.set()
        drainer.join(30)
        failed = gate.rest()[-1]
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, Draining)


def test_a_full_queue_refuses_and_keeps_the_session_free() -> None:
    with served_engine(max_running=1, max_queued=1) as engine:
        holder, gate = opened(engine), Gate()
        engine.generate(holder, GenerateParams(max_tokens=2), listener=gate)
        assert gate.reached.wait(30)  # the engine's thread is held: what is submitted now stays queued
        waiting = engine.generate(opened(engine), GenerateParams(max_tokens=2))
        refused = opened(engine)
        with pytest.raises(Overloaded) as overload:
            engine.generate(refused, GenerateParams(max_tokens=2))
        assert overload.value.retry_after_seconds
        gate.go_on.set()
        assert len(tokens(drain(waiting))) == 2
        assert len(generate(engine, refused, 2)) == 2


# -- memory and idleness ----------------------------------------------------------------------------------------------


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


def test_a_session_larger_than_its_owners_quota_evicts_none_and_need_not_come_again() -> None:
    clock = Clock()
    with served_engine(clock=clock, growth="guaranteed", kv_bytes_per_owner=bytes_for(0.5)) as engine:
        small = opened(engine, strategy=SinkWindow(sink=1, window=8))
        generate(engine, small, 2)
        clock.now += 1000
        with pytest.raises(QuotaExceeded):
            engine.create_session(strategy=Full())
        assert engine.session_info(small).cached_tokens == 21


def test_a_session_that_can_never_fit_evicts_none() -> None:
    clock = Clock()
    with served_engine(
        clock=clock, strategy="sink_window:sink=1,window=8", growth="guaranteed", kv_bytes=bytes_for(0.5)
    ) as engine:
        small = opened(engine, strategy=SinkWindow(sink=1, window=8))
        clock.now += 1000
        with pytest.raises(NoCapacity, match="in all"):
            engine.create_session(strategy=Full())
        assert engine.session_info(small).history_length == 20


def test_no_session_is_evicted_for_one_that_would_not_fit_even_then() -> None:
    clock = Clock()
    with served_engine(clock=clock, growth="guaranteed", kv_bytes=bytes_for(1.5)) as engine:
        engine.create_session(owner="another")
        mine = opened(engine, strategy=SinkWindow(sink=1, window=8))
        clock.now += 1000
        with pytest.raises(NoCapacity):
            engine.create_session(strategy=Full())
        assert engine.session_info(mine).history_length == 20


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


def test_another_owner_sees_and_touches_nothing() -> None:
    with served_engine() as engine:
        mine = engine.create_session(owner="me").session_id
        params = GenerateParams(max_tokens=1)
        answers = set()
        for session_id in (mine, "never issued"):
            for call in (
                lambda id_: engine.session_info(id_, owner="you"),
                lambda id_: engine.append(id_, [1], owner="you"),
                lambda id_: engine.generate(id_, params, owner="you"),
                lambda id_: engine.close_session(id_, owner="you"),
            ):
                with pytest.raises(SessionNotFound) as refusal:
                    call(session_id)
                answers.add(refusal.value.message)
        assert len(answers) == 1
        assert engine.session_info(mine, owner="me").history_length == 0


def test_many_short_sessions_leave_nothing_reserved() -> None:
    rng = np.random.default_rng(0)
    with served_engine(growth="guaranteed", kv_bytes=bytes_for(6)) as engine:
        open_ids: list[str] = []
        for _ in range(120):
            if open_ids and (len(open_ids) > 4 or rng.random() < 0.5):
                engine.close_session(open_ids.pop(int(rng.integers(len(open_ids)))))
            else:
                strategy = SinkWindow(sink=2, window=int(rng.integers(1, 60))) if rng.random() < 0.5 else Full()
                open_ids.append(opened(engine, int(rng.integers(1, 50)), strategy=strategy))
                generate(engine, open_ids[-1], 2)
        for session_id in open_ids:
            engine.close_session(session_id)
        assert engine.info().kv_reserved_bytes == 0


# -- faults -----------------------------------------------------------------------------------------------------------


class FailingJournal(MemoryJournal):
    """Refuses generated tokens from a position on, as a full disk would."""

    def __init__(self, from_position: int) -> None:
        super().__init__()
        self.from_position = from_position

    def append(
        self,
        session_id: str,
        position: int,
        token_ids: TokenIds,
        mark: Mark,
        *,
        began: GenerateRecord | None = None,
        logprobs: Logprobs | None = None,
    ) -> None:
        if mark is Mark.GENERATED and position >= self.from_position:
            raise OSError("no space left")
        super().append(session_id, position, token_ids, mark, began=began, logprobs=logprobs)


def test_a_token_the_journal_did_not_take_is_never_shown() -> None:
    with served_engine(journal=FailingJournal(23)) as engine:
        session = opened(engine)
        gate = Gate()
        gate.go_on.set()
        engine.generate(session, GenerateParams(max_tokens=10), listener=gate)
        events = gate.rest()
        assert isinstance(events[-1], Failed)
        assert isinstance(events[-1].error, InternalError)
        assert len(tokens(events)) == 3
        assert engine.session_info(session).history_length == 23
        # The session itself is well: its history is what was acknowledged.
        assert engine.append(session, [1]) == 24


def test_logits_that_are_not_finite_end_only_their_generate() -> None:
    with tiny_engine(seed=5) as engine:
        session = opened(engine)
        weight = tiny_forward(seed=5, windowed=True).seam.model.lm_head.weight
        kept = weight[3].clone()
        weight.data[3] = torch.nan
        try:
            with pytest.raises(NonFiniteLogits) as failure:
                drain(engine.generate(session, GenerateParams(max_tokens=3)))
            assert failure.value.metadata["position"] == "20"
        finally:
            weight.data[3] = kept
        with tiny_engine(seed=5) as fresh:
            assert generate(engine, session, 5) == generate(fresh, opened(fresh), 5)


def test_a_forward_that_fails_leaves_every_session_as_it_was() -> None:
    with served_engine() as engine:
        session = opened(engine)
        first = generate(engine, session, 4)

        def fail(step: Step) -> Result:
            raise RuntimeError("device-side assert triggered")

        with steps_run_by(engine, fail):
            with pytest.raises(InternalError) as failure:
                drain(engine.generate(session, GenerateParams(max_tokens=3)))
            assert "device-side" not in failure.value.message
            assert engine.is_alive()
            for _ in range(2):
                with pytest.raises(InternalError):
                    drain(engine.generate(session, GenerateParams(max_tokens=3)))
            assert not engine.is_alive(), "a device that fails every forward is not well"
        second = generate(engine, session, 4)
        assert engine.is_alive()
        with served_engine() as fresh:
            assert [*first, *second] == generate(fresh, opened(fresh), 8)


@pytest.mark.parametrize("kind", ["INV1", "INV2"])
def test_a_broken_invariant_fails_the_session_alone_and_frees_it(kind: str) -> None:
    with served_engine() as engine:
        session = opened(engine)
        generate(engine, session, 3)
        internal = session_of(engine, session)
        if kind == "INV1":
            internal.kv.groups[0].held[0] = -1
        else:
            internal.cached_tokens += 100
        with pytest.raises(InvariantViolated, match=kind):
            drain(engine.generate(session, GenerateParams(max_tokens=3)))
        info = engine.session_info(session)
        assert info.failure_reason == kind
        assert (info.inv1_violations, info.inv2_violations) == ((1, 0) if kind == "INV1" else (0, 1))
        assert info.kv_live_bytes == engine.info().kv_reserved_bytes == 0
        for call in (
            lambda: engine.append(session, [1]),
            lambda: engine.generate(session, GenerateParams(max_tokens=1)),
        ):
            with pytest.raises(InvariantViolated):
                call()
        assert engine.close_session(session) >= 20
        still_works(engine)


def test_engines_that_share_a_model_do_not_disturb_each_other() -> None:
    """Each runs its steps on its own thread: one within the trained positions, one past them."""
    strategy = "sink_window:sink=4,window=32"

    def both(engines: list[Engine], *, at_once: bool) -> list[list[tuple[int, float | None]]]:
        sessions = [opened(engine, length) for engine, length in zip(engines, (20, TRAINED_POSITIONS), strict=True)]
        with ThreadPoolExecutor(2 if at_once else 1) as threads:
            return list(threads.map(lambda engine, session: generate(engine, session, 40), engines, sessions))

    with (
        served_engine(strategy=strategy, mode=Mode.FIXED_SHAPE) as one,
        served_engine(strategy=strategy, mode=Mode.FIXED_SHAPE) as other,
    ):
        assert both([one, other], at_once=True) == both([one, other], at_once=False)
