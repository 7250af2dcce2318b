"""Constraints over the wire: refused in order, compiled beside the loop, and replayed."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from inference_engine.decode.constraints import Constraints
from kakeya.v1 import runtime_pb2 as pb
from tests.constraints import END, TOKENS
from tests.server.wire import connected, refused, serving
from tests.tiny_native import served_engine

SCHEMA = pb.Constraint(json_schema='{"type": "array", "items": {"const": "ann"}, "minItems": 9, "maxItems": 9}')
REQUEST = bytes(16)


def request(session_id: str, constraint: pb.Constraint = SCHEMA, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(session_id=session_id, max_tokens=80, constraint=constraint, **fields)


def ids_of(frames: list[Any]) -> list[int]:
    return [frame.token_id for frame in frames if frame.HasField("token_id")]


async def test_a_constraint_is_refused_after_an_unknown_session_and_changes_nothing() -> None:
    with served_engine(read_tokens=lambda: TOKENS) as engine:
        async with serving(engine) as handle, connected(handle) as client:
            session = await client.open(eos_token_ids=[END])
            for wrong in (pb.Constraint(), pb.Constraint(regex="("), pb.Constraint(regex="a" * 2**18 + "a")):
                details = await refused(client.call("Generate", request("none", wrong)))
                assert details.reason == "NOT_FOUND SESSION_NOT_FOUND"
                details = await refused(client.call("Generate", request(session, wrong)))
                assert details.reason == "INVALID_ARGUMENT INVALID_CONSTRAINT"
                assert details.fields == ["constraint"]
            assert len(await client.generate(session)) == 8


async def test_other_calls_are_answered_while_a_constraint_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    may, compiled = threading.Event(), Constraints._compiled

    def late(constraints: Constraints, constraint: Any) -> Any:
        assert may.wait(30)
        return compiled(constraints, constraint)

    monkeypatch.setattr(Constraints, "_compiled", late)
    with served_engine(read_tokens=lambda: TOKENS) as engine:
        async with serving(engine) as handle, connected(handle) as client:
            session, other = await client.open(eos_token_ids=[END]), await client.open()
            constrained = asyncio.ensure_future(client.call("Generate", request(session)))
            left = client.stream(request(session, request_id=REQUEST))
            await asyncio.sleep(0.1)
            left.cancel()  # ends nothing of the compilation that others wait for
            assert len(await client.generate(other)) == 8
            assert not constrained.done()
            may.set()
            done = (await constrained)[-1].done
    assert done.stop_reason == pb.GenerateDone.STOP_REASON_CONSTRAINT and done.fits_constraint


async def test_a_constrained_generate_is_replayed_and_another_constraint_is_another_call() -> None:
    with served_engine(read_tokens=lambda: TOKENS) as engine:
        async with serving(engine) as handle, connected(handle) as client:
            session = await client.open(eos_token_ids=[END])
            first = await client.call("Generate", request(session, request_id=REQUEST))
            again = await client.call("Generate", request(session, request_id=REQUEST))
            assert ids_of(first) == ids_of(again) and again[-1].done.replayed and again[-1].done.fits_constraint
            reused = request(session, pb.Constraint(regex="ann"), request_id=REQUEST)
            assert (await refused(client.call("Generate", reused))).reason == "INVALID_ARGUMENT REQUEST_ID_REUSED"
