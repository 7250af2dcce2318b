"""When calls are tried again, and how long one waits. No clock runs here."""

from __future__ import annotations

from typing import Any

import pytest

from kakeya import (
    ConnectionFailed,
    Draining,
    InvalidArgument,
    KakeyaError,
    NoCapacity,
    Overloaded,
    RetryPolicy,
    SessionBusy,
    SessionNotFound,
    TLSFailed,
)
from kakeya._checks import MAX_SECONDS
from kakeya._flows import Call, Sleep, close_session, repeatable
from kakeya._retry import FIRST_CONTACT_SECONDS, FULL_SECONDS, Contact, Patience
from kakeya.v1 import runtime_pb2 as pb

LOST = ConnectionFailed("lost", code="UNAVAILABLE")
INFO = pb.GetSessionInfoRequest(session_id="id")


def patience(timeout: float | None = None, **policy: Any) -> Patience:
    return Patience(RetryPolicy(**policy), timeout, clock=lambda: 0.0, jitter=lambda: 0.0)


def test_a_read_is_repeated_after_a_growing_wait() -> None:
    flow = repeatable("GetSessionInfo", INFO, patience(first_delay_seconds=1.0))
    assert isinstance(next(flow), Call)
    assert flow.throw(LOST) == Sleep(0.5)
    assert isinstance(flow.send(None), Call)
    assert flow.throw(LOST) == Sleep(1.0)
    assert isinstance(flow.send(None), Call)
    with pytest.raises(StopIteration) as end:
        flow.send("reply")
    assert end.value.value == "reply"


def test_the_servers_own_wait_is_respected() -> None:
    flow = repeatable("GetSessionInfo", INFO, patience())
    next(flow)
    draining = Draining("draining", code="UNAVAILABLE", reason="DRAINING", retry_after_seconds=7.0)
    assert flow.throw(draining) == Sleep(7.0)


def full() -> ConnectionFailed:
    error = ConnectionFailed("full", code="UNAVAILABLE")
    error._was_full, error._was_sent = True, False
    return error


def test_a_call_that_finds_its_connection_full_waits_without_an_attempt() -> None:
    flow = repeatable("GetSessionInfo", INFO, patience(attempts=2, first_delay_seconds=4.0))
    next(flow)
    waits = []
    for _ in range(8):
        waits.append(flow.throw(full()))
        assert isinstance(flow.send(None), Call)
    assert waits == [Sleep(seconds) for seconds in (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5)]
    assert flow.throw(LOST) == Sleep(1.0)  # the first attempt that counts
    flow.send(None)
    with pytest.raises(ConnectionFailed, match="lost"):
        flow.throw(LOST)


def test_a_connection_that_stays_full_is_given_up() -> None:
    now = 0.0
    asking = Patience(RetryPolicy(attempts=1), None, clock=lambda: now, jitter=lambda: 0.0)
    while (seconds := asking.wait_seconds(1, full())) is not None:
        now += seconds
    assert FULL_SECONDS <= now < FULL_SECONDS + 2.0
    brief = Patience(RetryPolicy(), 0.005, clock=lambda: 0.0, jitter=lambda: 0.0)
    assert brief.wait_seconds(1, full()) is None


