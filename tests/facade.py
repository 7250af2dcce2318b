"""What tests see of an engine that its callers do not: its sessions, its memory, its thread, and each of its steps.

The one place where tests reach into it. What callers can have, tests have from the engine itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from inference_engine.backends.base import Borrower, Forward, Result, Step, T
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.engine import Engine
from inference_engine.engine.results import SessionOpened
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.memory.pool import TRASH_UNITS
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies import parse_strategy
from inference_engine.scheduler.transcript import Transcript
from inference_engine.session import kept_journal, sqlite_journal
from inference_engine.session.capacity import Admission
from inference_engine.session.hibernation import Hibernation
from inference_engine.session.history import Leaves
from inference_engine.session.holding import holding
from inference_engine.session.journal import SessionRecord, TokensRecord
from inference_engine.session.session import Holder, Session
from inference_engine.session.sqlite_journal import COPIES, SQLiteJournal
from inference_engine.session.store import SessionStore
from inference_engine.session.writer import Change
from inference_engine.types import Bound, Mode, ModelFacts

LIMIT_SECONDS = 60.0


def store_of(engine: Engine) -> SessionStore:
    return engine._store


def context_of(engine: Engine) -> KVContext:
    return engine._context


def forward_of(engine: Engine) -> Forward:
    return engine._forward


def session_of(engine: Engine, session_id: str, owner: str = "") -> Session:
    return engine._store.find(session_id, owner)


def kv_of(engine: Engine, session_id: str, owner: str = "") -> SessionKV:
    return session_of(engine, session_id, owner).kv


def is_anything_held(engine: Engine) -> bool:
    """Is there a byte in the pool that is not zero? Where padding tokens may write is left aside."""
    pool = engine._context.pool
    aside = TRASH_UNITS * pool._unit
    # Words of eight bytes: a pool is address space of a gigabyte, and this is looked through 16 times faster.
    return bool(pool.memory[aside:].view(torch.int64).count_nonzero())


def take_rooms_back(engine: Engine, count: int) -> None:
    """Engine's thread: as when others need so many rooms of restored entries, and write there at once."""
    pool = engine._context.pool
    before = set(pool.rooms.runs)
    for _ in range(count):
        pool.rooms.give_back()
    for start, units in before - set(pool.rooms.runs):
        first = (start + TRASH_UNITS) * pool._unit
        pool.memory[first : first + units * pool._unit] = torch.nan


def soon(engine: Engine, task: Callable[[], None]) -> None:
    """Run it on the engine's thread, between two steps."""
    engine._scheduler.between_steps(task)


def on_the_engines_thread(engine: Engine, task: Callable[[], object] = lambda: None) -> None:
    """Run it between two steps; returns when it is done, and so is all that was asked for before."""
    is_done = threading.Event()

    def run() -> None:
        try:
            task()
        finally:
            is_done.set()

    soon(engine, run)
    assert is_done.wait(LIMIT_SECONDS)


@contextmanager
def standing_still(engine: Engine) -> Iterator[None]:
    """Nothing begins meanwhile: what is asked for is there together when the first of it begins."""
    with engine._scheduler._wake:
        yield


def wake(engine: Engine) -> None:
    """Let the loop check for a change of which it had no notification."""
    engine._scheduler.wake()


def rebuild_session(engine: Engine, began: SessionRecord, records: Sequence[TokensRecord]) -> SessionOpened:
    """A new session with the history of a recorded one, marks included; nothing else of that one is used."""
    opened = engine.create_session(
        strategy=parse_strategy(began.strategy),
        eos_token_ids=began.eos_token_ids,
        limit_tokens=began.limit_tokens,
        owner=began.owner,
    )
    session = session_of(engine, opened.session_id, began.owner)
    with holding(engine._store, session, Holder.APPEND, 0.0), engine._store.locked():
        for record in records:
            assert record.position == len(session.history), "records follow each other"
            session.record(record.token_ids, record.mark)
    return opened


