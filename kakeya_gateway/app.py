"""The gateway as an ASGI application and as a process: routes, keys, errors in each API's shape, clients that leave."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import signal
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import Annotated, Any, Protocol

import uvicorn
from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import kakeya
from kakeya.tools import ToolCallPart
from kakeya_gateway import chat_completions, messages, responses
from kakeya_gateway.bodies import Ask, Json, Refused
from kakeya_gateway.conversations import Conversations
from kakeya_gateway.texts import Texts
from kakeya_gateway.turns import Piece, Turn, require_model

MAX_BODY_BYTES = 2**24
# Proxies give up an answer of which nothing comes, most of them after a minute. Readers skip comments.
HEARTBEAT_SECONDS = 15.0
_COMMENT = ": waiting\n\n"
_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
_STATUSES: dict[type[kakeya.KakeyaError], int] = {
    kakeya.Unauthenticated: 401,
    kakeya.NoCapacity: 429,
    kakeya.QuotaExceeded: 429,
    kakeya.Overloaded: 429,
    kakeya.CallerError: 400,
    kakeya.RetryableError: 503,
    kakeya.TransportError: 503,
    kakeya.DeadlineExceeded: 504,
}

logger = logging.getLogger("kakeya_gateway")
routes = APIRouter()


class Gateway:
    """What all requests share: the tokenizer, and the conversations of every key that is in use."""

    def __init__(
        self, connect: Callable[[str], kakeya.AsyncClient], texts: Texts, *, name: str, most: int, idle_seconds: float
    ) -> None:
        """connect: a client for a key, "" for none. name: begins the labels of sessions, of which a key has `most`."""
        self._texts = texts
        self._connect = connect
        self._name = name
        self._limits: dict[str, Any] = {"most": most, "idle_seconds": idle_seconds}
        self._owners: dict[str, Conversations] = {}

    async def owner(self, request: Request) -> Conversations:
        """Of the request's key, which the server has accepted now. Raises the SDK's errors."""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        key = request.headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        for unused in [name for name, each in self._owners.items() if each.expire() and name != key]:
            if (gone := self._owners.pop(unused, None)) is not None:
                await gone.client.close()
        if (owner := self._owners.get(key)) is None:
            label = f"{self._name}/{hashlib.sha256(key.encode()).hexdigest()[:8]}"
            owner = self._owners[key] = Conversations(self._connect(key), self._texts, label=label, **self._limits)
        owner.asking += 1
        try:
            await owner.ready()
        finally:
            owner.asking -= 1
            if not owner.is_found and not owner.asking:  # the key is not accepted, or the server is not there
                self._owners.pop(key, None)
                await owner.client.close()
        return owner


async def _owner(request: Request) -> Conversations:
    gateway: Gateway = request.app.state.gateway
    return await gateway.owner(request)


Owner = Annotated[Conversations, Depends(_owner)]


@routes.post("/v1/chat/completions")
async def complete(asked: chat_completions.Request, owner: Owner) -> Response:
    return _Answer(asked.ask(), owner, lambda turn: chat_completions.Reply(asked, turn), streams=asked.stream)


@routes.post("/v1/messages")
async def message(asked: messages.Request, owner: Owner) -> Response:
    return _Answer(asked.ask(), owner, lambda turn: messages.Reply(asked, turn), streams=asked.stream)


@routes.post("/v1/messages/count_tokens")
async def count(asked: messages.Counted, owner: Owner) -> Response:
    ask = asked.ask()
    require_model(ask.model, owner)
    tools = await owner.texts.tools(ask.tools)
    return JSONResponse({"input_tokens": len(await owner.texts.begin(ask.messages, tools))})


@routes.post("/v1/responses")
async def respond(asked: responses.Request, owner: Owner) -> Response:
    return _Answer(asked.ask(owner), owner, lambda turn: responses.Reply(asked, turn), streams=asked.stream)


@routes.get("/v1/responses/{name}")
async def stored(name: str, owner: Owner) -> Response:
    return JSONResponse(responses.stored(owner, name))


@routes.delete("/v1/responses/{name}")
async def delete(name: str, owner: Owner) -> Response:
    responses.stored(owner, name)
    owner.drop(name.removeprefix(responses.ID))
    return JSONResponse({"id": name, "object": "response", "deleted": True})


@routes.get("/v1/models")
async def models(owner: Owner) -> Response:
    name = owner.info.model_id
    ends = {"first_id": name, "last_id": name, "has_more": False}
    return JSONResponse({"object": "list", "data": [_described(name)], **ends})


@routes.get("/v1/models/{name:path}")
async def model(name: str, owner: Owner) -> Response:
    require_model(name, owner)
    return JSONResponse(_described(name))


def _described(name: str) -> Json:
    """As OpenAI has it, and Anthropic. When it was made is not known."""
    shown = {"id": name, "object": "model", "created": 0, "owned_by": "kakeya"}
    return {**shown, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


@routes.get("/healthz")
async def health() -> Response:
    return JSONResponse({"status": "ok"})


def create_app(gateway: Gateway, *, is_own_host: Callable[[str], bool]) -> FastAPI:
    """is_own_host: may a request's `Host` be that?"""

    async def check_host(request: Request) -> None:
        if not is_own_host(request.headers.get("host", "")):
            raise Refused("the Host header does not name this gateway", status=421)

    pages: dict[str, Any] = {"openapi_url": None, "docs_url": None, "redoc_url": None, "redirect_slashes": False}
    app = FastAPI(dependencies=[Depends(check_host)], **pages)
    app.add_middleware(_Bounded)
    app.state.gateway = gateway
    app.include_router(routes)
    for kind in (Refused, kakeya.KakeyaError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _refuse)
    return app


