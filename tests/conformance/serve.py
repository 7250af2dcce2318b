"""Servers on TinyModel for tests that are not written in Python: each asked for over a control socket.

usage: serve.py

Prints the port of the socket, on loopback, and ends with its standard input. A connection asks with one line of JSON
and is answered with one:

    {"open": {"engine": {…}, "server": {…}, "guarded": true}}    {"target": …} and of a guarded one "authority", …
    {"drain": "<target>"}                                        {}
    {"process": ["<flag>", …]}                                   {"target": …}, of a server in a process of its own
    {"kill": "<target>"}                                         {}: by SIGKILL
    {"start": "<target>"}                                        {}: again, at its address; it is ready
    {"middle": "<target>"}                                       {"target": …}, of a middle in front of it
    {"fates": ["<middle>", [{"when": …, "what": …}, null, …]]}   {}: what becomes of its next calls, null for nothing
    {"darken": "<middle>"}                                       {}: nothing passes it any more
    {"passed": "<middle>"}                                       {"connections": …, "calls": …, "acted": …}, until now
    {"router": ["<target>", …]}                                  {"target": …}, of a proxy before them; tests/router.py
    {"lose": ["<router>", ["<method>", …]]}                      {}: of the next call of each, the answer is lost
    {"routed": "<router>"}                                       {"calls": [[method, route, server], …]}, until now
    {"census": "<target>"}                                       {metric: value, …}, as Prometheus would see them
    {"reasons": true}                                            {"reasons": {reason: code, …}}

`engine` and `server` are settings of EngineConfig and ServerConfig. A guarded server wants the key; its certificate,
with the private key, and that of its authority are printed as PEM text.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections import defaultdict
from contextlib import AsyncExitStack, ExitStack
from dataclasses import astuple
from pathlib import Path
from typing import Any

import trustme

from inference_engine.config import ServerConfig
from inference_engine.engine import Engine
from inference_engine.server.run import ServerHandle, start_server
from inference_engine.server.status import CODES
from tests.constraints import TOKENS
from tests.middle import Fate, Middle, open_middle
from tests.newer_strategy import NewerWindow, registered
from tests.processes import Restarted
from tests.router import Router, open_router
from tests.tiny_folder import save_tiny_chat_model
from tests.tiny_native import served_engine

KEY = "a" * 32


class Servers:
    """What runs, by target."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, tuple[ServerHandle, Engine]] = {}
        self._middles: dict[str, Middle] = {}
        self._listening = AsyncExitStack()
        self._routers: dict[str, Router] = {}
        self._processes: dict[str, Restarted] = {}
        self._ending = ExitStack()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One question and its answer."""
        question = json.loads(await reader.readline())
        reply: dict[str, Any]
        match question:
            case {"open": settings}:
                reply = await self._open(**settings)
            case {"drain": target}:
                await self._drain(target)
                reply = {}
            case {"process": flags}:
                process = await asyncio.to_thread(self._start, flags)
                self._processes[process.target] = process
                reply = {"target": process.target}
            case {"kill": target}:
                await asyncio.to_thread(self._processes[target].kill)
                reply = {}
            case {"start": target}:
                await asyncio.to_thread(self._processes[target].start)
                reply = {}
            case {"middle": target}:
                middle = await self._listening.enter_async_context(open_middle(target))
                self._middles[middle.target] = middle
                reply = {"target": middle.target}
            case {"fates": [target, fates]}:
                self._middles[target].fates.extend(None if fate is None else Fate(**fate) for fate in fates)
                reply = {}
            case {"darken": target}:
                self._middles[target].darken()
                reply = {}
            case {"passed": target}:
                middle = self._middles[target]
                reply = {"connections": middle.connections, "calls": middle.calls, "acted": middle.acted}
            case {"router": targets}:
                router = await self._listening.enter_async_context(open_router(*targets))
                self._routers[router.target] = router
                reply = {"target": router.target}
            case {"lose": [target, methods]}:
                self._routers[target].losses.extend(methods)
                reply = {}
            case {"routed": target}:
                reply = {"calls": [astuple(call) for call in self._routers[target].passed]}
            case {"census": target}:
                reply = self._statistics(target)
            case {"reasons": True}:
                reply = {"reasons": {reason: code.name for reason, code in CODES.items()}}
            case _:
                reply = {"error": f"cannot do {question!r}"}
        writer.write(json.dumps(reply).encode() + b"\n")
        await writer.drain()
        writer.close()

    async def close(self) -> None:
        await self._listening.aclose()
        self._ending.close()
        for target in list(self._running):
            await self._drain(target)

    async def _open(
        self, engine: dict[str, Any] | None = None, server: dict[str, Any] | None = None, *, guarded: bool = False
    ) -> dict[str, str]:
        guards, shown = self._guards() if guarded else ({}, {})
        config = ServerConfig(**{"bind": "127.0.0.1:0", "drain_seconds": 1.0, **guards, **(server or {})})
        runtime = served_engine(**{"read_tokens": lambda: TOKENS, **(engine or {})})
        handle = await start_server(runtime, config)
        self._running[handle.target] = handle, runtime
        return {"target": handle.target, **shown}

    def _start(self, flags: list[str]) -> Restarted:
        model = self._folder / "model"
        if not model.exists():
            save_tiny_chat_model(model)
        return Restarted(self._ending, "--model", model, "--kv-bytes=64MiB", *flags)

    def _statistics(self, target: str) -> dict[str, float]:
        """Every number without labels, and of those with labels their sums."""
        sums: defaultdict[str, float] = defaultdict(float)
        for metric in self._running[target][1].metrics.registry.collect():
            for sample in metric.samples:
                sums[sample.name] += sample.value
        return dict(sums)

    async def _drain(self, target: str) -> None:
        handle, engine = self._running.pop(target)
        await handle.drain_and_stop()
        engine.close()

    def _guards(self) -> tuple[dict[str, str], dict[str, str]]:
        authority = trustme.CA()
        # Of its own: a server reads its files again when they change.
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        certificate, keys = folder / "server.pem", folder / "keys"
        pem = authority.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem
        pem.write_to_path(certificate)
        keys.write_text(f"{KEY}\n", encoding="utf-8")
        files = {"api_key_file": str(keys), "tls_cert_file": str(certificate), "tls_key_file": str(certificate)}
        shown = {"authority": authority.cert_pem.bytes().decode(), "certificate": pem.bytes().decode(), "key": KEY}
        return files, shown


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder, registered(NewerWindow):
        servers = Servers(Path(folder))
        control = await asyncio.start_server(servers.answer, "127.0.0.1", 0)
        print(control.sockets[0].getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await servers.close()
        control.close()


if __name__ == "__main__":
    asyncio.run(main())
