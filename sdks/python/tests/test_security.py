"""Keys and certificates, against the real server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme

import kakeya
from inference_engine.config import ServerConfig

Do = Callable[..., Awaitable[Any]]
KEY = "a" * 32


@dataclass(frozen=True)
class Guarded:
    target: str
    authority: Path  # the certificate that clients have to trust


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, run_server: Callable[..., Any]) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    (folder / "keys").write_text(f"{KEY}\n", encoding="utf-8")
    config = ServerConfig(
        bind="127.0.0.1:0",
        api_key_file=str(folder / "keys"),
        tls_cert_file=str(folder / "server.pem"),
        tls_key_file=str(folder / "server.pem"),
        drain_seconds=1.0,
    )
    with run_server(config) as target:
        yield Guarded(target, folder / "ca.pem")


def make(flavour: str, target: str, **options: Any) -> Any:
    return (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(target, **options)


@pytest.mark.parametrize("as_bytes", [False, True], ids=["path", "bytes"])
async def test_a_key_and_the_right_authority_open_the_door(
    guarded: Guarded, do: Do, flavour: str, as_bytes: bool
) -> None:
    root = guarded.authority.read_bytes() if as_bytes else guarded.authority
    client = make(flavour, guarded.target, api_key=KEY, tls=kakeya.TLS(root_certificates=root))
    session = await do(client.create_session)
    await do(session.append, [1, 2, 3])
    assert (await do(session.generate(3).result)).generated_tokens == 3
    await do(session.close)
    await do(client.close)


@pytest.mark.parametrize("key", [None, "b" * 32], ids=str)
async def test_without_the_key_it_stays_shut(guarded: Guarded, do: Do, flavour: str, key: str | None) -> None:
    client = make(flavour, guarded.target, api_key=key, tls=kakeya.TLS(root_certificates=guarded.authority))
    with pytest.raises(kakeya.Unauthenticated):
        await do(client.create_session)
    await do(client.close)


async def test_a_server_of_an_unknown_authority_is_not_talked_to(guarded: Guarded, do: Do, flavour: str) -> None:
    other = trustme.CA().cert_pem.bytes()
    client = make(flavour, guarded.target, api_key=KEY, tls=kakeya.TLS(root_certificates=other))
    with pytest.raises(kakeya.ConnectionFailed):
        await do(client.create_session)
    await do(client.close)


def test_a_certificate_file_that_is_not_there_is_an_os_error() -> None:
    with pytest.raises(FileNotFoundError):
        kakeya.Client("127.0.0.1:1", tls=kakeya.TLS(root_certificates="nowhere.pem"))
