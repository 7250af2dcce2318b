"""No call on a session at the cap occupies the event loop or the engine's thread for long: all sessions share them.

Counted is the processor time of the thread, so that a machine that is busy with something else fails nothing. A slow
processor gets more of it: the measure is what protobuf alone takes with the ids of the largest append.
"""

from __future__ import annotations

import functools
import gc
import math
import threading
import time
import types
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference_engine.decode.draft import Wanted
from inference_engine.engine import Engine
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.server.auth import Key
from inference_engine.types import Mark
from kakeya.v1 import runtime_pb2 as pb
from kv_cache_proposer.ngram import NgramDrafter
from laboratory.scripted import Script
from tests.facade import session_of, store_of
from tests.garbage import leave_aside
from tests.load.scripted import scripted_engine
from tests.server.wire import connected, refused, serving

MOST_SECONDS = 0.005
MOST_MESSAGES = 2  # as often as this: the ids of the largest append through protobuf, there and back
TRIES = 5  # caches and the processor's clock are shared with others: what takes long each time takes long
APPEND = 65_536
KEY = "alice-has-a-long-key-of-her-own-0123456789"


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


def fill(engine: Engine, session_id: str, tokens: int) -> None:
    """Bring a history to so many tokens, as appends do, without their calls."""
    session = session_of(engine, session_id)
    ids = np.random.default_rng(0).integers(0, engine.info().facts.vocab_size, APPEND, dtype=np.uint32)
    with store_of(engine).locked():
        while (missing := tokens - len(session.history)) > 0:
            session.record(ids[:missing], Mark.APPENDED)


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
            "room": lambda _: store_of(engine).histories.room(session, 1),
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
    leave_aside()
    with scripted_engine(script=script, max_running=1, max_queued=1, stall_seconds=600.0) as engine:
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
