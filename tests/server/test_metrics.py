"""Every instrument is moved by something that happens, and no label names an owner or a session."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from inference_engine.engine import Engine
from inference_engine.errors import QuotaExceeded
from inference_engine.kv.strategies import parse_strategy, strategy_names
from inference_engine.kv.strategy import KVStrategy
from inference_engine.logs import written
from inference_engine.metrics import (
    INVARIANTS,
    KV_KINDS,
    SESSION_STATES,
    STEP_PARTS,
    Distribution,
    EngineMetrics,
)
from inference_engine.scheduler.step_time import StepTimer
from inference_engine.server.preauth_limits import FIRST_BYTES
from inference_engine.server.service import SERVICE_NAME
from inference_engine.server.status import CODES
from inference_engine.server.watchdog import Watchdog
from inference_engine.session.sqlite_journal import SQLiteJournal
from inference_engine.session.writer import Change, DiskFull
from inference_engine.types import Durability, GenerateParams, TokenCommitted
from kakeya.v1 import runtime_pb2 as pb
from laboratory.scripted import Fault, Script
from tests.facade import drop_entries, save_copies, session_of, store_of
from tests.hostile.http2 import PREFACE, PRIORITY, SETTINGS, frame
from tests.kept import keeping, remote
from tests.laws.drafters import Failing, Knowing, Wrong
from tests.load.scripted import scripted_engine
from tests.server.http.client import asking, http_client, serving_http, tiny_chat
from tests.server.wire import HISTORY, Client, connected, held, refused, serving, until
from tests.session.talks import until_folded
from tests.tiny_native import library, served_engine

POISON = 77  # the id at which the scripted device does what its script says

Values = dict[str, dict[str, float]]


def instruments(metrics: EngineMetrics) -> list[MetricWrapperBase]:
    return [instrument for instrument in vars(metrics).values() if isinstance(instrument, MetricWrapperBase)]


def shown(metrics: EngineMetrics) -> Values:
    """What every instrument shows now: its samples by name and labels."""
    metrics.look()
    return {
        family.name: {
            f"{sample.name}{sorted(sample.labels.items())}": sample.value
            for sample in family.samples
            if not sample.name.endswith("_created")
        }
        for instrument in instruments(metrics)
        for family in instrument.collect()
    }


class Seen:
    """Instruments that have shown something else than they did on an engine that is new."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._new: Values = {}

    def begin(self, engine: Engine) -> None:
        self._new = shown(engine.metrics)
        # What an engine sets when it starts has moved already.
        capacities = {name: values for name, values in self._new.items() if name.endswith("capacity_bytes")}
        self.names |= {name for name, values in capacities.items() if any(values.values())}

    def look(self, engine: Engine) -> None:
        now = shown(engine.metrics)
        self.names |= {name for name in now if now[name] != self._new[name]}


Scenario = Callable[[Seen], Awaitable[None]]


async def an_ordinary_day(seen: Seen) -> None:
    """Sessions of strategies that hold something special, a call that comes twice, one that is refused."""
    with served_engine() as engine:
        seen.begin(engine)
        async with serving(engine) as handle, connected(handle) as client:
            session_id = ""
            for strategy in (
                pb.Strategy(gather=pb.GatherStrategy(block=4, sink=4, window=16, budget=32)),
                pb.Strategy(restored=pb.RestoredStrategy(sink=4, window=16)),
                pb.Strategy(tiered=pb.TieredStrategy(block=4, sink=4, window=16, budget=32, resident_tokens=48)),
            ):
                session_id = await client.open(range(100), strategy=strategy)
                assert len(await client.generate(session_id)) == 8
                assert len(await client.generate(session_id)) == 8
                seen.look(engine)
            request = pb.AppendTokensRequest(session_id=session_id, token_ids=[1], request_id=os.urandom(16))
            for _ in range(2):
                await client.call("AppendTokens", request)
            await refused(client.append("unknown", [1]))
            await client.call("CloseSession", pb.CloseSessionRequest(session_id=session_id))
            with held(engine):
                seen.look(engine)  # a Generate runs
        seen.look(engine)


async def waiting(seen: Seen) -> None:
    """A Generate that waits for its turn."""
    with served_engine() as engine:
        seen.begin(engine)
        session = engine.create_session()
        engine.append(session.session_id, HISTORY)
        with held(engine):
            running = engine.generate(session.session_id, GenerateParams(max_tokens=1))
            seen.look(engine)
        assert list(running)


