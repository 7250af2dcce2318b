"""The HTTP door of a server, the chat behind it, and what tests wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import openai
import pytest

from inference_engine.engine import Engine
from inference_engine.server.http import client_connection as connection
from inference_engine.server.http.chat_text import ChatText
from inference_engine.server.run import ServerHandle
from tests.server.http.client import (
    openai_client,
    serving_http,
    tiny_chat,
)


@pytest.fixture
def chat() -> Iterator[ChatText]:
    chat = tiny_chat()
    yield chat
    chat.close()


@pytest.fixture
async def server(engine: Engine, chat: ChatText) -> AsyncIterator[ServerHandle]:
    async with serving_http(engine, chat) as handle:
        yield handle


@pytest.fixture
async def client(server: ServerHandle) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(server) as client:
        yield client


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine, str], asyncio.Event]:
    """An event that is set once the engine's method has been called."""

    def called(engine: Engine, method: str) -> asyncio.Event:
        loop, event, original = asyncio.get_running_loop(), asyncio.Event(), getattr(engine, method)

        def wrapper(*arguments: Any, **named: Any) -> Any:
            loop.call_soon_threadsafe(event.set)
            return original(*arguments, **named)

        monkeypatch.setattr(engine, method, wrapper)
        return event

    return called


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], asyncio.Event]:
    """An event that is set once a connection has read just these bytes."""

    def received(awaited: bytes) -> asyncio.Event:
        receive, is_received = connection.Connection.data_received, asyncio.Event()

        def data_received(of: connection.Connection, data: bytes) -> None:
            receive(of, data)
            if data == awaited:
                is_received.set()

        monkeypatch.setattr(connection.Connection, "data_received", data_received)
        return is_received

    return received
