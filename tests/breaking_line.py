"""A line to a server that breaks: whatever is asked arrives, and only so many bytes come back before it is cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager


class BreakingLine:
    """A TCP proxy on loopback. `allowances` has for each connection the bytes that may come back before it is reset.

    When they are used up, lines hold.
    """

    def __init__(self, server: str, allowances: Iterator[int]) -> None:
        host, _, port = server.rpartition(":")
        self._server = host, int(port)
        self._allowances = allowances
        self._open: set[asyncio.StreamWriter] = set()
        self.target = ""
        self.breaks = 0

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until it is cut or either side hangs up."""
        allowance = next(self._allowances, None)
        there, back = await asyncio.open_connection(*self._server)
        ends = writer, back
        self._open.update(ends)
        try:
            async with asyncio.TaskGroup() as both:
                asking = both.create_task(self._forward(reader, back, None))
                await self._forward(there, writer, allowance)
                asking.cancel()
        finally:
            for end in ends:
                # Reset, not closed: what is still on its way is lost.
                end.transport.abort()
                self._open.discard(end)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, allowance: int | None) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(2048):
                if allowance is not None and len(data) > allowance:
                    sink.write(data[:allowance])
                    self.breaks += 1
                    return
                allowance = None if allowance is None else allowance - len(data)
                sink.write(data)
                await sink.drain()

    def cut(self) -> None:
        """All connections, now."""
        for end in tuple(self._open):
            end.transport.abort()


@asynccontextmanager
async def breaking_line(server: str, allowances: Iterator[int]) -> AsyncIterator[BreakingLine]:
    line = BreakingLine(server, allowances)
    proxy = await asyncio.start_server(line.connect, "127.0.0.1", 0)
    line.target = f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    try:
        yield line
    finally:
        proxy.close()
        line.cut()
