"""The asyncio client: `_sync.py` name for name, with `await`.

A client belongs to the event loop that first uses it; a session is one conversation and belongs to one task at a time,
except that `info()`, `close()` and a stream's `cancel()` may come from anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

import grpc.aio

from kakeya import _requests as requests
from kakeya import _values as values
from kakeya._append import Append, Tail
from kakeya._channel import TLS
from kakeya._checks import token_ids as checked_token_ids
from kakeya._client import ClientBase
from kakeya._constraints import Constraint
from kakeya._errors import KakeyaError, StateError
from kakeya._flows import Call, Flow, Step, close_session, create_session, open_session, repeatable
from kakeya._fork import fork_session, rewind_session
from kakeya._retry import Patience, RetryPolicy
from kakeya._served_tokenizer import served_tokenizer
from kakeya._session import CALL_SECONDS, DEFAULT, GENERATE_SECONDS, SessionBase, Timeout
from kakeya._status import cause_of
from kakeya._strategies import Strategy
from kakeya._stream import Fold, StreamBase
from kakeya._text import AsyncTextStream, Decodes, IncrementalDetokenizer
from kakeya._thinking import Budget, Thought
from kakeya._values import (
    GenerateResult,
    HistoryPiece,
    Progress,
    ServerInfo,
    SessionInfo,
    SessionSummary,
    TokenDetail,
)
from kakeya.v1 import runtime_pb2 as pb
from kakeya.v1.runtime_pb2_grpc import RuntimeServiceStub

if TYPE_CHECKING:
    from kakeya.tokenization import ChatTokenizer

T = TypeVar("T")


class AsyncClient(ClientBase):
    """As `Client`. May be made before the event loop runs; the first call connects it."""

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        api_key: str | None = None,
        tls: TLS | bool = False,
        timeout: float | None = CALL_SECONDS,
        generate_timeout: float | None = GENERATE_SECONDS,
        retry: RetryPolicy | None = None,
    ) -> None:
        super().__init__(
            target, api_key=api_key, tls=tls, timeout=timeout, generate_timeout=generate_timeout, retry=retry
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: grpc.aio.Channel | None = None
        self._opened_stub: Any = None
        self._ended = asyncio.Event()  # by close()

    async def create_session(
        self,
        strategy: Strategy | None = None,
        *,
        eos_token_ids: Iterable[int] | None = None,
        limit_tokens: int | None = None,
        label: str = "",
        guaranteed: bool | None = None,
        timeout: Timeout = DEFAULT,
    ) -> AsyncSession:
        """As `Client.create_session`."""
        request = requests.create_session(strategy, eos_token_ids, limit_tokens, label, guaranteed)
        created, route = await self._run(create_session(request, self._patience(timeout)))
        self._warn_without_ends(request, created)
        return AsyncSession(self, created, route=route)

    async def session(self, session_id: str, *, timeout: Timeout = DEFAULT) -> AsyncSession:
        """As `Client.session`."""
        flow = open_session(requests.session_id(session_id), self._patience(timeout))
        route = requests.route_of(session_id)
        facts, info = await self._run(flow, route)
        session = AsyncSession(self, facts, route=route, history_length=info.history_length)
        session._tail.may_lag = info.generating
        return session

    def sessions(self, *, page_size: int = 100, timeout: Timeout = DEFAULT) -> AsyncIterator[SessionSummary]:
        """As `Client.sessions`."""
        self._require_open()
        return self._sessions(requests.list_sessions(page_size), timeout)

    async def _sessions(self, request: pb.ListSessionsRequest, timeout: Timeout) -> AsyncIterator[SessionSummary]:
        while True:
            reply: pb.ListSessionsResponse = await self._run(
                repeatable("ListSessions", request, self._patience(timeout))
            )
            for listed in reply.sessions:
                yield values.session_summary(listed)
            request.page_token = reply.next_page_token
            if not request.page_token:
                return

    async def server_info(self, *, timeout: Timeout = DEFAULT) -> ServerInfo:
        """As `Client.server_info`."""
        flow = repeatable("GetServerInfo", pb.GetServerInfoRequest(), self._patience(timeout))
        return values.server_info(await self._run(flow))

    async def tokenizer(
        self, path: str | os.PathLike[str] | None = None, *, timeout: Timeout = DEFAULT
    ) -> ChatTokenizer:
        """As `Client.tokenizer`; the files are read in a thread."""
        return await asyncio.to_thread(served_tokenizer, await self.server_info(timeout=timeout), path)

    async def close(self) -> None:
        """As `Client.close`."""
        self._is_closed = True
        self._ended.set()
        self._wake_streams()
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    def _stub(self) -> Any:
        """The stub, on a channel that belongs to the running event loop."""
        self._require_open()
        loop = _running_loop()
        if loop is None:
            raise StateError("no event loop is running here; call this from a coroutine, or use Client")
        if self._loop is None:
            credentials = self._address.credentials
            self._loop = loop
            self._channel = (
                grpc.aio.insecure_channel(self._address.reached, options=self._address.options)
                if credentials is None
                else grpc.aio.secure_channel(self._address.reached, credentials, options=self._address.options)
            )
            self._opened_stub = RuntimeServiceStub(self._channel)
        if self._loop is not loop:
            raise StateError("this client belongs to another event loop; make one in each")
        return self._opened_stub

    async def _run(self, flow: Flow[T], route: str = "") -> T:
        """Carry out a flow's steps until it returns; `route` is that of the session they are for."""
        self._require_open()
        try:
            step = next(flow)
            while True:
                try:
                    reply = await self._perform(step, route)
                except KakeyaError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(reply)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _perform(self, step: Step, route: str) -> Any:
        if not isinstance(step, Call):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), step.seconds)
            return None
        try:
            method = getattr(self._stub(), step.method)
            reply = await method(
                step.request, timeout=step.timeout, metadata=self._metadata(route if step.route is None else step.route)
            )
        except grpc.RpcError as error:
            explained = self._explain(error)
            if self._wants_probe(explained):
                explained = await asyncio.to_thread(self._probed, explained)
            raise explained from cause_of(explained, error)
        except asyncio.CancelledError:
            if _is_task_cancelled() or not self._is_closed:
                raise
            raise self._closed_meanwhile() from None
        self._is_met = True
        return reply

    def _generate(self, request: pb.GenerateRequest, patience: Patience, route: str) -> Any:
        return self._stub().Generate(request, timeout=patience.remaining_seconds(), metadata=self._metadata(route))


