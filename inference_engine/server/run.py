"""Starts the server, and ends it so that nothing is lost.

Draining, in order: health says NOT_SERVING; the engine refuses new work and lets running Generates end (at most
`drain_seconds`, then they end with DRAINING); every call of ours has returned; the port closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import cast

import grpc
import prometheus_client
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from inference_engine import __version__
from inference_engine.config import ServerConfig
from inference_engine.engine import Engine
from inference_engine.errors import ConfigError
from inference_engine.metrics import EngineMetrics
from inference_engine.server.address import Address, cannot_bind, resolve_bind
from inference_engine.server.auth import KeyRing
from inference_engine.server.health import Health
from inference_engine.server.interceptors import CallInterceptor
from inference_engine.server.service import SERVICE_NAME, RuntimeService

# How long finished calls may take to leave, and their last bytes to be sent, once the engine has drained.
LEAVE_SECONDS = 5.0
FLUSH_SECONDS = 1.0

_log = logging.getLogger(__name__)


class ServerHandle:
    """A running server."""

    def __init__(
        self,
        *,
        target: str,
        metrics_target: str | None,
        server: grpc.aio.Server,
        engine: Engine,
        health: Health,
        calls: CallInterceptor,
        config: ServerConfig,
        stop_metrics: Callable[[], None],
    ) -> None:
        self.target = target  # "127.0.0.1:50051": the address really bound
        self.metrics_target = metrics_target
        self._server = server
        self._engine = engine
        self._health = health
        self._calls = calls
        self._config = config
        self._stop_metrics = stop_metrics

    async def drain_and_stop(self) -> None:
        """Refuse new work, let running Generates end, close the port. The engine is left to its owner, drained."""
        self._engine.metrics.draining.set(1)
        await self._health.drain()
        await asyncio.to_thread(self._engine.drain, self._config.drain_seconds)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._calls.wait_idle(), LEAVE_SECONDS)
        await self._server.stop(FLUSH_SECONDS)
        await asyncio.to_thread(self._stop_metrics)


async def start_server(engine: Engine, config: ServerConfig) -> ServerHandle:
    """Listen as `config` says. Raises ConfigError if it must not or cannot."""
    address = resolve_bind("bind", config.bind)
    keys = KeyRing.from_file(config.api_key_file) if config.api_key_file else KeyRing()
    credentials = _credentials(config)
    if not address.is_loopback and not (keys and credentials):
        raise ConfigError(
            f"bind {config.bind} can be reached from other machines, which needs both api_key_file and tls_cert_file "
            "with tls_key_file; or bind 127.0.0.1"
        )
    metrics_target, stop_metrics = _start_metrics(engine.metrics, config)
    try:
        health, calls = Health(engine), CallInterceptor(keys, engine.metrics)
        server = grpc.aio.server(interceptors=(calls,), options=_options(config))
        server.add_generic_rpc_handlers((RuntimeService(engine, config).handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
        if address.is_loopback:
            names = (SERVICE_NAME, "grpc.health.v1.Health", reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        target = _bind(server, address, credentials)
        _describe(engine)
        await health.follow()
        await server.start()
    except BaseException:
        stop_metrics()
        raise
    return ServerHandle(
        target=target,
        metrics_target=metrics_target,
        server=server,
        engine=engine,
        health=health,
        calls=calls,
        config=config,
        stop_metrics=stop_metrics,
    )


def serve(engine: Engine, config: ServerConfig, *, on_ready: Callable[[ServerHandle], None] = lambda _: None) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return. A second signal ends the process at once.

    `on_ready` is called once, when clients can connect. Raises ConfigError as `start_server` does.
    """
    asyncio.run(_serve(engine, config, on_ready))


async def _serve(engine: Engine, config: ServerConfig, on_ready: Callable[[ServerHandle], None]) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    handle = await start_server(engine, config)
    # What is here now (the libraries, the model) stays. Walking all of it takes the collector a tenth of a second, in
    # which no token moves.
    gc.collect()
    gc.freeze()
    on_ready(handle)
    await stop.wait()
    for number in signals:
        loop.remove_signal_handler(number)
        # The system's own handler works even if the loop is stuck.
        signal.signal(number, signal.SIG_DFL)
    _log.info("draining for at most %g s; a second signal ends at once", config.drain_seconds)
    await handle.drain_and_stop()


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.max_metadata_size", 8 * 1024),
        ("grpc.absolute_max_metadata_size", 16 * 1024),
        ("grpc.max_concurrent_streams", 1024),
        # A long prefill is a silent call. Clients may ping through it, every 10 s (a common setting) or less often.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # And we find out about clients that vanished.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    if not config.tls_cert_file:
        return None
    certificate, key = Path(config.tls_cert_file).expanduser(), Path(config.tls_key_file).expanduser()
    try:
        # grpc would say no more than "cannot bind". An encrypted key must fail too, not ask for a password.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: b"")
        return grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    except OSError as error:
        raise ConfigError(
            f"tls_cert_file {certificate} and tls_key_file {key} are not a readable certificate chain and its "
            f"unencrypted key in PEM format: {error.strerror}"
        ) from error


def _bind(server: grpc.aio.Server, address: Address, credentials: grpc.ServerCredentials | None) -> str:
    try:
        if credentials is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise cannot_bind("bind", address)
    return str(Address(host=address.host, port=port, is_loopback=address.is_loopback))


def _start_metrics(metrics: EngineMetrics, config: ServerConfig) -> tuple[str | None, Callable[[], None]]:
    """Serve /metrics over HTTP, if asked to. Returns where, and what stops it."""
    if not config.metrics_bind:
        return None, lambda: None
    address = resolve_bind("metrics_bind", config.metrics_bind)
    if not address.is_loopback:
        raise ConfigError(
            f"metrics_bind {config.metrics_bind} can be reached from other machines, and metrics have no access "
            "control; bind 127.0.0.1 and let a local agent collect them"
        )
    # `session_created` beside `session_total` would read as a count.
    cast("Callable[[], None]", prometheus_client.disable_created_metrics)()
    try:
        httpd, thread = prometheus_client.start_http_server(address.port, address.host, metrics.registry)
    except OSError as error:
        raise cannot_bind("metrics_bind", address) from error

    def stop() -> None:
        httpd.shutdown()
        httpd.server_close()
        thread.join()

    return str(Address(host=address.host, port=httpd.server_port, is_loopback=True)), stop


def _describe(engine: Engine) -> None:
    info = engine.info()
    engine.metrics.set_build_info(
        version=__version__,
        model=info.facts.model_id,
        device=info.facts.device,
        dtype=info.facts.dtype,
        mode=info.mode.value,
    )
