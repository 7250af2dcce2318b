"""Bytes against the servicer, many calls at a time: whatever comes is answered, or refused with a typed error."""

from __future__ import annotations

import asyncio
import collections
import random

import grpc
import torch

from inference_engine.engine import Engine
from inference_engine.server.status import code_of
from kakeya.v1 import runtime_pb2 as pb
from tests.facade import store_of
from tests.load.messages import Messages
from tests.load.scripted import scripted_engine
from tests.load.servicer import Outcome, Servicer, Undecodable

SESSIONS = 24
AT_ONCE = 8
CANCELLED_SHARE = 0.1
DEADLINE_SHARE = 0.02
WITNESS = [3, 14, 15, 92, 65, 35, 89, 79]
# Never in the text of an error: what would reveal internals.
UNTOLD = ("Traceback", "site-packages", "inference_engine", "object at 0x", "tensor(", "Tensor")


def fuzzed_engine() -> Engine:
    """Small limits, so that every one of them is met."""
    return scripted_engine(
        dtype=torch.float32,  # so that every strategy is met
        max_sessions=SESSIONS,
        session_evictable_seconds=0.0,
        max_generate_tokens=8,
        max_append_tokens=36,
        max_queued=6,
    )


def check_outcome(outcome: Outcome) -> None:
    """An error is none of the server's own, and reveals no internals."""
    if outcome.error is not None:
        assert code_of(outcome.error) is not grpc.StatusCode.INTERNAL, outcome.error
        assert not any(word in outcome.error.message for word in UNTOLD), outcome.error.message


class Fuzzing:
    """Sends messages and counts how they ended, by method and reason."""

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self._engine, self._rng = engine, rng
        self._servicer = Servicer(engine, busy_wait_seconds=0.005)
        self._session_ids: list[str] = []
        self._messages = Messages(rng, self._session_ids, vocab_size=engine.info().facts.vocab_size)
        self._expected: list[int] = []
        self.seen: collections.Counter[tuple[str, str]] = collections.Counter()

    @property
    def count(self) -> int:
        return self.seen.total()

    async def send(self, count: int) -> None:
        """`count` messages, rounded up, AT_ONCE at a time. Raises what no client may ever be able to cause."""
        self._expected = self._expected or await self._witness()
        for _ in range(-(-count // AT_ONCE)):
            await asyncio.gather(*(self._one() for _ in range(AT_ONCE)))

    async def _one(self) -> None:
        method, data = self._messages.next()
        seconds = 0.001 if self._rng.random() < DEADLINE_SHARE else None
        task = asyncio.ensure_future(self._servicer.raw(method, data, seconds=seconds))
        if self._rng.random() < CANCELLED_SHARE:
            await asyncio.sleep(0)
            task.cancel()
        try:
            outcome = await task
        except Undecodable:
            self.seen[method, "undecodable"] += 1
            return
        except asyncio.CancelledError:
            self.seen[method, "cancelled"] += 1
            return
        self.seen[method, outcome.reason] += 1
        check_outcome(outcome)
        if outcome.error is None and method in ("CreateSession", "ForkSession", "RewindSession"):
            self._session_ids.append(outcome.only.session_id)
            # A few that are gone stay, so that they are called, too.
            del self._session_ids[: -(SESSIONS + 4)]

    async def check(self) -> None:
        """The engine serves as before, and when all sessions are closed nothing is reserved. It drains."""
        assert self._engine.is_alive()
        self._close_all()
        assert await self._witness() == self._expected
        self._close_all()
        # Draining waits for what runs, and takes no new calls: this is the end of the engine's part.
        await asyncio.to_thread(self._engine.drain, 30.0)
        assert self._engine.info().kv_reserved_bytes == 0

    async def _witness(self) -> list[int]:
        """What a session like any other is given."""
        opened = await self._servicer.call(pb.CreateSessionRequest())
        session_id = opened.only.session_id
        await self._servicer.call(pb.AppendTokensRequest(session_id=session_id, token_ids=WITNESS))
        return (await self._servicer.call(pb.GenerateRequest(session_id=session_id, max_tokens=6))).tokens

    def _close_all(self) -> None:
        for session in store_of(self._engine).sessions():
            self._engine.close_session(session.session_id, owner=session.owner)
        self._session_ids.clear()
