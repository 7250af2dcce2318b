"""The operator's port: Prometheus metrics and a dashboard over HTTP, read-only.

    GET /metrics           Prometheus' text format
    GET /dashboard         the page; its parts lie under /dashboard/
    GET /dashboard/data    what the page draws, as JSON
    GET /healthz           200, or 503: as grpc.health.v1 says it, for what speaks no gRPC; asks for no token

On loopback no key is needed, so the `Host` of each request must be a loopback name, too: a hostile page in the
operator's browser must not read it under a name of its own (DNS rebinding). Beyond, a request shows the token of
`metrics_token_file`, as a bearer or as the password that a browser asks for, and TLS has the server's certificates;
`allow_open_metrics` lets every request read, for what can show no token.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from prometheus_client.exposition import choose_encoder

from inference_engine.config import ServerConfig, in_full
from inference_engine.errors import ConfigError
from inference_engine.metrics import EngineMetrics
from inference_engine.server.address import Address, cannot_bind, names_this_machine, resolve_bind
from inference_engine.server.dashboard import SAMPLE_SECONDS, Dashboard

if TYPE_CHECKING:
    from inference_engine.server.tls import Certificates

PAGE = {
    "/dashboard": ("index.html", "text/html; charset=utf-8"),
    "/dashboard/style.css": ("style.css", "text/css; charset=utf-8"),
    "/dashboard/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/dashboard/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
HEALTH = "/healthz"
# Sent with every answer: the page loads only its own parts and data, and no other page may embed it.
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_QUIET_SECONDS = 10.0  # without a byte of a request received or of its answer sent
_MOST_READERS = 64  # at the same time; one more replaces the oldest
_SHORTEST_TOKEN = 16  # characters

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Answer:
    content_type: str
    body: bytes
    status: HTTPStatus = HTTPStatus.OK


class MetricsPort:
    """Listens from construction until `stop`."""

    def __init__(
        self,
        metrics: EngineMetrics,
        config: ServerConfig,
        certificates: Certificates | None = None,
        *,
        is_serving: Callable[[], bool] = lambda: True,
    ) -> None:
        """config: with metrics_bind. certificates: of TLS, beyond loopback. is_serving: asked by any thread.

        Raises ConfigError if the address is not available, or can be reached by readers that `config` lets in by no
        rule.
        """
        address = resolve_bind("metrics_bind", config.metrics_bind)
        refuse_open_metrics(address, config)
        self._metrics = metrics
        self._is_serving = is_serving
        self._dashboard = Dashboard(metrics)
        handler = type(
            "Handler",
            (_Handler,),
            {
                "answer": staticmethod(self._answer),
                "names": ("localhost", config.metrics_bind.rpartition(":")[0]) if address.is_loopback else None,
                "token": read_token(config),
            },
        )
        tls = None if address.is_loopback or certificates is None else certificates.context
        try:
            self._httpd = _MetricsServer(address, handler, metrics.connections_dropped.labels("metrics").inc, tls)
        except OSError as error:
            raise cannot_bind("metrics_bind", address) from error
        self.target = str(replace(address, port=self._httpd.server_port))
        self.url = f"http{'s' if tls else ''}://{self.target}"
        self._is_stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._httpd.serve_forever, name="metrics", daemon=True),
            threading.Thread(target=self._keep_sampling, name="dashboard", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Close the port. Idempotent."""
        self._is_stopping.set()
        self._httpd.shutdown()
        self._httpd.server_close()
        for thread in self._threads:
            thread.join()

    def _keep_sampling(self) -> None:
        while not self._is_stopping.wait(SAMPLE_SECONDS):
            self._dashboard.sample()

    def _answer(self, path: str, query: str, accept: str) -> _Answer | None:
        """None if there is no such page."""
        if path == HEALTH:
            if self._is_serving():
                return _Answer("text/plain", b"serving\n")
            return _Answer("text/plain", b"not serving\n", HTTPStatus.SERVICE_UNAVAILABLE)
        if path == "/metrics":
            encode, content_type = choose_encoder(accept)
            self._metrics.look()
            registry: Any = self._metrics.registry
            if names := parse_qs(query).get("name[]"):
                registry = registry.restricted_registry(names)
            return _Answer(content_type, encode(registry))
        if path == "/dashboard/data":
            return _Answer("application/json", json.dumps(self._dashboard.data(), allow_nan=False).encode())
        if path in PAGE:
            name, content_type = PAGE[path]
            return _Answer(content_type, resources.files(__package__).joinpath("dashboard_page", name).read_bytes())
        return None


