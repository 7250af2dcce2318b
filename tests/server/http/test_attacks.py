"""The HTTP port under attack: a client that holds connections keeps no other out."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from inference_engine.server.auth import Key
from inference_engine.server.preauth_limits import ADDRESS_REFUSALS, FIRST_BYTES, MOST_EXCESS, MOST_REFUSALS
from inference_engine.server.run import ServerHandle
from tests.further import further
from tests.hostile.attacks import KEY
from tests.hostile.conftest import VICTIM
from tests.hostile.http_attacks import ATTACKS, HEALTH, LONG_BODY, NO_HTTP, WRONG_KEY, connect, says
from tests.server.http.client import asking, http_client, openai_client, serving_http, tiny_chat
from tests.tiny import tiny_engine

pytestmark = pytest.mark.hostile

MOST_CONNECTIONS = 2 * (ADDRESS_REFUSALS + MOST_EXCESS)
MAX_CONNECTIONS = 40
HALF_REQUESTS = 200
MOST_THREADS = 70  # of 64 readers, and of what listens


@contextlib.asynccontextmanager
async def served(folder: Path, **settings: Any) -> AsyncIterator[tuple[ServerHandle, str]]:
    """A server that knows the victim's key, and where its HTTP port is."""
    path = folder / "keys"
    path.write_text(f"{Key.of(VICTIM, 'victim').line}\n", encoding="utf-8")
    with contextlib.closing(tiny_chat()) as chat, tiny_engine() as engine:
        async with serving_http(engine, chat, api_key_file=str(path), **settings) as server:
            assert server.http_url is not None
            yield server, server.http_url.removeprefix("http://").removesuffix("/v1")


async def test_an_http_connection_of_a_removed_key_is_closed_when_it_is_refused_too_often(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{Key.of(VICTIM).line}\n{Key.of(KEY).line}\n", encoding="utf-8")
    chat = tiny_chat()
    with tiny_engine() as engine:
        async with serving_http(engine, chat, api_key_file=str(path)) as server, http_client(server) as client:
            client.headers["authorization"] = f"Bearer {KEY}"
            assert (await client.get("/models")).status_code == 200
            path.write_text(f"{Key.of(VICTIM).line}\n", encoding="utf-8")
            answers = [await client.get("/models") for _ in range(MOST_REFUSALS)]
            assert {answer.status_code for answer in answers} == {401}
            assert [answer.headers.get("connection") for answer in answers] == [None] * (MOST_REFUSALS - 1) + ["close"]
    chat.close()


@pytest.mark.parametrize(
    "said", [further(b""), HEALTH[:-2], further(HEALTH)], ids=["nothing", "half a request", "health"]
)
async def test_an_owner_gets_in_beside_as_many_http_connections_as_there_may_be(tmp_path: Path, said: bytes) -> None:
    async with (
        served(tmp_path, max_connections=MAX_CONNECTIONS) as (server, http),
        contextlib.AsyncExitStack() as stack,
    ):
        host, _, port = http.partition(":")
        held = []
        for _ in range(MAX_CONNECTIONS + 10):
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            writer.write(said)
            held.append(reader)
        async with openai_client(server, key=VICTIM) as client:
            assert [model.id async for model in client.models.list()]
        hung_up = 0
        for reader in held:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    with contextlib.suppress(ConnectionError):
                        while await reader.read(1000):
                            pass
                    hung_up += 1
        assert hung_up >= len(held) - MAX_CONNECTIONS // 2


async def connects(target: str, source: str) -> bool:
    if (connection := await connect(target, source)) is None:
        return False
    connection[1].close()
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="the system's filters are Linux's")
@pytest.mark.parametrize(
    ("said", "source"),
    [
        (WRONG_KEY * MOST_REFUSALS, "127.0.4.1"),
        further(NO_HTTP, "127.0.4.2"),
        further(HEALTH * (FIRST_BYTES // len(HEALTH)), "127.0.4.3"),
        (LONG_BODY, "127.0.4.4"),
    ],
    ids=["wrong keys", "not HTTP", "a flood of health", "a long body"],
)
async def test_an_address_that_goes_on_attacking_over_http_is_barred_from_both_ports(
    said: bytes, source: str, tmp_path: Path
) -> None:
    async with served(tmp_path) as (server, http):
        # Each connection is refused at least once, and some at the same time.
        for _ in range(0, MOST_CONNECTIONS, 16):
            if not all(await asyncio.gather(*(says(http, source, said) for _ in range(16)))):
                break
        assert not await connects(http, source)
        assert not await connects(server.target, source)
        assert await connects(http, "127.0.4.99")
        async with openai_client(server, key=VICTIM) as client:
            assert [model.id async for model in client.models.list()]


@pytest.mark.parametrize(
    "name", [name if name in ("requests with a wrong key", "slow headers") else further(name) for name in ATTACKS]
)
async def test_an_owner_is_served_over_http_beside_an_attack_on_that_port(name: str, tmp_path: Path) -> None:
    async with served(tmp_path) as (server, http):
        attack = asyncio.create_task(ATTACKS[name](http, 1.0, f"127.0.5.{1 + list(ATTACKS).index(name)}"))
        async with openai_client(server, key=VICTIM) as client:
            while not attack.done():
                assert [model.id async for model in client.models.list()]
                await asyncio.sleep(0.05)
        assert await attack > 0


async def test_what_an_owner_sends_over_http_bars_no_address(tmp_path: Path) -> None:
    async with (
        served(tmp_path) as (server, _),
        http_client(server, headers={"authorization": f"Bearer {VICTIM}"}) as client,
    ):
        for _ in range(2):  # the first on a connection without a key so far
            long = asking(messages=[{"role": "user", "content": "x" * (4 * FIRST_BYTES)}])
            answer = await client.post("/chat/completions", json=long)
            assert answer.status_code == 400 and "tokens" in answer.text
