"""What it costs that sessions outlive the process: servers with each durability side by side, and a folder of many.

Three servers on the scripted model, which differ in `durability` only, are measured in turns, round by round; a ratio
is of two values of the same round. Streams at a model's pace, a step in 33 ms, and as fast as the machinery goes, a
step in 10 ms; a token's delay from single Generates, against a bare fsync in the same folder between them. Then a
folder of sessions is made: how long a server takes to start with it and without, and what the first call of a session
takes that has to be read, with none of its files in the system's memory.

With `--database NAME` a server on that PostgreSQL database takes the place of the one of `process`, and first calls are
of sessions that it keeps; a record of its own. Where the database is, libpq's variables say (PGHOST, PGUSER, …).

A commit of a step adds rows at the end of one table. The bytes that it writes into the log are counted, and those of
the same rows in their places by session, where each is on a page of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import apsw
import numpy as np
import psutil

from inference_engine.cli.child import ChildServer
from inference_engine.config import EngineConfig, ServerConfig
from inference_engine.metrics import EngineMetrics
from inference_engine.session.journal import GenerateRecord, ReplyRecord, SessionRecord
from inference_engine.session.journal_database import PAGE_BYTES
from inference_engine.session.journals import open_journal
from inference_engine.session.kept_journal import KeptJournal
from inference_engine.session.replies import DIGEST_BYTES
from inference_engine.session.sqlite_journal import FILE, SQLiteJournal
from inference_engine.types import Durability, Mark
from kakeya import AsyncClient, AsyncSession, Client, SinkWindow
from laboratory.bench.experiments import Save
from laboratory.evaluation import record
from laboratory.load.driver import NO_RETRIES
from laboratory.load.samples import percentile
from laboratory.load.scripted_server import VOCABULARY, WEIGHTS, scripted_child

NONE, PROCESS, POWER = (one.value for one in (Durability.NONE, Durability.PROCESS, Durability.POWER))
DATABASE = "database"  # PostgreSQL, with `power`
PACES = {"paced": 1 / 30, "flat out": 1 / 100}  # seconds a step takes at least
STREAMS = (32, 128)
WARM_SECONDS = 0.5  # for all streams of a round to begin
SYNC_BYTES = 16384  # about a commit
IDS = 8192  # of each session
# Ids appended and generated in a turn.
TURNS = ((8000, 192), (1000, 500), (200, 100), (30, 24), (1, 1))
TURNED_IDS, MOST_TURNS = 800_000, 65_536  # of all sessions together
TURNED_VOCABULARY = 151_936  # ids of three bytes; models with less than 65,536 need two
GOALS = {
    "goodput, power ÷ none": ("at least", 0.95),
    "goodput, process ÷ none": ("at least", 0.98),
    "goodput, database ÷ none": ("at least", 0.95),
    "server CPU, power - none": ("at most", 60.0),
    "server CPU, database - power": ("at most", 30.0),
    "delay of a token, power - none - fsync": ("at most", 1.0),
    "start, kept sessions - none": ("at most", 0.5),
    "first call of a kept session, p99": ("at most", 50.0),
    "database ÷ ids": ("at most", 1.1),
    "log of a commit": ("at most", 14.0),
}
STEPS = 100  # whose commits are counted
STEPPED_IDS = 1000  # of each session before
FRAME_BYTES = PAGE_BYTES + 24  # of the log
SERVER = ServerConfig(bind="127.0.0.1:0", drain_seconds=5.0, max_connection_calls=1024)


# -- streams ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """What one server did in one round."""

    goodput: float  # tokens a second of all streams together
    cpu: float  # seconds of the server's for a token


def engine_config(durability: str, folder: Path, database: str = "", **settings: Any) -> EngineConfig:
    """database: the name of that of the server of DATABASE."""
    kept = {} if durability == NONE else {"state_dir": str(folder), "durability": durability}
    if durability == DATABASE:
        kept = {"journal": f"postgres:dbname={database}", "durability": POWER, "replica": "bench"}
    return EngineConfig(
        **{
            "max_batch": 128,
            "max_sessions": 256,
            "kv_bytes": 2**30,
            "max_first_token_seconds": 0.0,
            "share_prefixes": "off",
            **kept,
            **settings,
        }
    )


@contextlib.contextmanager
def servers(step_seconds: float, folder: Path, database: str) -> Iterator[dict[str, ChildServer]]:
    """One of each durability; or with a database."""
    with ExitStack() as stack:
        started = {}
        for durability in (NONE, DATABASE if database else PROCESS, POWER):
            config = engine_config(durability, folder / durability, database)
            started[durability] = stack.enter_context(scripted_child(config, SERVER, step_seconds=step_seconds))
        yield started


async def stream(started: dict[str, ChildServer], count: int, tokens: int, rounds: int) -> dict[str, list[Round]]:
    """Generate `tokens` in each of `count` sessions at once, on one server after the other."""
    async with AsyncExitStack() as stack:
        sessions: dict[str, list[AsyncSession]] = {}
        for name, child in started.items():
            client = AsyncClient(child.wait_ready(), retry=NO_RETRIES, generate_timeout=None)
            await stack.enter_async_context(client)
            sessions[name] = [await client.create_session(limit_tokens=4096) for _ in range(count)]
            for number, session in enumerate(sessions[name]):
                await session.append([(number + index) % VOCABULARY for index in range(4 + number % 64)])
        seen: dict[str, list[Round]] = {name: [] for name in started}
        for name, is_counted in turns_of(list(started), rounds):
            found = await one_round(started[name].pid, sessions[name], tokens)
            if is_counted:
                seen[name].append(found)
        for session in (one for of_server in sessions.values() for one in of_server):
            await session.close()
        return seen


async def one_round(pid: int, sessions: Sequence[AsyncSession], tokens: int) -> Round:
    async def read(session: AsyncSession) -> list[float]:
        return [time.perf_counter() async for _ in session.generate(tokens)]

    process = psutil.Process(pid)
    before = sum(process.cpu_times()[:2])
    arrivals = await asyncio.gather(*(read(session) for session in sessions))
    cpu = sum(process.cpu_times()[:2]) - before
    # While all of them run.
    began = max(times[0] for times in arrivals) + WARM_SECONDS
    ended = min(times[-1] for times in arrivals)
    seen = sum(began < at <= ended for times in arrivals for at in times)
    return Round(seen / (ended - began), cpu / (len(sessions) * tokens))


def streams(seconds: float, rounds: int, folder: Path, database: str) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {}
    for pace, step_seconds in PACES.items():
        with servers(step_seconds, folder / pace, database) as started:
            for count in STREAMS:
                per_second = min(1 / step_seconds, 30 * max(STREAMS) / count)
                tokens = round((seconds + WARM_SECONDS) * per_second)
                seen = asyncio.run(stream(started, count, tokens, rounds))
                values |= compared(f"{count} streams, {pace}", seen)
                print(f"{count} streams, {pace}", flush=True)
            if pace == "flat out":
                values |= delays(started, rounds, folder)
    return values


def turns_of(names: Sequence[str], rounds: int) -> Iterator[tuple[str, bool]]:
    """Each name once in a round, another one first each time, and whether it is counted: the first round is not."""
    for number in range(-1, rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            yield name, number >= 0


def in_turns(names: Sequence[str], rounds: int, measure: Callable[[str], float]) -> dict[str, list[float]]:
    seen: dict[str, list[float]] = {name: [] for name in names}
    for name, is_counted in turns_of(names, rounds):
        value = measure(name)
        if is_counted:
            seen[name].append(value)
    return seen


def compared(where: str, seen: dict[str, list[Round]]) -> dict[str, dict[str, Any]]:
    values = {}
    for name in (one for one in (POWER, PROCESS, DATABASE) if one in seen):
        pairs = list(zip(seen[name], seen[NONE], strict=True))
        values[f"goodput, {name} ÷ none, {where}"] = record.summarize(
            [one.goodput / other.goodput for one, other in pairs], "ratio"
        )
        values[f"server CPU, {name} - none, {where}"] = record.summarize(
            [1e6 * (one.cpu - other.cpu) for one, other in pairs], "µs/token"
        )
    if DATABASE in seen:
        values[f"server CPU, database - power, {where}"] = record.summarize(
            [1e6 * (one.cpu - other.cpu) for one, other in zip(seen[DATABASE], seen[POWER], strict=True)], "µs/token"
        )
    for name, found in seen.items():
        values[f"goodput, {name}, {where}"] = record.summarize([one.goodput for one in found], "tokens/s")
        values[f"server CPU, {name}, {where}"] = record.summarize([1e6 * one.cpu for one in found], "µs/token")
    return values


def delays(started: dict[str, ChildServer], rounds: int, folder: Path, calls: int = 25) -> dict[str, dict[str, Any]]:
    """From a Generate's call to its token, one session alone, and a bare fsync between."""
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(child.wait_ready(), retry=NO_RETRIES)) for child in started.values()]
        sessions = dict(zip(started, [client.create_session() for client in clients], strict=True))

        def one_token(name: str) -> float:
            if name == "fsync":
                return 1e3 * median(syncs(folder, calls))
            took = []
            for _ in range(calls):
                sessions[name].append([1])
                began = time.perf_counter()
                arrivals = [time.perf_counter() for _ in sessions[name].generate(1)]
                took.append(arrivals[0] - began)
            return 1e3 * median(took)

        seen = in_turns([*started, "fsync"], rounds, one_token)
    values = {}
    for name in (one for one in (POWER, PROCESS, DATABASE) if one in seen):
        added = [one - other for one, other in zip(seen[name], seen[NONE], strict=True)]
        values[f"delay of a token, {name} - none, 1 stream"] = record.summarize(added, "ms")
        if name == POWER:
            beyond = [one - sync for one, sync in zip(added, seen["fsync"], strict=True)]
            values["delay of a token, power - none - fsync, 1 stream"] = record.summarize(beyond, "ms")
    for name, found in seen.items():
        what = "fsync of a file" if name == "fsync" else f"token, {name}, 1 stream"
        values[f"{what}, p50 of {calls}"] = record.summarize(found, "ms")
    return values


