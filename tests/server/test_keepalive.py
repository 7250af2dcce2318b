"""A long prefill is a silent call: neither side's pings may end it."""

import asyncio
import time

import pytest

from inference_engine.engine import Engine
from inference_engine.server.run import LEAST_PING_MS
from kakeya.v1 import runtime_pb2 as pb
from tests.further import further_test
from tests.hostile.http2 import ACK, GOAWAY, PING, Connection, frame
from tests.server.wire import connected, held, read_rest, serving

SILENCE_SECONDS = 75.0
# gRPC ends a connection with the third ping that comes too soon after the last.
PINGS = 5
ENHANCE_YOUR_CALM = 11
# What a ping may gain on the one before by waiting less on its way.
MARGIN_SECONDS = 0.3
# Common settings of clients; the fastest is the one that servers with grpc's defaults cut off.
CLIENTS = (
    (),
    (("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 5_000)),
    (
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ),
)


@pytest.mark.long
@pytest.mark.parametrize("options", CLIENTS, ids=["no pings", "every 20 s", "every 10 s"])
async def test_a_generate_that_is_silent_for_more_than_a_minute_goes_on(
    engine: Engine, options: tuple[tuple[str, int], ...]
) -> None:
    async with serving(engine) as handle, connected(handle, options=options) as client:
        session_id = await client.open()
        with held(engine) as release:
            stream = client.stream(pb.GenerateRequest(session_id=session_id, max_tokens=4), timeout=300.0)
            reading = asyncio.ensure_future(read_rest(stream))
            done, _ = await asyncio.wait({reading}, timeout=SILENCE_SECONDS)
            assert not done
            release()
        assert len(await reading) == 5


def pinged(target: str, pause_seconds: float) -> list[int]:
    """Ping on a connection without a call, and again when it is answered. The reasons of the GOAWAYs that come."""
    reasons = []
    with Connection(target) as connection:
        frames = connection.frames()
        for _ in range(PINGS):
            time.sleep(pause_seconds)
            if not connection.try_send(frame(PING, 0, 0, bytes(8))):
                break
            for each in frames:
                if each.kind == GOAWAY:
                    reasons.append(int.from_bytes(each.payload[4:8]))
                if each.kind == PING and each.flags & ACK:
                    break
    return reasons


@further_test
async def test_a_proxy_may_ping_as_often_as_documented(engine: Engine) -> None:
    async with serving(engine) as handle:
        pause = LEAST_PING_MS / 1000 + MARGIN_SECONDS
        assert await asyncio.to_thread(pinged, handle.target, pause) == []


async def test_pings_without_a_pause_end_their_connection(engine: Engine) -> None:
    async with serving(engine) as handle:
        assert ENHANCE_YOUR_CALM in await asyncio.to_thread(pinged, handle.target, 0.0)
