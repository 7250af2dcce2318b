"""How many cores this process may use: what its affinity has, within the quota of processor time of its control groups.

A container's limit (`docker run --cpus=2`, `cpu` among Kubernetes' limits) is such a quota. It hides no cores, but more
threads than it pays for use it up early in each period, and then all of them stop until the next one. The kernel's
documentation has version 1 in `scheduler/sched-bwc` and version 2 in `admin-guide/cgroup-v2`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


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
    quotas = (_quota(folder) for folder in _folders(root))
    return min((-(-quota // period) for quota, period in filter(None, quotas)), default=None)


def _folders(root: Path) -> Iterator[Path]:
    """Of each control group of this process that can have a quota, and of those above it."""
    groups = dict(_groups(root))
    for version, top, mounted in _mounts(root):
        if version not in groups:
            continue
        group = groups[version]
        # A container that sees names of its host has its own group as the top, or one that it cannot name.
        inner = group.relative_to(top) if group.is_relative_to(top) and ".." not in group.parts else PurePosixPath()
        for part in (inner, *inner.parents):
            yield root / mounted.relative_to("/") / part


def _groups(root: Path) -> Iterator[tuple[int, PurePosixPath]]:
    """By version of control groups, the one of this process. A line: `2:cpu,cpuacct:/a`, or `0::/a` of version 2."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        match line.split(":", 2):
            case ["0", "", path]:
                yield 2, PurePosixPath(path)
            case [_, controllers, path] if "cpu" in controllers.split(","):
                yield 1, PurePosixPath(path)


def _mounts(root: Path) -> Iterator[tuple[int, PurePosixPath, PurePosixPath]]:
    """Version, group and folder of each place where groups with quotas can be seen.

    A line: `36 35 0:31 GROUP FOLDER rw,relatime shared:9 - cgroup cgroup rw,cpu`, with any number of words before `-`.
    """
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        match before.split(), after.split():
            case [_, _, _, top, folder, *_], [kind, _, options]:
                if kind == "cgroup2":
                    yield 2, _unescaped(top), _unescaped(folder)
                elif kind == "cgroup" and "cpu" in options.split(","):
                    yield 1, _unescaped(top), _unescaped(folder)


def _quota(folder: Path) -> tuple[int, int] | None:
    """Microseconds of processor time in each period of so many; None if there is no such limit."""
    words = _read(folder / "cpu.max").split() or [
        word for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us") for word in _read(folder / name).split()
    ]
    # Without a quota the first word is `max`, in version 1 `-1`.
    if len(words) != 2 or not all(re.fullmatch("[0-9]{1,19}", word) for word in words):
        return None
    quota, period = map(int, words)
    return (quota, period) if quota and period else None


def _unescaped(path: str) -> PurePosixPath:
    """As the kernel meant it: blanks and backslashes are in octal."""
    return PurePosixPath(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path))


def _read(path: Path) -> str:
    """What a file says; nothing if there is none that can be read."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except (OSError, ValueError):
        return ""