async def a_queue_that_is_full(seen: Seen) -> None:
    with served_engine(max_running=1, max_queued_per_owner=1) as engine:
        seen.begin(engine)
        first, second = (engine.create_session().session_id for _ in range(2))
        engine.append(first, HISTORY)
        engine.append(second, HISTORY)
        with held(engine):
            waits = engine.generate(first, GenerateParams(max_tokens=1))
            with pytest.raises(QuotaExceeded, match="as many as one owner"):
                engine.generate(second, GenerateParams(max_tokens=1))
            seen.look(engine)
        assert list(waits)


async def drafting(seen: Seen) -> None:
    with served_engine() as engine:
        session = engine.create_session()
        engine.append(session.session_id, HISTORY)
        events = engine.generate(session.session_id, GenerateParams(max_tokens=9))
        said = [event.token_id for event in events if isinstance(event, TokenCommitted)]
    for drafter in (Knowing(text=[*HISTORY, *said]), Failing(fails=1)):
        with served_engine(drafter=drafter, draft_tokens=2) as engine:
            seen.begin(engine)
            session = engine.create_session()
            engine.append(session.session_id, HISTORY)
            assert list(engine.generate(session.session_id, GenerateParams(max_tokens=9)))
            seen.look(engine)


async def a_fork_that_outlives_its_parent(seen: Seen) -> None:
    """It reads entries of the parent's, which are kept for it: only without windows, where none is evicted."""
    with served_engine(windowed=False) as engine:
        seen.begin(engine)
        parent = engine.create_session().session_id
        engine.append(parent, [token % 128 for token in range(100)])
        assert list(engine.generate(parent, GenerateParams(max_tokens=3)))
        fork = engine.fork_session(parent).session_id
        assert list(engine.generate(fork, GenerateParams(max_tokens=3)))
        engine.close_session(parent)
        seen.look(engine)


async def sessions_that_begin_alike(seen: Seen) -> None:
    with served_engine(share_prefixes="owner") as engine:
        seen.begin(engine)
        for length in (40, 40, 50):
            session = engine.create_session().session_id
            engine.append(session, list(range(length)))
            assert list(engine.generate(session, GenerateParams(max_tokens=1)))
            engine.close_session(session)
            seen.look(engine)


async def no_room(seen: Seen) -> None:
    """Idle sessions are evicted for others, or dropped to their tokens."""
    tight: tuple[dict[str, Any], ...] = ({"max_sessions": 1}, {"kv_bytes": 600_000, "growth": "guaranteed"})
    for settings in tight:
        with served_engine(session_evictable_seconds=0, **settings) as engine:
            seen.begin(engine)
            for _ in range(4):
                engine.create_session()
            seen.look(engine)


async def a_poisoned_history(seen: Seen) -> None:
    script = Script(faults={POISON: (Fault.NON_FINITE, 1)})
    with scripted_engine(script=script) as engine:
        seen.begin(engine)
        async with serving(engine) as handle, connected(handle) as client:
            details = await refused(client.generate(await client.open((1, 2, POISON))))
            assert details.reason == "INTERNAL NON_FINITE_LOGITS"
        seen.look(engine)


async def a_broken_invariant(seen: Seen) -> None:
    with served_engine() as engine:
        seen.begin(engine)
        async with serving(engine) as handle, connected(handle) as client:
            session_id = await client.open()
            session_of(engine, session_id).cached_tokens = 1_000_000
            assert (await refused(client.generate(session_id))).reason == "FAILED_PRECONDITION INV2"
        seen.look(engine)


async def a_device_that_hangs(seen: Seen) -> None:
    """The clock is ours: every look at it is a second later."""
    script = Script(faults={POISON: (Fault.HANG, 1)})
    ticks = count()
    with scripted_engine(script=script, clock=lambda: float(next(ticks)), stall_seconds=5.0) as engine:
        seen.begin(engine)
        session = engine.create_session()
        engine.append(session.session_id, (1, 2, POISON))
        running = engine.generate(session.session_id, GenerateParams(max_tokens=1))
        watchdog = Watchdog(engine, exit_seconds=0.0, clock=lambda: 0.0)
        while not engine.metrics.registry.get_sample_value("kakeya_engine_stalls_total"):
            assert not watchdog.look()
        seen.look(engine)
        script.let_go.set()
        assert any(isinstance(event, TokenCommitted) for event in running)


async def over_http(seen: Seen) -> None:
    with served_engine() as engine:
        seen.begin(engine)
        async with serving_http(engine, tiny_chat()) as handle, http_client(handle) as client:
            assert (await client.post("chat/completions", json=asking())).status_code == 200
        seen.look(engine)  # the server has drained


