"""The journal in a folder: what it refuses, what it notices, and what it keeps when its disk fails."""

from __future__ import annotations

import os
import random
import shutil
from contextlib import closing
from pathlib import Path

import apsw
import numpy as np
import pytest

from inference_engine.errors import ConfigError, HistoryCorrupt
from inference_engine.metrics import EngineMetrics
from inference_engine.session import sqlite_journal
from inference_engine.session.journal import GenerateRecord, SessionRecord
from inference_engine.session.sqlite_journal import FILE, SQLiteJournal
from inference_engine.session.wal_scan import find_damage
from inference_engine.types import Durability, Mark
from tests.kept import after_a_kill
from tests.kept import sqlite_journal as open_journal
from tests.session.faulty_disk import FaultyDisk

SESSIONS = 3


def record_of(number: int) -> SessionRecord:
    return SessionRecord(f"session-{number}", "alice", "full", None, (1, 2), segment_tokens=16, label=f"label {number}")


class Talk:
    """Sessions that grow by random steps, and what of them was told: all that was safe at some moment."""

    def __init__(self, journal: SQLiteJournal, seed: int = 0) -> None:
        self.journal = journal
        self.rng = random.Random(seed)
        self.said: dict[int, list[int]] = {number: [] for number in range(SESSIONS)}
        self.told = 0  # tokens, in the order of all sessions together
        self.order: list[tuple[int, int]] = []  # session, its length then
        for number in range(SESSIONS):
            with journal.unit():
                journal.open(record_of(number))
        self.wait()

    def step(self) -> None:
        for number in self.rng.sample(range(SESSIONS), self.rng.randrange(1, SESSIONS + 1)):
            said, rng = self.said[number], self.rng
            mark = Mark(rng.randrange(2))
            ids = np.array([rng.randrange(50_000) for _ in range(rng.choice([1, 1, 1, 3, 300]))], dtype=np.uint32)
            began = GenerateRecord(len(said), rng.randbytes(16), rng.randbytes(32), rng.getrandbits(64))
            self.journal.append(
                record_of(number).session_id, len(said), ids, mark, began=began if mark is Mark.GENERATED else None
            )
            said += ids.tolist()
            self.order.append((number, len(said)))
            if rng.random() < 0.2:
                self.journal.rest(record_of(number).session_id)
        self.journal.kick()

    def wait(self) -> None:
        """Until all is safe; then it is told."""
        assert self.journal._writer.flush(20), self.journal.failure
        self.told = len(self.order)

    def lengths(self, steps: int) -> dict[int, int]:
        """The length of each session after so many records."""
        return {number: max([0, *(to for one, to in self.order[:steps] if one == number)]) for number in self.said}

    def check(self, folder: Path, *, may_refuse: bool = False) -> str:
        """What is found in a copy of the folder: nothing wrong, nothing doubled, and all that was told."""
        try:
            journal = open_journal(folder)
        except ConfigError:
            assert may_refuse
            return "refused"
        found, corrupt = {}, 0
        try:
            for number in range(SESSIONS):
                try:
                    kept = journal.load(record_of(number).session_id, "alice")
                except (HistoryCorrupt, apsw.Error):
                    corrupt += 1
                    continue
                if kept is None:
                    found[number] = -1
                    continue
                ids = [token for row in kept.tokens for token in row.token_ids.tolist()]
                assert ids == self.said[number][: len(ids)], "a history that was never told"
                found[number] = len(ids)
        finally:
            journal.stop()
        if corrupt:
            assert may_refuse
            return "corrupt"
        shortest = self.lengths(self.told)
        if all(found[number] >= length for number, length in shortest.items()):
            return "whole"
        assert may_refuse, (found, shortest)
        return "shorter"


