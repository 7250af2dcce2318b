"""What one client may take: calls, connections, bytes. All others go on."""

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from inference_engine.engine import Engine
from inference_engine.errors import Overloaded
from inference_engine.server.auth import Key
from inference_engine.server.limits import OWN_DESCRIPTORS, OwnerLimits, allowed_connections
from inference_engine.server.message_limits import MESSAGE_BYTES
from kakeya.v1 import runtime_pb2 as pb
from tests.server.wire import HISTORY, Client, connected, held, read_rest, refused, serving

pytestmark = pytest.mark.hostile

ALICE, BOB = "alice-" + "a" * 32, "bob-" + "b" * 32
# Channels of one process to one target share their connection unless an option forbids it.
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def limits(*, calls: int = 10, calls_per_second: float = 0.0, clock: Clock | None = None) -> OwnerLimits:
    return OwnerLimits(calls=calls, calls_per_second=calls_per_second, clock=clock or Clock())


def is_refused(limits: OwnerLimits, owner: str) -> Overloaded | None:
    try:
        with limits.call(owner):
            return None
    except Overloaded as overloaded:
        return overloaded


def test_an_owner_starts_a_seconds_worth_of_calls_and_then_as_many_as_time_allows() -> None:
    clock = Clock()
    limit = limits(calls_per_second=4.0, clock=clock)
    assert [is_refused(limit, "a") is None for _ in range(5)] == [True] * 4 + [False]
    clock.now += 0.5
    assert [is_refused(limit, "a") is None for _ in range(3)] == [True, True, False]
    clock.now += 60.0
    assert [is_refused(limit, "a") is None for _ in range(5)] == [True] * 4 + [False]


def test_a_refusal_says_after_how_long_the_next_call_is_taken() -> None:
    clock = Clock()
    limit = limits(calls_per_second=0.5, clock=clock)
    assert is_refused(limit, "a") is None
    refusal = is_refused(limit, "a")
    assert refusal is not None and refusal.retry_after_seconds == 2.0
    clock.now += refusal.retry_after_seconds
    assert is_refused(limit, "a") is None


def test_a_call_that_ended_however_makes_room_for_another() -> None:
    limit = limits(calls=2)
    with limit.call("a"):
        with contextlib.suppress(ZeroDivisionError), limit.call("a"):
            assert is_refused(limit, "a") is not None
            _ = 1 / 0
        assert is_refused(limit, "a") is None


@asynccontextmanager
async def streaming(client: Client) -> AsyncIterator[list[pb.GenerateResponse]]:
    """A Generate that has started; at the end it must end well."""
    session_id = await client.open()
    stream = client.stream(pb.GenerateRequest(session_id=session_id, max_tokens=4, progress=True))
    frames = [await stream.read()]
    yield frames
    frames += await read_rest(stream)
    assert frames[-1].done.generated_token_count == 4


