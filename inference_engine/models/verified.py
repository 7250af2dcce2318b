"""Remembered digests of files with the file status of that time, so that a start need not hash gigabytes again.

One small JSON file per hashed file, in `<cache>/verified/`. A note holds as long as size, inode, modification and
change time are those of the hashing. The change time is the kernel's own and cannot be set back by a program.
A note that is unreadable or out of date counts as none.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

Look = dict[str, int]


def look_of(path: Path) -> Look:
    """The file status that is compared instead of the content. Take it before hashing, to detect changes meanwhile."""
    stat = path.stat()
    return {
        "size_bytes": stat.st_size,
        "inode": stat.st_ino,
        "modified_ns": stat.st_mtime_ns,
        "changed_ns": stat.st_ctime_ns,
    }


def remembered_sha256(path: Path, cache: Path) -> str | None:
    """The digest of `path` when it was last hashed, or None if there is no note or the file has changed since."""
    try:
        note: Any = json.loads(_note(path, cache).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(note, dict) or note.get("look") != look_of(path):
        return None
    sha256 = note.get("sha256")
    return sha256 if isinstance(sha256, str) else None


def remember_sha256(path: Path, sha256: str, look: Look, cache: Path) -> None:
    """Store the digest of a file that had the status `look`. Raises OSError if the cache cannot be written."""
    note = _note(path, cache)
    note.parent.mkdir(parents=True, exist_ok=True)
    draft = note.with_suffix(f".{uuid4().hex}")
    draft.write_text(json.dumps({"path": str(path.resolve()), "look": look, "sha256": sha256}), encoding="utf-8")
    draft.replace(note)


def forget_sha256(path: Path, cache: Path) -> None:
    _note(path, cache).unlink(missing_ok=True)


def _note(path: Path, cache: Path) -> Path:
    key = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    return cache / "verified" / f"{key}.json"
