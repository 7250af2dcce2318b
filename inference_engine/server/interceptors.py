"""Around every call: authentication, limits per owner, metrics, and errors turned into statuses.

Default-deny: with keys set, every method needs one, known or not, except those in OPEN_METHODS, matched by exact path.
Without keys, the client's certificate names the owner; without either, all callers are one owner. All of this is
decided on the headers; the message of a call is read afterwards (`message_limits.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from dataclasses import replace
from time import perf_counter
from typing import Any, TypeAlias

import grpc

from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument, RequestError, Unauthenticated
from inference_engine.logs import about_request, about_session
from inference_engine.server import message_limits as incoming
from inference_engine.server.auth import NO_KEY, Key, KeyRing, owner_of_certificate
from inference_engine.server.grpc_listener import GrpcDoor
from inference_engine.server.limits import OwnerLimits
from inference_engine.server.message_limits import (
    MessageLimits,
    OpenReaders,
    OwnerReaders,
    TransportError,
    read_message,
)
from inference_engine.server.status import CODES, as_request_error, code_of, reason_of, to_trailers
from inference_engine.tracing import end_call

OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check"})
ROUTE_HEADER = "kakeya-route"
OUR_METHODS = "/kakeya.v1."

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Trailers: TypeAlias = tuple[tuple[str, bytes], ...]
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Behaviour = Callable[[Any, Context], Awaitable[Any]]

_log = logging.getLogger(__name__)
_key: ContextVar[Key] = ContextVar("key", default=NO_KEY)


def caller() -> str:
    """The owner that the current call runs for."""
    return _key.get().owner


def route_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """What the client wants the id of a new session to begin with, so that a proxy can route by it; "": nothing.

    Raises InvalidArgument if there are two of them.
    """
    routes = [value for key, value in metadata or () if key == ROUTE_HEADER]
    if len(routes) > 1:
        raise InvalidArgument(ROUTE_HEADER, f"must be sent once, got {len(routes)}")
    return str(routes[0]) if routes else ""


async def _abort(context: Context, code: grpc.StatusCode, text: str, trailers: Trailers = ()) -> None:
    """End the call with this status. Returns: gRPC raises by itself once the handler has returned.

    gRPC keeps its error with the call, and through its traceback all frames of the call, which hold the call. Only the
    garbage collector frees such a cycle; with thousands of refusals it takes 0.2 s, in which no session gets a token.
    """
    try:
        await context.abort(code, text, trailers)
    except grpc.aio.AbortError as abort:
        error: BaseException | None = abort
        while error is not None:
            error.__traceback__, error = None, error.__context__


class CallInterceptor(grpc.aio.ServerInterceptor):
    """One for each server: authenticates, maps errors, measures, and counts running calls."""

    def __init__(
        self,
        keys: KeyRing,
        engine: Engine,
        limits: OwnerLimits,
        *,
        messages: MessageLimits,
        door: GrpcDoor,
        has_certificates: bool = False,
    ) -> None:
        """door: gets the peers of accepted and refused calls. has_certificates: every client has shown one."""
        self._keys = keys
        self._engine = engine
        self._metrics = metrics = engine.metrics
        self._tracing = engine.tracing
        self._limits = limits
        self._messages = messages
        self._door = door
        self._open_readers, self._owner_readers = OpenReaders(), OwnerReaders()
        self._is_by_certificate = keys.is_open and has_certificates
        for reason in CODES:
            metrics.rpc_errors.labels(reason)
        self._guarded: dict[str, Handler] = {}
        self._refusals: dict[str, Handler] = {}  # by method; all unknown methods share one
        self._running: set[asyncio.Task[Any]] = set()  # calls of the runtime's own methods
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._ending: RequestError | None = None

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await self._handler(continuation, details)
        if details.method not in OPEN_METHODS:
            try:
                _key.set(self._keys.key_of(details.invocation_metadata))
            except Unauthenticated:
                return self._refusal(details.method if handler else "unknown")
        return handler

    async def wait_idle(self) -> None:
        """Wait until no own call runs. (`grpc.aio.Server.stop` may return while handlers still run.)"""
        await self._is_idle.wait()

    def end_all(self, error: RequestError) -> None:
        """End every running call of the runtime with `error`."""
        self._ending = error
        for task in tuple(self._running):
            task.cancel()

    async def _handler(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The guarded handler of a method, made once. Unknown methods are not stored: their number has no limit."""
        found = self._guarded.get(details.method)
        if found is None:
            handler = await continuation(details)
            if handler is None:
                return None
            found = self._guarded[details.method] = self._guard_handler(handler, details.method)
        return found

    def _guard_handler(self, handler: Handler, method: str) -> Handler:
        if handler.request_streaming:
            return handler  # server reflection: the library's own, without typed errors
        behaviour: Any = handler.unary_stream if handler.response_streaming else handler.unary_unary
        is_open = method in OPEN_METHODS
        behaviour = self._with_message(behaviour, handler.request_deserializer, method, is_open=is_open)
        if not is_open:
            behaviour = self._admitted(behaviour)
        # Streaming requests, though there is one message: grpc reads a unary message before it calls the handler.
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        guarded = self._observed(self._guard(behaviour, method), method)
        return make(guarded, None, handler.response_serializer)

    def _with_message(self, behaviour: Any, parse: Any, method: str, *, is_open: bool) -> Behaviour:
        """`behaviour` with the call's message, which it reads; parse: bytes to what `behaviour` takes, or None."""
        limit_bytes = self._messages.of(method)

        async def with_message(_messages: Any, context: Context) -> Any:
            if is_open:
                raw = await read_message(context, limit_bytes, incoming.MESSAGE_SECONDS, self._open_readers)
            else:
                async with self._owner_readers.one(caller()):
                    raw = await read_message(context, limit_bytes, incoming.MESSAGE_SECONDS)
            # Handed over, not kept beside what becomes of it: the call may go on for long.
            message = [raw if parse is None else parse(raw)]
            del raw
            return await behaviour(message.pop(), context)

        return with_message

    def _refusal(self, method: str) -> Handler:
        found = self._refusals.get(method)
        if found is None:

            async def refuse(_messages: Any, context: Context) -> None:
                await self._door.refused(context.peer())
                raise Unauthenticated

            guarded = self._guard(refuse, method)

            async def refuse_if_connected(messages: Any, context: Context) -> None:
                if self._door.has_dropped(context.peer()):
                    # The client is gone. Hundreds of such calls may be in gRPC's queue, ahead of other clients' calls.
                    await _abort(context, grpc.StatusCode.UNAUTHENTICATED, "")
                else:
                    await guarded(messages, context)

            found = grpc.stream_stream_rpc_method_handler(refuse_if_connected)
            self._refusals[method] = found
        return found

    def _observed(self, behaviour: Behaviour, method: str) -> Behaviour:
        """`behaviour` in a span of its own, if calls are traced, and with a tag for its log lines."""
        name, is_traced = method.removeprefix("/"), self._tracing.is_on and method.startswith(OUR_METHODS)

        async def observed(request: Any, context: Context) -> Any:
            with about_request():
                if not is_traced:
                    return await behaviour(request, context)
                with self._tracing.call(name, context.invocation_metadata() or ()):
                    return await behaviour(request, context)

        return observed

    def _admitted(self, behaviour: Any) -> Behaviour:
        """`behaviour` within the owner's limits."""

        async def admitted(request: Any, context: Context) -> Any:
            if self._is_by_certificate:
                _key.set(replace(NO_KEY, owner=owner_of_certificate(context.auth_context())))
            with self._limits.call(caller()):
                self._door.accepted(context.peer(), _key.get().digest)
                return await behaviour(request, context)

        return admitted

    def _guard(self, behaviour: Any, method: str) -> Behaviour:
        name = method.removeprefix("/")
        seconds = self._metrics.rpc_seconds.labels(name)
        ok = self._metrics.rpc_total.labels(name, "OK")
        is_ours = method.startswith(OUR_METHODS)

        async def guarded(request: Any, context: Context) -> Any:
            began = perf_counter()
            code, reason = grpc.StatusCode.OK, ""
            task = self._begin() if is_ours else None
            try:
                return await behaviour(request, context)
            except grpc.aio.AbortError:
                code = context.code()
                raise
            except TransportError as error:
                code = error.code
                await _abort(context, code, error.text)
            except (asyncio.CancelledError, grpc.aio.InternalError):
                # The client is gone (a write may fail before the cancellation arrives), or the server stops.
                # Either way the call must end here: grpc hangs if a handler's own CancelledError reaches it.
                if self._ending is None:
                    code = grpc.StatusCode.CANCELLED
                    await _abort(context, code, "the call was cancelled")
                else:
                    code, reason = code_of(self._ending), reason_of(self._ending)
                    await _abort(context, code, self._ending.message, to_trailers(self._ending))
            except Exception as error:  # noqa: BLE001 - the last place that can answer the client
                known = as_request_error(error, name)
                if known.is_behind:
                    self._note_behind(known)
                code, reason = code_of(known), reason_of(known)
                await _abort(
                    context, code, known.message, to_trailers(known, has_others=self._engine.journal.is_shared)
                )
            finally:
                self._end(task)
                seconds.observe(perf_counter() - began)
                end_call(code.value[0], reason)
                if reason:
                    self._metrics.rpc_errors.labels(reason).inc()
                (ok if code is grpc.StatusCode.OK else self._metrics.rpc_total.labels(name, code.name)).inc()

        return guarded

    def _note_behind(self, error: RequestError) -> None:
        """Of an error that is sent: one that the journal does not let through says nothing of what was lost."""
        self._metrics.histories_behind.inc()
        session = about_session(error.session_id)
        _log.warning("%s: tokens were lost, or the client is mistaken", error.message, extra=session)

    def _begin(self) -> asyncio.Task[Any]:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        self._is_idle.clear()
        return task

    def _end(self, task: asyncio.Task[Any] | None) -> None:
        if task is not None:
            self._running.discard(task)
        if not self._running:
            self._is_idle.set()