def syncs(folder: Path, count: int) -> list[float]:
    """Seconds that each of `count` appends to a file takes until it is on the disk."""
    took, data = [], b"\1" * SYNC_BYTES
    with (folder / "synced").open("ab", buffering=0) as file:
        for _ in range(count):
            began = time.perf_counter()
            file.write(data)
            os.fsync(file.fileno())
            took.append(time.perf_counter() - began)
    return took


# -- a folder of many sessions ----------------------------------------------------------------------------------------


def many(count: int, rounds: int, calls: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Starts with a folder of `count` sessions of IDS ids and with an empty one; first calls of kept sessions."""
    settings: dict[str, Any] = {"hibernate": "never", "max_sessions": calls + 1}
    with (
        scripted_child(engine_config(POWER, folder / "many", **settings), SERVER, step_seconds=0.0) as child,
        Client(child.wait_ready(), retry=NO_RETRIES) as client,
    ):
        client.create_session(strategy=SinkWindow())  # which has no limit: each gets one id more
    with journal_of(folder / "many") as journal:
        ids = fill(journal, count)

    def start(name: str) -> float:
        out_of_memory(folder / "many")
        began = time.perf_counter()
        config = engine_config(POWER if name != NONE else NONE, folder / name, **settings)
        with scripted_child(config, SERVER, step_seconds=0.0) as child:
            child.wait_ready()
            return time.perf_counter() - began

    seen = in_turns([NONE, "empty", "many"], rounds, start)
    values = {}
    for name, what in ((NONE, "no folder"), ("empty", "an empty folder")):
        added = [one - other for one, other in zip(seen["many"], seen[name], strict=True)]
        label = "start, kept sessions - none" if name == "empty" else "start, kept sessions - no folder"
        values[f"{label}, {count:,} of {IDS:,} ids"] = record.summarize(added, "s")
        values[f"start, {what}"] = record.summarize(seen[name], "s")
    values[f"start, {count:,} sessions of {IDS:,} ids"] = record.summarize(seen["many"], "s")
    out_of_memory(folder / "many")
    values |= first_calls(engine_config(POWER, folder / "many", **settings), ids, calls)
    size = (folder / "many" / FILE).stat().st_size
    values[f"database ÷ ids, {count:,} sessions, one append each"] = record.exact(size / (4 * IDS * count), "ratio")
    return values


def first_calls(config: EngineConfig, ids: Sequence[str], calls: int) -> dict[str, dict[str, Any]]:
    took = []
    with (
        scripted_child(config, SERVER, step_seconds=0.0) as child,
        Client(child.wait_ready(), retry=NO_RETRIES) as client,
    ):
        client.server_info()
        for session_id in np.random.default_rng(1).choice(ids, min(calls, len(ids)), replace=False):
            began = time.perf_counter()
            assert client.session(str(session_id)).append([1]) == IDS + 1  # a look would not bring it back
            took.append(1e3 * (time.perf_counter() - began))
    return {
        "first call of a kept session": record.summarize(took, "ms"),
        "first call of a kept session, p99": record.exact(percentile(took, 99), "ms"),
    }


def many_in_a_database(database: str, count: int, calls: int, folder: Path) -> dict[str, dict[str, Any]]:
    """First calls of sessions that are kept there; what the database has in memory stays."""
    config = engine_config(DATABASE, folder, database, max_sessions=calls + 1)
    with (
        scripted_child(config, SERVER, step_seconds=0.0) as child,
        Client(child.wait_ready(), retry=NO_RETRIES) as client,
    ):
        like = client.create_session(strategy=SinkWindow(), label="like").id
    journal = open_journal(replace(config, replica="filler"), weights=WEIGHTS, metrics=EngineMetrics())
    try:
        ids = fill(journal, count, like)
    finally:
        journal.stop()
    return first_calls(config, ids, calls)


def fill(journal: Any, count: int, of: str = "") -> list[str]:
    """Add `count` sessions, like the one that a server made, or like `of`. Returns their ids."""
    (like,) = (entry.record for entry in journal.everyone() if of in ("", entry.record.session_id))
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        session_id = f"{like.session_id[:-16]}{secrets.token_hex(8)}"
        list(put(journal, replace(like, session_id=session_id), [(IDS, 0)], rng))
        found.append(session_id)
        if number % 64 == 0:
            assert journal._writer.flush(60.0)
    folded(journal)  # as a server's are whose sessions rest; a start reads the rows of turns that are not over
    return found


def put(
    journal: KeptJournal,
    kept: SessionRecord,
    turns: Sequence[tuple[int, int]],
    rng: np.random.Generator,
    vocabulary: int = VOCABULARY,
) -> Iterator[None]:
    """A session of some turns, as a server records them: ids that were generated come one by one. Yields after each."""
    journal.open(kept)
    position = 0
    for appended, generated in turns:
        ids = rng.integers(0, vocabulary, appended + generated).astype(np.uint32)
        with journal.unit():
            journal.append(kept.session_id, position, ids[:appended], Mark.APPENDED)
            position += appended
            reply = ReplyRecord(
                kept.session_id, kept.owner, "appended", rng.bytes(16), rng.bytes(DIGEST_BYTES), position, str(position)
            )
            journal.reply(reply)
        began = GenerateRecord(position, rng.bytes(16), rng.bytes(DIGEST_BYTES), int(rng.integers(2**62)))
        for number in range(appended, appended + generated):
            one = ids[number : number + 1]
            is_first = number == appended
            journal.append(kept.session_id, position, one, Mark.GENERATED, began=began if is_first else None)
            position += 1
        journal.rest(kept.session_id)
        yield
    journal.leave(kept.session_id)


@contextlib.contextmanager
def journal_of(folder: Path) -> Iterator[SQLiteJournal]:
    folder.mkdir(mode=0o700, exist_ok=True)
    journal = SQLiteJournal(folder, Durability.PROCESS, weights=WEIGHTS, metrics=EngineMetrics())
    try:
        yield journal
    finally:
        journal.stop()


def folded(journal: KeptJournal) -> None:
    """Returns once all that was recorded is written, and turns that ended are folded."""
    assert journal._writer.flush(60.0)
    while journal._tables.to_fold:
        time.sleep(0.001)
    with journal._db_lock:
        pass


def out_of_memory(folder: Path) -> None:
    """The system forgets what it holds of the files, which have to be read from the disk next."""
    if hasattr(os, "posix_fadvise"):
        for path in folder.glob(f"{FILE}*"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sizes(folder: Path) -> dict[str, dict[str, Any]]:
    """Bytes of the database for each byte of ids, of sessions that talked in turn, in turns of several sizes."""
    values = {}
    rng = np.random.default_rng(2)
    for appended, generated in TURNS:
        state = folder / f"{appended}-{generated}"
        turns = IDS // (appended + generated)
        ids = turns * (appended + generated)
        count = max(1, min(TURNED_IDS // ids, MOST_TURNS // turns))
        with journal_of(state) as journal:
            talks = [
                put(
                    journal,
                    SessionRecord(f"session-{number:04}", "", "full", None, (0,)),
                    [(appended, generated)] * turns,
                    rng,
                    TURNED_VOCABULARY,
                )
                for number in range(count)
            ]
            for _ in range(turns + 1):
                for talk in talks:
                    next(talk, None)
                    folded(journal)  # as the next turn comes later
        ratio = (state / FILE).stat().st_size / (4 * count * ids)
        values[f"database ÷ ids, turns of {appended:,} + {generated:,}"] = record.exact(ratio, "ratio")
    return values


def logs(folder: Path) -> dict[str, dict[str, Any]]:
    """Bytes of the log for a commit of a step, a token of each stream: as they are written, and by session instead."""
    values = {}
    for count in STREAMS:
        for what, find in (("log of a commit", added_at_the_end), ("log of a commit by session", added_by_session)):
            pages = find(folder / f"{find.__name__}-{count}", count)
            name = f"{what}, {count} streams, a token each"
            # The mean: a commit either fits on the last page or begins another, and the median would be one of the two.
            values[name] = record.exact(sum(pages) * FRAME_BYTES / 1024 / len(pages), "KiB")
    return values


def added_at_the_end(folder: Path, count: int) -> list[int]:
    """The pages that each step of `count` sessions adds to a journal's log."""
    sessions = [SessionRecord(f"session-{number:04}", "", "full", None, (0,)) for number in range(count)]
    rng, pages = np.random.default_rng(3), []
    with journal_of(folder) as journal:
        for one in sessions:
            journal.open(one)
            ids = rng.integers(0, TURNED_VOCABULARY, STEPPED_IDS).astype(np.uint32)
            journal.append(one.session_id, 0, ids, Mark.APPENDED)
            journal.rest(one.session_id)
        folded(journal)
        for step in range(-1, STEPS):
            before = journal._wal_pages
            with journal.unit():  # that a step is recorded at once is the engine's doing
                for one in sessions:
                    began = GenerateRecord(STEPPED_IDS, rng.bytes(16), rng.bytes(DIGEST_BYTES), 1) if step < 0 else None
                    token = rng.integers(0, TURNED_VOCABULARY, 1).astype(np.uint32)
                    position = STEPPED_IDS + 1 + step
                    journal.append(one.session_id, position, token, Mark.GENERATED, began=began)
            assert journal._writer.flush(60.0)
            if step >= 0 and journal._wal_pages > before:  # else there was a checkpoint
                pages.append(journal._wal_pages - before)
    return pages


def added_by_session(folder: Path, count: int) -> list[int]:
    """The same rows in a table that is ordered by session and position."""
    folder.mkdir()
    db = apsw.Connection(str(folder / FILE))
    rng, seen, pages = np.random.default_rng(3), 0, []
    for pragma in (f"page_size={PAGE_BYTES}", "journal_mode=WAL", "wal_autocheckpoint=0", "synchronous=NORMAL"):
        db.execute(f"pragma {pragma}").fetchall()
    db.execute(
        "create table rows (session integer, position integer, mark integer, ids blob, logprobs blob, crc integer, "
        "primary key (session, position)) without rowid"
    )

    def note(_db: apsw.Connection, _name: str, logged: int) -> int:
        nonlocal seen
        pages.append(logged - seen)
        seen = logged
        return apsw.SQLITE_OK

    def add(positions: Sequence[int]) -> None:
        with db:
            db.executemany(
                "insert into rows values (?, ?, 1, ?, null, ?)",
                [
                    (number, position, rng.bytes(4), int(rng.integers(2**32)))
                    for position in positions
                    for number in range(count)
                ],
            )

    db.set_wal_hook(note)
    add(range(STEPPED_IDS))
    for step in range(STEPS):
        add([STEPPED_IDS + step])
    db.close()
    return pages[1:]


# -- all of it --------------------------------------------------------------------------------------------------------


def verdicts(values: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Each value that there is a goal for, and whether it is met."""
    rows = []
    for start, (direction, goal) in GOALS.items():
        for name, value in values.items():
            if name == start or name.startswith(f"{start},"):
                is_met = value["median"] >= goal if direction == "at least" else value["median"] <= goal
                rows.append({"value": name, "median": value["median"], "goal": f"{direction} {goal:g}", "met": is_met})
    return rows


def only_sizes() -> dict[str, Any]:
    with TemporaryDirectory() as name:
        values = sizes(Path(name)) | logs(Path(name))
    return {
        "experiment": "journal_sizes",
        "config": {
            "ids_of_a_session": IDS,
            "ids_of_all_sessions": TURNED_IDS,
            "turns_of_all_sessions": MOST_TURNS,
            "vocabulary": TURNED_VOCABULARY,
        },
        "seeds": [2],
        "values": values,
        "baseline": "four bytes for each id; of a commit, the same rows in their places by session",
        "tables": {"goals": verdicts(values)},
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", type=float, default=1.5, metavar="S", help="of each round of streams (default: %(default)g)"
    )
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument(
        "--sessions", type=int, default=10_000, metavar="N", help="in the folder of many (default: %(default)s)"
    )
    parser.add_argument(
        "--calls", type=int, default=500, metavar="N", help="first calls of kept sessions (default: %(default)s)"
    )
    parser.add_argument("--database", default="", metavar="NAME", help="of a PostgreSQL server; a record of its own")
    parser.add_argument("--sizes", action="store_true", help="the bytes of the database alone; a record of their own")


def main(arguments: argparse.Namespace, _save: Save) -> dict[str, Any]:
    began = time.monotonic()
    if arguments.sizes:
        return only_sizes()
    load_before = os.getloadavg()[0]
    with TemporaryDirectory() as name:
        folder = Path(name)
        for pace in PACES:
            (folder / pace).mkdir()
        values = streams(arguments.seconds, arguments.rounds, folder, arguments.database)
        print("streams are done", flush=True)
        if arguments.database:
            values |= many_in_a_database(arguments.database, arguments.sessions, arguments.calls, folder)
        else:
            values |= many(arguments.sessions, min(arguments.rounds, 5), arguments.calls, folder)
            values |= logs(folder)
    rows = verdicts(values)
    for row in rows:
        print(f"{'met   ' if row['met'] else 'MISSED'} {row['value']}: {row['median']:,.3f}, {row['goal']}")
    return {
        "experiment": "journal_database_cost" if arguments.database else "journal_cost",
        "config": {
            "model": "scripted",
            "rounds": arguments.rounds,
            "seconds_of_a_round": arguments.seconds,
            "step_seconds": PACES,
            "sessions": arguments.sessions,
            "ids_of_a_session": IDS,
            "bytes_of_a_bare_sync": SYNC_BYTES,
            "runnable_processes_before": load_before,
            "clients": "in one process on the same cores, loopback, one channel",
            "seconds": round(time.monotonic() - began),
        },
        "seeds": [0, 1, 2],
        "values": values,
        "baseline": "the same server with durability none, in the same rounds",
        "tables": {"goals": rows},
    }
