"""Who may read metrics and the dashboard, on loopback and beyond; names under which a picker of endpoints reads."""

from __future__ import annotations

import asyncio
import base64
import http.client
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from inference_engine.config import PICKER_METRICS, ServerConfig
from inference_engine.engine import Engine
from inference_engine.errors import ConfigError
from inference_engine.metrics import EngineMetrics
from inference_engine.server.health import Health
from inference_engine.server.metrics_port import MetricsPort
from inference_engine.server.tls import Certificates
from kakeya.v1 import runtime_pb2 as pb
from tests.server.certificates import Authority
from tests.server.wire import connected, serving, until
from tests.tiny_native import served_engine

TOKEN = "0123456789abcdef-of-a-scraper"
PATHS = ("/metrics", "/dashboard", "/dashboard/data", "/nothing")
SECONDS = 20.0
NAMES = PICKER_METRICS.split(",")


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n", encoding="ascii")
    return str(path)


@pytest.fixture
def opened() -> Iterator[Callable[..., MetricsPort]]:
    with ExitStack() as stack:

        def opened(certificates: Certificates | None = None, **settings: Any) -> MetricsPort:
            port = MetricsPort(EngineMetrics(), ServerConfig(**settings), certificates)
            stack.callback(port.stop)
            return port

        yield opened


def here(port: MetricsPort) -> str:
    """The port's address, bound beyond loopback, as this machine reaches it."""
    return f"127.0.0.1:{port.target.rpartition(':')[2]}"


def status(target: str, path: str, headers: dict[str, str] | None = None, *, tls: ssl.SSLContext | None = None) -> int:
    connection = (
        http.client.HTTPConnection(target, timeout=SECONDS)
        if tls is None
        else http.client.HTTPSConnection(target, timeout=SECONDS, context=tls)
    )
    try:
        connection.request("GET", path, headers=headers or {})
        return connection.getresponse().status
    finally:
        connection.close()


def basic(password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"anyone:{password}".encode()).decode()}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_beyond_loopback_metrics_need_a_token_or_to_be_declared_open(
    token_file: str, subtests: pytest.Subtests
) -> None:
    for settings, said in (
        ({}, "set metrics_token_file, or allow_open_metrics"),
        ({"metrics_token_file": token_file}, "would cross the network unencrypted"),
        ({"allow_plaintext": True}, "set metrics_token_file, or allow_open_metrics"),
    ):
        with subtests.test(said), pytest.raises(ConfigError, match=said):
            MetricsPort(EngineMetrics(), ServerConfig(metrics_bind="0.0.0.0:0", **settings))


def test_a_file_that_holds_no_token_is_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for content in ("", "short", f"{TOKEN} {TOKEN}", f"{TOKEN}\n{TOKEN}\n"):
        (tmp_path / "token").write_text(content, encoding="ascii")
        config = ServerConfig(metrics_bind="127.0.0.1:0", metrics_token_file=str(tmp_path / "token"))
        with subtests.test(content), pytest.raises(ConfigError, match="one token of 16 characters"):
            MetricsPort(EngineMetrics(), config)
    config = ServerConfig(metrics_bind="127.0.0.1:0", metrics_token_file=str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="absent cannot be read: No such file"):
        MetricsPort(EngineMetrics(), config)


def test_with_a_token_every_page_asks_for_it(opened: Callable[..., MetricsPort], token_file: str) -> None:
    settings = {"metrics_token_file": token_file, "allow_plaintext": True}
    remote = here(opened(metrics_bind="0.0.0.0:0", **settings))
    local = opened(metrics_bind="127.0.0.1:0", **settings).target
    wrong = [{}, bearer("wrong"), bearer(""), basic("wrong"), bearer(TOKEN[:-1]), {"Authorization": "Basic ?"}]
    for target in (remote, local):
        for path in PATHS:
            assert [status(target, path, headers) for headers in wrong] == [401] * len(wrong)
            assert {status(target, path, headers) for headers in (bearer(TOKEN), basic(TOKEN))} == {
                404 if path == "/nothing" else 200
            }
    # A scraper names the server as it knows it; a hostile page has no token.
    assert status(remote, "/metrics", {**bearer(TOKEN), "Host": "kakeya-0.kakeya:9090"}) == 200
    assert status(local, "/metrics", {**bearer(TOKEN), "Host": "kakeya-0.kakeya:9090"}) == 421


def test_open_metrics_answer_by_any_name(opened: Callable[..., MetricsPort]) -> None:
    port = opened(metrics_bind="0.0.0.0:0", allow_open_metrics=True)
    assert status(here(port), "/metrics", {"Host": "kakeya-0.kakeya:9090"}) == 200


def test_the_port_has_the_servers_certificates_and_a_silent_peer_delays_no_other(
    opened: Callable[..., MetricsPort], token_file: str, tmp_path: Path
) -> None:
    authority = Authority()
    tls = authority.settings(tmp_path)
    settings = {"metrics_bind": "0.0.0.0:0", "metrics_token_file": token_file, **tls}
    port = opened(Certificates(ServerConfig(**settings)), **settings)
    assert port.url.startswith("https://")
    trusting = ssl.create_default_context(cadata=authority.pem.decode())
    host, _, number = here(port).partition(":")
    with socket.create_connection((host, int(number)), timeout=SECONDS):  # no handshake
        assert status(here(port), "/metrics", bearer(TOKEN), tls=trusting) == 200
        assert status(here(port), "/metrics", tls=trusting) == 401
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            status(here(port), "/metrics", bearer(TOKEN))


async def test_health_over_http_is_that_of_grpc_and_needs_no_token(token_file: str) -> None:
    config = ServerConfig(metrics_bind="127.0.0.1:0", metrics_token_file=token_file)
    with served_engine() as engine:
        health = Health(engine)
        port = MetricsPort(engine.metrics, config, is_serving=lambda: health.is_serving)
        try:
            assert await asyncio.to_thread(status, port.target, "/healthz") == 200
            await health.drain()
            assert await asyncio.to_thread(status, port.target, "/healthz") == 503
        finally:
            await asyncio.to_thread(port.stop)


async def test_a_picker_reads_the_queue_what_runs_and_the_share_of_memory_under_its_own_names() -> None:
    with served_engine(max_running=1) as engine:
        async with serving(engine, picker_metrics=PICKER_METRICS) as handle, connected(handle) as client:
            assert [picked(engine, name) for name in NAMES] == [0, 0, 0]
            sessions = [await client.open_endless() for _ in range(2)]
            streams = [client.stream(pb.GenerateRequest(session_id=each, max_tokens=30_000)) for each in sessions]
            await until(lambda: [picked(engine, name) for name in NAMES[:2]] == [1, 1])
            for stream in streams:
                stream.cancel()
            await until(lambda: [picked(engine, name) for name in NAMES[:2]] == [0, 0])
            info = engine.info()
            share = picked(engine, NAMES[2])
            assert 0 < share == info.kv_reserved_bytes / info.kv_capacity_bytes
            assert share == picked(engine, "kakeya_session_kv_reserved_ratio")


def picked(engine: Engine, name: str) -> float:
    value = engine.metrics.registry.get_sample_value(name)
    assert value is not None
    return float(value)


@pytest.mark.parametrize("names", ["one,two", "a,a,b", "a,b,c d", "kakeya_generate_active,b,c"])
async def test_names_for_a_picker_that_cannot_be_shown_are_refused(names: str) -> None:
    with served_engine() as engine, pytest.raises(ConfigError, match="picker_metrics"):
        async with serving(engine, picker_metrics=names):
            pass
