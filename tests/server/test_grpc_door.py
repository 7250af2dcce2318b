"""How connections of the gRPC port are dropped: those found among this process's own sockets."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator

import pytest

from inference_engine.server import grpc_listener as grpc_door
from inference_engine.server.auth import KeyRing
from inference_engine.server.grpc_listener import GrpcDoor
from inference_engine.server.ip_bans import Bars
from inference_engine.server.preauth_limits import MOST_REFUSALS, UnauthenticatedPeers

pytestmark = pytest.mark.hostile


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A client's end, and the server's."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as served,
    ):
        client.settimeout(30.0)
        yield client, served


async def cancelled(door: GrpcDoor, peer: str) -> None:
    """A call without a key that its client cancels while it waits for the refusal."""
    call = asyncio.create_task(door.refused(peer))
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


@pytest.mark.parametrize("is_quick", [True, False], ids=["sockets are found at once", "at the next scan"])
async def test_a_client_that_cancels_a_refusal_counts_as_dropped_once_its_connection_is_closed(
    connection: tuple[socket.socket, socket.socket], is_quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of one that is still connected wait for their refusals, and so does it."""
    client, served = connection
    monkeypatch.setattr(grpc_door, "QUICK_SECONDS", 30.0 if is_quick else -1.0)
    dropped: list[int] = []
    keys = KeyRing()
    peers = UnauthenticatedPeers(keys, most=100, most_of_address=0, clock=time.monotonic)
    door = GrpcDoor(peers, dropped.append, time.monotonic, Bars(keys, time.monotonic, lambda: None))
    host, port = client.getsockname()
    peer = f"ipv4:{host}:{port}"
    for _ in range(MOST_REFUSALS - 1):
        await door.refused(peer)
    door.follow(served.getsockname()[1])
    await asyncio.sleep(0.1)  # the scan at the beginning
    if not is_quick:
        door._files = {}  # as if the connection were newer than that
    await cancelled(door, peer)

    assert door.has_dropped(peer) == (dropped == [1]) == is_quick
    assert await asyncio.to_thread(client.recv, 1) == b""
    assert door.has_dropped(peer)
    assert dropped == [1]
    door.stop()
