"""Certificates for tests: of a server, of clients, and of an authority that is not trusted."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import grpc
import psutil
import trustme


def own_address() -> str:
    """An address of this machine that others could reach, or loopback if it has none."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return str(address.address)
    return "127.0.0.1"


class Authority:
    """One that signs for servers and clients."""

    def __init__(self) -> None:
        self._ca = trustme.CA()

    @property
    def pem(self) -> bytes:
        return bytes(self._ca.cert_pem.bytes())

    def settings(self, folder: Path, *, asks_clients: bool = False) -> dict[str, Any]:
        """Writes files for a server at this machine's addresses; the settings that name them."""
        self.write_server_files(folder)
        (folder / "clients.pem").write_bytes(self.pem)
        files = {"tls_cert_file": str(folder / "chain.pem"), "tls_key_file": str(folder / "key.pem")}
        return {**files, "tls_client_ca_file": str(folder / "clients.pem")} if asks_clients else files

    def write_server_files(self, folder: Path) -> None:
        """Each is replaced as a whole, the key after the certificate, as renewals do."""
        issued = self._ca.issue_cert("localhost", "127.0.0.1", own_address())
        for name, content in (("chain.pem", _chain(issued)), ("key.pem", issued.private_key_pem.bytes())):
            (folder / f"{name}.new").write_bytes(content)
            (folder / f"{name}.new").replace(folder / name)

    def client(self, name: str) -> tuple[bytes, bytes]:
        """Key and certificate chain of a client; every call gives another certificate and subject."""
        issued = self._ca.issue_cert(f"{name}@example.org", common_name=name)
        return issued.private_key_pem.bytes(), _chain(issued)

    def credentials(self, client: tuple[bytes, bytes] | None = None) -> grpc.ChannelCredentials:
        """Trusts this authority; `client`: and shows that certificate."""
        key, chain = client or (None, None)
        return grpc.ssl_channel_credentials(self.pem, key, chain)


def _chain(issued: trustme.LeafCert) -> bytes:
    return b"".join(blob.bytes() for blob in issued.cert_chain_pems)