def let_leave(engine: Engine, session_id: str, owner: str = "") -> None:
    """The session leaves memory, as one that was idle for too long."""
    store = engine._store
    with store.locked():
        store._evict(store.find(session_id, owner), "ttl")


def drop_entries(engine: Engine, session_id: str, owner: str = "") -> None:
    """As if another session had needed the memory."""
    engine._store._admission._drop(session_of(engine, session_id, owner))


@contextmanager
def steps_run_by(engine: Engine, run: Callable[[Step], Result]) -> Iterator[None]:
    """Each step is run by `run` meanwhile, or fails with what that raises."""
    with patch.object(engine._forward, "run", run):
        yield


@contextmanager
def before_each_generate(engine: Engine, task: Callable[[], object]) -> Iterator[None]:
    """Done meanwhile, when a Generate has found its session and before it is looked whether it may begin."""
    with patch.object(engine._arguments, "check_params", lambda *_: task()):
        yield


def save_copies(engine: Engine, folder: Path) -> list[Path]:
    """As if every session had been idle for long: copies of their K/V are in files and recorded. Returns the files."""
    hibernation = engine._scheduler.snapshots
    assert isinstance(hibernation, Hibernation), "the engine keeps no copies"
    on_the_engines_thread(engine, lambda: hibernation.save_all(LIMIT_SECONDS))
    is_recorded = threading.Event()
    engine.journal.on_saved(is_recorded.set)
    assert is_recorded.wait(LIMIT_SECONDS)
    return sorted((folder / COPIES).glob("*.kv"))


def copies_known(engine: Engine) -> None:
    """What the copies that were there at the start begin with is known."""
    hibernation = engine._scheduler.snapshots
    assert isinstance(hibernation, Hibernation), "the engine keeps no copies"
    hibernation._writer.submit(lambda: None).result(LIMIT_SECONDS)


@contextmanager
def speeds(engine: Engine, *, prefill_tokens: float, read_bytes: float) -> Iterator[None]:
    """As if so many tokens were computed, and so many bytes read, in a second."""
    hibernation = engine._scheduler.snapshots
    assert isinstance(hibernation, Hibernation), "the engine keeps no copies"
    measured_read_bytes(engine)  # later it would be measured over these
    with (
        patch.object(hibernation, "_prefill_seconds", 1 / prefill_tokens),
        patch.object(hibernation, "_read_seconds", 1 / read_bytes),
    ):
        yield


def measured_read_bytes(engine: Engine) -> float:
    """What the engine measured of its disk at its start, in bytes a second."""
    hibernation = engine._scheduler.snapshots
    assert isinstance(hibernation, Hibernation), "the engine keeps no copies"
    hibernation._reader.submit(lambda: None).result(LIMIT_SECONDS)  # after the measurement
    return 1 / hibernation._read_seconds


@contextmanager
def half_saved(engine: Engine, session_id: str) -> Iterator[None]:
    """Begin a copy of an idle session's K/V, and let it not go on until the block's end."""
    hibernation = engine._scheduler.snapshots
    assert isinstance(hibernation, Hibernation), "the engine keeps no copies"
    may_go_on = threading.Event()

    def begin() -> None:
        hibernation._saving = hibernation._begin(session_of(engine, session_id))
        hibernation._writer.submit(may_go_on.wait, LIMIT_SECONDS)
        hibernation.poll()

    on_the_engines_thread(engine, begin)
    try:
        yield
    finally:
        may_go_on.set()


def remembered_appends(engine: Engine) -> int:
    return len(engine._calls.appended)


def remembered_generates(engine: Engine) -> list[Transcript]:
    return [reply for _, reply, _ in engine._generates._remembered._replies.values()]


