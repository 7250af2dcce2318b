"""How many connections there may be: each takes a file descriptor, and the system gives a process so many."""

from __future__ import annotations

import logging
import math
import resource

# For files of models and of rows, logs, pipes, and the ports themselves.
OWN_DESCRIPTORS = 256
# An idle one takes about 14 kB.
MOST_CONNECTIONS = 10_000
FEW_CONNECTIONS = 128

_log = logging.getLogger(__name__)


def allowed_connections(max_connections: int, *, ports: int = 1) -> int:
    """What of `max_connections` to each port (0: as many as is reasonable) the system can give.

    Warns if that is less, or little.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = math.inf if soft == resource.RLIM_INFINITY else soft
    available = max(1, (limit - OWN_DESCRIPTORS) / ports)
    if available < (max_connections or FEW_CONNECTIONS):
        _log.warning(
            "this process may open %d files, so that there can be %d connections to a port%s; allow it more "
            "(ulimit -n %d)",
            soft,
            available,
            f" instead of {max_connections}" if max_connections else "",
            ports * (max_connections or MOST_CONNECTIONS) + OWN_DESCRIPTORS,
        )
    return int(min(max_connections or MOST_CONNECTIONS, available))
