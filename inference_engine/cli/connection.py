"""Where a client command finds its server: flags for one that runs already, and the SDK client they lead to."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from inference_engine.errors import ConfigError

if TYPE_CHECKING:
    from kakeya import Client


def add_connection(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("connection")
    group.add_argument("--target", metavar="HOST:PORT", help="a running server (default: start one, and stop it after)")
    group.add_argument("--api-key-file", metavar="FILE", help="the key for that server, on the file's first line")
    group.add_argument("--tls", action="store_true", help="encrypt, and trust the usual authorities")
    group.add_argument("--tls-ca-file", metavar="FILE", help="encrypt, and trust this certificate, in PEM format")


def connect(args: argparse.Namespace, target: str) -> Client:
    """A client for `target` with the key and the certificate of `args`. Raises ConfigError for files it cannot read."""
    from kakeya import TLS, Client

    try:
        key = _first_line(args.api_key_file) if args.api_key_file else None
        tls = TLS(root_certificates=Path(args.tls_ca_file).expanduser()) if args.tls_ca_file else args.tls
        return Client(target, api_key=key, tls=tls)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the key or the certificate for {target}: {error}") from error


def _first_line(path: str) -> str:
    lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    if not lines or not lines[0].strip():
        raise ConfigError(f"{path} holds no key on its first line")
    return lines[0].strip()
