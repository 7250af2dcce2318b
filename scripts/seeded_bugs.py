"""Bugs of one line, planted in a copy of the code one at a time: does the test suite catch each of them?

    python scripts/seeded_bugs.py                    all of them; writes results/seeded_bugs/<date>-<machine>/
    python scripts/seeded_bugs.py "owner …" …        those whose names begin so, and no record

A bug is an exact replacement in one file. The copy is first on the import path. The tests named with the bug run there
first without it, and must pass; then with it, and must fail. Nothing outside the copy is touched.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from inference_engine.config import child_environment
from laboratory.evaluation import record

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("inference_engine", "kakeya_gateway", "kv_cache_proposer", "laboratory", "tests", "scripts", "pyproject.toml")
LIMIT_SECONDS = 600

ISOLATION = "tests/load/test_isolation.py::test_interleaved_operations_of_many_owners_leave_every_stream_its_own[0]"
CANCELS = "tests/load/test_cancels.py::test_cancels_at_random_instants_stop_within_a_step_and_leave_no_trace[0]"
SEQUENCES = "tests/load/test_call_sequences.py"
FUZZ = "tests/load/test_fuzz.py::test_whatever_bytes_come_are_answered_or_refused_with_a_typed_error[0]"
CLOSED_FORM = "tests/laboratory/test_scripted.py::test_the_engine_gives_the_tokens_of_the_closed_form"
JOURNAL = tuple(
    f"tests/session/test_{part}.py"
    for part in (
        "kept_journal",
        "sqlite_journal",
        "journal_folders",
        "journal_damage",
        "damaged_answers",
        "journal_disks",
    )
)
KEPT = "tests/engine/test_kept_sessions.py"
KEPT_ON_THE_WIRE, FULL_DISK = "tests/server/test_kept_sessions.py", "tests/server/test_full_disk.py"
AWAY = "tests/server/test_journal_away.py"
RANKS = "tests/parallel/test_split_models.py"
POSTGRES, OWNERSHIP = "tests/session/test_postgres_journal.py", "tests/replicas/test_ownership.py"
PIPED = "tests/load/test_kills.py::test_an_engine_that_is_killed_at_any_moment_has_all_that_it_acknowledged"
LEFT_OVERS = "tests/laboratory/test_scripted.py::test_what_others_left_in_memory_reaches_no_session"


@dataclass(frozen=True, slots=True)
class Bug:
    """`old` stands in `path` exactly once; with `new` in its place `tests` have to fail."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


