"""How much memory the host has to spare."""

from __future__ import annotations

import math
from pathlib import Path

import psutil


def free_host_bytes() -> int:
    """Memory that could be used now, within what the container around this process allows."""
    return int(min(psutil.virtual_memory().available, _container_bytes()))


def _container_bytes() -> float:
    """Memory that the container around this process still allows; infinite where there is none."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return math.inf
    return math.inf if limit == "max" else max(0, int(limit) - used)
