"""Folders that a journal refuses: of another process, model, format or program, or open to others."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import apsw
import pytest

from inference_engine.errors import ConfigError
from inference_engine.metrics import EngineMetrics
from inference_engine.session.journal_database import FORMAT
from inference_engine.session.sqlite_journal import FILE, SQLiteJournal
from inference_engine.types import Durability
from tests.kept import sqlite_journal as open_journal
from tests.session.journal_files import content, killed_after


def test_a_second_server_is_refused_with_the_process_of_the_first(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    before = content(tmp_path)
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        open_journal(tmp_path)
    assert content(tmp_path) == before
    journal.stop()
    open_journal(tmp_path).stop()


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_a_folder_of_another_model_or_of_a_newer_format_is_refused_and_left_as_it_is(
    tmp_path: Path, *, is_killed: bool
) -> None:
    _, killed = killed_after(tmp_path / "state", Durability.POWER)
    folder = killed if is_killed else tmp_path / "state"
    before = content(folder)
    assert bool(before.get(f"{FILE}-wal")) == is_killed
    with pytest.raises(ConfigError, match="another model"):
        open_journal(folder, weights="b" * 64)
    assert content(folder) == before
    with closing(apsw.Connection(str(folder / FILE))) as db:
        db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, is_killed)
        db.execute("pragma locking_mode = exclusive").fetchall()
        db.execute(f"pragma user_version = {FORMAT + 1}")
    before = content(folder)
    with pytest.raises(ConfigError, match="newer one"):
        open_journal(folder)
    assert content(folder) == before


def test_a_folder_that_others_can_reach_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        open_journal(folder)
    assert list(folder.iterdir()) == []
    folder.chmod(0o700)
    with patch("os.geteuid", return_value=os.geteuid() + 1), pytest.raises(ConfigError, match="belongs to user"):
        open_journal(folder)
    assert list(folder.iterdir()) == []
    (tmp_path / "file").touch(mode=0o600)
    with pytest.raises(ConfigError):
        SQLiteJournal(tmp_path / "file", Durability.POWER, weights="a", metrics=EngineMetrics())
    with pytest.raises(ConfigError, match="gone; make that first"):
        SQLiteJournal(tmp_path / "gone" / "state", Durability.POWER, weights="a", metrics=EngineMetrics())


def test_a_file_system_that_is_mounted_read_only_is_named_before_anything_is_opened(tmp_path: Path) -> None:
    """What SQLite says of it is "disk I/O error"."""
    tmp_path.chmod(0o700)
    mounted = os.statvfs_result((*os.statvfs(tmp_path)[:8], os.ST_RDONLY, 255))
    with patch("os.statvfs", return_value=mounted), pytest.raises(ConfigError, match="read-only: mount it for writing"):
        open_journal(tmp_path)
    assert list(tmp_path.iterdir()) == []
    refused = OSError(errno.EROFS, os.strerror(errno.EROFS))
    with patch.object(Path, "mkdir", side_effect=refused), pytest.raises(ConfigError, match="mounted read-only"):
        SQLiteJournal(tmp_path / "new", Durability.POWER, weights="a", metrics=EngineMetrics())


def test_a_folder_where_sqlite_cannot_have_a_log_is_refused_by_name_and_the_way_out(tmp_path: Path) -> None:
    class File(apsw.VFSFile):
        def __init__(self, name: Any, flags: list[int]) -> None:
            super().__init__("", name, flags)

        def xDeviceCharacteristics(self) -> int:
            return apsw.SQLITE_IOCAP_IMMUTABLE  # then SQLite answers journal_mode=WAL with delete

    class Disk(apsw.VFS):
        def xOpen(self, name: Any, flags: list[int]) -> Any:
            return File(name, flags)

    disk = Disk("without a log", "")
    with pytest.raises(ConfigError, match=f"state_dir {tmp_path}: SQLite cannot have a write-ahead log.*local disk"):
        open_journal(tmp_path, vfs="without a log")
    disk.unregister()
    open_journal(tmp_path).stop()


@pytest.mark.parametrize(
    ("setting", "has"), [("synchronous", 0), ("locking_mode", "normal"), ("auto_vacuum", 2), ("page_size", 8192)]
)
def test_a_setting_of_sqlite_that_has_another_value_than_it_was_given_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, has: int | str
) -> None:
    class Deaf(apsw.Connection):
        def execute(self, statements: Any, *given: Any, **named: Any) -> Any:
            is_change = statements.startswith(f"pragma {setting}=")
            return super().execute(f"pragma {setting}={has}" if is_change else statements, *given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(apsw, "Connection", Deaf)
        with pytest.raises(ConfigError, match=f"SQLite has {setting}={has} there"):
            open_journal(tmp_path)
    if setting in ("synchronous", "locking_mode"):  # the others are a file's own
        open_journal(tmp_path).stop()
