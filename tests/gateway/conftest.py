"""A gateway in front of a real server on TinyModel, and clients of other people's making for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
import uvicorn

from inference_engine.engine import Engine
from inference_engine.server.address import names_this_machine
from kakeya import AsyncClient, Client
from kakeya_gateway.app import Gateway, create_app
from kakeya_gateway.texts import Texts
from tests.server_thread import server_thread
from tests.tiny_folder import END, tiny_tokenizer
from tests.tiny_native import served_engine

ENDS = (tiny_tokenizer().convert_tokens_to_ids(END),)


@contextmanager
def gateway_for(
    target: str, *, tokenizer: Any = None, tool_format: str | None = None, timeout: float = 30.0, **settings: Any
) -> Iterator[str]:
    """Yields its base URL, without the API's path."""
    texts = Texts(tokenizer or tiny_tokenizer(), tool_format=tool_format)
    given = {"name": "gateway", "most": 8, "idle_seconds": 60.0, **settings}
    gateway = Gateway(lambda key: AsyncClient(target, api_key=key or None, timeout=timeout), texts, **given)
    app = create_app(gateway, is_own_host=names_this_machine)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=30)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Where every entry stays, so that nothing but what is new is computed."""
    engine = served_engine(windowed=False, end_ids=ENDS)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def target(engine: Engine) -> Iterator[str]:
    with server_thread(engine) as target:
        yield target


@pytest.fixture
def runtime(target: str) -> Iterator[Client]:
    with Client(target) as client:
        yield client
        for each in client.sessions():
            client.session(each.id).close()


@pytest.fixture
def url(target: str, runtime: Client) -> Iterator[str]:
    with gateway_for(target) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client
