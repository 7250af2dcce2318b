"""A middle between a client and a server that speaks HTTP/2, and does to calls what networks and balancers do.

It passes frames on whole and gRPC messages one by one, so it can act behind the n-th message of an answer, behind the
one with which a Generate is done, or between that and the trailers. Each call takes the next of `fates`.

    client ── request ──▶ middle ──▶ server
           ◀─ headers, mess-age, …, message (done), trailers ─
             │         │  │                  │         │
             │    inside  messages=n       done     trailers       `answer`: nothing of it has passed
           headers
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

from google.protobuf.message import DecodeError

from kakeya.v1 import runtime_pb2 as pb

_DATA, _HEADERS, _RST_STREAM = 0, 1, 3
_END_STREAM, _PADDED = 0x1, 0x8
_PREFACE_BYTES = 24
_MESSAGE_HEAD = struct.Struct(">BI")

When: TypeAlias = Literal["request", "answer", "headers", "inside", "messages", "done", "trailers"]
What: TypeAlias = Literal["cut", "close", "hold", "delay", "reset"]


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a call, and when.

    `request`: before the server receives it · `answer`: the server has answered, and nothing of it has passed ·
    `headers`, `messages`, `done`, `trailers`: right behind that part of the answer · `inside`: behind the first half of
    the n-th message's last frame, so that the connection is of no more use: `cut`, `close` or `hold`.

    `cut`: the connection is reset · `close`: it is ended in order · `hold`: it stays open, and nothing passes in either
    direction any more · `delay`: nothing comes back for `seconds` · `reset`: this call alone is ended, with `code`.
    """

    when: When
    what: What
    messages: int = 0  # with when="messages" or "inside": of this call's answer, at least 1
    seconds: float = 0.0
    code: int = 8  # of HTTP/2: CANCEL


@dataclass(slots=True)
class _Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes

    def pack(self) -> bytes:
        return (
            struct.pack(">I", len(self.payload))[1:]
            + struct.pack(">BBI", self.kind, self.flags, self.stream)
            + (self.payload)
        )

    @property
    def ends(self) -> bool:
        return self.kind in {_DATA, _HEADERS} and self.flags & _END_STREAM != 0


@dataclass(slots=True)
class _Call:
    fate: Fate | None
    held: bytes = b""  # the beginning of a message that is not whole yet
    messages: int = 0
    is_done: bool = False
    is_reset: bool = False


class Middle:
    """Listens on loopback in front of `server`. Calls take `fates` as they come; when there are none, all pass."""

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self.server = host, int(port)
        self.target = ""
        self.fates: deque[Fate | None] = deque()
        self.connections = 0
        self.calls = 0
        self.acted = 0  # how many calls met their fate
        self.is_dark = False  # of connections that are made from now on no byte passes
        self._open: set[_Connection] = set()
        self._running: set[asyncio.Task[None] | None] = set()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._running.add(asyncio.current_task())
        there = await asyncio.open_connection(*self.server)
        connection = _Connection(self, (reader, writer), there, is_held=self.is_dark)
        self._open.add(connection)
        try:
            await connection.run()
        finally:
            connection.cut()
            self._open.discard(connection)
            self._running.discard(asyncio.current_task())

    def darken(self) -> None:
        """From now on nothing passes, of any connection there is or will be."""
        self.is_dark = True
        for connection in self._open:
            connection.is_held = True

    def cut(self) -> None:
        """All connections, now."""
        for connection in tuple(self._open):
            connection.cut()

    async def close(self) -> None:
        self.cut()
        await asyncio.gather(*(task for task in tuple(self._running) if task is not None), return_exceptions=True)


