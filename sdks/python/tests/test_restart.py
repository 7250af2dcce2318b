"""Both clients and a server process that is killed and started again on its port, as an operator or a crash does it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import kakeya
from tests.further import further_test
from tests.processes import Restarted
from tests.tiny_folder import save_tiny_chat_model

Do = Callable[..., Awaitable[Any]]
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
TOKENS = (600, 30)  # of the Generate that a kill has to meet, and of the one that follows
ENDLESS = kakeya.SinkWindow(sink=4, window=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def server(folder: Path) -> Iterator[Restarted]:
    with ExitStack() as stack:
        yield Restarted(stack, "--model", folder, "--kv-bytes=64MiB")


@pytest.fixture
def keeper(folder: Path, tmp_path: Path) -> Iterator[Restarted]:
    """A server that keeps its sessions in a folder."""
    with ExitStack() as stack:
        kept = f"--state-dir={tmp_path / 'state'}"
        yield Restarted(stack, "--model", folder, "--kv-bytes=64MiB", "--determinism=batch-invariant", kept)


@further_test
async def test_a_client_waits_for_a_server_that_is_started_again_and_learns_that_its_session_is_gone(
    server: Restarted, flavour: str, do: Do, read: Any
) -> None:
    client: Any = (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(server.target)
    session, other = await do(client.create_session, ENDLESS, eos_token_ids=[]), await do(client.create_session)
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


async def test_a_stream_goes_on_where_a_server_that_keeps_sessions_was_killed_and_so_does_what_follows(
    keeper: Restarted, flavour: str, do: Do
) -> None:
    """Two kills in the middle of one Generate; then calls of this client, and of another that has only the id."""

    async def conversation(between: Callable[[int], Awaitable[None]]) -> list[Any]:
        said: list[Any] = []
        session = await do(client.create_session, ENDLESS, label="kept")
        for turn in range(2):
            said.append(await do(session.append, PROMPT))
            stream = session.generate(TOKENS[turn], temperature=1.2, seed=turn, logprobs=True)
            tokens = stream.details()
            for _ in range(2):
                await do(lambda tokens=tokens: next(tokens)) if flavour == "threads" else await anext(tokens)
                await between(turn)
            result = await do(stream.result)
            said.append((result.token_ids, result.logprobs, result.stop_reason, result.history_length, result.seed))
        found = await do(client.session, session.id)
        fork = await do(found.fork, label="")
        said.append((await do(fork.append, PROMPT), found.history_length, (await do(found.info)).label))
        said.append((await do(fork.generate(5).result)).token_ids)
        said.append((await do(fork.close), await do(session.close)))
        return said

    async def kill(turn: int) -> None:
        if turn == 0:
            await asyncio.to_thread(keeper.kill)
            await asyncio.to_thread(keeper.start)

    async def nothing(_: int) -> None:
        pass

    client: Any = (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(keeper.target)
    generate, calls = client._generate, 0

    def counted(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        return generate(*given)

    client._generate = counted
    assert await conversation(nothing) == await conversation(kill)
    # Three without a kill, and three more; each kill met a Generate that was running.
    assert calls >= 3 + 3 + 2
    assert (await do(client.server_info)).durability is kakeya.Durability.POWER
    await do(client.close)


async def test_a_server_that_goes_on_from_a_backup_says_so_before_it_generates(
    keeper: Restarted, tmp_path: Path, flavour: str, do: Do
) -> None:
    client: Any = (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(keeper.target)
    session = await do(client.create_session, ENDLESS)
    await do(session.append, PROMPT)
    await asyncio.to_thread(keeper.kill)
    shutil.copytree(tmp_path / "state", tmp_path / "backup")
    await asyncio.to_thread(keeper.start)
    await do(session.append, PROMPT)
    await asyncio.to_thread(keeper.kill)
    shutil.rmtree(tmp_path / "state")
    (tmp_path / "backup").rename(tmp_path / "state")
    await asyncio.to_thread(keeper.start)
    with pytest.raises(kakeya.HistoryBehindClient) as caught:
        await do(session.generate(3).result)
    assert (caught.value.expected, caught.value.actual) == (2 * len(PROMPT), len(PROMPT))
    assert (await do(session.info)).history_length == len(PROMPT)
    await do(session.append, PROMPT)
    assert (await do(session.generate(3).result)).history_length == 2 * len(PROMPT) + 3
    await do(client.close)