@pytest.mark.parametrize("durability", [Durability.PROCESS, Durability.POWER])
def test_what_was_recorded_is_read_again_after_a_kill_folded_or_not(tmp_path: Path, durability: Durability) -> None:
    journal = open_journal(tmp_path, durability)
    talk = Talk(journal)
    for _ in range(60):
        talk.step()
    talk.wait()
    killed = after_a_kill(tmp_path)
    journal.stop()
    assert talk.check(killed) == "whole"
    assert talk.check(tmp_path) == "whole"
    with closing(apsw.Connection(str(tmp_path / FILE))) as db:
        assert next(db.execute("select count(*) from tokens"))[0]
        assert next(db.execute("select max(length(ids)) from tokens"))[0] <= 4 * sqlite_journal.FOLD_TOKENS


def test_a_session_that_is_unused_for_too_long_is_deleted_and_no_other(tmp_path: Path) -> None:
    now = 1000.0
    journal = open_journal(tmp_path, wall_clock=lambda: now, keep_seconds=50.0)
    talk = Talk(journal)
    talk.step()
    journal.leave("session-0")
    journal.leave("session-1")
    talk.wait()
    now += 40
    assert journal.load("session-1", "alice") is not None  # it is in memory again, however long
    journal.rest("session-1")
    talk.wait()
    now += 40
    journal.stop()
    journal = open_journal(tmp_path, wall_clock=lambda: now, keep_seconds=50.0)
    assert journal._writer.flush(20)
    journal.kick()
    journal.open(record_of(9))
    assert journal._writer.flush(20)
    kept = {entry.record.session_id for entry in journal.page("alice", after="", most=10)}
    journal.stop()
    assert "session-1" in kept
    assert "session-9" in kept


# -- folders ----------------------------------------------------------------------------------------------------------


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != sqlite_journal.LOCK}