BUGS = (
    Bug(
        "eviction takes sessions that are in use",
        "inference_engine/session/capacity.py",
        "            and session.operation is None\n            and not session.pins\n",
        "            and not session.pins\n",
        (ISOLATION,),
    ),
    Bug(
        "sessions are dropped for one that is refused even then",
        "inference_engine/session/capacity.py",
        "                self._check_without(first, sessions, needed, owner)\n",
        "                assert sessions\n",
        ("tests/engine/test_waking.py",),
    ),
    Bug(
        "a session of another owner is found",
        "inference_engine/session/store.py",
        "if session is not None and session.owner == owner:",
        "if session is not None:",
        (ISOLATION,),
    ),
    Bug(
        "KV entries are not zeroed when they are opened",
        "inference_engine/kv/parts/layer_entries.py",
        "            self.open(opened, needed)\n",
        "            pass\n",
        (LEFT_OVERS,),
    ),
    Bug(
        "a freed allocation is not zeroed",
        "inference_engine/kv/memory/pool.py",
        "        (self._discard or _zero)(self.memory[first : first + count])\n",
        "        assert len(self.memory[first : first + count])\n",
        ("tests/kv/test_cleaning.py",),
    ),
    Bug(
        "a prefix of another owner is found",
        "inference_engine/session/prefixes.py",
        'return "\\0".join((session.owner, str(kv.strategy), *rotaries)).encode()',
        'return "\\0".join((str(kv.strategy), *rotaries)).encode()',
        ("tests/engine/test_kept_prefixes.py",),
    ),
    Bug(
        "what closed sessions leave is not given back for open ones",
        "inference_engine/kv/memory/pool.py",
        "        return self.rooms.give_back() or self.spare.give_back()\n",
        "        return self.rooms.give_back()\n",
        ("tests/engine/test_kept_prefixes.py",),
    ),
    Bug(
        "an allocation is freed twice",
        "inference_engine/kv/session_kv.py",
        "        parts, self.parts = self.parts, ()\n",
        "        parts = self.parts\n",
        ("tests/engine/test_making_room.py", ISOLATION),
    ),
    Bug(
        "a session does not become idle after its Generate",
        "inference_engine/scheduler/lifecycle.py",
        "        session.kv.idle()\n",
        "        session.kv.footprint()\n",
        (CANCELS,),
    ),
    Bug(
        "entries of rejected draft tokens keep their slots",
        "inference_engine/kv/parts/layer_entries.py",
        "        self.held[self.layout.slots(positions)] = -1\n",
        "        self.layout.slots(positions)\n",
        (CANCELS,),
    ),
    Bug(
        "the window is one position too short",
        "inference_engine/kv/layout.py",
        "            horizons = queries - queries % self.segment - self.window\n",
        "            horizons = queries - queries % self.segment - self.window + 1\n",
        (CLOSED_FORM,),
    ),
    Bug(
        "restored keys are rotated with another layer's table",
        "inference_engine/kv/slots.py",
        "torch.from_numpy(shifts), self.layer_set.rotary)",
        "torch.from_numpy(shifts), self.context.geometry.layers[0].rotary)",
        ("tests/kv/test_restored_rotation.py",),
    ),
    Bug(
        "non-finite logits are sampled",
        "inference_engine/kernels/sampling.py",
        "    is_finite = math.isfinite(row[token_id]) and math.isfinite(np.minimum.reduce(row))\n",
        "    is_finite = True\n",
        ("tests/laboratory/test_scripted.py",),
    ),
    Bug(
        "randomness depends on the position in the batch",
        "inference_engine/kernels/sampling.py",
        "key(sampler.seed, each.position + offset)",
        "key(sampler.seed, len(rows))",
        (CLOSED_FORM,),
    ),
    Bug(
        "rejected draft tokens are kept",
        "inference_engine/decode/verifier.py",
        "            return tuple(samples[:count])\n",
        "            return tuple(samples)\n",
        (
            "tests/laws/test_speculation_laws.py::test_a_right_draft_saves_steps_and_a_wrong_one_does_not",
            "tests/laws/test_speculation_laws.py::test_a_stop_id_within_a_draft_ends_the_stream_there",
        ),
    ),
    Bug(
        "a cancel commits one more token",
        "inference_engine/scheduler/commit.py",
        "session.is_closed or (request.stop is not None and not is_committed)\n",
        "session.is_closed\n",
        (CANCELS,),
    ),
    Bug(
        "the expected length may be off by one",
        "inference_engine/engine/arguments.py",
        "    if expected is not None and expected != length:\n",
        "    if expected is not None and abs(expected - length) > 1:\n",
        (ISOLATION,),
    ),
    Bug(
        "every key is accepted",
        "inference_engine/server/auth.py",
        "key = self._keys.get(given)\n",
        "key = self._keys.get(given) or next(iter(self._keys.values()))\n",
        ("tests/server/test_auth.py",),
    ),
    Bug(
        "a request id is reused with other content",
        "inference_engine/session/replies.py",
        "        if digest != call.digest:\n",
        "        if len(digest) != len(call.digest):\n",
        (SEQUENCES,),
    ),
    Bug(
        "a stream that is resumed skips a token",
        "inference_engine/scheduler/transcript.py",
        "        self.position = position  # of the next token\n",
        "        self.position = position + (position < transcript.end_position)  # of the next token\n",
        (SEQUENCES,),
    ),
    Bug(
        "the history grows before the journal has the tokens",
        "inference_engine/session/session.py",
        "        start = self.history.reserve(len(token_ids))\n",
        "        start = len(self.history)\n        self.history.extend(token_ids, mark)\n",
        ("tests/engine/test_lifecycle.py",),
    ),
    Bug(
        "an append is acknowledged and lost",
        "inference_engine/session/history.py",
        "        self.length = before + done\n",
        "        self.length = before + max(0, done - 1)\n",
        (ISOLATION,),
    ),
    Bug(
        "sessions in use expire",
        "inference_engine/session/store.py",
        "                if session.operation is None:\n                    if has_old",
        "                if session is not None:\n                    if has_old",
        ("tests/load/test_isolation.py::test_a_session_whose_generate_takes_longer_than_its_time_to_live_goes_on",),
    ),
    Bug(
        "a typed error has no status code",
        "inference_engine/server/status.py",
        '    "REQUEST_ID_REUSED": grpc.StatusCode.INVALID_ARGUMENT,\n',
        "",
        (FUZZ,),
    ),
    Bug(
        "the journal acknowledges before it commits",
        "inference_engine/session/writer.py",
        "            is_now = number <= self._saved if receipt is None else receipt.is_safe or receipt.is_refused\n",
        "            is_now = True\n",
        JOURNAL,
    ),
    Bug(
        "an answer does not wait for its session",
        "inference_engine/server/durable_gate.py",
        "        while not await self.synced(receipt, unless_full=of_error, unless_away=True):\n",
        "        while False:\n",
        (KEPT_ON_THE_WIRE,),
    ),
    Bug(
        "what a journal that is away has not counts as safe",
        "inference_engine/session/writer.py",
        "                self._commit(changes)\n                self.is_away = False\n",
        "                self.is_away = False\n",
        (AWAY,),
    ),
    Bug(
        "a commit to the database is not fenced",
        "inference_engine/session/postgres_journal.py",
        "            self._db.begin(self._replica, self._tables.epoch, number)\n",
        "            self._db.begin()\n",
        (POSTGRES,),
    ),
    Bug(
        "a commit in doubt is repeated",
        "inference_engine/session/postgres_journal.py",
        "        if commits == number:\n            self._made()\n",
        "        if commits == -1:\n            self._made()\n",
        (POSTGRES,),
    ),
    Bug(
        "a commit in doubt may come after it was asked for",
        "inference_engine/session/postgres_journal.py",
        "        if commits == number - 1:\n",
        "        if commits == -1:\n",
        (POSTGRES,),
    ),
    Bug(
        "a server folds what another one has by then",
        "inference_engine/session/postgres_tables.py",
        "        if list(rows):\n            super().fold(number)\n",
        "        if rows:\n            super().fold(number)\n",
        (POSTGRES,),
    ),
    Bug(
        "a server that may have been taken for dead answers as if it was not",
        "inference_engine/session/postgres_journal.py",
        "        return SAFE if self._lease.is_sure else self._ask_for_proof()\n",
        "        return SAFE\n",
        (OWNERSHIP,),
    ),
    Bug(
        "a session is taken over while its server may still commit",
        "inference_engine/session/postgres_database.py",
        "            update replicas set epoch = epoch + 1, until = '-infinity' where name = r and epoch = e;\n",
        "",
        (OWNERSHIP,),
    ),
    Bug(
        "a claim that the database lost is relied on",
        "inference_engine/session/postgres_journal.py",
        "        self._reconnects += 1\n",
        "",
        (OWNERSHIP,),
    ),
    Bug(
        "a server that decides tokens otherwise than one that is alive is let in",
        "inference_engine/session/postgres_database.py",
        "if theirs.get(name, own) != own]",
        "if name not in theirs]",
        (f"{OWNERSHIP}::test_servers_that_would_give_other_tokens_are_not_alive_together",),
    ),
    Bug(
        "entries are coded on the first rank alone",
        "inference_engine/backends/ranks/leader.py",
        '            self._send("done", work)\n            return super()',
        "            return super()",
        (f"{RANKS}::test_what_sessions_do_between_steps_is_done_on_every_rank",),
    ),
    Bug(
        "ages are counted by each server's own clock",
        "inference_engine/session/postgres_journal.py",
        "_SAME_SECONDS = 1.0",
        "_SAME_SECONDS = 1e9",
        (OWNERSHIP,),
    ),
    Bug(
        "a claim that the database lost is made again though another server has had the session",
        "inference_engine/session/postgres_journal.py",
        "xmin::text = ? ",
        "(xmin::text = ?) is not null ",
        (OWNERSHIP,),
    ),
    Bug(
        "a server whose lock may be free is sure of its place",
        "inference_engine/session/postgres_lease.py",
        "                self._sure_until = at = 0.0  #",
        "                at = 0.0  #",
        (OWNERSHIP,),
    ),
    Bug(
        "a session that is closed where it is keeps its rows",
        "inference_engine/engine/calls.py",
        "            self._journal.close(session_id)\n            self._store.has_closed",
        "            self._store.has_closed",
        (KEPT_ON_THE_WIRE,),
    ),
    Bug(
        "a call that is open is answered as one that changed nothing",
        "inference_engine/server/durable_gate.py",
        "JournalAway(is_pending=not of_error)",
        "JournalAway()",
        (AWAY,),
    ),
    Bug(
        "of two calls that bring one session back each reads it",
        "inference_engine/engine/recall.py",
        "                if not self._store.is_resident(session_id):\n",
        "                if session_id:\n",
        (KEPT,),
    ),
    Bug(
        "an append that was refused is answered as done",
        "inference_engine/session/writer.py",
        "            unit.settle(is_safe=False)\n",
        "            unit.settle(is_safe=True)\n",
        (FULL_DISK,),
    ),
    Bug(
        "an append that was refused stays in memory",
        "inference_engine/session/session.py",
        "        self.history.take_back(length)\n",
        "",
        (FULL_DISK,),
    ),
    Bug(
        "an answer waits for all that others do",
        "inference_engine/session/kept_journal.py",
        "        return self._gone.get(session_id, SAFE) if known is None else known.saved.receipt\n",
        "        return max((one.saved.receipt for one in list(self._open.values())), key=lambda one: one.number)\n",
        (FULL_DISK,),
    ),
    Bug(
        "the journal lets a token be sent that is not committed",
        "inference_engine/session/kept_journal.py",
        "            (known.saved, end),\n",
        "            (known.saved, end + 2),\n",
        (PIPED,),
    ),
    Bug(
        "the journal does not sync its log",
        "inference_engine/session/sqlite_journal.py",
        "        if self.durability is Durability.POWER:\n            self._log.sync()\n",
        "        pass\n",
        JOURNAL,
    ),
    Bug(
        "the journal goes on after an error of the disk",
        "inference_engine/session/sqlite_journal.py",
        "        return isinstance(error, apsw.FullError) or self",
        "        return isinstance(error, apsw.FullError | apsw.IOError) or self",
        JOURNAL,
    ),
    Bug(
        "the journal swallows a checkpoint that failed",
        "inference_engine/session/sqlite_journal.py",
        "            if self._is_full(error):\n                return False  # nothing",
        "            if error:\n                return False  # nothing",
        JOURNAL,
    ),
    Bug(
        "damage in the middle of the log is taken for a torn end",
        "inference_engine/session/wal_scan.py",
        "    return wrong_at if commits_behind >= 2 else None\n",
        "    return wrong_at if commits_behind >= 200 else None\n",
        JOURNAL,
    ),
    Bug(
        "the journal accepts a row whose checksum is wrong",
        "inference_engine/session/journal_reader.py",
        "            if first != position or crc != tokens_crc(first, mark, ids, logprobs):\n",
        "            if first != position:\n",
        JOURNAL,
    ),
    Bug(
        "the journal folds all rows but the last",
        "inference_engine/session/journal_tables.py",
        "                records += since.tokens\n",
        "                records += since.tokens[: max(1, len(since.tokens) - 1)]\n",
        JOURNAL,
    ),
    Bug(
        "the journal loses a token's mark when a row has both",
        "inference_engine/session/journal_rows.py",
        "Mark(int(marks[start]))",
        "Mark(int(marks[0]))",
        JOURNAL,
    ),
    Bug(
        "a fork gets full rows only from the journal",
        "inference_engine/session/journal_tables.py",
        "for row in packed(end):",
        "for row in packed(end[:0]):",
        JOURNAL,
    ),
    Bug(
        "the journal forgets the appends before the last turn",
        "inference_engine/session/journal_tables.py",
        "most_recent(past.appends + since.appends)",
        "most_recent(since.appends)",
        JOURNAL,
    ),
    Bug(
        "the journal gives one owner's replies to another",
        "inference_engine/session/kept_journal.py",
        '"owner = ? and request_id = ?", (owner, request_id)',
        '"request_id = ?", (request_id,)',
        (*JOURNAL, KEPT),
    ),
    Bug(
        "the journal loses the seed of a Generate",
        "inference_engine/session/journal_rows.py",
        "began.digest, began.seed) + data",
        "began.digest, 0) + data",
        (KEPT,),
    ),
    Bug(
        "the journal does not notice that a session's answers are gone",
        "inference_engine/session/journal_reader.py",
        "            if answers_sum(number, appends, generates) != expected:\n",
        "            if expected and (appends or generates) and answers_sum(number, appends, generates) != expected:\n",
        (*JOURNAL, KEPT),
    ),
    Bug(
        "the journal starts with answers that are damaged",
        "inference_engine/session/sqlite_journal.py",
        "                refuse_damaged_replies(self._reader, folder)\n            self._count",
        "                pass\n            self._count",
        JOURNAL,
    ),
    Bug(
        "the journal deletes old sessions that are in memory",
        "inference_engine/session/journal_tables.py",
        "if number not in resident][:_EXPIRE_SESSIONS]",
        "][:_EXPIRE_SESSIONS]",
        JOURNAL,
    ),
    Bug(
        "a session that leaves memory is closed in the journal",
        "inference_engine/session/store.py",
        "        session.journal.leave(session.session_id, self._wall_clock() - (self._clock() - session.used_at))\n",
        "        session.journal.close(session.session_id)\n",
        (KEPT,),
    ),
    Bug(
        "a second server uses the folder",
        "inference_engine/session/journal_folder.py",
        "        os.close(descriptor)\n        is_ours = False\n",
        "        is_ours = True\n",
        JOURNAL,
    ),
)


