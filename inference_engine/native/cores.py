"""How many cores this process may use: what its affinity has, within the quota of processor time of its control groups.

A container's limit (`docker run --cpus=2`, `cpu` among Kubernetes' limits) is such a quota. It hides no cores, but more
threads than it pays for use it up early in each period, and then all of them stop until the next one. The kernel's
documentation has version 1 in `scheduler/sched-bwc` and version 2 in `admin-guide/cgroup-v2`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from inference_engine.control_groups import folders, text_of


def usable_cores(root: Path = Path("/")) -> int:
    """The cores of this process's affinity, or its quota, rounded up, where that is less; at least 1.

    root: of the files of /proc and /sys.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = quota_cores(root)
    return cores if quota is None else min(cores, quota)


def quota_cores(root: Path) -> int | None:
    """As many cores as the least quota of this process's control groups pays for, rounded up. None without a quota.

    A group is within the quota of each group above it, too. A file that is not there or not as the kernel writes it
    limits nothing.
    """
    quotas = (_quota(folder) for folder in folders("cpu", root))
    return min((-(-quota // period) for quota, period in filter(None, quotas)), default=None)


def _quota(folder: Path) -> tuple[int, int] | None:
    """Microseconds of processor time in each period of so many; None if there is no such limit."""
    words = text_of(folder / "cpu.max").split() or [
        word for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us") for word in text_of(folder / name).split()
    ]
    # Without a quota the first word is `max`, in version 1 `-1`.
    if len(words) != 2 or not all(re.fullmatch("[0-9]{1,19}", word) for word in words):
        return None
    quota, period = map(int, words)
    return (quota, period) if quota and period else None