def test_a_second_server_is_refused_with_the_process_of_the_first(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    before = content(tmp_path)
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        open_journal(tmp_path)
    assert content(tmp_path) == before
    journal.stop()
    open_journal(tmp_path).stop()


def test_a_folder_of_another_model_or_of_a_newer_format_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    open_journal(tmp_path).stop()
    before = content(tmp_path)
    with pytest.raises(ConfigError, match="another model"):
        open_journal(tmp_path, weights="b" * 64)
    assert content(tmp_path) == before
    with closing(apsw.Connection(str(tmp_path / FILE))) as db:
        db.execute(f"pragma user_version = {sqlite_journal.FORMAT + 1}")
    before = content(tmp_path)
    with pytest.raises(ConfigError, match="newer one"):
        open_journal(tmp_path)
    assert content(tmp_path) == before
    (tmp_path / FILE).write_bytes(b"")
    with closing(apsw.Connection(str(tmp_path / FILE))) as db:
        db.execute("create table t (x)")
    with pytest.raises(ConfigError, match="not a journal"):
        open_journal(tmp_path)


def test_a_folder_that_others_can_reach_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        open_journal(folder)
    assert list(folder.iterdir()) == []
    (tmp_path / "file").touch(mode=0o600)
    with pytest.raises(ConfigError):
        SQLiteJournal(tmp_path / "file", Durability.POWER, weights="a", metrics=EngineMetrics())
    with pytest.raises(ConfigError, match="No such file"):
        SQLiteJournal(tmp_path / "gone" / "state", Durability.POWER, weights="a", metrics=EngineMetrics())


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_no_flipped_bit_gives_another_history_and_none_shortens_one_without_a_word(tmp_path: Path, seed: int) -> None:
    """The log's end is the exception: the last commit cannot be told from what a crash left half written."""
    source = tmp_path / "source"
    journal = open_journal(source, Durability.POWER)
    talk = Talk(journal, seed)
    for step in range(80):
        talk.step()
        if step == 40:
            talk.wait()
            with journal._db_lock:
                journal._checkpoint(apsw.SQLITE_CHECKPOINT_TRUNCATE)
        if step % 4 == 0 or step > 70:
            talk.wait()
    killed = after_a_kill(source)
    (killed / sqlite_journal.LOCK).write_text("1 power\n")
    journal.stop()
    rng, outcomes = random.Random(seed), list[str]()
    for _ in range(40):
        target = tmp_path / "flipped"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(killed, target)
        target.chmod(0o700)
        file = target / rng.choice([FILE, f"{FILE}-wal"])
        data = bytearray(file.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        outcomes.append(talk.check(target, may_refuse=True))
    assert outcomes.count("whole") < 40, "no flip did anything"
    assert outcomes.count("shorter") <= 2, outcomes


def test_a_torn_end_of_the_log_is_no_damage_and_a_hole_in_it_is(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, Durability.POWER)
    talk = Talk(journal)
    for _ in range(20):
        talk.step()
        talk.wait()
    log = after_a_kill(tmp_path) / f"{FILE}-wal"
    journal.stop()
    whole = log.read_bytes()
    assert find_damage(log) is None
    for cut in (0, 20, 32, 100, len(whole) // 2, len(whole) - 1):
        log.write_bytes(whole[:cut])
        assert find_damage(log) is None
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    log.write_bytes(flipped)
    assert find_damage(log) is not None
    assert find_damage(tmp_path / "gone") is None


# -- disks that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["write", "sync"])
def test_after_any_error_of_the_disk_nothing_more_is_told_and_what_was_told_is_there(tmp_path: Path, kind: str) -> None:
    disk = FaultyDisk(f"faulty-{kind}")
    with disk:
        for at in (*range(1, 12), 17, 29, 60, 111):
            folder = tmp_path / f"{at}"
            journal = open_journal(folder, Durability.POWER, vfs=disk.name)
            talk = Talk(journal, at)
            disk.fail(kind, at)
            for _ in range(300):
                talk.step()
                if not journal._writer.flush(20):
                    break
                talk.told = len(talk.order)
            failed, disk.failing = bool(journal.failure), None
            told = talk.told
            talk.step()
            assert not failed or not journal._writer.flush(0.05), "told after an error"
            journal.stop()
            talk.told = told
            assert failed
            assert talk.check(folder) == "whole"


def test_a_full_disk_is_waited_for_and_loses_nothing(tmp_path: Path) -> None:
    disk = FaultyDisk("full")
    with disk:
        journal = open_journal(tmp_path, Durability.POWER, vfs=disk.name)
        talk = Talk(journal)
        for _ in range(10):
            talk.step()
        talk.wait()
        disk.is_full = True
        for _ in range(3):
            talk.step()
        assert not journal._writer.flush(1.0)
        assert journal.is_behind()
        assert not journal.failure
        disk.is_full = False
        talk.wait()
        for _ in range(10):
            talk.step()
        talk.wait()
        journal.stop()
        assert talk.check(tmp_path) == "whole"


def test_whatever_a_loss_of_power_leaves_has_all_that_was_told(tmp_path: Path) -> None:
    disk = FaultyDisk("power")
    with disk:
        folder = tmp_path / "state"
        journal = open_journal(folder, Durability.POWER, vfs=disk.name)
        talk = Talk(journal)
        disk.record(folder)
        told: list[tuple[int, int]] = []  # events of the disk so far, and what was told by then
        for step in range(24):
            talk.step()
            talk.wait()
            told.append((len(disk.events), talk.told))
            if step == 12:
                with journal._db_lock:
                    journal._checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)
        journal.stop()
        rng, seen = random.Random(1), 0
        for state, by in disk.states(rng, most=150):
            target = tmp_path / "cut"
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(mode=0o700)
            for name, data in state.items():
                (target / name).write_bytes(data)
            (target / sqlite_journal.LOCK).write_text("1 power\n")
            talk.told = max([0, *(count for events, count in told if events <= by)])
            assert talk.check(target) == "whole"
            seen += 1
        assert seen > 100
        # The control: were syncs of the log left out, states would be found that lack what was told.
        assert any(
            not _has_all(state, talk, told, by, tmp_path / "control")
            for state, by in disk.states(random.Random(2), most=80, without_syncs_of="-wal")
        )


def _has_all(state: dict[str, bytes], talk: Talk, told: list[tuple[int, int]], by: int, target: Path) -> bool:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(mode=0o700)
    for name, data in state.items():
        (target / name).write_bytes(data)
    talk.told = max([0, *(count for events, count in told if events <= by)])
    return talk.check(target, may_refuse=True) == "whole"
