"""Free memory of the host."""

from __future__ import annotations

import math
from pathlib import Path

import psutil


def free_host_bytes() -> int:
    """Memory that could be used now, within the limit of this process's container."""
    return int(min(psutil.virtual_memory().available, _container_bytes()))


def _container_bytes() -> float:
    """Memory left within the container's limit; infinite without one."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return math.inf
    return math.inf if limit == "max" else max(0, int(limit) - used)
