"""Keys and certificates, against the real server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

import kakeya
from inference_engine.config import ServerConfig

Do = Callable[..., Awaitable[Any]]
KEY = "a" * 32
# A client that waits before trying again fails by time-out.
NEVER_IN_TIME = kakeya.RetryPolicy(first_delay_seconds=600.0, max_delay_seconds=600.0)


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


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def run_grpc() -> Iterator[Callable[..., str]]:
    """A gRPC server with a certificate, and with no service behind it; it asks clients for one of `clients`."""
    servers: list[grpc.Server] = []

    def run(certificate: trustme.LeafCert, *, clients: trustme.CA | None = None) -> str:
        chain = b"".join(each.bytes() for each in certificate.cert_chain_pems)
        credentials = grpc.ssl_server_credentials(
            [(certificate.private_key_pem.bytes(), chain)],
            root_certificates=None if clients is None else clients.cert_pem.bytes(),
            require_client_auth=clients is not None,
        )
        server = grpc.server(ThreadPoolExecutor(max_workers=1))
        servers.append(server)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        return f"127.0.0.1:{port}"

    yield run
    for server in servers:
        server.stop(0).wait(timeout=10)


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
    for tls in (True, kakeya.TLS(root_certificates=other)):
        client = make(flavour, guarded.target, api_key=KEY, tls=tls, retry=NEVER_IN_TIME)
        with pytest.raises(kakeya.TLSFailed, match="is not accepted: unable to get local issuer certificate"):
            await do(client.create_session)
        await do(client.close)


async def test_a_certificate_of_another_name_is_reported_at_once(
    authority: trustme.CA, run_grpc: Callable[..., str], do: Do, flavour: str
) -> None:
    target = run_grpc(authority.issue_cert("elsewhere.example.org"))
    tls = kakeya.TLS(root_certificates=authority.cert_pem.bytes())
    client = make(flavour, target, tls=tls, retry=NEVER_IN_TIME)
    with pytest.raises(kakeya.TLSFailed, match="certificate is for another name"):
        await do(client.server_info)
    await do(client.close)


async def test_an_expired_certificate_is_reported_at_once(
    authority: trustme.CA, run_grpc: Callable[..., str], do: Do, flavour: str
) -> None:
    target = run_grpc(authority.issue_cert("127.0.0.1", not_after=datetime(2020, 1, 1, tzinfo=UTC)))
    tls = kakeya.TLS(root_certificates=authority.cert_pem.bytes())
    client = make(flavour, target, tls=tls, retry=NEVER_IN_TIME)
    with pytest.raises(kakeya.TLSFailed, match="certificate has expired"):
        await do(client.server_info)
    await do(client.close)


async def test_a_server_that_asks_for_a_certificate_says_so(
    authority: trustme.CA, run_grpc: Callable[..., str], do: Do, flavour: str
) -> None:
    target = run_grpc(authority.issue_cert("127.0.0.1"), clients=authority)
    tls = kakeya.TLS(root_certificates=authority.cert_pem.bytes())
    client = make(flavour, target, tls=tls, retry=kakeya.RetryPolicy(attempts=1))
    with pytest.raises(kakeya.ConnectionFailed, match="if it asks its clients for a certificate, tls="):
        await do(client.server_info)
    await do(client.close)


def test_certificates_and_keys_that_are_none_are_refused_before_anything_is_sent(
    authority: trustme.CA, tmp_path: Path, flavour: str, subtests: pytest.Subtests
) -> None:
    own = authority.issue_cert("localhost")
    certificate, key = own.cert_chain_pems[0].bytes(), own.private_key_pem.bytes()
    path = tmp_path / "ca.pem"
    path.write_text("no PEM at all", encoding="utf-8")
    wrapped = key.replace(b"PRIVATE KEY-----\n", b"PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n", 1)
    needed = {"root_certificates": "a certificate", "certificate": "a certificate", "key": "an unencrypted key"}
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"root_certificates": path}, f"root_certificates must hold a certificate in PEM format, and {path} has none"),
        ({"root_certificates": b""}, "root_certificates"),
        ({"root_certificates": key}, "root_certificates"),
        ({"root_certificates": certificate[:200] + certificate[-30:]}, "root_certificates"),
        ({"certificate": b"no PEM at all", "key": key}, "certificate"),
        ({"certificate": certificate, "key": certificate}, "key"),
        ({"certificate": certificate, "key": b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nMII=\n"}, "key"),
        ({"certificate": certificate, "key": wrapped}, "key"),
    ]
    for given, wrong in refusals:
        name = wrong.split(" ", 1)[0]
        with subtests.test(wrong=wrong, given=sorted(given)):
            with pytest.raises(kakeya.InvalidArgument, match=f"^tls {name} must hold {needed[name]} in PEM") as refused:
                make(flavour, "127.0.0.1:1", tls=kakeya.TLS(**given))
            assert wrong in str(refused.value) and refused.value.field == "tls"


async def test_plaintext_to_a_port_that_speaks_tls_says_so(guarded: Guarded, do: Do, flavour: str) -> None:
    client = make(flavour, guarded.target, retry=NEVER_IN_TIME)
    with pytest.raises(kakeya.TLSFailed, match="it speaks TLS, and this client does not; give tls=True"):
        await do(client.create_session)
    await do(client.close)