def serve(
    app: FastAPI, listening: socket.socket, *, certificate: str | None, key: str | None, drain_seconds: float
) -> None:
    """Serve until SIGTERM, SIGHUP or Ctrl-C, which let answers end for `drain_seconds`; then the signal has its own
    effect. SIGHUP stays ignored where it is, as under nohup.

    certificate, key: paths of PEM files. Sessions stay on the server, where the next gateway finds them.
    """
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=round(drain_seconds),
        timeout_keep_alive=60,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    server = uvicorn.Server(config)
    closed = list[int]()  # terminals; it knows the other two

    def stop(number: int, _frame: FrameType | None) -> None:
        closed.append(number)
        server.should_exit = True

    if (before := signal.getsignal(signal.SIGHUP)) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, stop)
    server.run(sockets=[listening])
    signal.signal(signal.SIGHUP, before)
    if closed:
        signal.raise_signal(signal.SIGHUP)


class _Bounded:
    """Refuses a body that is too long, as other errors are: the framework's own limit answers without JSON."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        announced = dict(scope.get("headers", ())).get(b"content-length", b"0")
        count = int(announced) if announced.isdigit() else 0
        read = 0

        async def bounded() -> Message:
            nonlocal read
            message = {"body": b""} if count > MAX_BODY_BYTES else await receive()
            read += len(message.get("body", b""))
            if max(count, read) > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes")
            return message

        await self._app(scope, bounded, send)


class Reply(Protocol):
    """What an API makes of a turn: the events of a stream, and after the last one the whole. ending: behind them."""

    ending: str

    def begin(self) -> Iterable[Json]: ...
    def more(self, piece: Piece | ToolCallPart) -> Iterable[Json]: ...
    def end(self) -> Iterable[Json]: ...
    def whole(self) -> Json: ...


class _Answer(Response):
    """Works while it is sent: only then is it seen that the client leaves, which ends the Generate."""

    def __init__(self, ask: Ask, owner: Conversations, reply: Callable[[Turn], Reply], *, streams: bool) -> None:
        super().__init__()
        self._ask = ask
        self._owner = owner
        self._reply = reply
        self._work = self._stream if streams else self._send_whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._work(scope, receive, send))
        left = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            left.cancel()
            work.cancel()  # without effect if it has ended
            with suppress(asyncio.CancelledError):
                await work

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        with await Turn.begin(self._ask, self._owner) as turn:
            reply = self._reply(turn)
            async for piece in turn.pieces():
                deque(reply.more(piece), maxlen=0)
            deque(reply.end(), maxlen=0)
            turn.keep(reply.whole())
        await JSONResponse(reply.whole())(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Server-sent events. An error before the first one has a status; later it is the last event."""
        has_begun = False

        async def write(events: Iterable[Json], text: str = "") -> None:
            nonlocal has_begun
            begun = has_begun
            if not has_begun:
                await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                has_begun = True
            sent = [*(() if begun else reply.begin()), *events]
            body = "".join((*map(_event, sent), text)).encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})

        with await Turn.begin(self._ask, self._owner) as turn:
            reply, pieces = self._reply(turn), turn.pieces()
            try:
                while (piece := await _next(pieces, write)) is not None:
                    await write(reply.more(piece))
                if not has_begun:
                    await write(())
                last, ending = [*reply.end()], reply.ending
                turn.keep(reply.whole())
            except kakeya.KakeyaError as error:
                if not has_begun:
                    raise
                last, ending = [_shape(scope["path"])(_refused(error))], ""
        # The session is free before a client can know of the end, and ask for more.
        await write(last, ending)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _next(pieces: Any, write: Callable[[Iterable[Json], str], Awaitable[None]]) -> Piece | ToolCallPart | None:
    """The next piece, None at the end. While none comes, a comment says that something will."""
    coming = asyncio.ensure_future(anext(pieces, None))
    try:
        while not (await asyncio.wait((coming,), timeout=HEARTBEAT_SECONDS))[0]:
            await write((), _COMMENT)
    except BaseException:
        coming.cancel()
        raise
    piece: Piece | ToolCallPart | None = coming.result()
    return piece


def _event(event: Json) -> str:
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n"


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse(request: Request, error: Exception) -> Response:
    refused = _refused(error)
    headers = {"retry-after": str(math.ceil(refused.retry_seconds))} if refused.retry_seconds else None
    return JSONResponse(_shape(request.url.path)(refused), refused.status, headers)


def _shape(path: str) -> Callable[[Refused], Json]:
    return messages.error if path.startswith("/v1/messages") else chat_completions.error


def _refused(error: Exception) -> Refused:
    match error:
        case Refused():
            return error
        case HTTPException():
            return Refused(str(error.detail), status=error.status_code)
        case RequestValidationError():
            return _invalid(error)
        case kakeya.KakeyaError():
            status = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), 500)
            seconds = (error.retry_after_seconds or 1.0) if status in (429, 503) else 0
            param = getattr(error, "field", None) or getattr(error, "path", None)
            code = "context_length_exceeded" if isinstance(error, kakeya.HistoryLimit) else None
            refused = Refused(str(error), status=status, code=code, retry=seconds)
            refused.param = param  # which the SDK's message names already
            return refused
    logger.error("a request failed", exc_info=error)
    return Refused("an error in the gateway; its log has the rest", status=500)


def _invalid(error: RequestValidationError) -> Refused:
    """The first problem of a body, and where it is."""
    first = error.errors()[0]
    path = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in first["loc"][1:]).lstrip(".")
    match first["type"]:
        case "extra_forbidden":
            problem = "is not supported; leave it out"
        case "missing":
            problem = "is missing"
        case _:
            problem = f"{first['msg']}; got {repr(first.get('input'))[:80]}"
    return Refused(problem, param=path[:80] or "body")
