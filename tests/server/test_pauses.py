"""No call on a session at the cap occupies the event loop or the engine's thread for long: all sessions share them.

Counted is the processor time of the thread, so that a machine that is busy with something else fails nothing. A slow
processor gets more of it: the measure is what protobuf alone takes with the ids of the largest append.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import math
import multiprocessing
import os
import threading
import time
import types
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from inference_engine.config import EngineConfig
from inference_engine.decode.draft import Wanted
from inference_engine.engine import Engine
from inference_engine.engine.arguments import MAX_PAGE_SESSIONS, MAX_PIECE_TOKENS
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.scheduler.commit import Settling
from inference_engine.scheduler.lifecycle import Beginnings
from inference_engine.server.auth import Key
from inference_engine.session.store import SessionStore
from inference_engine.types import Mark
from kakeya.v1 import runtime_pb2 as pb
from kv_cache_proposer.ngram import NgramDrafter
from laboratory.scripted import Script
from tests.facade import session_of, store_of
from tests.further import further_test
from tests.garbage import left_aside
from tests.load.scripted import scripted_engine
from tests.server.wire import Client, connected, refused, serving, until, until_free
from tests.server_thread import server_thread

MOST_SECONDS = 0.005
MOST_MESSAGES = 2  # as often as this: the ids of the largest append through protobuf, there and back
TRIES = 5  # caches and the processor's clock are shared with others: what takes long each time takes long
APPEND = 65_536
LIMIT_TOKENS = 1024
MOST_STOP_IDS = 64
ROOM_BYTES = 2**22  # as much as the smallest sessions take, as many as there may be
LIMITS = EngineConfig()
GENERATES = LIMITS.max_running + LIMITS.max_queued + 20
CONNECTIONS = 6  # of fewer calls each than one may have
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
KEY = "alice-has-a-long-key-of-her-own-0123456789"
# What holds the engine's thread at a Generate's beginning and end, between steps, and in each step, but for the model.
ENGINES_WORK: tuple[tuple[type, str], ...] = (
    (Beginnings, "begin"),
    (Settling, "settle"),
    (SessionStore, "expire"),
    (SessionStore, "free"),
    (SessionStore, "unpin"),
)


class Watch:
    """The longest that a thread was kept, by what."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}

    def saw(self, what: str, seconds: float) -> None:
        self.longest[what] = max(seconds, self.longest.get(what, 0.0))

    def keep_shortest(self, other: Watch) -> None:
        for what, seconds in other.longest.items():
            self.longest[what] = min(seconds, self.longest.get(what, math.inf))

    def too_long(self) -> dict[str, float]:
        most = max(MOST_SECONDS, MOST_MESSAGES * seconds_of_largest_message())
        return {what: seconds for what, seconds in self.longest.items() if seconds > most}

    def around(self, function: Callable[..., Any], name: Callable[[Any], str]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(subject: Any, *args: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return function(subject, *args, **options)
            finally:
                self.saw(name(subject), time.thread_time() - began)

        return timed


@functools.cache
def seconds_of_largest_message() -> float:
    """Processor time that no server can save: the ids of the largest append, encoded, decoded, in an array."""
    ids, least = list(range(128)) * (APPEND // 128), math.inf
    for _ in range(4 * TRIES):
        began = time.thread_time()
        encoded = pb.AppendTokensRequest(token_ids=ids).SerializeToString()
        decoded = np.array(pb.AppendTokensRequest.FromString(encoded).token_ids, np.uint32)
        least = min(least, time.thread_time() - began)
        assert len(decoded) == APPEND
    return least


def _named(name: str) -> Callable[[Any], str]:
    return lambda _: name


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Every callback of the server's event loop, and the engine's work on histories."""
    watch, run = Watch(), asyncio.Handle._run

    def run_of_server(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        if threading.current_thread().name == "server":
            watch.saw("event loop", time.thread_time() - began)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", run_of_server)
        for kind, method in ENGINES_WORK:
            patch.setattr(kind, method, watch.around(getattr(kind, method), _named(f"engine: {method}")))
        # The collector may run in any callback; what it takes depends on all that the process ever imported.
        gc.collect()
        gc.disable()
        try:
            yield watch
        finally:
            gc.enable()


def fill(engine: Engine, session_id: str, tokens: int) -> None:
    """Bring a history to so many tokens, as appends do, without their calls."""
    session = session_of(engine, session_id)
    ids = np.random.default_rng(0).integers(0, engine.info().facts.vocab_size, APPEND, dtype=np.uint32)
    with store_of(engine).locked():
        while (missing := tokens - len(session.history)) > 0:
            session.record(ids[:missing], Mark.APPENDED)


def alternate(engine: Engine, session_id: str, tokens: int) -> None:
    """So many further tokens, every other one generated: an answer has a run for each."""
    session = session_of(engine, session_id)
    with store_of(engine).locked():
        for number in range(tokens):
            ids = np.array([number % 128], dtype=np.uint32)
            session.record(ids, Mark.GENERATED if number % 2 else Mark.APPENDED)


@further_test
def test_no_call_on_a_session_at_the_cap_keeps_others_waiting() -> None:
    # In a process of its own, as a server is: what freeing memory takes depends on all that a process did before.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        longest, too_long = process.submit(longest_pauses).result(timeout=240)
    works = ("event loop", "engine: begin", "engine: settle", "engine: expire")
    expected = {f"watched_use: {work}" for work in works}
    expected |= {f"watched_making_of_room: {work}" for work in ("event loop", "engine: expire")}
    assert expected <= set(longest)
    assert not too_long, f"seconds of processor time, the least of {TRIES} tries: {too_long}"


def longest_pauses() -> tuple[dict[str, float], dict[str, float]]:
    """The longest that each thread was kept by each kind of work, in the try where it took the least; what is long.

    Each scenario has tries of its own: what is short in one hides nothing that is long in the other.
    """
    longest: dict[str, float] = {}
    too_long: dict[str, float] = {}
    for scenario in (watched_use, watched_making_of_room):
        quickest = Watch()
        for _ in range(TRIES):
            quickest.keep_shortest(asyncio.run(scenario()))
            if not quickest.too_long():
                break
        for found, all_found in ((quickest.longest, longest), (quickest.too_long(), too_long)):
            all_found.update({f"{scenario.__name__}: {what}": seconds for what, seconds in found.items()})
    return longest, too_long


async def watched_use() -> Watch:
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        scripted_engine(kv_bytes=2**31) as engine,
        server_thread(engine) as target,
    ):
        async with contextlib.AsyncExitStack() as stack:
            channels = [grpc.aio.insecure_channel(target, options=OWN_CONNECTION) for _ in range(CONNECTIONS)]
            client, *others = [Client(await stack.enter_async_context(channel)) for channel in channels]
            most = LIMITS.max_sessions - 20
            held = [engine.create_session(limit_tokens=LIMIT_TOKENS).session_id for _ in range(most)]
            with watching(monkeypatch) as watch:
                await use(client, engine)
                await use_beside_many_sessions(client, held, others)
        return watch


async def watched_making_of_room() -> Watch:
    """As many idle sessions as there may be: one that needs the memory of thirty of them, and the end of all."""
    now = 1000.0
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        scripted_engine(kv_bytes=ROOM_BYTES, clock=lambda: now) as engine,
        server_thread(engine) as target,
    ):
        async with grpc.aio.insecure_channel(target, options=OWN_CONNECTION) as channel:
            client = Client(channel)
            for _ in range(LIMITS.max_sessions - 1):
                engine.create_session(limit_tokens=16)
            now += 2 * engine.config.session_evictable_seconds
            with watching(monkeypatch) as watch:
                await client.call(
                    "CreateSession", pb.CreateSessionRequest(limit_tokens=LIMIT_TOKENS // 2, guaranteed=True)
                )
                dropped = engine.metrics.registry.get_sample_value("session_dropped_total")
                assert dropped is not None and dropped >= 30
                # All of them are idle for too long at once.
                now += 2 * engine.config.session_idle_ttl_seconds
                await client.open([1])
                await until(lambda: len(store_of(engine)) == 1)
        return watch


async def use(client: Client, engine: Engine) -> None:
    """Append to it and to a fork of it, fork, look, read, generate, replay, close; each the most that one call can."""
    most, ids = engine.config.history_tokens_per_session, list(range(128)) * (APPEND // 128)
    session = await client.open_endless([])
    fill(engine, session, most - APPEND)
    forks = [await fork(client, session)]
    assert await client.append(session, ids) == most
    # What both hold until now is shared; neither copies it to go on.
    assert await client.append(forks[0], ids) == most
    assert (await refused(client.append(session, ids))).reason == "RESOURCE_EXHAUSTED HISTORY_LIMIT"
    forks += [await fork(client, session) for _ in range(3)]
    await client.info(session)
    for first in (0, most - APPEND - MAX_PIECE_TOKENS // 2, most - MAX_PIECE_TOKENS):
        await read_piece(client, session, first)
    await client.call("GetServerInfo", pb.GetServerInfoRequest())
    await client.call("CloseSession", pb.CloseSessionRequest(session_id=session))
    # With room for a few more tokens, whose penalty asks for every id before them.
    shorter = await client.open_endless([])
    fill(engine, shorter, most - 100 - MAX_PIECE_TOKENS)
    alternate(engine, shorter, MAX_PIECE_TOKENS)
    await read_piece(client, shorter, most - 100 - MAX_PIECE_TOKENS)
    running = client.stream(pb.GenerateRequest(session_id=shorter, max_tokens=8, repetition_penalty=1.3, progress=True))
    assert [(await running.read()).WhichOneof("payload") for _ in range(3)] == ["accepted", "progress", "progress"]
    running.cancel()
    await until_free(engine, shorter)
    reported = await client.open([1, 2, 3])
    asked: dict[str, Any] = {"max_tokens": 700, "request_id": b"g" * 16}
    assert await client.generate(reported, **asked) == await client.generate(reported, **asked)
    for session_id in (shorter, reported, *forks):
        await client.call("CloseSession", pb.CloseSessionRequest(session_id=session_id))


async def use_beside_many_sessions(client: Client, held: list[str], others: list[Client]) -> None:
    """As many sessions as there may be, and of calls on them the largest; as many Generates as may run and wait."""
    opened = await client.open(list(range(128)) * 4, limit_tokens=LIMIT_TOKENS, eos_token_ids=range(MOST_STOP_IDS))
    forked = await fork(client, opened)
    listed = await client.call("ListSessions", pb.ListSessionsRequest(page_size=MAX_PAGE_SESSIONS))
    assert len(listed.sessions) == MAX_PAGE_SESSIONS
    further = pb.ListSessionsRequest(page_token=listed.next_page_token, page_size=MAX_PAGE_SESSIONS)
    assert listed.next_page_token and (await client.call("ListSessions", further)).sessions
    await client.call("GetServerInfo", pb.GetServerInfoRequest())
    await client.generate(
        opened,
        8,
        stop_token_ids=range(MOST_STOP_IDS),
        logit_bias=dict.fromkeys(range(100), 1.0),
        token_details=True,
    )
    endless = await client.open_endless(list(range(128)) * (APPEND // 128))
    await read_piece(client, endless, 0)
    each_with = list(zip(held[:GENERATES], itertools.cycle(others), strict=False))
    await asyncio.gather(*(other.append(each, [1, 2, 3]) for each, other in each_with))
    running = [other.generate(each, 3) for each, other in each_with]
    ended = await asyncio.gather(*running, return_exceptions=True)
    assert sum(isinstance(one, list) for one in ended) >= LIMITS.max_running
    for session_id in (opened, forked, endless):
        await client.call("CloseSession", pb.CloseSessionRequest(session_id=session_id))


async def read_piece(client: Client, session: str, first: int) -> None:
    """The longest piece that one call returns."""
    request = pb.ReadHistoryRequest(session_id=session, first_position=first, max_tokens=MAX_PIECE_TOKENS)
    assert len((await client.call("ReadHistory", request)).token_ids) == MAX_PIECE_TOKENS


async def fork(client: Client, session: str) -> str:
    forked = await client.call("ForkSession", pb.ForkSessionRequest(session_id=session, request_id=os.urandom(16)))
    return str(forked.session_id)


def test_what_a_decode_step_does_with_a_history_at_the_cap_is_short() -> None:
    with scripted_engine() as engine:
        session_id = engine.create_session(strategy=SinkWindow(sink=4, window=32)).session_id
        fill(engine, session_id, engine.config.history_tokens_per_session - 10)
        session, drafter, watch = session_of(engine, session_id), NgramDrafter(), Watch()
        history, end = session.history, len(session.history)
        steps: dict[str, Callable[[object], object]] = {
            "draft": lambda _: drafter.propose([Wanted(None, history, 16)]) if drafter.method(history) else None,
            "record": lambda _: session.record(history[-1:], Mark.GENERATED),
            "pending": lambda _: (session.pending_ids(512), session.pending_generated(512)),
            "report": lambda _: history.ids(end - 256, end).tolist(),
            "penalty": lambda _: history.seen(engine.info().facts.vocab_size),
            "room": lambda _: store_of(engine).histories.room(session),
        }
        for name, step in steps.items():
            for _ in range(TRIES):
                once = Watch()
                once.around(step, _named(name))(None)
                watch.keep_shortest(once)
    assert set(watch.longest) == set(steps)
    assert not watch.too_long()


async def test_a_call_that_is_refused_leaves_no_frames_to_the_garbage_collector(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """A frame holds all of its call. After thousands of refusals the collector would keep every caller waiting."""
    path = tmp_path / "keys"
    path.write_text(Key.of(KEY, "alice").line, encoding="utf-8")
    script, go_on = Script(), threading.Event()
    script.on_step = lambda _: assert_came(go_on)
    with left_aside(), scripted_engine(script=script, max_running=1, max_queued=1, stall_seconds=600.0) as engine:
        async with serving(engine, api_key_file=str(path), busy_wait_seconds=0.0) as handle:
            as_alice = [("authorization", f"Bearer {KEY}")]
            async with connected(handle) as keyless, connected(handle, metadata=as_alice) as client:
                busy, waits, session = [await client.open() for _ in range(3)]
                streams = [
                    client.stream(pb.GenerateRequest(session_id=each, max_tokens=9, progress=True))
                    for each in (busy, waits)
                ]
                for stream in streams:
                    assert (await stream.read()).WhichOneof("payload") == "accepted"
                calls: dict[str, Callable[[], Awaitable[object]]] = {
                    "UNAUTHENTICATED UNAUTHENTICATED": lambda: keyless.info(session),
                    "NOT_FOUND SESSION_NOT_FOUND": lambda: client.info("missing"),
                    "INVALID_ARGUMENT TOKEN_OUT_OF_RANGE": lambda: client.append(session, [2**31]),
                    "INVALID_ARGUMENT INVALID_ARGUMENT": lambda: client.generate(session, 0),
                    "ABORTED SESSION_BUSY": lambda: client.append(busy, [1]),
                    "RESOURCE_EXHAUSTED OVERLOADED": lambda: client.generate(session, 5),
                }
                for reason, call in calls.items():
                    with subtests.test(reason):
                        with collecting() as garbage:
                            for _ in range(5):
                                assert (await refused(call())).reason == reason
                        assert [
                            found for found in garbage if isinstance(found, types.FrameType) and is_ours(found)
                        ] == []
                go_on.set()
                for stream in streams:
                    stream.cancel()


@contextmanager
def collecting() -> Iterator[list[object]]:
    """What became garbage within, and only the collector could free."""
    gc.collect()
    gc.disable()
    garbage: list[object] = []
    try:
        yield garbage
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        garbage += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def is_ours(found: object) -> bool:
    return isinstance(found, types.FrameType) and "inference_engine" in Path(found.f_code.co_filename).parts


def assert_came(event: threading.Event) -> None:
    assert event.wait(60)
