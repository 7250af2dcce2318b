"""The servicer without a transport: bytes in, frames or a typed error out, a hundred times as many a second.

What the interceptor and gRPC do around it is tested elsewhere, over a socket. Here an exception that is no error of
ours, which they would turn into INTERNAL, is simply raised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message

from inference_engine.config import ServerConfig
from inference_engine.engine import Engine
from inference_engine.errors import RequestError
from inference_engine.server.durable_gate import DurableGate
from inference_engine.server.message_limits import TransportError
from inference_engine.server.service import SERVICE_NAME, RuntimeService
from inference_engine.server.status import code_of, reason_of, to_trailers
from kakeya.v1 import runtime_pb2 as pb

STREAMING = "Generate"
_METHODS = pb.DESCRIPTOR.services_by_name["RuntimeService"].methods
REQUESTS: dict[str, type[Message]] = {method.name: getattr(pb, method.input_type.name) for method in _METHODS}
RESPONSES: dict[str, type[Message]] = {method.name: getattr(pb, method.output_type.name) for method in _METHODS}


@dataclass
class Details:
    """What gRPC says of a call before it is handled."""

    method: str
    invocation_metadata: tuple[tuple[str, str | bytes], ...] = ()


class Undecodable(Exception):
    """The bytes were no message of the method."""


@dataclass
class Context:
    """What a handler asks of gRPC. seconds: until the client's deadline."""

    seconds: float | None = None
    frames: list[Any] = field(default_factory=list)

    def time_remaining(self) -> float | None:
        return self.seconds

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def write(self, message: Any) -> None:
        self.frames.append(message)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Frames (one, where the method is unary), and how the call ended: OK, or an error's reason."""

    frames: list[Any]
    error: RequestError | None

    @property
    def reason(self) -> str:
        return "OK" if self.error is None else reason_of(self.error)

    @property
    def only(self) -> Any:
        assert self.error is None, self.error
        (frame,) = self.frames
        return frame

    @property
    def tokens(self) -> list[int]:
        return [
            frame.token.token_id if frame.HasField("token") else frame.token_id
            for frame in self.frames
            if frame.HasField("token_id") or frame.HasField("token")
        ]


class Servicer:
    """Every RPC of the service over `engine`."""

    def __init__(self, engine: Engine, *, busy_wait_seconds: float = 0.02) -> None:
        service = RuntimeService(engine, ServerConfig(busy_wait_seconds=busy_wait_seconds), DurableGate(engine.journal))
        self._handlers = service.handlers()

    async def call(self, request: Message, *, seconds: float | None = None) -> Outcome:
        """A message to the method it belongs to."""
        name = type(request).__name__.removesuffix("Request")
        return await self.raw(name, request.SerializeToString(), seconds=seconds)

    async def raw(
        self, method: str, message: bytes, *, seconds: float | None = None, context: Context | None = None
    ) -> Outcome:
        """Raises Undecodable for bytes that are no message, and whatever is no RequestError: that is a bug."""
        handler: Any = self._handlers.service(Details(f"/{SERVICE_NAME}/{method}"))
        context = context or Context(seconds)
        try:
            if method == STREAMING:
                await handler.unary_stream(message, context)
            else:
                context.frames.append(await handler.unary_unary(message, context))
        except RequestError as error:
            code_of(error)  # raises for one that is not in the table
            to_trailers(error)
            return Outcome(context.frames, error)
        except TransportError as error:
            if error.code is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
            raise Undecodable(error.text) from error
        for frame in context.frames:
            assert isinstance(frame, RESPONSES[method])
            handler.response_serializer(frame)
        return Outcome(context.frames, None)