class AsyncSession(SessionBase):
    """As `Session`. `generate` starts at once and is not awaited; reading its stream is."""

    def __init__(
        self,
        client: AsyncClient,
        created: pb.CreateSessionResponse,
        *,
        route: str,
        history_length: int = 0,
        shared_bytes: int = 0,
        prefill_tokens: int | None = None,
    ) -> None:
        super().__init__(
            created,
            route=route,
            history_length=history_length,
            shared_bytes=shared_bytes,
            prefill_tokens=prefill_tokens,
        )
        self._client = client

    async def append(
        self,
        token_ids: Iterable[int],
        *,
        expected_history_length: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> int:
        """As `Session.append`. If the task is cancelled meanwhile, the next append insists on the length known now."""
        self._require_open()
        append = Append(
            self.id,
            checked_token_ids(token_ids),
            tail=self._tail,
            expected_history_length=requests.history_length(expected_history_length),
            limit=self._client._append_limit,
            patience=self._client._patience(timeout),
        )
        return await self._client._run(append.run(), self._route)

    def generate(
        self,
        max_tokens: int,
        *,
        seed: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        stop_token_ids: Iterable[int] = (),
        stop_sequences: Iterable[Iterable[int]] = (),
        min_tokens: int = 0,
        allowed_token_ids: Iterable[int] | None = None,
        banned_token_ids: Iterable[int] = (),
        logprobs: bool = False,
        top_logprobs: int = 0,
        on_progress: Callable[[Progress], None] | None = None,
        expected_history_length: int | None = None,
        drafting: bool = True,
        constraint: Constraint | None = None,
        timeout: Timeout = DEFAULT,
    ) -> AsyncGenerateStream:
        """As `Session.generate`."""
        self._require_open()
        request = requests.generate(
            self.id,
            max_tokens,
            seed=seed,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            stop_token_ids=stop_token_ids,
            stop_sequences=stop_sequences,
            min_tokens=min_tokens,
            allowed_token_ids=allowed_token_ids,
            banned_token_ids=banned_token_ids,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            on_progress=on_progress,
            expected_history_length=self._tail.length if expected_history_length is None else expected_history_length,
            drafting=drafting,
            constraint=constraint,
        )
        return self._started(request, on_progress, expected_history_length, timeout)

    async def generate_thinking(
        self, budget: int, max_tokens: int, *, end_token_ids: Iterable[int], **options: Any
    ) -> Thought[AsyncGenerateStream]:
        """As `Session.generate_thinking`."""
        parts = Budget(end_token_ids, options)
        thinking = await self.generate(budget, **parts.thinking).result()
        missing = parts.missing(thinking)
        if missing:
            await self.append(missing)
        answer = None if missing is None else self.generate(max_tokens, **parts.answer(thinking))
        return Thought(thinking=thinking, appended_ids=tuple(missing or ()), answer=answer)

    async def prefill(
        self,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        expected_history_length: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> GenerateResult:
        """As `Session.prefill`. If the task is cancelled meanwhile, what is computed so far is kept."""
        self._require_open()
        known = self._tail.length if expected_history_length is None else expected_history_length
        request = requests.prefill(self.id, on_progress=on_progress, expected_history_length=known)
        return await self._started(request, on_progress, expected_history_length, timeout).result()

    def _started(
        self,
        request: pb.GenerateRequest,
        on_progress: Callable[[Progress], None] | None,
        expected_history_length: int | None,
        timeout: Timeout,
    ) -> AsyncGenerateStream:
        fold = Fold(request, on_progress)
        patience = self._client._stream_patience(timeout)
        call = self._client._generate(request, patience, self._route)
        return AsyncGenerateStream(
            self._client,
            call,
            request,
            must_match=expected_history_length is not None,
            route=self._route,
            fold=fold,
            tail=self._tail,
            patience=patience,
        )

    async def fork(
        self,
        *,
        at_position: int | None = None,
        limit_tokens: int | None = None,
        label: str = "",
        expected_history_length: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> AsyncSession:
        """As `Session.fork`."""
        self._require_open()
        request = requests.fork_session(self.id, at_position, limit_tokens, label, expected_history_length)
        forked = await self._client._run(
            fork_session(request, self._tail, self._client._patience(timeout)), self._route
        )
        return AsyncSession(self._client, route=self._route, **self._of_fork(forked))

    async def rewind(
        self, position: int, *, expected_history_length: int | None = None, timeout: Timeout = DEFAULT
    ) -> AsyncSession:
        """As `Session.rewind`."""
        self._require_open()
        request = requests.rewind_session(self.id, position, expected_history_length)
        rewound = await self._client._run(
            rewind_session(request, self._tail, self._client._patience(timeout)), self._route
        )
        self._closed(None)
        return AsyncSession(self._client, route=self._route, **self._of_fork(rewound))

    async def info(self, *, timeout: Timeout = DEFAULT) -> SessionInfo:
        """As `Session.info`."""
        self._require_open()
        request = pb.GetSessionInfoRequest(session_id=self.id)
        flow = repeatable("GetSessionInfo", request, self._client._patience(timeout))
        info = values.session_info(await self._client._run(flow, self._route))
        self._tail.saw(info.history_length)
        return info

    def history(
        self, *, first_position: int = 0, piece_tokens: int = requests.MAX_PIECE_TOKENS, timeout: Timeout = DEFAULT
    ) -> AsyncIterator[HistoryPiece]:
        """As `Session.history`."""
        self._require_open()
        return self._pieces(requests.read_history(self.id, first_position, piece_tokens), timeout)

    async def _pieces(self, request: pb.ReadHistoryRequest, timeout: Timeout) -> AsyncIterator[HistoryPiece]:
        while True:
            flow = repeatable("ReadHistory", request, self._client._patience(timeout))
            piece = values.history_piece(await self._client._run(flow, self._route))
            if piece.token_ids:
                yield piece
            if not self._saw_piece(piece, request):
                return

    async def close(self, *, timeout: Timeout = DEFAULT) -> int:
        """As `Session.close`."""
        if self._is_closed:
            return self.history_length
        flow = close_session(self.id, self._client._patience(timeout))
        return self._closed(await self._client._run(flow, self._route))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except KakeyaError:
            if error is None:
                raise
            # What went wrong inside matters more than that closing failed, too.


class AsyncGenerateStream(StreamBase):
    """As `GenerateStream`, with `async for`, `async with` and `await result()`."""

    _client: AsyncClient

    def __init__(
        self,
        client: AsyncClient,
        call: Any,
        request: pb.GenerateRequest,
        *,
        must_match: bool,
        route: str,
        fold: Fold,
        tail: Tail,
        patience: Patience,
    ) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        super().__init__(client, request, must_match=must_match, route=route, fold=fold, tail=tail, patience=patience)

    def __aiter__(self) -> AsyncIterator[int]:
        """As `GenerateStream.__iter__`."""
        self._take()
        return _Tokens(self, lambda token: token.token_id)

    def details(self) -> AsyncIterator[TokenDetail]:
        """As `GenerateStream.details`."""
        self._take()
        return _Tokens(self, lambda token: token)

    def text(
        self, tokenizer: Decodes, *, stop: Iterable[str] = (), skip_special_tokens: bool = True
    ) -> AsyncTextStream:
        """As `GenerateStream.text`."""
        least = self._request.min_tokens
        detokenizer = IncrementalDetokenizer(tokenizer, stop, skip_special_tokens=skip_special_tokens, min_tokens=least)
        return AsyncTextStream(self, detokenizer)

    async def result(self) -> GenerateResult:
        """As `GenerateStream.result`."""
        while await self._next_token() is not None:
            pass
        return self._outcome()

    def cancel(self) -> None:
        """As `GenerateStream.cancel`: at once, from any thread, not awaited."""
        if self._is_over:
            return
        self._is_over = self._is_cancelled = True
        if _running_loop() is self._loop:
            self._stop()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the RPC with it
                self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        """On the loop: end the RPC, or the wait for the next one."""
        self._stopped.set()
        self._call.cancel()

    async def close(self) -> None:
        """The same as `cancel`."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()

    async def _next_token(self) -> TokenDetail | None:
        """The next token, None at the end. Whatever goes wrong here, and is not a lost connection, ends the RPC."""
        try:
            while not self._is_over:
                try:
                    frame = await self._call.read()
                except grpc.RpcError as error:
                    if (delay := self._broke(error)) is not None:
                        await self._attach_again(delay)
                    continue
                if frame is grpc.aio.EOF:
                    self._ended()
                elif (token := self._received(cast("pb.GenerateResponse", frame))) is not None:
                    return token
        except asyncio.CancelledError:
            # grpc raises this for a cancelled RPC, too.
            if not _is_task_cancelled() and self._is_cancelled:
                return None
            self.cancel()
            if not _is_task_cancelled() and self._client._is_closed:
                self._fail(self._client._closed_meanwhile())
            raise
        except BaseException:
            self.cancel()
            raise
        return None

    async def _attach_again(self, delay: float) -> None:
        self._client._waiting.add(self._stopped)
        try:
            if not self._client._is_closed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopped.wait(), delay)
        finally:
            self._client._waiting.discard(self._stopped)
        if not self._is_cancelled:
            self._fail_if_closed()
            self._call = self._client._generate(self._request_again(), self._patience, self._route)


class _Tokens(Generic[T]):
    """An iterator that cancels its stream when it is dropped: `break` stops the generation there and then."""

    def __init__(self, stream: AsyncGenerateStream, pick: Callable[[TokenDetail], T]) -> None:
        self._stream = stream
        self._pick = pick

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        token = await self._stream._next_token()
        if token is None:
            raise StopAsyncIteration
        return self._pick(token)

    def __del__(self) -> None:
        self._stream.cancel()


def _is_task_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
