"""Files of a journal, as tests find, leave and damage them."""

from __future__ import annotations

import shutil
from pathlib import Path

from inference_engine.session.journal_folder import LOCK
from inference_engine.session.sqlite_journal import FILE
from inference_engine.types import Durability
from tests.kept import after_a_kill
from tests.kept import sqlite_journal as open_journal
from tests.session.talks import (
    Talk,
)


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {file.name: (file.stat().st_mode, file.read_bytes()) for file in folder.iterdir()}


def killed_after(folder: Path, durability: Durability, steps: int = 20) -> tuple[Talk, Path]:
    """What a talk was sent, and a folder that its server leaves when it is killed: the log is not empty."""
    journal = open_journal(folder, durability)
    talk = Talk(journal)
    for _ in range(steps):
        talk.step()
        talk.wait()
    killed = after_a_kill(folder)
    shutil.copy(folder / LOCK, killed)
    journal.stop()
    return talk, killed


def damage_log(folder: Path) -> None:
    log = folder / f"{FILE}-wal"
    flipped = bytearray(log.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    log.write_bytes(flipped)