async def a_log_on_a_full_disk(seen: Seen) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with served_engine() as engine:
        seen.begin(engine)
        with written("text", Full()):
            logging.getLogger("a.test").warning("lost")
        seen.look(engine)


async def unauthenticated(seen: Seen) -> None:
    """Two connections where there is room for one, and no call came yet."""
    with served_engine() as engine:
        seen.begin(engine)
        async with serving_http(engine, tiny_chat(), max_connections=1) as handle:
            assert handle.http_url is not None
            url = urlsplit(handle.http_url)
            first, first_writer = await asyncio.open_connection(url.hostname, url.port)
            _, second_writer = await asyncio.open_connection(url.hostname, url.port)
            with contextlib.suppress(ConnectionError):
                assert await first.read() == b""
            for writer in (first_writer, second_writer):
                writer.close()
        seen.look(engine)


async def an_address_that_sends_too_much(seen: Seen) -> None:
    """Without a call, on a connection from an address that no owner shares."""
    with served_engine() as engine, socket.socket() as connection:
        seen.begin(engine)
        async with serving(engine) as handle:
            host, _, port = handle.target.rpartition(":")
            connection.bind(("127.0.0.9", 0))
            connection.connect((host, int(port)))
            connection.settimeout(10.0)
            nothing = frame(PRIORITY, 0, 1, bytes(5))
            with contextlib.suppress(OSError):  # it is dropped
                connection.sendall(PREFACE + frame(SETTINGS, 0, 0) + nothing * (2 * FIRST_BYTES // len(nothing)))
            barred = engine.metrics.addresses_barred
            await until(lambda: next(iter(barred.collect())).samples[0].value == 1)
        seen.look(engine)


async def a_folder_of_sessions(seen: Seen) -> None:
    """One that is read again, one that is forgotten, a disk that is full, a client that knows more."""
    now, metrics, full = 0.0, EngineMetrics(), threading.Event()

    class Journal(SQLiteJournal):
        def _transact(self, changes: Sequence[Change]) -> None:
            if full.is_set():
                raise DiskFull
            super()._transact(changes)

    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(
            Path(folder), Durability.PROCESS, weights="", metrics=metrics, keep_seconds=10.0, wall_clock=lambda: now
        )
        with scripted_engine(journal=journal, metrics=metrics, wall_clock=lambda: now) as engine:
            seen.begin(engine)
            async with serving(engine) as handle, connected(handle) as client:
                session_id, other = await client.open(), await client.open()
                for one in (session_id, other):
                    with store_of(engine).locked():
                        store_of(engine)._leave(session_of(engine, one))
                await client.append(session_id, ())
                seen.look(engine)
                until_folded(journal)  # which notes when a session was used
                now, value = 100.0, metrics.registry.get_sample_value

                def is_forgotten() -> bool:
                    # Each time: the journal's thread may be about to say when it looks next.
                    journal._expire_at = 0.0
                    journal.request_sync()
                    return bool(value("kakeya_journal_forgotten_total"))

                await until(is_forgotten)
                await refused(client.generate(session_id, request_id=os.urandom(16), resume_from=1000))
                full.set()
                append = asyncio.ensure_future(client.append(session_id, [1]))
                await until(lambda: bool(value("kakeya_journal_full")))
                seen.look(engine)
                assert (await refused(append)).reason == "RESOURCE_EXHAUSTED JOURNAL_FULL"
                full.clear()


async def a_journal_that_is_away(seen: Seen) -> None:
    with tempfile.TemporaryDirectory() as folder, remote(Path(folder)) as (engine, journal):
        seen.begin(engine)
        async with serving(engine) as handle, connected(handle) as client:
            journal.cuts_at_commit = True
            assert (await refused(client.open(()))).reason == "UNAVAILABLE JOURNAL_AWAY"
            seen.look(engine)
            journal.is_cut = False
            await until(lambda: not journal.is_away)
            session = await client.open()
            journal.is_taken = True
            assert (await refused(client.append(session, [1]))).reason == "UNAVAILABLE SESSION_ELSEWHERE"
            seen.look(engine)


async def a_session_read_from_a_file(seen: Seen) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        keeping(Path(folder) / "state", make=served_engine, hibernate="always") as engine,
    ):
        seen.begin(engine)
        async with serving(engine) as handle, connected(handle) as client:
            session_id = await client.open()
            await client.generate(session_id)
            save_copies(engine, Path(folder) / "state")
            seen.look(engine)
            drop_entries(engine, session_id)
            await client.generate(session_id)
            seen.look(engine)


async def entries_that_stay_restored(seen: Seen) -> None:
    select = "restored:source=latent,bytes_per_token=160,mode=select,sink=2,window=17,budget=63,rank=5,bits=3,run=1"
    library()
    with served_engine() as engine:
        seen.begin(engine)
        session = engine.create_session(strategy=parse_strategy(select)).session_id
        engine.append(session, [token % 128 for token in range(100)])
        assert list(engine.generate(session, GenerateParams(max_tokens=3)))
        seen.look(engine)


async def test_every_instrument_is_moved_by_something_that_happens() -> None:
    """Every instrument is set."""
    seen = Seen()
    scenarios: tuple[Scenario, ...] = (
        an_ordinary_day,
        waiting,
        a_queue_that_is_full,
        drafting,
        a_fork_that_outlives_its_parent,
        sessions_that_begin_alike,
        no_room,
        a_poisoned_history,
        a_broken_invariant,
        a_device_that_hangs,
        over_http,
        a_log_on_a_full_disk,
        unauthenticated,
        an_address_that_sends_too_much,
        a_folder_of_sessions,
        a_journal_that_is_away,
        a_session_read_from_a_file,
        entries_that_stay_restored,
    )
    for scenario in scenarios:
        await scenario(seen)
    known = {family.name for instrument in instruments(EngineMetrics()) for family in instrument.describe()}
    assert known - seen.names == set()


METHODS = {
    *(f"{SERVICE_NAME}/{method.name}" for method in pb.DESCRIPTOR.services_by_name["RuntimeService"].methods),
    *(f"grpc.health.v1.Health/{name}" for name in ("Check", "List", "Watch")),
}
KNOWN_LABELS: dict[str, set[str]] = {
    "strategy": set(strategy_names()),
    "state": set(SESSION_STATES),
    "kind": {*KV_KINDS, *INVARIANTS, *map(str.upper, INVARIANTS)},
    "part": set(STEP_PARTS),
    "method": {*METHODS, "unknown"},
    "code": {code.name for code in CODES.values()} | {"OK", "CANCELLED"},
}


async def test_labels_come_from_small_fixed_sets_whatever_the_caller() -> None:
    """Twenty sessions, owners and labels later there are as many time series as after two."""
    with served_engine() as engine:
        async with serving(engine) as handle, connected(handle) as client:
            series: list[set[str]] = []
            session_id = ""
            for number in range(20):
                label = f"label-{number}"
                session_id = await client.open(client_label=label)
                await client.generate(session_id)
                await refused(client.append(f"no-such-session-{number}", [1]))
                await refused(client.raw("NoSuchMethod", b""))
                engine.create_session(owner=f"owner-{number}")
                series.append({sample for samples in shown(engine.metrics).values() for sample in samples})
            page = generate_latest(engine.metrics.registry).decode()
    assert series[1] == series[-1]
    assert all(text not in page for text in ("label-", "owner-", "no-such", session_id))
    for instrument in instruments(engine.metrics):
        for family in instrument.collect():
            for sample in family.samples:
                for name, known in KNOWN_LABELS.items():
                    assert sample.labels.get(name) is None or sample.labels[name] in known, sample


def test_every_byte_that_a_strategy_holds_is_of_a_known_kind() -> None:
    with served_engine(drafter=Wrong()) as engine:
        kinds: set[str] = set()
        for name in strategy_names():
            session = engine.create_session(strategy=_strategy(name))
            engine.append(session.session_id, [token % 128 for token in range(100)])
            assert list(engine.generate(session.session_id, GenerateParams(max_tokens=3)))
            kinds |= set(session_of(engine, session.session_id).live_kinds)
        value = engine.metrics.registry.get_sample_value
        by_kind = [value("kakeya_session_kv_bytes", {"kind": kind}) or 0 for kind in KV_KINDS]
        assert sum(by_kind) == value("kakeya_session_kv_live_bytes")
    assert kinds <= set(KV_KINDS)
    assert sum(by_kind) > 0


def _strategy(name: str) -> KVStrategy:
    small = {
        "sink_window": "sink=4,window=16",
        "layer_window": "sink=4,window=16,full_layers=1",
        "restored": "sink=4,window=16",
        "gather": "block=4,sink=4,window=16,budget=32",
        "tiered": "block=4,sink=4,window=16,budget=32,resident_tokens=48",
    }
    return parse_strategy(f"{name}:{small[name]}" if name in small else name)


@pytest.mark.parametrize("observed", [0, 1, 63, 64, 200])
def test_observations_that_are_counted_together_are_all_counted(observed: int) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    buckets = (0.5, 1.0, 2.0)
    one = Distribution("some_seconds", "Help.", ("part",), buckets=buckets, registry=ours).labels("some")
    other = Histogram("some_seconds", "Help.", ("part",), buckets=buckets, registry=theirs).labels("some")
    for number in range(observed):
        for histogram in (one, other):
            histogram.observe(number % 6 / 2)
    shown = [
        {
            (sample.name, *sample.labels.values()): sample.value
            for family in registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")  # a time
        }
        for registry in (ours, theirs)
    ]
    assert shown[0] == shown[1]
    assert shown[0]["some_seconds_count", "some"] == observed


def test_the_parts_of_a_step_add_up_to_the_step() -> None:
    """Each moment of a step belongs to exactly one part."""
    metrics, ticks = EngineMetrics(), count()
    timer = StepTimer(metrics, lambda: float(next(ticks)))
    timer.begin()
    timer.lap("plan")
    timer.begin()  # the step before failed, and counts for nothing
    for part in ("plan", "draft", "plan", "forward", "sample"):
        timer.lap(part)
    timer.end("settle")
    value = metrics.registry.get_sample_value
    parts = {part: value("kakeya_engine_step_part_seconds_sum", {"part": part}) for part in STEP_PARTS}
    assert parts == {"plan": 2, "draft": 1, "forward": 1, "sample": 1, "settle": 1}
    assert value("kakeya_engine_step_seconds_sum") == 6
    assert value("kakeya_engine_step_seconds_count") == 1


async def test_states_of_sessions_follow_what_they_do() -> None:
    with served_engine() as engine:
        value = engine.metrics.registry.get_sample_value

        def states() -> dict[str, float]:
            found = {
                state: value("kakeya_session_state", {"strategy": "full", "state": state}) for state in SESSION_STATES
            }
            return {state: number for state, number in found.items() if number}

        session = engine.create_session()
        engine.append(session.session_id, HISTORY)
        assert states() == {"idle": 1}
        with held(engine):
            running = engine.generate(session.session_id, GenerateParams(max_tokens=1))
            assert states() == {"decoding": 1, "queued": 1}
            assert (value("kakeya_generate_active"), value("kakeya_generate_queue_depth")) == (1, 1)
        assert list(running)
        assert value("kakeya_session_active") == 2


def test_a_burst_of_drafted_tokens_is_one_gap_which_its_tokens_share() -> None:
    """Tokens that come at once are no proof of speed: the stream was silent before them."""
    with served_engine() as engine:
        session = engine.create_session().session_id
        engine.append(session, HISTORY)
        events = list(engine.generate(session, GenerateParams(max_tokens=9)))
        said = [event.token_id for event in events if isinstance(event, TokenCommitted)]
    with served_engine(drafter=Knowing(text=[*HISTORY, *said]), draft_tokens=2) as engine:
        session = engine.create_session().session_id
        engine.append(session, HISTORY)
        assert list(engine.generate(session, GenerateParams(max_tokens=9)))
        value = engine.metrics.registry.get_sample_value
        gaps, tokens = (f"kakeya_generate_{name}_seconds" for name in ("step_gap", "inter_token"))
        assert 0 < int(value(f"{gaps}_count") or 0) < int(value(f"{tokens}_count") or 0) <= 8
        assert value(f"{tokens}_sum") == pytest.approx(value(f"{gaps}_sum"))


async def test_server_info_the_metrics_and_the_ready_line_say_the_same(client: Client, engine: Engine) -> None:
    await client.open()
    info: Any = await client.call("GetServerInfo", pb.GetServerInfoRequest())
    value = engine.metrics.registry.get_sample_value
    for name in ("kv_capacity_bytes", "kv_reserved_bytes", "tier_capacity_bytes", "tier_reserved_bytes"):
        assert getattr(info, name) == value(f"kakeya_session_{name}") == getattr(engine.info(), name), name
    mode = pb.Mode.Name(info.mode).removeprefix("MODE_").lower()
    labels = {"version": info.version, "model": info.model_id, "device": info.device, "dtype": info.dtype, "mode": mode}
    assert value("kakeya_server_build_info", labels) == 1
    assert set(info.strategies) == {
        sample.labels["strategy"] for family in engine.metrics.session_states.collect() for sample in family.samples
    }
