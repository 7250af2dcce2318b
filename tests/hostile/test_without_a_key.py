"""A client without a key: nothing of what it does is held for long, and an owner's calls go on beside it."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inference_engine.config import EngineConfig, ServerConfig
from inference_engine.server.auth import Key
from kakeya.v1 import runtime_pb2 as pb
from kakeya.v1 import runtime_pb2_grpc
from laboratory.load.scripted_server import scripted_child
from tests.further import further
from tests.hostile import attacks
from tests.hostile.attacks import CHECK, INFO, KEY, WITHOUT_KEY
from tests.hostile.conftest import (
    MAX_CONNECTIONS,
    MEMORY_BYTES,
    VICTIM,
    Attacked,
    Victim,
    attack,
    bearer,
    beside,
    write_keys,
)
from tests.hostile.http2 import (
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    RST_STREAM,
    Connection,
    call_headers,
    frame,
    message,
)

pytestmark = pytest.mark.hostile

ROOT = Path(__file__).resolve().parents[2]
SHORT_SECONDS, LONG_SECONDS = 0.5, 10.0
# What its server takes no longer than a moment for; the others take their time, so they are in the long form alone.
SHORT = ("messages that do not end", "2,000 headers a call", "rapid reset", "CONTINUATION without end", "PING flood")


@pytest.mark.parametrize("name", SHORT)
def test_an_owner_is_served_beside_an_attack_that_takes_no_memory(name: str, attacked: Attacked) -> None:
    attack(name, SHORT_SECONDS, attacked)


@pytest.mark.long
@pytest.mark.parametrize("name", WITHOUT_KEY)
def test_an_owner_is_served_beside_a_long_attack_that_takes_no_memory(name: str, attacked: Attacked) -> None:
    attack(name, LONG_SECONDS, attacked)


def test_a_client_that_is_refused_too_often_waits_and_is_dropped_when_too_many_wait(
    attacked: Attacked, victim: Victim
) -> None:
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(Connection(attacked.target)) for _ in range(4)]
        ends = time.monotonic() + 60.0
        while not any(each.is_closed() for each in connections):
            assert time.monotonic() < ends, "no connection was dropped"
            for each in connections:
                with contextlib.suppress(OSError):
                    for _ in range(250):
                        each.begin(INFO)
            victim.goes_on(1)


def test_a_client_whose_key_was_removed_and_that_cancels_refused_calls_is_dropped(tmp_path: Path) -> None:
    keys = write_keys(tmp_path)
    config = ServerConfig(bind="127.0.0.1:0", api_key_file=keys)
    with scripted_child(EngineConfig(kv_bytes=2**26), config, step_seconds=0.001) as child:
        server = Attacked(child.wait_ready(), child.pid)
        with beside(server) as victim, Connection(server.target) as connection:
            first = connection.begin(INFO, [(b"authorization", f"Bearer {KEY}".encode())])
            connection.send(frame(DATA, END_STREAM, first, message(b"")))
            answered = (each.kind for each in connection.frames() if each.stream == first)
            assert DATA in answered
            # Replaced in one piece: the server must not read half of it.
            (tmp_path / "keys.new").write_text(f"{Key.of(VICTIM, 'victim').line}\n", encoding="utf-8")
            (tmp_path / "keys.new").replace(keys)
            cancel_until_dropped(connection, first + 2)
            victim.goes_on()


def cancel_until_dropped(connection: Connection, first_stream: int = 1) -> None:
    """Calls without a key, each cancelled as soon as it is made."""
    reset = struct.pack(">I", CANCEL)
    ends = time.monotonic() + 60.0
    for stream in itertools.count(first_stream, 2):
        call = frame(HEADERS, END_HEADERS, stream, call_headers(INFO)) + frame(RST_STREAM, 0, stream, reset)
        if not connection.try_send(call) or connection.is_closed(0.005):
            break
        assert time.monotonic() < ends, "it goes on"


@pytest.mark.skipif(
    sys.platform != "linux", reason="the system's filters are Linux's, and so are more loopback addresses"
)
@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("rapid reset", "127.0.2.1"),
        further("HPACK bomb", "127.0.2.2"),
        further("calls with a wrong key", "127.0.2.3"),
    ],
)
def test_an_address_that_goes_on_attacking_gets_no_new_connection_and_owners_do(
    name: str, address: str, attacked: Attacked, victim: Victim
) -> None:
    attacker = subprocess.Popen(
        (sys.executable, "-m", "tests.hostile.attacks", attacked.target, name, "30", address), cwd=ROOT
    )
    try:
        ends = time.monotonic() + 60.0
        while connects(attacked.target, address):
            assert time.monotonic() < ends, "it is not barred"
            victim.goes_on(1)
    finally:
        attacker.kill()
        attacker.wait()
    assert connects(attacked.target, "127.0.2.99")
    victim.goes_on()


def connects(target: str, source: str) -> bool:
    host, _, port = target.rpartition(":")
    with socket.socket() as connection:
        connection.settimeout(0.5)
        connection.bind((source, 0))
        try:
            connection.connect((host, int(port)))
        except TimeoutError:
            return False
        return True


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
            assert time.monotonic() < ends, "no connection was dropped"
    finally:
        for each in held:
            each.close()
