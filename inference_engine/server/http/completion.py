"""One chat completion, from its body to the last byte of its answer; cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from inference_engine.engine import Engine
from inference_engine.errors import Overloaded, RequestError
from inference_engine.scheduler.policy import may_join
from inference_engine.server.http.chat_replies import ChatReplies, Json, Usage, logprob_entry
from inference_engine.server.http.chat_request import read_request
from inference_engine.server.http.chat_text import ChatText
from inference_engine.server.http.error_replies import BodyTooLarge, BodyTooSlow, NotJson, UnknownModel, body_of
from inference_engine.server.http.single_shot import Prompt, prepare, single_shot
from inference_engine.server.http.turns import RequestTurns
from inference_engine.server.limits import OwnerLimits
from inference_engine.server.service import STALL_SECONDS
from inference_engine.server.status import as_request_error
from inference_engine.server.stream import EventQueue, Heartbeat, Stall
from inference_engine.types import Accepted, Event, Failed, Finished, StopReason, TokenCommitted, Truncated
from kakeya.tokenization import StopStrings

ROUTE = "/v1/chat/completions"
MAX_BODY_SECONDS = 30.0
# Proxies give up an answer of which nothing comes, most of them after a minute.
HEARTBEAT_SECONDS = 15.0
_COMMENT = ": waiting\n\n"  # readers of server-sent events skip it
_FINISH_REASONS = {
    StopReason.EOS: "stop",
    StopReason.MAX_TOKENS: "length",
    StopReason.TRUNCATED: "length",
}


@dataclass(slots=True)
class Slots:
    """Limits the requests in progress, so that further bodies and prompts take no memory.

    An owner always gets its even share of them, and one at least, so no owner can lock the others out.
    """

    limit: int
    _taken: Counter[str] = field(default_factory=Counter, init=False)

    @contextlib.contextmanager
    def one(self, owner: str) -> Iterator[None]:
        """Raises Overloaded if no slot is free for the owner."""
        if not may_join(owner, self._taken, most=self.limit):
            raise Overloaded(
                f"{self._taken.total()} requests are in progress, the limit of this server; retry later",
                retry_after_seconds=1.0,
            )
        self._taken[owner] += 1
        try:
            yield
        finally:
            self._taken[owner] -= 1
            if not self._taken[owner]:
                del self._taken[owner]


@dataclass(frozen=True, kw_only=True, slots=True)
class Desk:
    """What every completion needs. turns: schedules rendering and encoding over owners and processes.

    given_up: its result is the error that ends all requests once the server gives up.
    """

    engine: Engine
    chat: ChatText
    limits: OwnerLimits
    slots: Slots
    turns: RequestTurns
    max_body_bytes: int
    now: Callable[[], float]
    given_up: asyncio.Future[RequestError]


class Completion(Response):
    """A response that does the work when it is sent: only then it can see that the client disconnects."""

    def __init__(self, desk: Desk, owner: str) -> None:
        super().__init__()
        self._desk = desk
        self._owner = owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._desk.limits.call(self._owner), self._desk.slots.one(self._owner):
            body = await read_json_body(Request(scope, receive), self._desk.max_body_bytes)
            await _while_connected(receive, self._desk.given_up, self._answer(body, scope, receive, send))

    async def _answer(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        desk = self._desk
        prompt = await desk.turns.run(self._owner, partial(self._prepare, body))
        replies = ChatReplies(
            model=prompt.asked.model, created=int(desk.now()), include_usage=prompt.asked.include_usage
        )
        answer = Answer(prompt, desk.chat)
        async with single_shot(desk.engine, prompt, owner=self._owner) as events:
            if prompt.asked.stream:
                await _stream(answer, replies, events, send, desk.given_up)
                return
            whole = await _whole(answer, replies, events)
        await JSONResponse(whole)(scope, receive, send)

    def _prepare(self, body: bytes, process: int) -> Prompt:
        asked = read_request(body)
        info = self._desk.engine.info()
        if asked.model != info.facts.model_id:
            raise UnknownModel(asked.model, info.facts.model_id)
        return prepare(asked, self._desk.chat, info, process=process)


class Answer:
    """Turns the events of one Generate into text, finish reason, usage.

    It consumes them until `is_finished`: the Generate has ended, or a stop string is complete.
    """

    def __init__(self, prompt: Prompt, chat: ChatText) -> None:
        self.finish_reason = ""
        self.dropped_tokens = 0
        self._prompt = prompt
        self._chat = chat
        self._text = chat.text_stream()
        self._stops = StopStrings(prompt.asked.stops)
        self._ends = prompt.end_ids.union(prompt.params.stop_token_ids)
        self._completion_tokens = 0
        self._logprobs: list[Json] = []

    @property
    def is_finished(self) -> bool:
        return bool(self.finish_reason)

    @property
    def usage(self) -> Usage:
        """The usage so far. A token that ended the answer counts."""
        return Usage(prompt_tokens=len(self._prompt.token_ids), completion_tokens=self._completion_tokens)

    def take(self, event: Event) -> str:
        """The text that can be sent now. Raises the error of a Failed."""
        if isinstance(event, TokenCommitted):
            return self._take_token(event)
        if isinstance(event, Finished):
            self.finish_reason = _FINISH_REASONS[event.stop_reason]
            return self._stops.end()
        if isinstance(event, Truncated):
            self.dropped_tokens = event.dropped_tokens
        if isinstance(event, Failed):
            raise event.error
        return ""

    def pop_logprobs(self) -> list[Json] | None:
        """The logprobs since the last call, without the token that ended the answer; None: not requested.

        Text may wait for a stop string or the rest of a character; logprobs do not.
        """
        if not self._prompt.asked.logprobs:
            return None
        entries, self._logprobs = self._logprobs, []
        return entries

    def _take_token(self, event: TokenCommitted) -> str:
        self._completion_tokens += 1
        if event.token_id in self._ends:
            return ""
        if event.logprob is not None:
            self._logprobs.append(logprob_entry(*self._chat.token_text(event.token_id), event.logprob))
        shown = self._stops.push(self._text.push(event.token_id))
        if self._stops.matched is not None:
            self.finish_reason = "stop"
        return shown


async def _whole(answer: Answer, replies: ChatReplies, events: EventQueue) -> Json:
    text = []
    async for event in _follow([], events):
        text.append(answer.take(event))
        if answer.is_finished:
            break
    return replies.whole(
        "".join(text), answer.pop_logprobs(), answer.finish_reason, answer.usage, answer.dropped_tokens
    )


async def _stream(
    answer: Answer, replies: ChatReplies, events: EventQueue, send: Send, given_up: asyncio.Future[RequestError]
) -> None:
    """Server-sent events. An error after the answer has begun is sent as the last event, that of `given_up`, too.

    While nothing else is sent, comments keep a proxy from giving the answer up. The first one begins it.
    """
    has_begun = False

    async def write_text(text: str) -> None:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

    async with Heartbeat(write_text, _COMMENT, HEARTBEAT_SECONDS) as heartbeat:
        with _writing(heartbeat.write) as write:
            try:
                first = await _until_work_begins(events)
                await write(replies.first_chunk())
                async for event in _follow(first, events):
                    text, logprobs = answer.take(event), answer.pop_logprobs()
                    if text or logprobs:
                        await write(replies.chunk(text, logprobs))
                    if answer.is_finished:
                        break
                await write(replies.last_chunk(answer.finish_reason, answer.dropped_tokens))
                if replies.include_usage:
                    await write(replies.usage_chunk(answer.usage))
            except Exception as error:  # the status may be sent; then only the body can still report the error
                if not has_begun:
                    raise
                await write(body_of(as_request_error(error, ROUTE)))
            except asyncio.CancelledError:
                if not (given_up.done() and has_begun):
                    raise
                await write(body_of(given_up.result()))
            else:
                await write("[DONE]")
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_work_begins(events: EventQueue) -> list[Event]:
    """The events up to the first one that is not Accepted. Raises the error of a Failed.

    Until the answer begins, an error can still be sent as an HTTP status.
    """
    first: list[Event] = []
    while all(isinstance(event, Accepted) for event in first):
        await events.wait()
        first += events.pop_all()
    for event in first:
        if isinstance(event, Failed):
            raise event.error
    return first


async def _follow(first: list[Event], events: EventQueue) -> AsyncIterator[Event]:
    """`first`, then all further events, without end."""
    for event in first:
        yield event
    while True:
        await events.wait()
        for event in events.pop_all():
            yield event


@contextlib.contextmanager
def _writing(write_text: Callable[[str], Awaitable[None]]) -> Iterator[Callable[[Json | str], Awaitable[None]]]:
    """A function that sends one event. Cancels this task if the client stops reading."""
    task = asyncio.current_task()
    assert task is not None
    stall = Stall(asyncio.get_running_loop(), STALL_SECONDS, task.cancel)

    async def write(data: Json | str) -> None:
        text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        stall.begin_write()
        await write_text(f"data: {text}\n\n")
        stall.end_write()

    try:
        yield write
    finally:
        stall.stop()


async def _while_connected(
    receive: Receive, given_up: asyncio.Future[RequestError], work: Coroutine[Any, Any, None]
) -> None:
    """Run `work` to its end, or until the client disconnects: then it is cancelled, and has ended on return.

    Raises the error of `given_up`, if that comes first and `work` does not end with having sent it.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, leaving, given_up), return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_done = working.done()
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait((working, leaving))
    has_answered = not working.cancelled() and working.exception() is None
    if is_done and not working.cancelled():
        await working
    elif given_up.done() and not has_answered:
        raise given_up.result()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_json_body(request: Request, limit_bytes: int) -> bytes:
    """The bytes as they came. Raises NotJson, BodyTooLarge, BodyTooSlow; starlette's ClientDisconnect."""
    # Required, so that a browser's page cannot send a request here without a preflight.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise NotJson
    # Refused before it is sent, where its length is said. More digits than int() takes are a refusal, too.
    said = request.headers.get("content-length", "")
    if said.isdecimal() and (len(said) > len(str(limit_bytes)) or int(said) > limit_bytes):
        raise BodyTooLarge(limit_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(MAX_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit_bytes:
                    raise BodyTooLarge(limit_bytes)
    except TimeoutError:
        raise BodyTooSlow(MAX_BODY_SECONDS) from None
    return bytes(body)
