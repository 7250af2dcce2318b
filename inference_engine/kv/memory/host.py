"""Free memory of the host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psutil

from inference_engine.control_groups import folders, text_of

# By version of control groups: the files of a group's limit and use, and what `memory.stat` calls pages of files that
# were not read of late, which the kernel gives up before it ends a process.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_host_bytes() -> int:
    """Memory that could be used now, within the limits of this process's control groups: its container's, mostly."""
    return min([psutil.virtual_memory().available, *left_in_groups(Path("/"))])


def left_in_groups(root: Path) -> Iterator[int]:
    """Bytes that each of this process's control groups has left of its limit. root: of the files of /proc and /sys.

    A group is within the limit of each group above it, too. A file that is not there or not as the kernel writes it
    limits nothing.
    """
    for folder in folders("memory", root):
        for limit, use, unused in _FILES:
            most, used = _number(text_of(folder / limit)), _number(text_of(folder / use))
            if most is not None and used is not None:
                statistics = dict(line.partition(" ")[::2] for line in text_of(folder / "memory.stat").splitlines())
                yield max(0, most - max(0, used - (_number(statistics.get(unused, "")) or 0)))


def _number(text: str) -> int | None:
    """Of bytes; None if there is none, as `max` in place of a limit."""
    return int(text) if re.fullmatch("[0-9]{1,19}", text.strip()) else None
