"""Starts the server, and shuts it down gracefully.

Draining, in order: health says NOT_SERVING; the engine refuses new work and lets running Generates end (at most
`drain_seconds`, then they end with DRAINING); every call has returned; the port closes; the journal is written out. All
that follows the grace has STOP_SECONDS, then the process ends as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from inference_engine import __version__
from inference_engine.config import ServerConfig
from inference_engine.engine import Engine
from inference_engine.errors import ConfigError, Draining, RequestError
from inference_engine.models.mapped import MappedWeights
from inference_engine.server.address import Address, cannot_bind, refuse_open_doors, resolve_bind
from inference_engine.server.auth import KeyRing
from inference_engine.server.convert import check_strategies
from inference_engine.server.durable_gate import DurableGate
from inference_engine.server.grpc_listener import GrpcDoor
from inference_engine.server.health import Health
from inference_engine.server.interceptors import CallInterceptor
from inference_engine.server.ip_bans import Bars
from inference_engine.server.limits import OwnerLimits, allowed_connections
from inference_engine.server.message_limits import MessageLimits
from inference_engine.server.metrics_port import MetricsPort
from inference_engine.server.preauth_limits import UnauthenticatedPeers
from inference_engine.server.service import SERVICE_NAME, RuntimeService
from inference_engine.server.tls import Certificates
from inference_engine.server.watchdog import GaveUp, Watchdog

if TYPE_CHECKING:
    from inference_engine.server.http.chat_text import ChatText
    from inference_engine.server.http_shim import HttpShim

# Once the engine has drained: how long calls may take to return, and their last bytes to be sent.
LEAVE_SECONDS = 5.0
FLUSH_SECONDS = 1.0
# From the end of the grace to that of the process: supervisors get one time that holds, whatever hangs. In order it
# takes these two, ten seconds for copies of sessions' K/V, one for the journal, and the rest of a step.
STOP_SECONDS = 25.0
LAST_WORDS_SECONDS = 1.0  # of these, to say where it hangs
EXIT_LATE = 124  # as timeout(1) ends with
SWITCH_SECONDS = 0.0005
LEAST_PING_MS = 2_000  # between two pings of a client without data
# The default if the server can be reached from other machines.
OWNER_CALLS_PER_SECOND = 1000.0

_STANDARD_ERROR = 2

_log = logging.getLogger(__name__)


class ServerHandle:
    """A running server."""

    def __init__(
        self,
        *,
        target: str,
        metrics_port: MetricsPort | None,
        server: grpc.aio.Server,
        engine: Engine,
        health: Health,
        calls: CallInterceptor,
        door: GrpcDoor,
        config: ServerConfig,
        http: HttpShim | None = None,
    ) -> None:
        self.target = target  # "127.0.0.1:50051": the address really bound
        self.metrics_url = metrics_port.url if metrics_port is not None else None
        self._metrics_port = metrics_port
        self.http_url = http.url if http else None
        self._server = server
        self._engine = engine
        self._health = health
        self._calls = calls
        self._door = door
        self._config = config
        self._http = http

    async def drain_and_stop(self) -> None:
        """Refuse new work, let running Generates end, close the port. The drained engine stays with its owner."""
        self._engine.metrics.draining.set(1)
        await self._health.drain()
        if self._http:
            self._http.refuse_work()
        await asyncio.to_thread(self._engine.drain, self._config.drain_seconds)
        try:
            await asyncio.wait_for(self._calls.wait_idle(), LEAVE_SECONDS)
        except TimeoutError:  # of clients that do not read, or of a journal that is away
            self._calls.end_all(Draining())
        if self._http:
            await self._http.stop()
        await self._server.stop(FLUSH_SECONDS)
        self._door.stop()
        if self._metrics_port is not None:
            await asyncio.to_thread(self._metrics_port.stop)

    async def abandon(self, error: RequestError) -> None:
        """End every call with `error` and close the ports, without draining the engine, which may have stalled."""
        await self._health.drain()
        self._calls.end_all(error)
        if self._http:
            self._http.give_up(error)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._calls.wait_idle(), FLUSH_SECONDS)
        if self._http:
            await self._http.stop()
        await self._server.stop(FLUSH_SECONDS)
        self._door.stop()


async def start_server(engine: Engine, config: ServerConfig, *, chat: ChatText | None = None) -> ServerHandle:
    """Listen as `config` says; `chat` is for `http_bind`. Raises ConfigError if that is unsafe or impossible."""
    async with contextlib.AsyncExitStack() as opened:  # closed again if the start fails
        if chat is not None:
            opened.push_async_callback(asyncio.to_thread, chat.close)
        handle = await _started(engine, config, chat, opened)
        opened.pop_all()
    return handle


async def _started(
    engine: Engine, config: ServerConfig, chat: ChatText | None, opened: contextlib.AsyncExitStack
) -> ServerHandle:
    """opened: gets what has to be closed if this raises."""
    check_strategies(engine.info().default_strategy)
    address = resolve_bind("bind", config.bind)
    http_address = resolve_bind("http_bind", config.http_bind) if config.http_bind else None
    keys = KeyRing.from_file(config.api_key_file) if config.api_key_file else KeyRing()
    certificates = Certificates(config) if config.tls_cert_file else None
    is_reachable = False
    for setting, bind, each in (("bind", config.bind, address), ("http_bind", config.http_bind, http_address)):
        if each is not None and not each.is_loopback:
            refuse_open_doors(f"{setting} {bind}", config, has_keys=not keys.is_open)
            if not config.tls_cert_file:
                _log.warning(
                    "%s %s can be reached from other machines, and keys cross the network unencrypted", setting, bind
                )
            is_reachable = True
    limits = _limits(config, is_reachable=is_reachable)
    connections = allowed_connections(config.max_connections, ports=1 if http_address is None else 2)
    _describe(engine)
    health = Health(engine)
    port = None
    if config.picker_metrics:
        try:
            engine.metrics.name_for_pickers(*config.picker_metric_names)
        except ValueError as error:  # one is there already
            raise ConfigError(f"picker_metrics {config.picker_metrics}: {error}") from error
    if config.metrics_bind:
        port = MetricsPort(engine.metrics, config, certificates, is_serving=lambda: health.is_serving)
        opened.callback(port.stop)
    messages = MessageLimits(
        max_append_tokens=engine.info().config.max_append_tokens, max_message_bytes=config.max_message_bytes
    )
    bars = Bars(keys, time.monotonic, engine.metrics.addresses_barred.inc)
    door = GrpcDoor(
        _unauthenticated(keys, config, connections, address),
        engine.metrics.connections_dropped.labels("grpc").inc,
        time.monotonic,
        bars,
    )
    calls = CallInterceptor(
        keys,
        engine,
        limits,
        messages=messages,
        door=door,
        has_certificates=certificates is not None and certificates.asks_clients,
    )
    http = None
    if http_address is not None:
        # Imported here: it takes a second.
        from inference_engine.server.http.door import HttpDoor
        from inference_engine.server.http_shim import start_http

        http = await start_http(
            engine,
            config,
            http_address,
            keys=keys,
            limits=limits,
            certificates=certificates,
            chat=chat,
            door=HttpDoor(
                _unauthenticated(keys, config, connections, http_address),
                bars,
                most=connections,
                on_drop=engine.metrics.connections_dropped.labels("http").inc,
            ),
        )
        opened.push_async_callback(http.stop)
    await health.follow()
    opened.push_async_callback(health.drain)
    server = grpc.aio.server(interceptors=(calls,), options=_options(config, connections, messages))
    server.add_generic_rpc_handlers((RuntimeService(engine, config, DurableGate(engine.journal)).handlers(),))
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    if address.is_loopback:
        names = (SERVICE_NAME, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    target = _bind(server, address, None if certificates is None else certificates.for_grpc())
    opened.push_async_callback(_close, server)
    await server.start()
    door.follow(int(target.rpartition(":")[2]))
    return ServerHandle(
        target=target,
        metrics_port=port,
        server=server,
        engine=engine,
        health=health,
        calls=calls,
        door=door,
        config=config,
        http=http,
    )


def serve(
    engine: Engine,
    config: ServerConfig,
    *,
    chat: ChatText | None = None,
    weights: MappedWeights | None = None,
    on_ready: Callable[[ServerHandle], None] = lambda _: None,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, then drain and return. A second signal ends the process at once, except
    SIGHUP, which a terminal that is closed sends more than once. SIGHUP stays ignored where it is, as under nohup.

    weights: of the engine's model. If their files are overwritten, the process ends with status EXIT_SPOILED, because
    tokens would be wrong from then on. `on_ready` is called once, when clients can connect. Raises ConfigError as
    `start_server` does.
    """
    asyncio.run(_serve(engine, config, chat, weights, on_ready))


