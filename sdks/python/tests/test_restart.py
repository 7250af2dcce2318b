"""Both clients and a server process that is killed and started again on its port, as an operator or a crash does it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import kakeya
from tests.processes import Restarted
from tests.tiny_folder import save_tiny_chat_model

Do = Callable[..., Awaitable[Any]]
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
ENDLESS = kakeya.SinkWindow(sink=4, window=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def server(folder: Path) -> Iterator[Restarted]:
    with ExitStack() as stack:
        yield Restarted(stack, "--model", folder, "--kv-bytes=64MiB")


async def test_a_client_waits_for_a_server_that_is_started_again_and_learns_that_its_session_is_gone(
    server: Restarted, flavour: str, do: Do, read: Any
) -> None:
    client: Any = (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(server.target)
    session, other = await do(client.create_session, ENDLESS), await do(client.create_session)
    await do(session.append, PROMPT)
    stream = session.generate(30_000)
    tokens = stream.details()
    first = await (asyncio.to_thread(next, tokens) if flavour == "threads" else anext(tokens))
    assert first.position == len(PROMPT)
    await asyncio.to_thread(server.kill)
    calls = [
        asyncio.ensure_future(do(call))  # in the middle of a stream, and between calls
        for call in (stream.result, client.server_info, lambda: other.append(PROMPT), other.info)
    ]
    await asyncio.to_thread(server.start)
    cut, info, append, length = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(info, kakeya.ServerInfo)
    for gone in (cut, append, length):
        assert isinstance(gone, kakeya.SessionNotFound), gone
    assert len(stream.token_ids) > 0
    with pytest.raises(kakeya.SessionNotFound):
        await do(session.close)
    await do(client.close)
