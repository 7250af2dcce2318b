"""grpc.health.v1 for the server ("") and for RuntimeService.

SERVING while the engine is alive, what it does can be kept, and it is not draining.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

from inference_engine.engine import Engine
from inference_engine.server.service import SERVICE_NAME

LOOK_SECONDS = 0.5

_SERVICES = ("", SERVICE_NAME)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class _Servicer(HealthServicer):
    """The library's servicer, with `List`, which it lacks."""

    async def List(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        asked = {service: health_pb2.HealthCheckRequest(service=service) for service in _SERVICES}
        messages: Any = health_pb2  # whose types do not know this one
        return messages.HealthListResponse(
            statuses={service: await self.Check(request, context) for service, request in asked.items()}
        )


class Health:
    """Reports an engine's state to the health service, from `follow` until `drain`."""

    def __init__(self, engine: Engine) -> None:
        self.servicer = _Servicer()
        self._engine = engine
        self._following: asyncio.Task[None] | None = None
        self._is_draining = False

    @property
    def is_serving(self) -> bool:
        """Any thread may ask."""
        return not self._is_draining and self._engine.is_serving()

    async def follow(self) -> None:
        """Report the engine's state now, and again every LOOK_SECONDS."""
        await self._look()
        self._following = asyncio.create_task(self._keep_looking(), name="health")

    async def drain(self) -> None:
        """NOT_SERVING from now on."""
        self._is_draining = True
        if self._following is not None:
            self._following.cancel()
        await self.servicer.enter_graceful_shutdown()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self._look()

    async def _look(self) -> None:
        status = _SERVING if self.is_serving else _NOT_SERVING
        for service in _SERVICES:
            await self.servicer.set(service, status)