class _Connection:
    def __init__(
        self,
        middle: Middle,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        *,
        is_held: bool,
    ) -> None:
        self.is_held = is_held
        self._middle = middle
        self._from_client, self._to_client = client
        self._from_server, self._to_server = server
        self._calls: dict[int, _Call] = {}
        self._is_cut = asyncio.Event()

    async def run(self) -> None:
        """Until either side hangs up, or the connection is cut. One that is held knows of no hanging up."""
        flows = [asyncio.ensure_future(flow) for flow in (self._upwards(), self._downwards(), self._until_cut())]
        try:
            await asyncio.wait(flows, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for flow in flows:
                flow.cancel()
            await asyncio.gather(*flows, return_exceptions=True)
        for flow in flows:
            if not flow.cancelled() and (error := flow.exception()) is not None:
                raise error

    def cut(self) -> None:
        # Reset, not closed: what is still in flight is lost.
        self._is_cut.set()
        self._to_client.transport.abort()
        self._to_server.transport.abort()

    async def _until_cut(self) -> None:
        await self._is_cut.wait()

    async def _upwards(self) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            preface = await self._from_client.readexactly(_PREFACE_BYTES)
            if not self.is_held:
                self._to_server.write(preface)
            async for frame in _frames(self._from_client):
                if self.is_held:
                    continue
                if frame.kind == _HEADERS and frame.stream not in self._calls:
                    fates = self._middle.fates
                    self._middle.calls += 1
                    call = self._calls[frame.stream] = _Call(fates.popleft() if fates else None)
                    if call.fate is None or call.fate.when != "request":
                        self._to_server.write(frame.pack())
                    elif call.fate.what == "reset":
                        # The server keeps its table of headers, and receives no message.
                        self._to_server.write(frame.pack())
                        await self._act(frame.stream, call.fate)
                    elif not await self._act(frame.stream, call.fate):
                        return
                    elif not self.is_held:
                        self._to_server.write(frame.pack())
                elif frame.stream not in self._calls or not self._calls[frame.stream].is_reset:
                    self._to_server.write(frame.pack())
                await self._to_server.drain()
        if self.is_held:
            await self._is_cut.wait()

    async def _downwards(self) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            async for frame in _frames(self._from_server):
                for part in self._parts(frame):
                    if not self.is_held and not await self._pass_down(part):
                        return
        if self.is_held:
            await self._is_cut.wait()

    async def _pass_down(self, part: _Frame) -> bool:
        """False if the connection is over."""
        call = self._calls.get(part.stream)
        fate = call.fate if call is not None else None
        if call is not None and call.is_reset and part.kind in {_DATA, _HEADERS}:
            if part.kind == _HEADERS:  # without them the tables of headers at both ends would differ
                self._to_client.write(part.pack())
            return True
        if fate is not None and fate.when == "answer" and part.kind in {_DATA, _HEADERS}:
            if fate.what == "delay" or part.ends:
                assert call is not None
                call.fate = None
                if not await self._act(part.stream, fate):
                    return False
            if fate.what != "delay":
                return True
        if fate is not None and fate.when == "inside" and part.kind == _DATA and _has_passed(call, fate):
            raw = part.pack()
            self._to_client.write(raw[: len(raw) // 2])
            return await self._act(part.stream, fate)
        self._to_client.write(part.pack())
        await self._to_client.drain()
        if call is None or fate is None or not _is_behind(part, call, fate):
            return True
        call.fate = None
        return await self._act(part.stream, fate)

    async def _act(self, stream: int, fate: Fate) -> bool:
        """False if the connection is over."""
        self._middle.acted += 1
        match fate.what:
            case "cut":
                self.cut()
                return False
            case "close":
                self._to_client.close()
                with contextlib.suppress(ConnectionError):
                    await self._to_client.wait_closed()
                return False
            case "hold":
                self.is_held = True
            case "delay":
                await asyncio.sleep(fate.seconds)
            case "reset":
                self._calls[stream].is_reset = True
                self._to_client.write(_Frame(_RST_STREAM, 0, stream, struct.pack(">I", fate.code)).pack())
                self._to_server.write(_Frame(_RST_STREAM, 0, stream, struct.pack(">I", 8)).pack())
        return True

    def _parts(self, frame: _Frame) -> Iterator[_Frame]:
        """The frame; of DATA, a frame for each message that ends in it, and one for what is left."""
        call = self._calls.get(frame.stream)
        if frame.kind != _DATA or call is None:
            yield frame
            return
        assert frame.flags & (_PADDED | _END_STREAM) == 0, "gRPC's servers neither pad messages nor end with one"
        rest = frame.payload
        while True:
            whole = call.held + rest
            size = _MESSAGE_HEAD.size + (_MESSAGE_HEAD.unpack_from(whole)[1] if len(whole) >= _MESSAGE_HEAD.size else 0)
            if len(whole) < max(size, _MESSAGE_HEAD.size):
                break
            message, taken = whole[_MESSAGE_HEAD.size : size], size - len(call.held)
            call.held = b""
            call.messages += 1
            call.is_done = call.is_done or _is_done(message)
            yield _Frame(_DATA, 0, frame.stream, rest[:taken])
            rest = rest[taken:]
        if rest:
            call.held += rest
            yield _Frame(_DATA, 0, frame.stream, rest)


def _is_behind(part: _Frame, call: _Call, fate: Fate) -> bool:
    match fate.when:
        case "headers":
            return part.kind == _HEADERS
        case "messages":
            return part.kind == _DATA and _has_passed(call, fate)
        case "done":
            return part.kind == _DATA and call.is_done
        case "trailers":
            return part.ends
    return False


def _has_passed(call: _Call | None, fate: Fate) -> bool:
    """Is the part that is passed on the end of that message?"""
    return call is not None and call.messages >= fate.messages and not call.held


def _is_done(message: bytes) -> bool:
    """Is it the last message of a Generate? Answers of other calls are none: what they hold is no `done`."""
    try:
        return pb.GenerateResponse.FromString(message).WhichOneof("payload") == "done"
    except DecodeError:
        return False


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[_Frame]:
    while True:
        head = await reader.readexactly(9)
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        yield _Frame(kind, flags, stream & 0x7FFFFFFF, await reader.readexactly(int.from_bytes(head[:3])))


@asynccontextmanager
async def open_middle(server: str, fates: Iterable[Fate | None] = ()) -> AsyncIterator[Middle]:
    middle = Middle(server)
    middle.fates.extend(fates)
    listening = await asyncio.start_server(middle.connect, "127.0.0.1", 0)
    middle.target = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield middle
    finally:
        listening.close()
        await middle.close()
