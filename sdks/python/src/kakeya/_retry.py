"""Retries: how long a call waits for its server, and the waits between its attempts.

A call has a deadline over all its attempts. Within it, patience counts the time without the server since its last
answer: the waits, and attempts that found no connection. A prefill that takes long does not use it up, and a refusal
that says when to come back is an answer, but for one of a server that serves nothing: one that drains, or has stalled.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from kakeya._checks import MAX_SECONDS, finite, invalid, whole_number
from kakeya._errors import DeadlineExceeded, KakeyaError, TLSFailed, TransportError

# How long to look for a server that this client has never reached: it may be starting, or the address is wrong.
FIRST_CONTACT_SECONDS = 2.0
# A call that finds its connection full waits for a free stream; that does not count as an attempt.
FULL_SECONDS = 60.0
_FULL_DELAY_SECONDS, _LONGEST_FULL_DELAY_SECONDS = 0.02, 1.0
# Status codes of calls ended by gRPC, a load balancer or a proxy. A retry is the same call, by its request id.
_PASSING = frozenset({"UNAVAILABLE", "CANCELLED", "UNKNOWN", "INTERNAL", "RESOURCE_EXHAUSTED"})
# Every wait but the first is at least so long, whatever the policy says: no call is sent again in a busy loop.
_LEAST_DELAY_SECONDS = 0.02
# Timers are that exact: what is left of patience when its last wait has ended.
_LEAST_LEFT_SECONDS = 0.001
# Of its own: an application that seeds `random` neither makes all clients come back at once nor loses numbers to them.
_RANDOM = random.Random()


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How long a call waits for its server: after a lost connection, after a call that a proxy ended, and if the server
    says when to retry.

    `patience_seconds` is the time without an answer after which a call is given up; it is meant to be longer than a
    restart of the server. Time counts from the last answer, for a stream from its last token, and never beyond the
    call's timeout. A refusal that says when to retry is an answer, so such a call ends with its timeout only, but a
    server that drains or has stalled counts as away. One that this client has never reached is given up after 2 s.

    The n-th wait is between half and all of `first_delay_seconds` × 2^(n-1), at most `max_delay_seconds`, and never
    less than the server requests; none is longer than 10^9 seconds, nor may a delay be. `attempts` limits the number of
    attempts as well: 1 switches retries off.
    """

    attempts: int | None = None
    first_delay_seconds: float = 0.2
    max_delay_seconds: float = 2.0
    patience_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts is not None:
            whole_number(self.attempts, "attempts", at_least=1, below=1000)
        for name in ("first_delay_seconds", "max_delay_seconds", "patience_seconds"):
            if finite(getattr(self, name), name) < 0:
                raise invalid(name, f"must be at least 0, got {getattr(self, name)}")
        for name in ("first_delay_seconds", "max_delay_seconds"):
            if getattr(self, name) > MAX_SECONDS:
                raise invalid(name, f"must be at most {MAX_SECONDS} seconds, got {getattr(self, name)}")

    def delay_seconds(self, attempt: int, jitter: float) -> float:
        """The wait after failed attempt number `attempt` (from 1), with `jitter` in [0, 1)."""
        longest = min(self.max_delay_seconds, self.first_delay_seconds * 2.0 ** min(attempt - 1, 64))
        if attempt > 1:
            longest = max(longest, _LEAST_DELAY_SECONDS)
        return longest * (0.5 + 0.5 * jitter)


@dataclass(slots=True)
class Contact:
    """Has this client ever reached its server? Shared by all calls of a client."""

    is_made: bool = False


