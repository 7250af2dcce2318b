"""The shim as an ASGI application: routes, authentication, and the headers of every answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from http import HTTPStatus

import prometheus_client
from fastapi import APIRouter, Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_engine.errors import Draining, RequestError
from inference_engine.logs import about_request
from inference_engine.metrics import EngineMetrics
from inference_engine.server.address import Address, names_this_machine
from inference_engine.server.auth import KeyRing
from inference_engine.server.http import deprecation
from inference_engine.server.http.chat_replies import model_list
from inference_engine.server.http.completion import ROUTE, Completion, Desk
from inference_engine.server.http.door import HttpDoor
from inference_engine.server.http.error_replies import OperatorsOnly, body_of, envelope, headers_of, said, status_of
from inference_engine.server.status import as_request_error

MODELS, HEALTH, METRICS = "/v1/models", "/healthz", "/metrics"
METHODS = {ROUTE: "POST", **dict.fromkeys((MODELS, HEALTH, METRICS, deprecation.PAGE), "GET")}
ROUTES = tuple(METHODS)


@dataclass(slots=True)
class State:
    """State that changes while the shim runs."""

    is_draining: bool = field(default=False)


def create_app(desk: Desk, keys: KeyRing, address: Address, state: State, door: HttpDoor) -> ASGIApp:
    """The whole application, for `address`. door: gets the peers of accepted and refused requests."""
    # No OpenAPI pages: the interface is frozen, and documented by others.
    # Nor is a client sent to another route, which it would ask without its key.
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.include_router(_open_routes(desk, state))
    app.include_router(_guarded_routes(desk, keys, state, door, is_loopback=address.is_loopback))
    app.add_exception_handler(RequestError, _refuse)
    app.add_exception_handler(HTTPException, _refuse_route)
    app.add_exception_handler(ClientDisconnect, _forget)
    app.add_exception_handler(Exception, _report)
    return _Frame(app, desk.engine.metrics, address, door)


def _open_routes(desk: Desk, state: State) -> APIRouter:
    router = APIRouter()

    @router.get(HEALTH)
    async def health() -> Response:
        is_serving = desk.engine.is_serving() and not state.is_draining
        return JSONResponse({"status": "ok" if is_serving else "unavailable"}, 200 if is_serving else 503)

    @router.get(deprecation.PAGE)
    async def why() -> Response:
        return PlainTextResponse(deprecation.PAGE_TEXT)

    return router


def _guarded_routes(desk: Desk, keys: KeyRing, state: State, door: HttpDoor, *, is_loopback: bool) -> APIRouter:
    async def authenticate(request: Request) -> None:
        headers = [(name.decode("latin-1"), value) for name, value in request.headers.raw]
        key = keys.key_of(headers)
        request.state.owner = key.owner
        if request.client is not None:
            door.accepted((request.client.host, request.client.port), key.digest)

    router = APIRouter(dependencies=[Depends(authenticate)])
    created = int(desk.now())

    @router.post(ROUTE)
    async def complete(request: Request) -> Response:
        if state.is_draining:
            raise Draining
        return Completion(desk, request.state.owner)

    @router.get(MODELS)
    async def models() -> Response:
        return JSONResponse(model_list(desk.engine.info().facts.model_id, created))

    @router.get(METRICS)
    async def metrics() -> Response:
        # Metrics cover all owners. Without keys on loopback, any local caller could read `metrics_bind` as well.
        if not (is_loopback and keys.is_open):
            raise OperatorsOnly(METRICS)
        # In a thread: it reads the process's own numbers from the system.
        page = await asyncio.to_thread(prometheus_client.generate_latest, desk.engine.metrics.registry)
        return Response(page, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    return router


async def _refuse(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse(body_of(error), status_of(error), headers_of(error))


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    routes = ", ".join(f"{method} {route}" for route, method in METHODS.items())
    message = f"{said(request.method)} {said(request.url.path)} is not served here; these are: {routes}"
    return JSONResponse(envelope(error.status_code, message), error.status_code, error.headers)


async def _forget(request: Request, _error: Exception) -> Response:
    """The client has disconnected, so this is never read."""
    request.state.has_left = True
    return Response(status_code=400)


async def _report(request: Request, error: Exception) -> Response:
    return await _refuse(request, as_request_error(error, request.url.path))


class _Frame:
    """Around every request: checks the host, counts the answer, marks it as deprecated, tags log lines.

    Answers without a key are few for each connection and address: the last one closes its connection.

    On loopback, a hostile web page can resolve its own name to 127.0.0.1 (DNS rebinding); requests of the browser then
    carry that name. So on loopback, only names of this machine are answered.
    """

    def __init__(self, app: ASGIApp, metrics: EngineMetrics, address: Address, door: HttpDoor) -> None:
        self._app = app
        self._door = door
        self._responses = metrics.http_responses
        self._is_loopback = address.is_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        route = scope["path"] if scope["path"] in ROUTES else "other"

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), *deprecation.HEADERS]
                refuses = message["status"] == HTTPStatus.UNAUTHORIZED
                # The door knows the others already: they are gone, or were refused as what is not HTTP.
                is_here = scope["client"] is not None and not scope.get("state", {}).get("has_left")
                if is_here and self._door.answers(tuple(scope["client"]), refuses=refuses):
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
                self._responses.labels(route, str(message["status"])).inc()
            await send(message)

        if self._is_loopback and not _is_of_this_machine(scope):
            text = "the Host header does not name this machine; use 127.0.0.1 or localhost"
            await JSONResponse(envelope(421, text), 421)(scope, receive, marked)
            return
        try:
            with about_request():
                await self._app(scope, receive, marked)
        except Exception:  # noqa: BLE001 - `_report` has answered and logged it; starlette raises it again
            return


def _is_of_this_machine(scope: Scope) -> bool:
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    return len(hosts) == 1 and names_this_machine(hosts[0])
