"""Rate limits and other limits on the calls of one owner, and on the number of connections.

The calls of an owner are limited in number at the same time, and in starts per second. A token bucket holds one second
of starts, so that a burst after a pause is served at once:

    calls left   ████████░░   +1 every 1/rate seconds, at most `rate`, −1 for every call that starts

There are at most as many owners as keys or certificates, so the state kept for them is bounded. A connection takes a
file descriptor, which the system limits per process.
"""

from __future__ import annotations

import logging
import math
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from inference_engine.errors import Overloaded

# For files of models and of the second tier, logs, pipes, and the ports themselves.
OWN_DESCRIPTORS = 256
# An idle one takes about 14 kB.
MOST_CONNECTIONS = 10_000
FEW_CONNECTIONS = 128

_log = logging.getLogger(__name__)

# It is unknown when a running call will end.
_RETRY_SECONDS = 1.0


@dataclass(slots=True)
class _Bucket:
    calls: float
    filled_at: float


class OwnerLimits:
    """Event loop only. `clock` gives monotonic seconds."""

    def __init__(self, *, calls: int, calls_per_second: float, clock: Callable[[], float]) -> None:
        """calls: at the same time. calls_per_second: starts; 0: no limit."""
        self._calls = calls
        self._rate = calls_per_second
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._buckets: dict[str, _Bucket] = {}

    @contextmanager
    def call(self, owner: str) -> Iterator[None]:
        """Around one call. Raises Overloaded before the call begins."""
        if self._running[owner] >= self._calls:
            raise Overloaded(
                f"{self._calls} of your calls are running, the limit of one owner (max_owner_calls); retry later",
                retry_after_seconds=_RETRY_SECONDS,
                max_owner_calls=self._calls,
            )
        self._take_one(owner)
        self._running[owner] += 1
        try:
            yield
        finally:
            self._running[owner] -= 1
            if not self._running[owner]:
                del self._running[owner]

    def _take_one(self, owner: str) -> None:
        if not self._rate:
            return
        now, most = self._clock(), max(1.0, self._rate)
        bucket = self._buckets.setdefault(owner, _Bucket(most, now))
        bucket.calls = min(most, bucket.calls + (now - bucket.filled_at) * self._rate)
        bucket.filled_at = now
        if bucket.calls < 1.0:
            raise Overloaded(
                f"more than {self._rate:g} calls per second, the limit of one owner; retry later",
                retry_after_seconds=(1.0 - bucket.calls) / self._rate,
                owner_calls_per_second=f"{self._rate:g}",
            )
        bucket.calls -= 1.0


def allowed_connections(max_connections: int, *, ports: int = 1) -> int:
    """How many of `max_connections` to each port (0: MOST_CONNECTIONS) the limit on open files allows.

    Warns if that is fewer, or few.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = math.inf if soft == resource.RLIM_INFINITY else soft
    available = max(1, (limit - OWN_DESCRIPTORS) / ports)
    if available < (max_connections or FEW_CONNECTIONS):
        _log.warning(
            "this process may open %d files, which allows %d connections to a port%s; raise the limit (ulimit -n %d)",
            soft,
            available,
            f" instead of {max_connections}" if max_connections else "",
            ports * (max_connections or MOST_CONNECTIONS) + OWN_DESCRIPTORS,
        )
    return int(min(max_connections or MOST_CONNECTIONS, available))
