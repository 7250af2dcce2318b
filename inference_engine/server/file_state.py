"""Detects that a file has changed since it was read."""

from __future__ import annotations

from pathlib import Path


def state_of(path: Path) -> tuple[int, ...] | None:
    """A fingerprint that changes with the file's content, made without reading it; None if there is no such file."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return (facts.st_ino, facts.st_dev, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