def refuse_open_metrics(address: Address, config: ServerConfig) -> None:
    """Raises ConfigError for an address that other machines can reach, if nothing says which of them may read."""
    if address.is_loopback:
        return
    if not (config.metrics_token_file or config.allow_open_metrics):
        raise ConfigError(
            f"metrics_bind {config.metrics_bind} can be reached from other machines: set metrics_token_file, or "
            "allow_open_metrics if all that reach it may read metrics; or bind 127.0.0.1 and collect them with a "
            "local agent"
        )
    if config.metrics_token_file and not (config.tls_cert_file or config.allow_plaintext):
        raise ConfigError(
            f"the token of metrics_bind {config.metrics_bind} would cross the network unencrypted: set tls_cert_file "
            "with tls_key_file, or allow_plaintext in a network of your own"
        )


def read_token(config: ServerConfig) -> bytes | None:
    """What readers of metrics have to show; None: nothing. Raises ConfigError for a file without a token."""
    if not config.metrics_token_file:
        return None
    path = in_full(config.metrics_token_file)
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"metrics_token_file {path} cannot be read: {error.strerror}") from error
    if len(token) < _SHORTEST_TOKEN or len(token.split()) > 1:
        raise ConfigError(
            f"metrics_token_file {path} must hold one token of {_SHORTEST_TOKEN} characters or more, without spaces; "
            f"make one: openssl rand -hex 32 > {path}"
        )
    return token


class _MetricsServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 2 * _MOST_READERS  # beyond it, clients wait for a second or more

    def __init__(
        self,
        address: Address,
        handler: type[BaseHTTPRequestHandler],
        on_drop: Callable[[], object],
        tls: Callable[[], ssl.SSLContext] | None,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._on_drop = on_drop
        self._tls = tls
        self._lock = threading.Lock()
        self._readers: dict[socket.socket, None] = {}  # connections being served, the oldest first
        super().__init__((address.host, address.port), handler)

    def get_request(self) -> tuple[Any, Any]:
        request, client_address = super().get_request()
        if self._tls is not None:  # the handshake is the first read's, in the request's own thread
            request = self._tls().wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return request, client_address

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._readers[request] = None
            if len(self._readers) > _MOST_READERS:
                first = next(iter(self._readers))
                del self._readers[first]
                self._on_drop()
                # Its thread sees the end of the connection, and closes it.
                with contextlib.suppress(OSError):
                    first.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._readers.pop(request, None)
            super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        _log.debug("a reader of the metrics port left", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One request. Subclasses set the attributes without a value.

    names: that this machine is called by; None: any. token: to be shown; None: none.
    """

    timeout = _QUIET_SECONDS
    server_version, sys_version = "kakeya", ""
    answer: Callable[[str, str, str], _Answer | None]
    names: tuple[str, ...] | None
    token: bytes | None

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if not self._is_for_us():
            self._send(
                _Answer("text/plain", b"this port answers to loopback names only\n", HTTPStatus.MISDIRECTED_REQUEST)
            )
            return
        if url.path != HEALTH and not self._is_allowed():
            self._send(
                _Answer("text/plain", b"show the token of metrics_token_file\n", HTTPStatus.UNAUTHORIZED),
                {"WWW-Authenticate": 'Basic realm="metrics", charset="UTF-8"'},
            )
            return
        try:
            found = self.answer(url.path, url.query, self.headers.get("Accept", ""))
        except Exception:  # noqa: BLE001 - the client gets status 500, the log the error
            _log.exception("the metrics port cannot answer")
            found = _Answer("text/plain", b"internal error\n", HTTPStatus.INTERNAL_SERVER_ERROR)
        if found is None and url.path == "/":
            self._send(_Answer("text/plain", b"see /dashboard\n", HTTPStatus.SEE_OTHER), {"Location": "/dashboard"})
            return
        self._send(found or _Answer("text/plain", b"see /metrics and /dashboard\n", HTTPStatus.NOT_FOUND))

    def do_HEAD(self) -> None:
        self.do_GET()

    def _is_for_us(self) -> bool:
        """Does the request name a loopback address? Browsers always send a Host, so none is accepted."""
        host = self.headers.get("Host")
        return host is None or self.names is None or names_this_machine(host, self.names)

    def _is_allowed(self) -> bool:
        shown = _shown(self.headers.get("Authorization", ""))
        return self.token is None or hmac.compare_digest(shown, self.token)

    def _send(self, answer: _Answer, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self.send_response(answer.status)
        for name, value in {**HEADERS, **headers, "Content-Type": answer.content_type}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class names it
        _log.debug(format, *arguments)


def _shown(authorization: str) -> bytes:
    """The token of a bearer, or the password of a Basic authorization; empty where there is neither."""
    kind, _, value = authorization.strip().partition(" ")
    if kind.lower() == "bearer":
        return value.strip().encode("latin-1")
    if kind.lower() == "basic":
        with contextlib.suppress(binascii.Error, ValueError):
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    return b""
