"""Engines that keep sessions in a folder, and what a kill leaves of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from inference_engine.engine import Engine
from inference_engine.metrics import EngineMetrics
from inference_engine.session.journal_folder import LOCK
from inference_engine.session.sqlite_journal import SQLiteJournal
from inference_engine.types import Durability
from tests.load.scripted import scripted_engine

WEIGHTS = "a" * 64


def sqlite_journal(
    folder: Path, durability: Durability = Durability.PROCESS, *, weights: str = WEIGHTS, **settings: Any
) -> SQLiteJournal:
    folder.mkdir(mode=0o700, exist_ok=True)
    metrics = settings.pop("metrics", None) or EngineMetrics()  # making them takes longer than to open the journal
    return SQLiteJournal(folder, durability, weights=weights, metrics=metrics, **settings)


@contextmanager
def keeping(folder: Path, *, make: Any = scripted_engine, **settings: Any) -> Iterator[Engine]:
    """An engine that keeps its sessions in `folder`, stopped in order at the end."""
    metrics = EngineMetrics()
    journal = sqlite_journal(folder, metrics=metrics)
    with make(journal=journal, metrics=metrics, state_dir=str(folder), **settings) as engine:
        yield engine


def saved(engine: Engine) -> None:
    """Returns once everything is safe that was done until now."""
    from threading import Event

    done = Event()
    engine.when_saved(done.set)
    assert done.wait(30), "the journal does not commit"


def after_a_kill(folder: Path) -> Path:
    """What a process that is killed now would leave: the files as they are, in a folder of their own."""
    found = folder.with_name(f"{folder.name}-killed")
    shutil.rmtree(found, ignore_errors=True)
    found.mkdir(mode=0o700)
    shutil.copytree(
        folder, found, dirs_exist_ok=True, ignore=shutil.ignore_patterns(LOCK), copy_function=_copy_if_there
    )
    return found


def _copy_if_there(file: str, to: str) -> None:
    """The process goes on meanwhile: a file that it removes before it is copied was gone when it was killed."""
    with suppress(FileNotFoundError):
        shutil.copy2(file, to)
