"""RuntimeService over an Engine: convert, call, convert back.

Unary engine calls take microseconds and run on the event loop. Waiting (for a busy session, for the next token) is done
here, on the loop; the engine never waits for the server. Errors are raised as they are; `interceptors.py` maps them.

Where sessions are kept, an answer and an error wait until what they say of their session is safe. A read says what is
safe, and waits only for a change whose call has ended without its answer. What only the server knows waits for nothing.
Calls that need what only the disk has wait on threads of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from inference_engine import __version__
from inference_engine.config import ServerConfig
from inference_engine.engine import Engine
from inference_engine.engine.arguments import MAX_PIECE_TOKENS
from inference_engine.engine.generation import Generation
from inference_engine.engine.results import HistoryLength, SessionForked
from inference_engine.errors import InvalidArgument, JournalAway, RequestError, SessionBusy, SessionNotFound
from inference_engine.logs import name_request
from inference_engine.server import convert
from inference_engine.server.durable_gate import DurableGate
from inference_engine.server.interceptors import caller, route_of
from inference_engine.server.message_limits import MessageLimits, TransportError
from inference_engine.server.status import SlowConsumer
from inference_engine.server.stream import Feed, Heartbeat, LoopWaker, Stall
from inference_engine.types import Accepted, Durability, Failed, Finished, GenerateParams, Progress, TokenCommitted
from kakeya.v1 import runtime_pb2 as pb

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["RuntimeService"].full_name

# Sessions of a list's page, if its request does not say.
PAGE_SESSIONS = 100
# A client that reads no frame for this long loses its Generate, not its session.
STALL_SECONDS = 30.0
# A Generate is stopped this fraction of its time (but at most this many seconds) before the client's deadline, so that
# the typed error still reaches the client.
DEADLINE_MARGIN = 0.1
MAX_DEADLINE_MARGIN_SECONDS = 0.1

# A list waits so long for what was done before it, and then says what is safe.
LIST_SECONDS = 0.05

# Threads that wait for the disk. One reads at a time.
DISK_THREADS = 32

# So often may a session leave memory between a call's look for it and the call itself.
MOST_LEAVING = 8

T = TypeVar("T")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Behaviour = Callable[[Any, Context], Awaitable[Any]]


class RuntimeService:
    """The RPCs. State that outlives a call is kept in the engine."""

    def __init__(self, engine: Engine, config: ServerConfig, gate: DurableGate) -> None:
        self._engine = engine
        self._config = config
        self._gate = gate
        info = engine.info()
        self._mode, self._model_id = info.mode, info.facts.model_id
        self._durability = info.durability
        self._keeps = info.durability is not Durability.NONE
        self._max_append_tokens = info.config.max_append_tokens
        self._max_message_bytes = MessageLimits(
            max_append_tokens=info.config.max_append_tokens, max_message_bytes=config.max_message_bytes
        ).promised_bytes
        self._disk = ThreadPoolExecutor(DISK_THREADS, "kakeya-recall")  # starts them when they are needed
        self._awaited: dict[str, asyncio.Event] = {}  # by session, set when it becomes free
        self._unanswered: set[str] = set()  # sessions that a call has changed whose client does not know it
        self._waker: LoopWaker | None = None  # of the loop that serves

    async def create_session(self, request: pb.CreateSessionRequest, context: Context) -> pb.CreateSessionResponse:
        strategy = convert.strategy_from_wire(request.strategy) if request.HasField("strategy") else None
        await self._recall("", request.request_id)
        try:
            if self._engine.has_to_prepare(strategy):
                await asyncio.to_thread(self._engine.prepare, strategy)
            opened = self._engine.create_session(
                strategy=strategy,
                eos_token_ids=list(request.eos_token_ids),
                limit_tokens=convert.optional(request, "limit_tokens"),
                label=request.client_label,
                owner=caller(),
                request_id=request.request_id,
                guaranteed=convert.optional(request, "guaranteed"),
                model_ends=request.model_eos_token_ids,
                route=route_of(context.invocation_metadata()),
                may_be_undone=True,
            )
        except InvalidArgument as error:
            if strategy is None:
                raise
            raise convert.in_strategy(error, request.strategy) from None
        return convert.opened_to_wire(opened, mode=self._mode, model_id=self._model_id, durability=self._durability)

    async def append_tokens(self, request: pb.AppendTokensRequest, context: Context) -> pb.AppendTokensResponse:
        session_id, request_id, owner = request.session_id, request.request_id, caller()
        expected = convert.optional(request, "expected_history_length")
        with self._engine.carrying(owner, len(request.token_ids)):
            # Too many ids are refused by their count, before they are converted.
            too_many = len(request.token_ids) > self._max_append_tokens
            token_ids = request.token_ids if too_many else convert.token_ids_from_wire(request.token_ids)
            # The call may have to wait, and a message takes three times the memory of its ids.
            del request

            def append() -> HistoryLength:
                return self._engine.append_once(
                    session_id,
                    token_ids,
                    request_id=request_id,
                    expected_history_length=expected,
                    owner=owner,
                    may_be_undone=True,
                )

            return convert.appended_to_wire(await self._on_session(session_id, append, request_id, is_its_own=True))

    async def generate(self, request: pb.GenerateRequest, context: Context) -> None:
        owner = caller()
        resume_from = convert.optional(request, "resume_from")
        params = functools.cache(partial(self._params, request, owner))  # ids are converted once

        def start() -> Generation:
            return self._engine.generate(
                request.session_id,
                params(),
                request_id=request.request_id,
                resume_from=resume_from,
                owner=owner,
                refuse_late=True,
            )

        async with AsyncExitStack() as stack:
            heartbeat: Heartbeat[pb.GenerateResponse] | None = None
            if (seconds := convert.heartbeat_of(request)) is not None:
                heartbeat = Heartbeat(context.write, convert.progress_to_wire(), seconds)
                await stack.enter_async_context(heartbeat)
            if request.HasField("constraint"):
                await self._compile_constraint(request.session_id, params, owner)
            generation = await self._on_session(request.session_id, start)
            feed = Feed(generation, self._loop_waker())
            with self._known_to_client(request.session_id), self._supervised(generation, feed, context) as stall:
                await self._send(request.session_id, feed, convert.framer_for(request), context, stall, heartbeat)

    async def close_session(self, request: pb.CloseSessionRequest, context: Context) -> pb.CloseSessionResponse:
        owner, session_id, request_id = caller(), request.session_id, request.request_id
        expected = convert.optional(request, "expected_history_length")
        call: dict[str, Any] = {"request_id": request_id, "expected_history_length": expected, "owner": owner}
        if not self._keeps or not self._engine.is_elsewhere(session_id, owner=owner, request_id=request_id):
            with contextlib.suppress(SessionNotFound) if self._keeps else contextlib.nullcontext():
                return convert.closed_to_wire(self._engine.close_once(session_id, **call))
        length = await self._on_disk(partial(self._engine.close_kept, session_id, **call))
        return convert.closed_to_wire(length)

    async def fork_session(self, request: pb.ForkSessionRequest, context: Context) -> pb.ForkSessionResponse:
        owner = caller()

        def fork() -> SessionForked:
            return self._engine.fork_session(
                request.session_id,
                expected_history_length=convert.optional(request, "expected_history_length"),
                at_position=convert.optional(request, "at_position"),
                limit_tokens=convert.optional(request, "limit_tokens"),
                label=request.client_label,
                owner=owner,
                request_id=request.request_id,
                may_be_undone=True,
            )

        forked = await self._on_session(request.session_id, fork, request.request_id)
        return self._forked(pb.ForkSessionResponse, forked)

    async def rewind_session(self, request: pb.RewindSessionRequest, context: Context) -> pb.RewindSessionResponse:
        owner = caller()

        def rewind() -> SessionForked:
            if not request.HasField("at_position"):
                self._engine.session_info(request.session_id, owner=owner)  # an unknown session is reported before
                raise InvalidArgument("at_position", "must be present: how many tokens of the history stay")
            return self._engine.rewind_session(
                request.session_id,
                request.at_position,
                expected_history_length=convert.optional(request, "expected_history_length"),
                owner=owner,
                request_id=request.request_id,
            )

        return self._forked(
            pb.RewindSessionResponse, await self._on_session(request.session_id, rewind, request.request_id)
        )

    def _forked(self, response: type[convert.Begun], forked: SessionForked) -> convert.Begun:
        return convert.forked_to_wire(
            response, forked, mode=self._mode, model_id=self._model_id, durability=self._durability
        )

    async def get_session_info(self, request: pb.GetSessionInfoRequest, context: Context) -> pb.GetSessionInfoResponse:
        info, kept_info = self._engine.session_info, self._engine.kept_session_info
        session_id, owner = request.session_id, caller()
        return convert.session_info_to_wire(
            await self._look(
                session_id,
                partial(info, session_id, owner=owner, saved_only=True),
                partial(kept_info, session_id, owner=owner),
            )
        )

    async def get_server_info(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        return convert.server_info_to_wire(
            self._engine.info(),
            self._engine.reserved_by(caller()),
            prefix_bytes=self._engine.prefix_bytes_of(caller()),
            history_tokens=self._engine.history_tokens_of(caller()),
            usage=self._engine.usage_of(caller()),
            version=__version__,
            max_message_bytes=self._max_message_bytes,
        )

    async def list_sessions(self, request: pb.ListSessionsRequest, context: Context) -> pb.ListSessionsResponse:
        most, owner = request.page_size or PAGE_SESSIONS, caller()

        def page() -> pb.ListSessionsResponse:
            listed = self._engine.list_sessions(after=request.page_token, most=most, owner=owner)
            return convert.list_to_wire(listed, most=most)

        receipt = self._engine.journal.receipt_of_owner(owner)
        await self._gate.synced(receipt, unless_full=True, unless_away=True, most_seconds=LIST_SECONDS)
        if not self._engine.lists_from_memory(owner):
            return await self._on_disk(page)
        # A long page takes milliseconds.
        return page() if most <= PAGE_SESSIONS else await asyncio.to_thread(page)

    async def read_history(self, request: pb.ReadHistoryRequest, context: Context) -> pb.ReadHistoryResponse:
        session_id, most = request.session_id, request.max_tokens or MAX_PIECE_TOKENS
        here, kept = (
            partial(read, session_id, first=request.first_position, most=most, owner=caller())
            for read in (self._engine.read_history, self._engine.read_kept_history)
        )
        return convert.history_to_wire(await self._look(session_id, here, kept))

    def handlers(self) -> grpc.GenericRpcHandler:
        """The RPCs by their names on the wire."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "CreateSession": self._unary(self.create_session, pb.CreateSessionRequest),
                "AppendTokens": self._unary(self.append_tokens, pb.AppendTokensRequest),
                "Generate": self._stream(self.generate, pb.GenerateRequest),
                "CloseSession": self._unary(self.close_session, pb.CloseSessionRequest),
                "ForkSession": self._unary(self.fork_session, pb.ForkSessionRequest),
                "RewindSession": self._unary(self.rewind_session, pb.RewindSessionRequest),
                "GetSessionInfo": self._unary(self.get_session_info, pb.GetSessionInfoRequest, is_read=True),
                "GetServerInfo": self._unary(self.get_server_info, pb.GetServerInfoRequest, is_read=True),
                "ListSessions": self._unary(self.list_sessions, pb.ListSessionsRequest, is_read=True),
                "ReadHistory": self._unary(self.read_history, pb.ReadHistoryRequest, is_read=True),
            },
        )

    def _unary(
        self, behaviour: Behaviour, request_type: type[Message], *, is_read: bool = False
    ) -> grpc.RpcMethodHandler[Any, Any]:
        call = _decoded(self._once_safe(behaviour, changes=not is_read), request_type)
        return grpc.unary_unary_rpc_method_handler(call, response_serializer=_serialize)

    def _stream(self, behaviour: Behaviour, request_type: type[Message]) -> grpc.RpcMethodHandler[Any, Any]:
        """`behaviour` waits before each frame until what that says is safe."""
        call = _decoded(self._once_safe(behaviour, changes=False), request_type)
        return grpc.unary_stream_rpc_method_handler(call, response_serializer=_serialize)

    def _once_safe(self, behaviour: Behaviour, *, changes: bool) -> Behaviour:
        """`behaviour`, whose errors, and if it changes something its answer, are sent once what they say is safe.

        Raises JournalFull or JournalAway instead of what is not safe and cannot become so now.
        """
        if not self._keeps:
            return behaviour

        async def call(request: Any, context: Context) -> Any:
            session_id = getattr(request, "session_id", "")
            # Handed over, so that the call may let go of it.
            handed = [request]
            del request
            try:
                answer = await behaviour(handed.pop(), context)
            except RequestError as error:
                of = session_id or error.session_id
                if error.reveals_session:
                    await self._gate.confirmed(self._engine.journal.receipt(of), of_error=True)
                raise
            # Looked up in the turn of the call: later ones of the session have other receipts.
            of = getattr(answer, "session_id", session_id)
            if changes:
                with self._known_to_client(of):
                    await self._gate.confirmed(self._engine.journal.receipt(of))
            return answer

        return call

    @contextlib.contextmanager
    def _known_to_client(self, session_id: str) -> Iterator[None]:
        """Around what ends with the answer to a change. If it ends otherwise, the next reads wait for the change."""
        try:
            yield
        except BaseException:
            if self._keeps:
                safe = {one for one in self._unanswered if self._engine.journal.receipt(one).is_safe}
                self._unanswered = {*(self._unanswered - safe), session_id}
            raise

    async def _on_session(
        self,
        session_id: str,
        act: Callable[[], T],
        request_id: bytes = b"",
        *,
        is_its_own: bool = False,
    ) -> T:
        """Act on a session that is in memory: the road of every call that uses one.

        What left memory is brought back first, again if it leaves before `act` has it. Again, too, each time the
        session becomes free, until `act` is not refused with SessionBusy. Raises SessionBusy when `busy_wait_seconds`
        are over. (Past the client's own deadline the call is cancelled.)

        request_id: of a call whose reply may be on the disk; is_its_own: it is the session's, and comes with it.
        """

        async def attempt() -> T:
            if not is_its_own or self._engine.is_elsewhere(session_id, owner=caller()):
                # If it is elsewhere, it may have been closed, and its replies are remembered for a while.
                await self._recall(session_id, request_id)
            return act()

        for _ in range(MOST_LEAVING):
            try:
                return await self._when_free(session_id, attempt)
            except SessionNotFound:
                if not self._keeps:
                    raise
                await self._recall(session_id)
                self._engine.session_info(session_id, owner=caller())  # raises: it is not there
        return await self._when_free(session_id, attempt)

    async def _look(self, session_id: str, in_memory: Callable[[], T], in_journal: Callable[[], T]) -> T:
        """What a session is, or has, as far as it is safe. It stays where it is, and nothing waits for it.

        A change whose call has ended without its answer is waited for, unless the disk has no space for it: its client
        asks here whether an append arrived. Raises JournalAway if it is out of reach whether that counts.
        """
        receipt = self._engine.journal.receipt(session_id)
        if not (is_synced := receipt.is_safe) and session_id in self._unanswered:
            is_synced = await self._gate.synced(receipt, unless_full=True, unless_away=True)
        if is_synced:
            self._unanswered.discard(session_id)
        if not is_synced and self._engine.journal.is_away:
            raise JournalAway
        await self._gate.proved()
        try:
            return in_memory()
        except SessionNotFound:
            if not self._keeps:
                raise
        return await self._on_disk(in_journal)

    async def _send(
        self,
        session_id: str,
        feed: Feed,
        frame: convert.Framer,
        context: Context,
        stall: Stall,
        heartbeat: Heartbeat[pb.GenerateResponse] | None,
    ) -> None:
        """Write the frames of one Generate until its last event. Raises the error of a Failed.

        heartbeat: of the stream, until its first token.
        """
        write = context.write if heartbeat is None else heartbeat.write
        while True:
            await feed.wait()
            for event in feed.pop_all():
                if self._keeps and not isinstance(event, TokenCommitted):
                    # A reader gets saved tokens only; others say how long the history is.
                    await self._gate.synced(self._engine.journal.receipt(session_id))
                if isinstance(event, Failed):
                    raise event.error
                message = frame(event)
                if heartbeat is not None:
                    if isinstance(event, Accepted):
                        heartbeat.frame = convert.progress_to_wire(0, event.prefill_tokens)
                    elif isinstance(event, Progress):
                        heartbeat.frame = convert.progress_to_wire(event.done_tokens, event.total_tokens)
                    else:
                        await heartbeat.stop()
                        heartbeat, write = None, context.write
                if message is not None:
                    stall.begin_write()
                    await write(message)
                    stall.end_write()
                if isinstance(event, Finished):
                    return

    async def _recall(self, session_id: str, request_id: bytes = b"") -> None:
        """Bring back from the journal what a call needs and memory has not. Others do not wait for the disk."""
        if self._keeps and self._engine.is_elsewhere(session_id, owner=caller(), request_id=request_id):
            recall = partial(self._engine.recall, owner=caller(), request_id=request_id)
            await self._on_disk(partial(recall, session_id))

    async def _on_disk(self, work: Callable[[], T]) -> T:
        context = contextvars.copy_context()  # with the caller
        return await asyncio.get_running_loop().run_in_executor(self._disk, context.run, work)

    def _loop_waker(self) -> LoopWaker:
        """The waker of the loop, which all streams share."""
        if self._waker is None:
            self._waker = LoopWaker(asyncio.get_running_loop())
        return self._waker

    def _params(self, request: pb.GenerateRequest, owner: str) -> GenerateParams:
        try:
            return convert.params_from_wire(request)
        except InvalidArgument:
            # An unknown session is reported before an invalid argument.
            self._engine.session_info(request.session_id, owner=owner)
            raise

    async def _compile_constraint(self, session_id: str, params: Callable[[], GenerateParams], owner: str) -> None:
        """Have the constraint of a Generate compiled, which may take long, before it is begun."""

        def compile_it() -> Future[Any]:
            self._engine.session_info(session_id, owner=owner)
            return self._engine.compile_constraint(params(), owner=owner)

        # Others may wait for the same one: that this call is left ends it for none of them.
        compiled = asyncio.wrap_future(await self._on_session(session_id, compile_it))
        compiled.add_done_callback(lambda done: done.cancelled() or done.exception())  # also where the client has left
        await asyncio.shield(compiled)

    async def _when_free(self, session_id: str, attempt: Callable[[], Awaitable[T]]) -> T:
        try:
            return await attempt()
        except SessionBusy:
            pass
        loop = asyncio.get_running_loop()
        began = loop.time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(began + self._config.busy_wait_seconds):
                while True:
                    await self._free(session_id, loop)
                    with contextlib.suppress(SessionBusy):
                        return await attempt()
        raise SessionBusy(round(loop.time() - began, 3))

    async def _free(self, session_id: str, loop: asyncio.AbstractEventLoop) -> None:
        # One callback for all waiting calls, so that calls that give up leave none behind.
        is_free = self._awaited.get(session_id)
        if is_free is None:
            is_free = self._awaited[session_id] = asyncio.Event()
            self._engine.when_free(session_id, lambda: self._notify_free(session_id, loop))
        await is_free.wait()

    def _notify_free(self, session_id: str, loop: asyncio.AbstractEventLoop) -> None:
        """Any thread."""

        def notify() -> None:
            self._awaited.pop(session_id).set()

        # The loop is closed only when the process ends, and then no call waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(notify)

    @contextlib.contextmanager
    def _supervised(self, generation: Generation, feed: Feed, context: Context) -> Iterator[Stall]:
        """Stops the engine's work when the client disconnects, stops reading or reaches its deadline.

        A repeated call can take the Generate over; then the end of this call stops nothing.
        """
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        stall = Stall(loop, STALL_SECONDS, task.cancel)
        remaining = context.time_remaining()
        expiry = None
        if remaining is not None:
            margin = min(remaining * DEADLINE_MARGIN, MAX_DEADLINE_MARGIN_SECONDS)
            expiry = loop.call_later(remaining - margin, generation.expire)
        try:
            yield stall
        except BaseException as error:
            # No effect on a Generate that has ended or was already stopped.
            generation.expire() if context.time_remaining() == 0 else generation.cancel()
            if stall.is_stalled and isinstance(error, asyncio.CancelledError):
                raise SlowConsumer(STALL_SECONDS, feed.position) from None
            raise
        finally:
            generation.leave()
            stall.stop()
            if expiry is not None:
                expiry.cancel()


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _decoded(behaviour: Behaviour, request_type: type[Message]) -> Behaviour:
    """`behaviour` over raw bytes. Left to grpc, bytes that do not parse end as UNKNOWN with class names in the text."""

    async def call(raw: bytes, context: Context) -> Any:
        try:
            request = request_type.FromString(raw)
            del raw  # the call may go on for long
        except DecodeError:
            raise TransportError(
                grpc.StatusCode.INVALID_ARGUMENT, f"the message is not a valid {request_type.DESCRIPTOR.full_name}"
            ) from None
        if request_id := getattr(request, "request_id", b""):
            name_request(request_id)
        # Handed over, so that the call may let go of it.
        handed = [request]
        del request
        return await behaviour(handed.pop(), context)

    return call
