"""What a coverage-guided fuzzer changes byte by byte: a unit, which is a few calls on two sessions of its own.

    unit      call*                             call      method (1 byte), length (2 bytes, big-endian), message

A message goes to the servicer as it stands, but that a session id of one character means a session of the unit's:
ids are random, and no fuzzer draft tokens one. When a unit is over, nothing may be left of it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import DecodeError, Message

from inference_engine.engine import Engine
from kakeya.v1 import runtime_pb2 as pb
from tests.facade import store_of
from tests.load.fuzzing import check_outcome
from tests.load.messages import Messages
from tests.load.servicer import REQUESTS, Servicer, Undecodable

METHODS = tuple(sorted(REQUESTS))
CALLS_AT_MOST = 12
SETTLED_SECONDS = 20.0
NAMES = ("0", "1")  # of the sessions that every unit begins with: one with a history, one without
HISTORY = (3, 14, 15, 92, 65)


class Units:
    """Runs units. seen: how calls ended, by method and reason."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._servicer = Servicer(engine, busy_wait_seconds=0.005)
        self._loop = asyncio.new_event_loop()
        self.seen: Counter[tuple[str, str]] = Counter()

    def run(self, unit: bytes) -> None:
        """Raises what no client may ever be able to cause."""
        self._loop.run_until_complete(self._run(unit))
        self._check()

    def close(self) -> None:
        """The engine is the caller's, and stays open."""
        self._loop.close()

    async def _run(self, unit: bytes) -> None:
        sessions = [self._engine.create_session().session_id for _ in NAMES]
        self._engine.append(sessions[0], HISTORY)
        for method, message in calls_of(unit):
            await self._call(method, _with_real_id(method, message, sessions), sessions)
        for session in store_of(self._engine).sessions():
            self._engine.close_session(session.session_id, owner=session.owner)

    def _check(self) -> None:
        """Nothing is left of a unit, once the step or the copying of entries that was under way has ended."""
        until = time.monotonic() + SETTLED_SECONDS
        while self._engine.info().kv_reserved_bytes and time.monotonic() < until:
            time.sleep(0.0005)
        assert self._engine.info().kv_reserved_bytes == 0
        assert self._engine.is_alive()

    async def _call(self, method: str, message: bytes, sessions: list[str]) -> None:
        try:
            outcome = await self._servicer.raw(method, message)
        except Undecodable:
            self.seen[method, "undecodable"] += 1
            return
        self.seen[method, outcome.reason] += 1
        check_outcome(outcome)
        if outcome.error is None and method in ("CreateSession", "ForkSession", "RewindSession"):
            sessions.append(outcome.only.session_id)


def calls_of(unit: bytes) -> Iterator[tuple[str, bytes]]:
    """The calls that a unit means. Every string of bytes is a unit: the last message may be cut short."""
    at = 0
    for _ in range(CALLS_AT_MOST):
        if at + 3 > len(unit):
            return
        length = int.from_bytes(unit[at + 1 : at + 3], "big")
        yield METHODS[unit[at] % len(METHODS)], unit[at + 3 : at + 3 + length]
        at += 3 + length


def unit_of(calls: list[tuple[str, bytes]]) -> bytes:
    """The unit that means these calls."""
    return b"".join(
        bytes([METHODS.index(method)]) + len(message).to_bytes(2, "big") + message for method, message in calls
    )


def some_units(rng: random.Random, count: int, *, vocab_size: int) -> Iterator[bytes]:
    """Units to begin with: one with a single message for each method, then random ones, whole or not."""
    for method in METHODS:
        yield unit_of([(method, _plain(method).SerializeToString())])
    messages = Messages(rng, list(NAMES), vocab_size=vocab_size)
    for _ in range(count):
        yield unit_of([messages.next() for _ in range(rng.randint(1, CALLS_AT_MOST))])


def _plain(method: str) -> Message:
    """The shortest request that works."""
    request: Any = REQUESTS[method]()
    names = request.DESCRIPTOR.fields_by_name
    if "session_id" in names:
        request.session_id = NAMES[0]
    if isinstance(request, pb.GenerateRequest):
        request.max_tokens = 3
    if isinstance(request, pb.AppendTokensRequest):
        request.token_ids.extend(HISTORY)
    message: Message = request
    return message


def _with_real_id(method: str, data: bytes, sessions: list[str]) -> bytes:
    """The same message about a session that is there, if it names one by its number."""
    request: Any = REQUESTS[method]()
    if "session_id" not in request.DESCRIPTOR.fields_by_name:
        return data
    try:
        request.ParseFromString(data)
    except DecodeError:
        return data
    if len(request.session_id) != 1 or not request.session_id.isdecimal():
        return data
    request.session_id = sessions[int(request.session_id) % len(sessions)]
    return bytes(request.SerializeToString())
