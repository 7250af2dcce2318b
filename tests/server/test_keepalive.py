"""A long prefill is a silent call: neither side's pings may end it."""

import asyncio

import pytest

from inference_engine.engine import Engine
from kakeya.v1 import runtime_pb2 as pb
from tests.server.wire import connected, held, read_rest, serving

SILENCE_SECONDS = 75.0
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
