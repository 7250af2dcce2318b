"""Where the server listens: never wider than meant, never on a port it does not own."""

import asyncio
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from inference_engine.config import ServerConfig
from inference_engine.engine import Engine
from inference_engine.errors import ConfigError, Draining
from inference_engine.server.address import resolve_bind
from inference_engine.server.grpc_listener import GrpcDoor
from inference_engine.server.http.chat_text import ChatText
from inference_engine.server.run import start_server
from tests.server.http.client import MESSAGES, serving_http, tiny_chat
from tests.server.wire import Client, connected, refused, serving

KEY = "k" * 32
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.fixture
def tls(tmp_path: Path) -> dict[str, Any]:
    """Files of a certificate for localhost and 127.0.0.1 with its chain, and what a client must trust."""
    authority = trustme.CA()
    issuer = authority.create_child_ca()
    certificate = issuer.issue_cert("localhost", "127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    chain = b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
    (tmp_path / "chain.pem").write_bytes(chain)
    return {"tls_cert_file": str(tmp_path / "chain.pem"), "tls_key_file": str(tmp_path / "key.pem")}


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text(KEY, encoding="utf-8")
    return str(path)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.fixture
def chat() -> Iterator[ChatText]:
    chat = tiny_chat()
    yield chat
    chat.close()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


BINDS: list[tuple[str, bool]] = [
    ("127.0.0.1:0", True),
    ("127.9.9.9:0", True),
    ("[::1]:0", True),
    ("[::ffff:127.0.0.1]:0", True),
    ("localhost:0", True),
    ("0.0.0.0:0", False),
    ("[::]:0", False),
    ("[::ffff:10.0.0.1]:0", False),
    ("192.0.2.1:0", False),
]


def test_loopback_is_judged_by_the_address_not_by_the_name(subtests: pytest.Subtests) -> None:
    for bind, is_loopback in BINDS:
        with subtests.test(bind):
            assert resolve_bind("bind", bind).is_loopback is is_loopback


def test_a_name_with_one_outside_address_is_not_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in ("127.0.0.1", "192.0.2.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert not resolve_bind("bind", "localhost:0").is_loopback


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"])
@pytest.mark.parametrize(("with_key", "with_tls"), [(False, False), (True, False), (False, True)])
async def test_a_bind_others_can_reach_needs_key_and_tls(
    engine: Engine, tls: dict[str, Any], key_file: str, bind: str, with_key: bool, with_tls: bool
) -> None:
    settings: dict[str, Any] = {**(tls if with_tls else {}), **({"api_key_file": key_file} if with_key else {})}
    with pytest.raises(ConfigError, match="both api_key_file and tls_cert_file"):
        await start_server(engine, ServerConfig(bind=bind, **settings))


async def test_with_key_and_tls_every_interface_is_served_without_reflection(
    engine: Engine, tls: dict[str, Any], key_file: str, tmp_path: Path
) -> None:
    credentials = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes())
    metadata = [("authorization", f"Bearer {KEY}")]
    async with serving(engine, bind="0.0.0.0:0", api_key_file=key_file, **tls) as handle:
        target = handle.target.replace("0.0.0.0", "127.0.0.1")
        async with grpc.aio.secure_channel(target, credentials) as channel:
            client = Client(channel, metadata)
            assert len(await client.generate(await client.open())) == 8
            details = await refused(client.channel.unary_unary(REFLECTION)(b"", metadata=metadata))
            assert details.code is grpc.StatusCode.UNIMPLEMENTED
        async with grpc.aio.insecure_channel(target) as channel:
            details = await refused(Client(channel).channel.unary_unary(REFLECTION)(b"", timeout=10.0))
            assert details.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("broken", ["tls_cert_file", "tls_key_file"])
@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
async def test_broken_tls_files_stop_the_start(
    engine: Engine, tls: dict[str, Any], tmp_path: Path, broken: str, content: bytes | None
) -> None:
    path = tmp_path / "broken.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="tls_cert_file"):
        await start_server(engine, ServerConfig(bind="127.0.0.1:0", **{**tls, broken: str(path)}))


async def test_a_port_in_use_stops_the_start_and_says_so(engine: Engine, taken_port: int) -> None:
    with pytest.raises(ConfigError, match=f"127.0.0.1:{taken_port} is already in use"):
        await start_server(engine, ServerConfig(bind=f"127.0.0.1:{taken_port}"))


@pytest.mark.parametrize("late", ["before gRPC starts", "while gRPC starts", "door"])
async def test_a_start_that_failed_late_leaves_no_grpc_port_behind(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    kind: Any = type(grpc.aio.server())
    start, starts = kind.start, list[object]()

    async def fail_once(server: object) -> None:
        starts.append(server)
        if len(starts) > 1 or late == "while gRPC starts":
            await start(server)
        if len(starts) == 1:
            raise OSError("no more descriptors")

    bind = f"127.0.0.1:{free_port()}"
    with monkeypatch.context() as patch:
        if late == "door":
            patch.setattr(GrpcDoor, "follow", Mock(side_effect=OSError("no more descriptors")))
        else:
            patch.setattr(kind, "start", fail_once)
        with pytest.raises(OSError, match="no more descriptors"):
            await start_server(engine, ServerConfig(bind=bind))
    async with serving(engine, bind=bind) as handle, connected(handle) as client:
        assert len(await client.generate(await client.open())) == 8


@pytest.mark.parametrize("taken", ["bind", "http_bind"])
async def test_a_start_without_one_of_its_ports_leaves_the_other_to_others(
    engine: Engine, chat: ChatText, taken_port: int, taken: str
) -> None:
    binds: dict[str, Any] = {name: f"127.0.0.1:{free_port()}" for name in ("bind", "http_bind")}
    with pytest.raises(ConfigError, match="already in use"):
        await start_server(engine, ServerConfig(**{**binds, taken: f"127.0.0.1:{taken_port}"}), chat=chat)
    with pytest.raises(Draining):
        chat.prompt_ids(MESSAGES)
    async with serving_http(engine, chat, **binds) as handle:
        assert handle.target == binds["bind"]


async def test_metrics_count_calls_by_method_and_code_and_name_no_session(engine: Engine) -> None:
    async with serving(engine, metrics_bind="127.0.0.1:0") as handle, connected(handle) as client:
        session_id = await client.open(client_label="a-secret-label")
        await client.generate(session_id)
        await refused(client.append("unknown", [1]))
        page = await asyncio.to_thread(fetch, f"{handle.metrics_url}/metrics")
    method = "kakeya.v1.RuntimeService"
    assert f'kakeya_rpc_total{{code="OK",method="{method}/Generate"}} 1.0' in page
    assert f'kakeya_rpc_total{{code="NOT_FOUND",method="{method}/AppendTokens"}} 1.0' in page
    assert 'model="tiny"' in page
    for name in (
        "kakeya_session_active",
        "kakeya_session_total",
        "kakeya_session_kv_live_bytes",
        "kakeya_session_history_tokens",
        "kakeya_generate_prefill_tokens",
        "kakeya_generate_prefill_duration_seconds",
        "kakeya_cache_invariant_violations_total",
        "kakeya_session_evicted_total",
    ):
        assert f"# HELP {name} " in page
        assert f"# HELP {name.removeprefix('kakeya_')} Use {name}:" in page
    assert session_id not in page
    assert "a-secret-label" not in page
    assert "_created" not in page


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10.0) as answer:
        return str(answer.read().decode())


async def test_a_loopback_server_describes_itself_by_reflection(client: Client) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = client.channel.stream_stream(REFLECTION)([request.SerializeToString()])
    answer = reflection_pb2.ServerReflectionResponse.FromString(await call.read())
    names = {service.name for service in answer.list_services_response.service}
    assert {"kakeya.v1.RuntimeService", "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize("service", ["", "kakeya.v1.RuntimeService"])
async def test_health_follows_the_engine(
    client: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch, service: str
) -> None:
    check = client.channel.unary_stream("/grpc.health.v1.Health/Watch")
    watch = check(health_pb2.HealthCheckRequest(service=service).SerializeToString())
    states = health_pb2.HealthCheckResponse

    async def state() -> int:
        return states.FromString(await watch.read()).status

    assert await state() == states.SERVING
    with monkeypatch.context() as patch:
        patch.setattr(engine, "is_alive", lambda: False)
        assert await state() == states.NOT_SERVING
    assert await state() == states.SERVING
    watch.cancel()