class Clock:
    """Stands still but for the waits that a patience asks for, and attempts that take as long as a test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def attempts(self, waiting: Patience, error: KakeyaError, *, taking: float = 0.0) -> int:
        """Calls that fail with `error` until it is given up."""
        for attempt in range(1, 10_000):
            self.now += taking
            if (delay := waiting.wait_seconds(attempt, error)) is None:
                return attempt
            self.now += delay
        raise AssertionError("it is never given up")


def unsent() -> ConnectionFailed:
    error = ConnectionFailed("refused", code="UNAVAILABLE")
    error._was_sent = False
    return error


def of_clock(clock: Clock, timeout: float | None = None, *, is_reached: bool = True, **policy: Any) -> Patience:
    contact = Contact(is_made=is_reached)
    return Patience(RetryPolicy(**policy), timeout, contact=contact, clock=lambda: clock.now, jitter=lambda: 0.0)


def test_a_server_that_was_there_is_waited_for_until_patience_ends_and_tried_at_its_end() -> None:
    clock = Clock()
    assert clock.attempts(of_clock(clock), unsent()) > 10
    assert clock.now == pytest.approx(RetryPolicy().patience_seconds)


def test_a_server_that_was_never_there_is_given_up_soon() -> None:
    clock = Clock()
    waiting = of_clock(clock, is_reached=False)
    assert clock.attempts(waiting, unsent()) > 2
    assert clock.now == pytest.approx(FIRST_CONTACT_SECONDS)
    clock.attempts(of_clock(clock, is_reached=False), LOST)  # a connection that breaks was one
    assert clock.now == pytest.approx(FIRST_CONTACT_SECONDS + RetryPolicy().patience_seconds)


def test_with_an_answer_patience_begins_anew() -> None:
    clock = Clock()
    waiting = of_clock(clock)
    for _ in range(3):
        began = clock.now
        clock.attempts(waiting, unsent())
        assert clock.now - began == pytest.approx(RetryPolicy().patience_seconds)
        waiting.answered()


@pytest.mark.parametrize("asked_seconds", [0.05, 7.0])
def test_patience_does_not_end_while_the_server_says_when_to_come_back(asked_seconds: float) -> None:
    clock = Clock()
    refused = Overloaded("later", code="RESOURCE_EXHAUSTED", reason="OVERLOADED", retry_after_seconds=asked_seconds)
    waiting = of_clock(clock, 600.0, patience_seconds=1.0)
    assert clock.attempts(waiting, refused) > 80
    assert 590.0 < clock.now < 600.0
    # Then it is gone: patience counts from its last answer, the wait that it asked for included.
    began = clock.now
    assert clock.attempts(of_clock(clock, patience_seconds=1.0), LOST) > 1
    assert clock.now - began == pytest.approx(1.0)
    assert clock.attempts(of_clock(clock, attempts=3), refused) == 3
    assert clock.attempts(of_clock(clock, patience_seconds=0.0), refused) == 1


def test_calls_that_fail_at_once_are_not_sent_in_a_busy_loop() -> None:
    clock = Clock()
    waiting = of_clock(clock, first_delay_seconds=0.0, max_delay_seconds=0.0, patience_seconds=1.0)
    assert clock.attempts(waiting, LOST) <= 102


def test_a_wait_that_outlasts_the_deadline_is_not_begun() -> None:
    flow = repeatable("GetSessionInfo", INFO, patience(5.0))
    next(flow)
    draining = Draining("draining", code="UNAVAILABLE", reason="DRAINING", retry_after_seconds=7.0)
    with pytest.raises(Draining):
        flow.throw(draining)


def test_no_agreement_on_tls_is_not_tried_again() -> None:
    flow = repeatable("GetSessionInfo", INFO, patience())
    next(flow)
    with pytest.raises(TLSFailed):
        flow.throw(TLSFailed("its certificate is not accepted", code="UNAVAILABLE"))


@pytest.mark.parametrize(
    "error", [SessionBusy("busy", code="ABORTED"), SessionNotFound("none", code="NOT_FOUND")], ids=repr
)
def test_what_is_neither_a_lost_connection_nor_promised_for_later_is_not_tried_again(error: KakeyaError) -> None:
    flow = repeatable("GetSessionInfo", INFO, patience())
    next(flow)
    with pytest.raises(type(error)):
        flow.throw(error)


def test_after_retry_after_calls_are_tried_again_and_not_all_at_once() -> None:
    full = NoCapacity("no room", code="RESOURCE_EXHAUSTED", retry_after_seconds=2.0)
    waits = set()
    jitters = [0.0, 0.5]
    waiting = Patience(RetryPolicy(), None, clock=lambda: 0.0, jitter=jitters.pop)
    for _ in range(2):
        flow = repeatable("CreateSession", pb.CreateSessionRequest(), waiting)
        next(flow)
        waits.add(flow.throw(full))
    assert waits == {Sleep(2.0), Sleep(2.2)}


def test_a_call_that_is_repeated_says_by_its_id_that_it_is_the_same() -> None:
    flow = close_session("id", patience())
    first = next(flow)
    flow.throw(LOST)
    second = flow.send(None)
    assert isinstance(first, Call) and isinstance(second, Call)
    assert first.request == second.request
    assert isinstance(first.request, pb.CloseSessionRequest)
    assert len(first.request.request_id) == 16


def test_a_session_gone_after_a_lost_close_counts_as_closed() -> None:
    flow = close_session("id", patience())
    next(flow)
    assert isinstance(flow.throw(LOST), Sleep)
    flow.send(None)
    with pytest.raises(StopIteration) as end:
        flow.throw(SessionNotFound("no such session", code="NOT_FOUND"))
    assert end.value.value is None


def test_a_deadline_covers_all_attempts() -> None:
    now = [0.0]
    waiting = Patience(RetryPolicy(), 10.0, clock=lambda: now[0], jitter=lambda: 0.0)
    flow = repeatable("GetSessionInfo", INFO, waiting)
    first = next(flow)
    now[0] = 6.0
    flow.throw(LOST)
    second = flow.send(None)
    assert isinstance(first, Call) and first.timeout == 10.0
    assert isinstance(second, Call) and second.timeout == 4.0


def test_a_policy_that_makes_no_sense_is_refused(subtests: pytest.Subtests) -> None:
    for settings in (
        {"attempts": 0},
        {"first_delay_seconds": -1},
        {"max_delay_seconds": float("nan")},
        {"patience_seconds": -1},
        # Longer than any timer waits.
        {"first_delay_seconds": MAX_SECONDS + 1},
        {"max_delay_seconds": 3.4e38},
    ):
        with subtests.test(str(settings)), pytest.raises(InvalidArgument):
            RetryPolicy(**settings)
