"""Both clients through a proxy before two servers that hashes `kakeya-route`: a session stays where it is."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import pytest

import kakeya
from inference_engine.config import ServerConfig
from tests.router import Router, open_router

Do = Callable[..., Awaitable[Any]]
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
QUICK = kakeya.RetryPolicy(first_delay_seconds=0.02)
SESSIONS = 12  # that all go to one of two servers happens in one run of 2048
LOST = ["CreateSession", "AppendTokens", "Generate", "ForkSession", "CloseSession"]


@pytest.fixture
async def router(run_server: Callable[..., Any]) -> AsyncIterator[Router]:
    with ExitStack() as stack:
        config = ServerConfig(bind="127.0.0.1:0", drain_seconds=1.0)
        servers = [await asyncio.to_thread(stack.enter_context, run_server(config)) for _ in range(2)]
        async with open_router(*servers) as router:
            yield router


async def test_every_call_of_a_session_and_of_its_forks_arrives_at_one_server(
    router: Router, flavour: str, do: Do
) -> None:
    client: Any = (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(router.target, retry=QUICK)
    results = []
    for _ in range(SESSIONS):
        router.losses.extend(LOST)
        session = await do(client.create_session)
        await do(session.append, PROMPT)
        answer = await do(session.generate(5).result)
        fork = await do(session.fork)
        await do(fork.append, PROMPT)
        results.append((answer.token_ids, (await do(fork.generate(5).result)).token_ids))
        assert (await do(session.info)).history_length == 13
        assert await do(fork.close) == 26
        assert await do(session.close) == 13
    assert len(set(results)) == 1
    servers = defaultdict(set)
    for call in router.passed:
        assert call.method == "GetServerInfo" or re.fullmatch("[0-9a-f]{16}", call.route or "")
        servers[call.route].add(call.server)
    servers.pop(None, None)
    assert len(servers) == SESSIONS
    assert all(len(each) == 1 for each in servers.values())
    assert {0, 1} == {server for each in servers.values() for server in each}
    for method in LOST:
        assert sum(call.method == method for call in router.passed) > SESSIONS
    await do(client.close)


async def test_a_session_whose_server_is_away_is_made_by_another_route(router: Router, flavour: str, do: Do) -> None:
    """The first repeat keeps the route: the answer may be there."""
    client: Any = (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(router.target, retry=QUICK)
    await do(client.server_info)
    router.losses.extend(["CreateSession"] * 4)
    session = await do(client.create_session)
    routes = [call.route for call in router.passed if call.method == "CreateSession"]
    assert (len(routes), len(set(routes)), routes[0]) == (5, 4, routes[1])
    assert (await do(session.info)).history_length == 0
    assert session.id.startswith(f"{router.passed[-1].route}.")
    assert router.passed[-1].route in routes
    await do(client.close)
