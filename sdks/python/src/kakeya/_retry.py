"""Retries: one deadline over all attempts of a call, and the waits between them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from kakeya._checks import finite, invalid, whole_number
from kakeya._errors import DeadlineExceeded, KakeyaError, TLSFailed, TransportError

# A call that finds its connection full waits for a free stream; that does not count as an attempt.
FULL_SECONDS = 60.0
_FULL_DELAY_SECONDS, _LONGEST_FULL_DELAY_SECONDS = 0.02, 1.0
# Status codes of calls ended by gRPC, a load balancer or a proxy. A retry is the same call, by its request id.
_PASSING = frozenset({"UNAVAILABLE", "CANCELLED", "UNKNOWN", "INTERNAL", "RESOURCE_EXHAUSTED"})


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """Waits between attempts of a call: after a lost connection, after a call that a proxy ended, and if the server
    says when to retry.

    The n-th wait is between half and all of `first_delay_seconds` × 2^(n-1), at most `max_delay_seconds`, and never
    less than the server requests. `attempts=1` switches retries off. A stream's attempts count from its last token.
    """

    attempts: int = 4
    first_delay_seconds: float = 0.2
    max_delay_seconds: float = 5.0

    def __post_init__(self) -> None:
        whole_number(self.attempts, "attempts", at_least=1, below=1000)
        for name in ("first_delay_seconds", "max_delay_seconds"):
            if finite(getattr(self, name), name) < 0:
                raise invalid(name, f"must be at least 0, got {getattr(self, name)}")

    def delay_seconds(self, attempt: int, jitter: float) -> float:
        """The wait after failed attempt number `attempt` (from 1), with `jitter` in [0, 1)."""
        longest = min(self.max_delay_seconds, self.first_delay_seconds * 2.0 ** (attempt - 1))
        return longest * (0.5 + 0.5 * jitter)


class Patience:
    """One call's deadline, counted from now, with the policy for its attempts."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.policy = policy
        self._clock = clock
        self._jitter = jitter
        self._deadline = None if timeout is None else clock() + timeout
        self._last_reported: KakeyaError | None = None  # by the server, and not answered since
        self._times_full = 0  # since the last answer
        self._full_since = 0.0

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
        asked = error.retry_after_seconds
        if isinstance(error, TLSFailed):
            return None
        is_passing = error.code == "UNAVAILABLE" or (
            isinstance(error, TransportError) and error.reason is None and error.code in _PASSING
        )
        if (not is_passing and asked is None) or attempt >= self.policy.attempts:
            return None
        # Jitter, so that clients that got the same answer do not all come back at the same time.
        jitter = self._jitter()
        delay = max(self.policy.delay_seconds(attempt, jitter), (asked or 0.0) * (1.0 + 0.2 * jitter))
        return self._if_in_time(delay)

    def _full_wait_seconds(self) -> float | None:
        now = self._clock()
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
        self._last_reported = None
        self._times_full = 0

    def extended(self, timeout: float) -> Patience:
        """A deadline of its own, from now, for what has to follow even when this one has passed."""
        return Patience(self.policy, timeout, clock=self._clock, jitter=self._jitter)


def _is_unexplained(error: KakeyaError) -> bool:
    return error.reason is None and isinstance(error, TransportError | DeadlineExceeded)
