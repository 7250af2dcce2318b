"""Linux control groups of this process, which limit what a container may use of the host.

The kernel's documentation has version 1 in `admin-guide/cgroup-v1` and version 2 in `admin-guide/cgroup-v2`. A file
that is not there limits nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def folders(controller: str, root: Path) -> Iterator[Path]:
    """Of each group of this process that can have a limit of `controller`, and of those above it, which limit it, too.

    controller: `cpu` or `memory`. root: of the files of /proc and /sys.
    """
    groups = dict(_groups(controller, root))
    for version, top, mounted in _mounts(controller, root):
        if version not in groups:
            continue
        group = groups[version]
        # A container that sees names of its host has its own group as the top, or one that it cannot name.
        inner = group.relative_to(top) if group.is_relative_to(top) and ".." not in group.parts else PurePosixPath()
        for part in (inner, *inner.parents):
            yield root / mounted.relative_to("/") / part


def text_of(path: Path) -> str:
    """What a file says; nothing if there is none that can be read."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except (OSError, ValueError):
        return ""


def _groups(controller: str, root: Path) -> Iterator[tuple[int, PurePosixPath]]:
    """By version of control groups, the one of this process. A line: `2:cpu,cpuacct:/a`, or `0::/a` of version 2."""
    for line in text_of(root / "proc/self/cgroup").splitlines():
        match line.split(":", 2):
            case ["0", "", path]:
                yield 2, PurePosixPath(path)
            case [_, controllers, path] if controller in controllers.split(","):
                yield 1, PurePosixPath(path)


def _mounts(controller: str, root: Path) -> Iterator[tuple[int, PurePosixPath, PurePosixPath]]:
    """Version, group and folder of each place where groups with limits can be seen.

    A line: `36 35 0:31 GROUP FOLDER rw,relatime shared:9 - cgroup cgroup rw,cpu`, with any number of words before `-`.
    """
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        match before.split(), after.split():
            case [_, _, _, top, folder, *_], [kind, _, options]:
                if kind == "cgroup2":
                    yield 2, _unescaped(top), _unescaped(folder)
                elif kind == "cgroup" and controller in options.split(","):
                    yield 1, _unescaped(top), _unescaped(folder)


def _unescaped(path: str) -> PurePosixPath:
    """As the kernel meant it: blanks and backslashes are in octal."""
    return PurePosixPath(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path))
