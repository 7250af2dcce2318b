"""A real server on an event loop of its own thread, for tests that call it with a blocking client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from inference_engine.config import ServerConfig
from inference_engine.engine import Engine
from inference_engine.server.run import start_server


@contextmanager
def server_thread(engine: Engine, **settings: Any) -> Iterator[str]:
    """Serve `engine` on a free loopback port; yields the target. The engine stays the caller's to close."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server", daemon=True)
    thread.start()
    try:
        starting = start_server(engine, ServerConfig(bind="127.0.0.1:0", drain_seconds=5, **settings))
        handle = asyncio.run_coroutine_threadsafe(starting, loop).result(timeout=60)
        try:
            yield handle.target
        finally:
            asyncio.run_coroutine_threadsafe(handle.drain_and_stop(), loop).result(timeout=60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=10)
        loop.close()