class Patience:
    """One call's deadline, counted from now, and how long it goes on without its server."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout: float | None,
        *,
        contact: Contact | None = None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = _RANDOM.random,
    ) -> None:
        self.policy = policy
        self._contact = Contact() if contact is None else contact
        self._clock = clock
        self._jitter = jitter
        self._deadline = None if timeout is None else clock() + timeout
        self._last_reported: KakeyaError | None = None  # by the server, and not answered since
        self._times_full = 0  # since the last answer
        self._full_since = 0.0
        self._failed_at: float | None = None  # the last time; None: the server has answered since
        self._last_delay = 0.0  # that followed
        self._without_server = 0.0  # seconds since the last answer

    def remaining_seconds(self) -> float | None:
        """Time left, never below 0; None if there is no deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def wait_seconds(self, attempt: int, error: KakeyaError) -> float | None:
        """How long to wait before the next attempt; None to give up with `error`."""
        if error._was_full:
            return self._full_wait_seconds()
        attempt -= self._times_full
        if error.reason is not None:
            self._last_reported = error
        self._contact.is_made |= error._was_sent
        spent = self._time_without_server(error)
        asked = error.retry_after_seconds
        if isinstance(error, TLSFailed):
            return None
        is_passing = error.code == "UNAVAILABLE" or (
            isinstance(error, TransportError) and error.reason is None and error.code in _PASSING
        )
        if not is_passing and asked is None:
            return None
        if asked is not None and error.code != "UNAVAILABLE":  # one that drains or has stalled serves nothing
            spent = self._without_server = 0.0
        left = (self.policy.patience_seconds if self._contact.is_made else self._first_patience_seconds()) - spent
        if left < _LEAST_LEFT_SECONDS or (self.policy.attempts is not None and attempt >= self.policy.attempts):
            return None
        # Jitter, so that clients that got the same answer do not all come back at the same time.
        jitter = self._jitter()
        # The last attempt is at the end of patience, or when the server asks for it.
        longest = max(min(self.policy.delay_seconds(attempt, jitter), left), (asked or 0.0) * (1 + 0.2 * jitter))
        self._last_delay = min(longest, MAX_SECONDS)  # no timer waits longer
        return self._if_in_time(self._last_delay)

    def _first_patience_seconds(self) -> float:
        return min(FIRST_CONTACT_SECONDS, self.policy.patience_seconds)

    def _time_without_server(self, error: KakeyaError) -> float:
        """Seconds since its last answer, less those in which an attempt that was sent waited for one."""
        now = self._clock()
        if self._failed_at is not None:
            self._without_server += self._last_delay if error._was_sent else now - self._failed_at
        self._failed_at = now
        return self._without_server

    def _full_wait_seconds(self) -> float | None:
        now = self._clock()
        self._failed_at = None  # it is there
        if not self._times_full:
            self._full_since = now
        if now - self._full_since >= FULL_SECONDS:
            return None
        longest = min(_LONGEST_FULL_DELAY_SECONDS, _FULL_DELAY_SECONDS * 2.0 ** min(self._times_full, 16))
        self._times_full += 1
        return self._if_in_time(longest * (0.5 + 0.5 * self._jitter()))

    def _if_in_time(self, delay: float) -> float | None:
        remaining = self.remaining_seconds()
        return delay if remaining is None or delay < remaining else None

    def verdict(self, error: KakeyaError) -> KakeyaError:
        """What to raise when giving up with `error`: the last reason that the server gave, if it gave one.

        A server that drains says so and then refuses connections: the first is why, the second only what follows.
        """
        reported = self._last_reported
        if reported is None or reported is error or not _is_unexplained(error):
            return error
        reported.add_note(f"tried again since, and at last: {error}")
        reported.__cause__ = error
        return reported

    def answered(self) -> None:
        """The server answers again: what it said before is no reason for what comes."""
        self._contact.is_made = True
        self._last_reported = None
        self._times_full = 0
        self._failed_at = None
        self._without_server = 0.0

    def extended(self, timeout: float) -> Patience:
        """A deadline of its own, from now, for what has to follow even when this one has passed."""
        return Patience(self.policy, timeout, contact=self._contact, clock=self._clock, jitter=self._jitter)


def _is_unexplained(error: KakeyaError) -> bool:
    return error.reason is None and isinstance(error, TransportError | DeadlineExceeded)
