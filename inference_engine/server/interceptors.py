"""What happens around every call: who is calling, how long it took, what its error becomes.

Default-deny: with keys set, every method needs one, known or not, except those in OPEN_METHODS, matched by exact path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from time import perf_counter
from typing import Any, TypeAlias

import grpc

from inference_engine.errors import Unauthenticated
from inference_engine.metrics import EngineMetrics
from inference_engine.server.auth import KeyRing
from inference_engine.server.status import as_request_error, code_of, to_trailers

OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check"})
OUR_METHODS = "/kakeya.v1."

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Behaviour = Callable[[Any, Context], Awaitable[Any]]

_caller: ContextVar[str] = ContextVar("caller", default="")


def caller() -> str:
    """The owner on whose behalf the current call runs."""
    return _caller.get()


class CallInterceptor(grpc.aio.ServerInterceptor):
    """One for the server: authenticates, maps errors, measures, and knows how many calls are running."""

    def __init__(self, keys: KeyRing, metrics: EngineMetrics) -> None:
        self._keys = keys
        self._metrics = metrics
        self._guarded: dict[str, Handler] = {}
        self._running = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await self._handler(continuation, details)
        if details.method not in OPEN_METHODS:
            try:
                _caller.set(self._keys.owner_of(details.invocation_metadata))
            except Unauthenticated as error:
                return self._refusal(error, details.method if handler else "unknown")
        return handler

    async def wait_idle(self) -> None:
        """Until no call of ours runs. (`grpc.aio.Server.stop` may return while handlers still do.)"""
        await self._is_idle.wait()

    async def _handler(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The guarded handler of a method, made once. Unknown methods are not remembered: anybody can invent them."""
        found = self._guarded.get(details.method)
        if found is None:
            handler = await continuation(details)
            if handler is None:
                return None
            found = self._guarded[details.method] = self._guard_handler(handler, details.method)
        return found

    def _guard_handler(self, handler: Handler, method: str) -> Handler:
        if handler.request_streaming:
            return handler  # server reflection: a library's, with no errors of ours
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._guard(handler.unary_stream, method), handler.request_deserializer, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            self._guard(handler.unary_unary, method), handler.request_deserializer, handler.response_serializer
        )

    def _refusal(self, error: Unauthenticated, method: str) -> Handler:
        async def refuse(_request: Any, _context: Context) -> None:
            raise error

        return grpc.unary_unary_rpc_method_handler(self._guard(refuse, method))

    def _guard(self, behaviour: Any, method: str) -> Behaviour:
        name = method.removeprefix("/")
        seconds = self._metrics.rpc_seconds.labels(name)
        ok = self._metrics.rpc_total.labels(name, "OK")
        counts_as_running = method.startswith(OUR_METHODS)

        async def guarded(request: Any, context: Context) -> Any:
            began = perf_counter()
            code = grpc.StatusCode.OK
            self._change_running(counts_as_running)
            try:
                return await behaviour(request, context)
            except grpc.aio.AbortError:
                code = context.code()
                raise
            except (asyncio.CancelledError, grpc.aio.InternalError):
                # The client is gone (a write to it may fail before the cancellation comes), or the server stops.
                # Either way the call must end here: grpc hangs if a handler's own CancelledError reaches it.
                code = grpc.StatusCode.CANCELLED
                await context.abort(code, "the call was cancelled")
            except Exception as error:  # noqa: BLE001 - the last one who can answer the client
                known = as_request_error(error, name)
                code = code_of(known)
                await context.abort(code, known.message, to_trailers(known))
            finally:
                self._change_running(-counts_as_running)
                seconds.observe(perf_counter() - began)
                (ok if code is grpc.StatusCode.OK else self._metrics.rpc_total.labels(name, code.name)).inc()

        return guarded

    def _change_running(self, by: int) -> None:
        self._running += by
        if self._running:
            self._is_idle.clear()
        else:
            self._is_idle.set()
