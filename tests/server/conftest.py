"""A real server over a real engine on TinyModel, and a witness: after every fault another session still works."""

from collections.abc import AsyncIterator, Iterator

import pytest

from inference_engine.engine import Engine
from inference_engine.server.run import ServerHandle
from tests.server.wire import HISTORY, Client, connected, serving
from tests.tiny_native import served_engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    with served_engine() as engine:
        yield engine


@pytest.fixture
async def server(engine: Engine) -> AsyncIterator[ServerHandle]:
    async with serving(engine, busy_wait_seconds=0.2) as handle:
        yield handle


@pytest.fixture
async def client(server: ServerHandle) -> AsyncIterator[Client]:
    """A client whose server, once the test is over, still gives another session the tokens it gave before."""
    async with connected(server) as client:
        witness = await client.open()
        expected = await client.generate(witness)
        assert len(expected) == 8
        yield client
        assert await client.length(witness) == len(HISTORY) + 8
        assert await client.generate(await client.open()) == expected
