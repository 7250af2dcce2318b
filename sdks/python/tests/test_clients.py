"""A client and its server: what it learns of it, a port without a server, and the event loop it belongs to."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

import kakeya
from kakeya._retry import FIRST_CONTACT_SECONDS

Do = Callable[..., Awaitable[Any]]
ONCE = kakeya.RetryPolicy(attempts=1)


async def test_server_info_has_the_model_and_the_limits(client: Any, do: Do) -> None:
    info = await do(client.server_info)
    assert (info.model_id, info.vocab_size, info.trained_positions) == ("tiny", 128, 512)
    assert {"full", "sink_window", "layer_window"} <= set(info.strategies)
    assert info.default_strategy == kakeya.Full()
    assert info.max_append_tokens == 40


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
async def test_a_server_that_was_never_there_is_an_error_soon_that_says_where_and_what_to_do(
    do: Do, flavour: str, unused_port: int, host: str
) -> None:
    target = f"{host}:{unused_port}"
    client = (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(target, timeout=None)
    with pytest.raises(kakeya.ConnectionFailed, match="check host and port, and that a server runs there") as caught:
        await asyncio.wait_for(do(client.create_session), FIRST_CONTACT_SECONDS + 20)
    assert target in caught.value.message
    assert isinstance(caught.value, ConnectionError)
    await do(client.close)


@pytest.fixture
def proxied(unused_port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address that the environment names as proxy, where there is none."""
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{unused_port}")
    return f"127.0.0.1:{unused_port}"


@pytest.mark.parametrize("host", ["127.0.0.1", "LocalHost.", "127.1", "0.0.0.0", "[::ffff:127.0.0.1]"])
async def test_calls_to_this_machine_do_not_go_through_a_proxy(
    server_target: str, do: Do, flavour: str, host: str, proxied: str
) -> None:
    target = f"{host}:{server_target.rpartition(':')[2]}"
    client = (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(target, api_key="a" * 32)
    assert (await do(client.server_info)).model_id == "tiny"
    await do(client.close)


async def test_a_call_that_a_proxy_lost_says_so_in_a_traceback_without_grpc(do: Do, flavour: str, proxied: str) -> None:
    client = (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)("10.9.8.7:1", retry=ONCE)
    with pytest.raises(kakeya.ConnectionFailed) as caught:
        await do(client.server_info)
    error = caught.value
    assert f"the call goes through the proxy {proxied}, which the environment names in grpc_proxy" in error.message
    assert "check host and port" not in error.message
    shown = "".join(traceback.format_exception(error))
    assert "RpcError" not in shown and "exception" not in shown
    assert isinstance(error.__context__, grpc.RpcError)
    await do(client.close)


def test_an_asyncio_client_stays_with_its_loop(server_target: str) -> None:
    client = kakeya.AsyncClient(server_target)

    async def first() -> None:
        await client.server_info()

    asyncio.run(first())
    with pytest.raises(kakeya.StateError, match="another event loop"):
        asyncio.run(first())
