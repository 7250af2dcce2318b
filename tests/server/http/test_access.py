"""Which callers may use the shim, by which name, over what; and what every answer of it carries."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trustme

from inference_engine.config import ServerConfig
from inference_engine.engine import Engine
from inference_engine.errors import ConfigError, EngineStalled, Overloaded
from inference_engine.server.http import client_connection as connection
from inference_engine.server.http.chat_text import ChatText
from inference_engine.server.run import ServerHandle, start_server
from tests.server import certificates
from tests.server.http.client import COMPLETIONS, asking, http_client, serving_http
from tests.server.wire import TIMEOUT_SECONDS

KEY = "k" * 32
MAX_BODY_BYTES = 4096
MODELS, HEALTH, METRICS, WHY = "/v1/models", "/healthz", "/metrics", "/deprecation"


@pytest.fixture
async def server(engine: Engine, chat: ChatText) -> AsyncIterator[ServerHandle]:
    async with serving_http(engine, chat, max_message_bytes=MAX_BODY_BYTES) as handle:
        yield handle


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text(KEY, encoding="utf-8")
    return str(path)


class Authority:
    """Certificates for localhost, written where a server reads them."""

    def __init__(self, folder: Path) -> None:
        self._authority = trustme.CA()
        self._folder = folder
        self.settings = {"tls_cert_file": str(folder / "chain.pem"), "tls_key_file": str(folder / "key.pem")}
        self.issue()

    def issue(self) -> None:
        certificate = self._authority.issue_cert("localhost", "127.0.0.1")
        certificate.private_key_pem.write_to_path(self._folder / "key.pem")
        (self._folder / "chain.pem").write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))

    def trust(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self._authority.configure_trust(context)
        return context


def site(handle: ServerHandle) -> str:
    """The shim's address without the path that is the API's."""
    assert handle.http_url is not None
    return handle.http_url.removesuffix("/v1")


async def test_every_answer_says_that_it_is_deprecated_and_until_when(server: ServerHandle) -> None:
    async with http_client(server) as client:
        answers = [
            await client.post(COMPLETIONS, json=asking()),
            await client.post(COMPLETIONS, json=asking(stream=True)),
            await client.post(COMPLETIONS, json=asking(top_k=1)),
            await client.post(COMPLETIONS, content=b"x"),
            await client.post(COMPLETIONS, json=asking(stop="x" * MAX_BODY_BYTES)),
            await client.get(COMPLETIONS),
            *[await client.get(site(server) + path) for path in (MODELS, HEALTH, METRICS, WHY, "/none")],
            await client.get(site(server) + HEALTH, headers={"host": "evil.example"}),
        ]
    assert sorted({answer.status_code for answer in answers}) == [200, 400, 404, 405, 413, 415, 421]
    assert all(tells_its_end(answer.headers) for answer in answers)


def tells_its_end(headers: httpx2.Headers) -> bool:
    """Whether an answer says since when it is deprecated, until when it stays, and where to read why."""
    since = datetime.fromtimestamp(int(headers["deprecation"].removeprefix("@")), tz=UTC)
    links = {rel for rel in ("deprecation", "sunset") if f'rel="{rel}"' in headers["link"]}
    return parsedate_to_datetime(headers["sunset"]) > since and links == {"deprecation", "sunset"}


@pytest.mark.parametrize(
    ("error", "status"),
    [(Overloaded("later"), 429), (ZeroDivisionError("a bug"), 500), (EngineStalled(), 503)],
    ids=str,
)
async def test_an_answer_that_failed_says_that_it_is_deprecated(
    engine: Engine, server: ServerHandle, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    def failing(*_arguments: object, **_named: object) -> None:
        raise error

    monkeypatch.setattr(engine, "create_session", failing)
    async with http_client(server) as client:
        answer = await client.post(COMPLETIONS, json=asking())
    assert answer.status_code == status
    assert tells_its_end(answer.headers)


@pytest.mark.parametrize(
    "sent", [b"not HTTP at all\r\n\r\n", b"GET / HTTP/1.1\r\nno header\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\r\n\r\n"]
)
async def test_what_is_no_http_is_reported_so_in_the_envelope_and_that_it_is_deprecated(
    server: ServerHandle, sent: bytes
) -> None:
    host, port = site(server).removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    head, _, body = (await asyncio.wait_for(reader.read(), TIMEOUT_SECONDS)).partition(b"\r\n\r\n")
    writer.close()
    first, *lines = head.decode().split("\r\n")
    headers = httpx2.Headers(dict(line.split(": ", 1) for line in lines))
    assert first == "HTTP/1.1 400 Bad Request"
    assert tells_its_end(headers)
    assert int(headers["content-length"]) == len(body)
    assert json.loads(body)["error"]["code"] == "bad_http"


HOSTS: list[tuple[str, int]] = [
    ("localhost", 200),
    ("LOCALHOST:8000", 200),
    ("127.0.0.1:1", 200),
    ("127.8.8.8", 200),
    ("[::1]:8000", 200),
    ("[::1]", 200),
    ("[::ffff:127.0.0.1]:8000", 200),
    ("localhost.:8000", 200),
    ("0.0.0.0", 421),
    ("[::ffff:10.0.0.1]", 421),
    ("evil.example", 421),
    ("localhost.evil.example", 421),
    ("127.0.0.1.evil.example:80", 421),
    ("10.0.0.1", 421),
    ("", 421),
]


async def test_on_loopback_only_names_of_this_machine_are_answered(
    server: ServerHandle, subtests: pytest.Subtests
) -> None:
    for host, status in HOSTS:
        with subtests.test(host):
            async with http_client(server) as client:
                answer = await client.get(site(server) + MODELS, headers={"host": host})
            assert answer.status_code == status


async def test_without_the_key_everything_but_health_is_refused(
    engine: Engine, chat: ChatText, key_file: str, subtests: pytest.Subtests
) -> None:
    for authorization in (
        None,
        "",
        "Bearer",
        "Bearer x",
        f"Bearer {KEY}x",
        f"Bearer{KEY}",
        f"Basic {KEY}",
        f"Bearer  {KEY}",
    ):
        with subtests.test(str(authorization)):
            headers = {} if authorization is None else {"authorization": authorization}
            async with serving_http(engine, chat, api_key_file=key_file) as handle, http_client(handle) as client:
                for answer in (
                    await client.post(COMPLETIONS, json=asking(), headers=headers),
                    await client.post(COMPLETIONS, content=b"not even JSON", headers=headers),
                    await client.get(site(handle) + MODELS, headers=headers),
                    await client.get(site(handle) + METRICS, headers=headers),
                ):
                    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                    assert tells_its_end(answer.headers)
                    assert answer.json()["error"]["code"] == "invalid_api_key"
                assert (await client.get(site(handle) + HEALTH, headers=headers)).status_code == 200
                assert not engine.info().kv_reserved_bytes


async def test_the_scheme_of_a_key_is_a_name_in_any_case(engine: Engine, chat: ChatText, key_file: str) -> None:
    async with serving_http(engine, chat, api_key_file=key_file) as handle, http_client(handle) as client:
        for scheme in ("Bearer", "bearer", "BEARER"):
            answer = await client.get(site(handle) + MODELS, headers={"authorization": f"{scheme} {KEY}"})
            assert answer.status_code == 200, scheme


async def test_one_header_too_many_is_no_key(engine: Engine, chat: ChatText, key_file: str) -> None:
    headers = [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")]
    async with serving_http(engine, chat, api_key_file=key_file) as handle, http_client(handle) as client:
        assert (await client.get(site(handle) + MODELS, headers=headers)).status_code == 401


async def test_with_a_certificate_it_speaks_tls_only(engine: Engine, chat: ChatText, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with serving_http(engine, chat, **authority.settings) as handle:
        assert handle.http_url is not None
        assert handle.http_url.startswith("https://")
        async with http_client(handle, verify=authority.trust()) as client:
            assert (await client.post(COMPLETIONS, json=asking())).status_code == 200
        async with http_client(handle) as client:
            with pytest.raises(httpx2.ConnectError):
                await client.post(COMPLETIONS, json=asking())
            with pytest.raises(httpx2.HTTPError):
                await client.get(site(handle).replace("https:", "http:") + HEALTH)


@pytest.mark.hostile
async def test_connections_that_begin_no_handshake_are_as_few_as_others_without_a_key(
    engine: Engine, chat: ChatText, key_file: str, tmp_path: Path
) -> None:
    authority, most = Authority(tmp_path), 8
    settings = {"api_key_file": key_file, "max_connections": most, **authority.settings}
    async with serving_http(engine, chat, **settings) as handle:
        host, port = site(handle).removeprefix("https://").split(":")
        streams = [await asyncio.open_connection(host, int(port)) for _ in range(2 * most)]
        ends = [asyncio.create_task(reader.read()) for reader, _ in streams]
        async with asyncio.timeout(TIMEOUT_SECONDS):
            for end in itertools.islice(asyncio.as_completed(ends), len(ends) - most // 2):
                with contextlib.suppress(ConnectionError):
                    await end
        async with http_client(handle, verify=authority.trust()) as client:
            answer = await client.get(site(handle) + MODELS, headers={"authorization": f"Bearer {KEY}"})
            assert answer.status_code == 200
        for _, writer in streams:
            writer.close()
        await asyncio.gather(*ends, return_exceptions=True)


@pytest.mark.hostile
async def test_a_handshake_that_does_not_end_is_ended(
    engine: Engine, chat: ChatText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.05)
    async with serving_http(engine, chat, **Authority(tmp_path).settings) as handle:
        host, port = site(handle).removeprefix("https://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\x16\x03\x01\x02\x00\x01")  # the first bytes of one
        async with asyncio.timeout(TIMEOUT_SECONDS):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()


async def peer_certificate(handle: ServerHandle, context: ssl.SSLContext) -> Any:
    host, port = site(handle).removeprefix("https://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        return writer.get_extra_info("peercert")["serialNumber"]
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_renewed_certificate_serves_the_next_connection_and_a_broken_one_changes_nothing(
    engine: Engine, chat: ChatText, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    async with serving_http(engine, chat, **authority.settings) as handle:
        first = await peer_certificate(handle, authority.trust())
        authority.issue()
        second = await peer_certificate(handle, authority.trust())
        assert second != first
        (tmp_path / "chain.pem").write_text("nothing", encoding="utf-8")
        assert await peer_certificate(handle, authority.trust()) == second


def connect(handle: ServerHandle, context: ssl.SSLContext, session: ssl.SSLSession | None) -> ssl.SSLSession | None:
    """The TLS session of a connection that got an answer; None if it got none. A `session` is resumed."""
    host, port = site(handle).removeprefix("https://").split(":")
    try:
        with (
            socket.create_connection((host, int(port)), timeout=TIMEOUT_SECONDS) as sock,
            context.wrap_socket(sock, server_hostname="localhost", session=session) as connection,
        ):
            connection.sendall(f"GET {HEALTH} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            return connection.session if connection.recv(1) else None
    except OSError:
        return None


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=str)
async def test_a_removed_authority_lets_no_client_in_whatever_happens_to_the_files(
    engine: Engine, chat: ChatText, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    authority, newer = certificates.Authority(), certificates.Authority()
    context = ssl.create_default_context(cadata=authority.pem.decode())
    context.maximum_version = version
    (tmp_path / "client.pem").write_bytes(b"".join(authority.client("alice")))
    context.load_cert_chain(tmp_path / "client.pem")
    async with serving_http(engine, chat, **authority.settings(tmp_path, asks_clients=True)) as handle:
        session = await asyncio.to_thread(connect, handle, context, None)
        assert (session is not None) == (version is ssl.TLSVersion.TLSv1_3)
        (tmp_path / "clients.pem").write_bytes(newer.pem)
        assert await asyncio.to_thread(connect, handle, context, session) is None
        assert await asyncio.to_thread(connect, handle, context, None) is None
        (tmp_path / "chain.pem").write_text("nothing", encoding="utf-8")
        assert await asyncio.to_thread(connect, handle, context, None) is None


@pytest.mark.parametrize("has_key", [True, False])
async def test_where_others_can_reach_it_keys_and_a_certificate_are_needed(
    engine: Engine, chat: ChatText, key_file: str, tmp_path: Path, has_key: bool
) -> None:
    settings: Any = {"api_key_file": key_file} if has_key else Authority(tmp_path).settings
    with pytest.raises(ConfigError, match=r"http_bind 0\.0\.0\.0:0 can be reached"):
        await start_server(engine, ServerConfig(bind="127.0.0.1:0", http_bind="0.0.0.0:0", **settings), chat=chat)


async def test_where_others_can_reach_it_they_call_it_by_any_name(
    engine: Engine, chat: ChatText, key_file: str, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    settings = {"http_bind": "0.0.0.0:0", "api_key_file": key_file, **authority.settings}
    async with serving_http(engine, chat, **settings) as handle:
        url = site(handle).replace("0.0.0.0", "127.0.0.1") + MODELS
        headers = {"host": "models.example", "authorization": f"Bearer {KEY}"}
        async with http_client(handle, verify=authority.trust()) as client:
            assert (await client.get(url, headers=headers)).status_code == 200


async def test_a_port_in_use_is_said_by_the_settings_name(engine: Engine, chat: ChatText) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"http_bind: {bind} is already in use"):
            await start_server(engine, ServerConfig(bind="127.0.0.1:0", http_bind=bind), chat=chat)


@pytest.mark.hostile
async def test_metrics_are_not_for_every_key(engine: Engine, chat: ChatText, key_file: str, tmp_path: Path) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    async with serving_http(engine, chat, api_key_file=key_file) as handle, http_client(handle) as client:
        answer = await client.get(site(handle) + METRICS, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "operators_only")
    assert "metrics_bind" in answer.json()["error"]["message"]


async def test_metrics_show_the_engine_and_the_requests_over_http(server: ServerHandle) -> None:
    async with http_client(server) as client:
        await client.post(COMPLETIONS, json=asking())
        await client.post(COMPLETIONS, json=asking(top_k=1))
        await client.get(site(server) + "/some/path")
        page = await client.get(site(server) + METRICS)
    assert page.headers["content-type"].startswith("text/plain")
    shown = dict(line.rsplit(" ", 1) for line in page.text.splitlines() if not line.startswith("#"))
    assert shown["kakeya_generate_tokens_total"] == "4.0"
    assert shown['kakeya_http_response_total{route="/v1/chat/completions",status="200"}'] == "1.0"
    assert shown['kakeya_http_response_total{route="/v1/chat/completions",status="400"}'] == "1.0"
    assert shown['kakeya_http_response_total{route="other",status="404"}'] == "1.0"
    assert "some/path" not in page.text


async def test_an_answer_on_a_kept_connection_does_not_wait_for_the_clients_system(
    server: ServerHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which acknowledges its first part after 40 ms."""
    made, at_once = connection.Connection.connection_made, []

    def connection_made(of: connection.Connection, transport: asyncio.Transport) -> None:
        made(of, transport)
        at_once.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(connection.Connection, "connection_made", connection_made)
    async with http_client(server) as client:
        assert (await client.get(site(server) + HEALTH)).status_code == 200
    assert at_once and all(at_once)