async def _serve(
    engine: Engine,
    config: ServerConfig,
    chat: ChatText | None,
    weights: MappedWeights | None,
    on_ready: Callable[[ServerHandle], None],
) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.SIG_DFL, signal.SIGHUP: signal.SIG_IGN}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        del signals[signal.SIGHUP]
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    handle = await start_server(engine, config, chat=chat)
    # Objects of this point (the libraries, the model) are permanent. Scanning them takes the garbage collector a tenth
    # of a second, in which no token is generated.
    gc.collect()
    gc.freeze()
    # The engine's thread and the event loop take turns at Python. The waiting one runs after this long: with the
    # usual 5 ms a busy loop, as beside many refusals, would lengthen each step by several of those.
    sys.setswitchinterval(SWITCH_SECONDS)
    on_ready(handle)
    watchdog = Watchdog(engine, config.stall_exit_seconds, time.monotonic, weights)
    gave_up = asyncio.create_task(watchdog.gave_up(), name="watchdog")
    await asyncio.wait({gave_up, asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
    if gave_up.done():
        await _end_process(handle, gave_up.result())
    for number, second in signals.items():
        loop.remove_signal_handler(number)
        # The system's default handler works even if the loop is blocked. No default ends the first process of a
        # container.
        at_once = second is signal.SIG_DFL and os.getpid() == 1
        signal.signal(number, _end_at_once if at_once else second)
    _log.info("draining for at most %g s; a second signal ends at once", config.drain_seconds)
    threading.Thread(target=_end_late, args=(config.drain_seconds,), name="stop", daemon=True).start()
    draining = asyncio.create_task(handle.drain_and_stop())
    await asyncio.wait({gave_up, draining}, return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        await _end_process(handle, gave_up.result())
    gave_up.cancel()
    draining.result()


def _end_at_once(number: int, _frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)


async def _end_process(handle: ServerHandle, reason: GaveUp) -> NoReturn:
    """Does not wait for the engine, which may have stalled."""
    _log.critical("%s: ending with status %d", reason.text, reason.status)
    await handle.abandon(reason.error)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(reason.status)


def _end_late(drain_seconds: float) -> None:
    """What clients received is in the journal by then, if there is one."""
    time.sleep(max(0.0, drain_seconds + STOP_SECONDS - LAST_WORDS_SECONDS))
    saying = threading.Thread(target=_say_late, name="stop", daemon=True)
    saying.start()
    saying.join(LAST_WORDS_SECONDS)  # what reads the log may hang as well
    os._exit(EXIT_LATE)


def _say_late() -> None:
    _log.critical("still not stopped %g s after drain_seconds: ending with status %d", STOP_SECONDS, EXIT_LATE)
    logging.shutdown()
    faulthandler.dump_traceback(_STANDARD_ERROR)


def _limits(config: ServerConfig, *, is_reachable: bool) -> OwnerLimits:
    default = OWNER_CALLS_PER_SECOND if is_reachable else 0.0
    return OwnerLimits(
        calls=config.max_owner_calls,
        calls_per_second=config.owner_calls_per_second or default,
        clock=time.monotonic,
    )


def _unauthenticated(keys: KeyRing, config: ServerConfig, connections: int, address: Address) -> UnauthenticatedPeers:
    default = 0 if address.is_loopback else max(1, connections // 2)
    return UnauthenticatedPeers(
        keys,
        most=connections,
        most_of_address=config.max_connections_per_address or default,
        clock=time.monotonic,
    )


def _options(config: ServerConfig, connections: int, messages: MessageLimits) -> list[tuple[str, int]]:
    age = [("grpc.max_connection_age_ms", max(1, round(config.max_connection_age_seconds * 1000)))]
    idle = [("grpc.max_connection_idle_ms", max(1, round(config.max_connection_idle_seconds * 1000)))]
    return [
        *(age if config.max_connection_age_seconds else ()),
        *(idle if config.max_connection_idle_seconds else ()),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", 20_000),  # a silent connection holds a file descriptor
        ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
        ("grpc.max_receive_message_length", messages.largest_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        # A stream's window stays at 64 KiB until its message is read, whatever the bandwidth of its connection.
        ("grpc.http2.bdp_probe", 0),
        # Refusing headers costs time that grows with this limit, so refusals are delayed; a delayed one counts among
        # the streams of its connection.
        ("grpc.max_metadata_size", config.max_header_bytes),
        ("grpc.absolute_max_metadata_size", config.max_header_bytes),
        ("grpc.http.tarpit_min_duration_ms", 1_000),
        ("grpc.http.tarpit_max_duration_ms", 2_000),
        ("grpc.max_concurrent_streams", config.max_connection_calls),
        # A call is silent during a long prefill. Clients may ping then, every 10 s (a common setting), and proxies more
        # often: only so they find a machine that is gone.
        ("grpc.http2.min_ping_interval_without_data_ms", LEAST_PING_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        # The server detects clients that vanished.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
        # Each connection would hold statistics for channelz, a service that is not served, and places for sends without
        # a copy, which are off.
        ("grpc.enable_channelz", 0),
        ("grpc.experimental.tcp_tx_zerocopy_max_simultaneous_sends", 0),
    ]


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


async def _close(server: grpc.aio.Server) -> None:
    """gRPC closes the port of a server only if the server was started. Starting it again does nothing."""
    try:
        await server.start()
    finally:
        await server.stop(None)


def _describe(engine: Engine) -> None:
    info = engine.info()
    engine.metrics.set_build_info(
        version=__version__,
        model=info.facts.model_id,
        device=info.facts.device,
        dtype=info.facts.dtype,
        mode=info.mode.value,
    )
