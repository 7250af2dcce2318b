"""A proxy before several servers that sends each gRPC call to one of them by a hash of its `kakeya-route`.

It is what Envoy, HAProxy and nginx are configured to do. Calls without the header go to the servers in turn.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

ROUTE = "kakeya-route"
# Set by the connection itself, on each side.
_OWN = ("user-agent", "grpc-", ":")


@dataclass(frozen=True, slots=True)
class Passed:
    """A call as it was sent on."""

    method: str
    route: str | None
    server: int


class Router(grpc.GenericRpcHandler):
    def __init__(self, channels: Sequence[grpc.aio.Channel]) -> None:
        self.target = ""
        self.passed: list[Passed] = []
        self.losses: deque[str] = deque()  # methods: of the next call of each, the answer is lost
        self._channels: Sequence[Any] = channels
        self._turns = itertools.cycle(range(len(channels)))

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler[bytes, bytes]:
        method = handler_call_details.method

        async def pass_on(
            requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
        ) -> AsyncIterator[bytes]:
            metadata = [each for each in context.invocation_metadata() or () if not each[0].startswith(_OWN)]
            route = dict(metadata).get(ROUTE)
            server = self._server_of(route)
            name = method.rpartition("/")[2]
            self.passed.append(Passed(name, None if route is None else str(route), server))
            call: Any = self._channels[server].stream_stream(method)(
                requests, metadata=tuple(metadata), timeout=context.time_remaining()
            )
            is_lost = name in self.losses
            if is_lost:
                self.losses.remove(name)
            try:
                async for answer in call:
                    if not is_lost:
                        yield answer
            except grpc.aio.AioRpcError as error:
                context.set_trailing_metadata(tuple(error.trailing_metadata() or ()))
                await context.abort(error.code(), error.details() or "")
            finally:
                call.cancel()
            if is_lost:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "upstream connect error or disconnect/reset")

        return grpc.stream_stream_rpc_method_handler(pass_on)

    def _server_of(self, route: str | bytes | None) -> int:
        if route is None:
            return next(self._turns)
        return hashlib.sha256(str(route).encode()).digest()[0] % len(self._channels)


@asynccontextmanager
async def open_router(*servers: str) -> AsyncIterator[Router]:
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(server)) for server in servers]
        router = Router(channels)
        listening = grpc.aio.server()
        listening.add_generic_rpc_handlers((router,))
        router.target = f"127.0.0.1:{listening.add_insecure_port('127.0.0.1:0')}"
        await listening.start()
        stack.push_async_callback(listening.stop, None)
        yield router
