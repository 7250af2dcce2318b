"""Somebody without a key: nothing of what they do is held for long, and an owner's calls go on beside it.

Memory is that of the server's process. Its bounds are far above what it takes now (docs/security.md has the figures)
and far below what each attack took before there were limits: +809 MiB, +340 MiB.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kakeya.v1 import runtime_pb2 as pb
from kakeya.v1 import runtime_pb2_grpc
from tests.hostile import attacks
from tests.hostile.attacks import ATTACKS, CHECK, INFO
from tests.hostile.conftest import MAX_CONNECTIONS, VICTIM, Attacked, Victim, bearer, beside, in_background
from tests.hostile.http2 import END_STREAM, HEADERS, Connection

pytestmark = pytest.mark.hostile

MEMORY_BYTES = 64 * 2**20
SHORT_SECONDS, LONG_SECONDS = 0.5, 10.0
# What its server takes no longer than a moment for; the others take their time, so they are in the long form alone.
SHORT = ("messages that do not end", "2,000 headers a call", "rapid reset", "CONTINUATION without end", "PING flood")


def attack(name: str, seconds: float, attacked: Attacked) -> None:
    with beside(attacked) as victim:
        before = attacked.resident_bytes
        running = in_background(lambda: ATTACKS[name](attacked.target, seconds))
        most = before
        while running.is_alive():
            victim.goes_on(1)
            most = max(most, attacked.resident_bytes)
            running.join(0.05)
        assert most - before < MEMORY_BYTES


@pytest.mark.parametrize("name", SHORT)
def test_an_owner_is_served_beside_an_attack_that_takes_no_memory(name: str, attacked: Attacked) -> None:
    attack(name, SHORT_SECONDS, attacked)


@pytest.mark.long
@pytest.mark.parametrize("name", ATTACKS)
def test_an_owner_is_served_beside_a_long_attack_that_takes_no_memory(name: str, attacked: Attacked) -> None:
    attack(name, LONG_SECONDS, attacked)


def test_a_call_is_refused_on_its_headers(attacked: Attacked) -> None:
    """No byte of the message was sent, and the stream is over."""
    with Connection(attacked.target) as connection:
        stream = connection.begin(INFO)
        ended = (each.flags & END_STREAM for each in connection.frames() if each.stream == stream)
        assert any(ended)


def test_connections_of_somebody_who_is_refused_again_and_again_are_dropped(attacked: Attacked, victim: Victim) -> None:
    with Connection(attacked.target) as connection:
        refused = 0
        while connection.try_send(b"") and refused < 200:
            try:
                stream = connection.begin(INFO)
            except OSError:
                break
            got = any(
                each.kind == HEADERS and each.stream == stream and each.flags & END_STREAM
                for each in connection.frames(5.0)
            )
            if not got:
                break
            refused += 1
        assert refused < 200
    victim.goes_on()


def test_who_has_a_key_may_be_wrong_as_often_as_they_like(attacked: Attacked) -> None:
    """A proxy has calls of many on one connection: one of them without a key must not end the others'."""
    with grpc.insecure_channel(attacked.target, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        stub = runtime_pb2_grpc.RuntimeServiceStub(channel)
        stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=bearer(VICTIM), timeout=60.0)
        states: list[grpc.ChannelConnectivity] = []
        channel.subscribe(states.append)
        for _ in range(100):
            with pytest.raises(grpc.RpcError) as caught:
                stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60.0)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=bearer(VICTIM), timeout=60.0)
        assert grpc.ChannelConnectivity.TRANSIENT_FAILURE not in states


def test_health_answers_while_others_send_it_messages_that_do_not_end(attacked: Attacked, victim: Victim) -> None:
    before = attacked.resident_bytes
    with contextlib.closing(attacks.unfinished(attacked.target, 0.5, CHECK, 64)[1]):
        with grpc.insecure_channel(attacked.target, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
            for _ in range(10):
                stub: Any = health_pb2_grpc.HealthStub(channel)
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=60.0)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert attacked.resident_bytes - before < MEMORY_BYTES


def test_connections_without_a_call_leave_room_for_owners(attacked: Attacked, victim: Victim) -> None:
    """As many as the server takes; it goes on dropping the oldest, so an owner's new connection finds room."""
    held: list[Connection] = []
    try:
        for _ in range(MAX_CONNECTIONS + 20):
            with contextlib.suppress(OSError):
                held.append(Connection(attacked.target))
        with grpc.insecure_channel(attacked.target, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
            stub = runtime_pb2_grpc.RuntimeServiceStub(channel)
            stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=bearer(VICTIM), timeout=60.0, wait_for_ready=True)
        ends = time.monotonic() + 60.0
        while sum(not each.is_closed(0.001) for each in held) > MAX_CONNECTIONS // 2:
            assert time.monotonic() < ends, "nobody was dropped"
    finally:
        for each in held:
            each.close()