@contextmanager
def room_searches() -> Iterator[list[str]]:
    """The owners for whose sessions room in memory is looked for meanwhile, in order."""
    owners: list[str] = []
    check_quota = Admission._check_quota

    def noted(self: Admission, sessions: Any, needed: Bound, owner: str, **options: Any) -> None:
        owners.append(owner)
        check_quota(self, sessions, needed, owner, **options)

    with patch.object(Admission, "_check_quota", noted):
        yield owners


@contextmanager
def looking_for_unused_sessions_after_each_commit() -> Iterator[None]:
    """Journals delete sessions that are unused for too long at once, instead of now and then."""
    with patch.object(kept_journal, "EXPIRE_SECONDS", 0.0):
        yield


@contextmanager
def a_checkpoint_after_each_commit() -> Iterator[None]:
    """The log of journals holds one page at most."""
    with patch.object(sqlite_journal, "LOG_PAGES", 1):
        yield


@contextmanager
def a_disk_that_fails(journal: SQLiteJournal) -> Iterator[threading.Event]:
    """Once it is set, each commit of the journal fails."""
    transact, fails = journal._transact, threading.Event()

    def on_a_disk_that_fails(changes: Sequence[Change]) -> None:
        if fails.is_set():
            raise OSError("the disk is gone")
        transact(changes)

    with patch.object(journal, "_transact", on_a_disk_that_fails):
        yield fails


@contextmanager
def no_memory_for_histories() -> Iterator[None]:
    """As if the system gave no history another leaf meanwhile."""
    with patch.object(Leaves, "_new", side_effect=MemoryError):
        yield


def in_mode(forward: Forward, mode: Mode) -> Forward:
    """The same model, as if it had been loaded with the other `determinism`. MLX and recurrent states refuse it."""
    if mode is forward.facts.mode:
        return forward
    if forward.facts.backend == "mlx" or (isinstance(forward, TorchForward) and forward.seam.states):
        pytest.skip("it is about fixed shapes, which this refuses")
    others: dict[Mode, Forward] = vars(forward).setdefault("in_mode", {})
    if mode not in others:
        others[mode] = copy(forward)
        vars(others[mode]).pop("_quanta", None)
        vars(others[mode])["facts"] = replace(forward.facts, mode=mode)
    return others[mode]


class WatchedForward:
    """Any forward, that reports each step before it runs it. What `on_step` raises, the step fails with."""

    def __init__(self, forward: Forward, on_step: Callable[[Step], object]) -> None:
        self._forward = forward
        self._on_step = on_step

    def run(self, step: Step) -> Result:
        self._on_step(step)
        return self._forward.run(step)

    @property
    def facts(self) -> ModelFacts:
        return self._forward.facts

    @property
    def device(self) -> torch.device:
        return self._forward.device

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._forward.compute_dtype

    def geometry(self, *, page_tokens: int, segment_tokens: int) -> Geometry:
        return self._forward.geometry(page_tokens=page_tokens, segment_tokens=segment_tokens)

    def free_bytes(self) -> int:
        return self._forward.free_bytes()

    @property
    def indexes_keys(self) -> bool:
        return self._forward.indexes_keys

    @property
    def has_address_space(self) -> bool:
        return self._forward.has_address_space

    def open(
        self, geometry: Geometry, capacity_bytes: int, *, address_bytes: int = 0, tap_layers: tuple[int, ...] = ()
    ) -> KVContext:
        return self._forward.open(geometry, capacity_bytes, address_bytes=address_bytes, tap_layers=tap_layers)

    @property
    def launcher(self) -> None:
        """None: each step is seen, and done, before the next."""
        return None

    def lend(self, borrower: Borrower[T]) -> T:
        return self._forward.lend(borrower)

    @property
    def drafts_with_networks(self) -> bool:
        return self._forward.drafts_with_networks

    def inference_mode(self) -> AbstractContextManager[object]:
        return self._forward.inference_mode()

    def failure(self) -> str:
        return self._forward.failure()

    @property
    def records_graphs(self) -> bool:
        return self._forward.records_graphs
