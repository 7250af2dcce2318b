"""The Python SDK plays the scenarios as they are written, and both of its clients see the same."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import kakeya
from tests.conformance.python_runner import RETRY, Player, in_loop
from tests.conformance.scenarios import SCENARIOS, SETTINGS
from tests.constraints import TOKENS
from tests.newer_strategy import NewerWindow, registered
from tests.server.wire import serving
from tests.tiny_native import served_engine


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return await asyncio.to_thread(function, *args, **kwargs)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario["name"])
async def test_both_clients_play_a_scenario_and_see_the_same(scenario: dict[str, Any]) -> None:
    with registered(NewerWindow), served_engine(read_tokens=lambda: TOKENS, **SETTINGS["engine"]) as engine:
        async with serving(engine, **SETTINGS["server"]) as server:
            async with kakeya.AsyncClient(server.target, retry=RETRY) as client:
                awaited = await Player(client, in_loop).play(scenario["steps"])
            with kakeya.Client(server.target, retry=RETRY) as blocking:
                waited = await Player(blocking, in_thread).play(scenario["steps"])
    assert awaited == waited


async def test_a_step_that_sees_something_else_fails() -> None:
    with served_engine() as engine:
        async with serving(engine) as server, kakeya.AsyncClient(server.target) as client:
            step = {"do": "create", "session": "s", "expect": {"limit_tokens": 1}}
            with pytest.raises(AssertionError, match=r"seen.limit_tokens is 512, expected 1"):
                await Player(client, in_loop).play([step])