@dataclass(frozen=True, slots=True)
class Found:
    """What the tests said of a bug. caught_by: the first test that failed; "": none did."""

    bug: Bug
    caught_by: str
    seconds: float


class Copy:
    """The code in a folder of its own, in which one bug at a time is put."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
            else:
                shutil.copy(source, folder / name)

    def run(self, tests: Sequence[str]) -> tuple[int, str]:
        """The exit status of pytest, and the first test that failed."""
        done = subprocess.run(
            [*(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header"), *tests],
            cwd=self._folder,
            env=child_environment(PYTHONPATH=str(self._folder)),
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))]
        name = failed[0].split(" ", 1)[1].split(" - ")[0] if failed else ""
        return done.returncode, name

    def runs_here(self) -> bool:
        """Is it this copy that tests import?"""
        code = "import inference_engine, kv_cache_proposer; print(inference_engine.__file__)"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self._folder,
            env=child_environment(PYTHONPATH=str(self._folder)),
            capture_output=True,
            text=True,
            check=True,
        )
        return Path(done.stdout.strip()).is_relative_to(self._folder)

    def try_bug(self, bug: Bug) -> Found:
        """Put the bug in, run its tests, take it out again."""
        path = self._folder / bug.path
        healthy = path.read_text(encoding="utf-8")
        _write(path, planted(bug, healthy))
        began = time.monotonic()
        try:
            status, name = self.run(bug.tests)
        except subprocess.TimeoutExpired:
            status, name = 1, "the tests did not end in time"
        finally:
            _write(path, healthy)
        # Status 1: tests ran, and some failed. Anything else is no answer.
        return Found(bug, name if status == 1 else "", time.monotonic() - began)


def _write(path: Path, text: str) -> None:
    """What was compiled of another text goes: Python looks at size and second alone."""
    path.write_text(text, encoding="utf-8")
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def planted(bug: Bug, text: str) -> str:
    """The text with the bug in it. Raises ValueError if the place is not there, or not the only one."""
    if text.count(bug.old) != 1:
        raise ValueError(
            f"{bug.name!r}: {text.count(bug.old)} places in {bug.path} look like {bug.old!r}; it must be one"
        )
    return text.replace(bug.old, bug.new)


def try_all(bugs: Sequence[Bug]) -> list[Found]:
    """Raises ValueError if tests do not pass without any bug, or a bug has no place."""
    with tempfile.TemporaryDirectory(prefix="kakeya-bugs-") as folder:
        copy = Copy(Path(folder).resolve())
        if not copy.runs_here():
            raise ValueError("the tests would import another copy of the code")
        for test in sorted({test for bug in bugs for test in bug.tests}):
            status, name = copy.run([test])
            if status:
                raise ValueError(f"without any bug pytest ends with status {status}: {name or test}")
        found = []
        for bug in bugs:
            found.append(copy.try_bug(bug))
            print(f"{'caught' if found[-1].caught_by else 'MISSED':7} {bug.name}: {found[-1].caught_by}", flush=True)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginnings of names (default: all, and a record)")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    bugs = [bug for bug in BUGS if not args.names or bug.name.startswith(tuple(args.names))]
    found = try_all(bugs)
    missed = [each for each in found if not each.caught_by]
    if not args.names:
        payload = {
            "command": record.command_line(without=("--results",)),
            "config": {"bugs": len(BUGS)},
            "seeds": [],
            "values": {
                "bugs": record.exact(len(found), "bugs"),
                "caught": record.exact(len(found) - len(missed), "bugs"),
                "time_to_catch": record.summarize([each.seconds for each in found], "s"),
            },
            "baseline": "the same tests on the same copy without a bug: all pass",
            "tables": {
                "bugs": [
                    {"name": each.bug.name, "file": each.bug.path, "caught_by": each.caught_by, "seconds": each.seconds}
                    for each in found
                ]
            },
        }
        path = record.write_record("seeded_bugs", payload, results_dir=args.results)
        print(path.parent.name, path.name)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