async def test_calls_beyond_an_owners_share_are_refused_and_other_owners_go_on(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{Key.of(ALICE, 'alice').line}\n{Key.of(BOB, 'bob').line}\n", encoding="utf-8")
    async with serving(engine, api_key_file=str(path), max_owner_calls=1) as handle:
        as_alice, as_bob = ([("authorization", f"Bearer {key}")] for key in (ALICE, BOB))
        async with (
            connected(handle, metadata=as_alice, options=OWN_CONNECTION) as alice,
            connected(handle, metadata=as_alice, options=OWN_CONNECTION) as alice_again,
            connected(handle, metadata=as_bob, options=OWN_CONNECTION) as bob,
        ):
            await bob.open()
            with held(engine) as release:
                async with streaming(alice):
                    details = await refused(alice_again.open())
                    await bob.open()
                    release()
            await alice_again.open()
    assert details.reason == "RESOURCE_EXHAUSTED OVERLOADED"
    assert details.retry_info is not None
    assert details.error_info is not None and details.error_info.metadata["max_owner_calls"] == "1"


async def test_a_connection_too_many_is_not_taken_and_a_place_that_is_free_again_is(engine: Engine) -> None:
    async with serving(engine, max_connections=1) as handle:
        async with connected(handle, options=OWN_CONNECTION) as first:
            session_id = await first.open()
            async with connected(handle, options=OWN_CONNECTION) as second:
                details = await refused(second.length(session_id))
                assert details.reason == "UNAVAILABLE"
            assert await first.length(session_id) == len(HISTORY)
        async with connected(handle, options=(*OWN_CONNECTION, ("grpc.initial_reconnect_backoff_ms", 100))) as third:
            request = pb.GetSessionInfoRequest(session_id=session_id)
            info = await third.stub.GetSessionInfo(request, wait_for_ready=True, timeout=60.0)
            assert info.history_length == len(HISTORY)


async def test_a_connection_past_its_age_lets_its_calls_end_and_another_follows(engine: Engine) -> None:
    async with serving(engine, max_connection_age_seconds=0.2) as handle, connected(handle) as client:
        with held(engine) as release:
            async with streaming(client):
                state = client.channel.get_state()
                while state is grpc.ChannelConnectivity.READY:
                    await client.channel.wait_for_state_change(state)
                    state = client.channel.get_state()
                release()
        assert len(await client.generate(await client.open())) == 8


async def test_headers_are_taken_up_to_a_limit_of_bytes_and_32_more_for_each(engine: Engine) -> None:
    async with serving(engine, max_header_bytes=4096) as handle, connected(handle) as client:
        call = client.channel.unary_unary("/kakeya.v1.RuntimeService/GetServerInfo")
        assert await call(b"", metadata=[("x-large", "x" * 3 * 1024)], timeout=30.0)
        assert await call(b"", metadata=[(f"x{number}", "") for number in range(80)], timeout=30.0)
        for too_much in ([("x-large", "x" * 5 * 1024)], [(f"x{number}", "") for number in range(140)]):
            details = await refused(call(b"", metadata=too_much, timeout=30.0))
            assert details.reason == "RESOURCE_EXHAUSTED"


def padded(size: int) -> bytes:
    """That many bytes: an unknown field, which every reader has to skip, its tag, its length, and the rest."""
    padding = size - 5
    length = bytes((padding & 0x7F | 0x80, padding >> 7 & 0x7F | 0x80, padding >> 14))
    return b"\xfa\x7f" + length + bytes(padding)


@pytest.mark.parametrize("method", ["CreateSession", "GetServerInfo"])
async def test_a_message_of_exactly_the_limit_is_taken_and_one_byte_more_is_not(client: Client, method: str) -> None:
    message = padded(MESSAGE_BYTES)
    assert len(message) == MESSAGE_BYTES
    assert await client.raw(method, message)
    details = await refused(client.raw(method, message + b"\0"))
    assert details.reason == "RESOURCE_EXHAUSTED"
    assert details.text == f"the message has {MESSAGE_BYTES + 1} bytes; this method takes {MESSAGE_BYTES} at most"


async def test_resets_by_the_thousand_leave_the_server_as_it_was(engine: Engine, client: Client) -> None:
    session_id = await client.open()
    for _ in range(20):
        calls = [client.stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=session_id)) for _ in range(100)]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    assert await client.length(session_id) == len(HISTORY)


@pytest.mark.parametrize(
    ("descriptors", "wanted", "allowed", "warns"),
    [
        (resource.RLIM_INFINITY, 0, 10_000, False),
        (100_000, 0, 10_000, False),
        (100_000, 50_000, 50_000, False),
        (1024, 0, 1024 - OWN_DESCRIPTORS, False),
        (1024, 500, 500, False),
        (1024, 2_000, 1024 - OWN_DESCRIPTORS, True),
        (300, 0, 300 - OWN_DESCRIPTORS, True),
        (100, 10, 1, True),
    ],
)
def test_connections_are_no_more_than_the_system_has_descriptors_for(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    descriptors: int,
    wanted: int,
    allowed: int,
    warns: bool,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (descriptors, descriptors))
    assert allowed_connections(wanted) == allowed
    assert [record.levelname for record in caplog.records] == (["WARNING"] if warns else [])
    if warns:
        assert f"may open {descriptors} files" in caplog.text
        assert f"ulimit -n {(wanted or 10_000) + OWN_DESCRIPTORS}" in caplog.text
