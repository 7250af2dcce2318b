"""Certificates: renewed without a restart, asked of clients, and naming owners where there are no keys."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from inference_engine.config import ServerConfig
from inference_engine.engine import Engine
from inference_engine.errors import ConfigError
from inference_engine.server.auth import Key
from inference_engine.server.run import ServerHandle, start_server
from tests.server.certificates import Authority
from tests.server.wire import HISTORY, Client, refused, serving

KEY = "k" * 32
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


@asynccontextmanager
async def encrypted(
    handle: ServerHandle, credentials: grpc.ChannelCredentials, key: str | None = None
) -> AsyncIterator[Client]:
    """A client on a connection of its own."""
    metadata = [] if key is None else [("authorization", f"Bearer {key}")]
    async with grpc.aio.secure_channel(handle.target, credentials, options=OWN_CONNECTION) as channel:
        yield Client(channel, metadata)


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text(f"{Key.of(KEY, 'alice').line}\n", encoding="utf-8")
    return str(path)


async def test_a_renewed_certificate_serves_the_next_connection_and_open_ones_go_on(
    engine: Engine, authority: Authority, tmp_path: Path
) -> None:
    renewing = Authority()
    async with (
        serving(engine, **authority.settings(tmp_path)) as handle,
        encrypted(handle, authority.credentials()) as old,
    ):
        session_id = await old.open()
        renewing.write_server_files(tmp_path)
        async with encrypted(handle, renewing.credentials()) as new:
            assert await new.length(session_id) == len(HISTORY)
        async with encrypted(handle, authority.credentials()) as outdated:
            assert (await refused(outdated.length(session_id))).reason == "UNAVAILABLE"
        assert len(await old.generate(session_id)) == 8


@pytest.mark.parametrize("name", ["chain.pem", "key.pem", "clients.pem"])
@pytest.mark.parametrize("content", [b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", None])
async def test_files_that_do_not_serve_leave_the_certificates_as_they_were(
    engine: Engine,
    authority: Authority,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    content: bytes | None,
) -> None:
    credentials = authority.credentials(authority.client("alice"))
    async with serving(engine, **authority.settings(tmp_path, asks_clients=True)) as handle:
        if content is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_bytes(content)
        async with encrypted(handle, credentials) as client:
            assert len(await client.generate(await client.open())) == 8
        assert "certificates stay unchanged" in caplog.text
        assert "BEGIN" not in caplog.text


async def test_a_certificate_whose_key_has_not_come_yet_waits_for_it(
    engine: Engine, authority: Authority, tmp_path: Path
) -> None:
    renewing, folder = Authority(), tmp_path / "renewed"
    folder.mkdir()
    renewing.write_server_files(folder)
    async with serving(engine, **authority.settings(tmp_path)) as handle:
        (folder / "chain.pem").replace(tmp_path / "chain.pem")
        async with encrypted(handle, authority.credentials()) as client:
            session_id = await client.open()
        (folder / "key.pem").replace(tmp_path / "key.pem")
        async with encrypted(handle, renewing.credentials()) as client:
            assert await client.length(session_id) == len(HISTORY)


async def test_without_keys_a_certificate_names_the_owner(engine: Engine, authority: Authority, tmp_path: Path) -> None:
    alice, bob = authority.client("alice"), authority.client("bob")
    async with (
        serving(engine, **authority.settings(tmp_path, asks_clients=True)) as handle,
        encrypted(handle, authority.credentials(alice)) as first,
        encrypted(handle, authority.credentials(alice), key="anything") as again,
        encrypted(handle, authority.credentials(bob)) as other,
    ):
        session_id = await first.open()
        assert await again.length(session_id) == len(HISTORY)
        assert len(await first.generate(session_id)) == 8
        assert (await refused(other.length(session_id))).reason == "NOT_FOUND SESSION_NOT_FOUND"


async def test_a_removed_authority_lets_no_new_client_in(engine: Engine, authority: Authority, tmp_path: Path) -> None:
    credentials, newer = authority.credentials(authority.client("alice")), Authority()
    async with serving(engine, **authority.settings(tmp_path, asks_clients=True)) as handle:
        async with encrypted(handle, credentials) as client:
            session_id = await client.open()
        (tmp_path / "clients.pem").write_bytes(newer.pem)
        async with encrypted(handle, credentials) as client:
            assert (await refused(client.length(session_id))).reason == "UNAVAILABLE"


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
async def test_beyond_loopback_plaintext_needs_a_setting_of_its_own(
    engine: Engine, key_file: str, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"bind": address, "api_key_file": key_file}
    with pytest.raises(ConfigError, match="allow_plaintext"):
        await start_server(engine, ServerConfig(**settings))
    async with serving(engine, **settings, allow_plaintext=True) as handle:
        assert "keys cross the network unencrypted" in caplog.text
        loopback = "127.0.0.1" if address.startswith("0") else "[::1]"
        async with grpc.aio.insecure_channel(f"{loopback}:{handle.target.rpartition(':')[2]}") as channel:
            assert await Client(channel, [("authorization", f"Bearer {KEY}")]).open()
            assert (await refused(Client(channel).open())).reason == "UNAUTHENTICATED UNAUTHENTICATED"


async def test_no_setting_admits_callers_without_keys_beyond_loopback(
    engine: Engine, authority: Authority, tmp_path: Path
) -> None:
    for settings in ({"allow_plaintext": True}, authority.settings(tmp_path)):
        with pytest.raises(ConfigError, match="can be reached from other machines"):
            await start_server(engine, ServerConfig(bind="0.0.0.0:0", **settings))
