"""Connection of client commands: flags for a running server, and the SDK client for them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from inference_engine.config import in_full
from inference_engine.errors import ConfigError

if TYPE_CHECKING:
    from kakeya import AsyncClient, Client

C = TypeVar("C")

# What the SDK calls an argument of Client, and the flags that say the same
_IN_FLAGS = {
    "tls=True or tls=TLS(…)": "--tls or --tls-ca-file",
    "tls=TLS(root_certificates=…)": "--tls-ca-file",
    "tls=TLS(certificate=…, key=…) gives": "--tls-client-cert-file with --tls-client-key-file gives",
    "tls root_certificates": "--tls-ca-file",
    "tls certificate": "--tls-client-cert-file",
    "tls key": "--tls-client-key-file",
    "leave out tls,": "leave out --tls and --tls-ca-file,",
    "the key in tls": "the key in --tls-client-key-file",
}

# What `connect` reads of a command that asks for no connection: it starts its server itself.
OWN_SERVER: dict[str, Any] = {"target": None, "api_key_file": None, "tls": False, "tls_ca_file": None}
OWN_SERVER |= {"tls_client_cert_file": None, "tls_client_key_file": None}


def add_connection(
    parser: argparse.ArgumentParser,
    *,
    target: str | None = None,
    names: Sequence[str] = ("--target",),
    has_key: bool = True,
) -> None:
    """target: the default; None: the command starts a server. has_key: it has a key of its own."""
    group = parser.add_argument_group("connection")
    default = target or "start one, and stop it after"
    group.add_argument(
        *names, dest="target", metavar="HOST:PORT", default=target, help=f"a running server (default: {default})"
    )
    parser.set_defaults(api_key_file=None)
    if has_key:
        group.add_argument("--api-key-file", metavar="FILE", help="the key for that server, on the file's first line")
    group.add_argument("--tls", action="store_true", help="use TLS and trust the system's authorities")
    group.add_argument("--tls-ca-file", metavar="FILE", help="use TLS and trust this certificate, in PEM format")
    group.add_argument(
        "--tls-client-cert-file", metavar="FILE", help="client certificate, for a server that requires one"
    )
    group.add_argument("--tls-client-key-file", metavar="FILE", help="its private key")


def connect(args: argparse.Namespace, target: str) -> Client:
    """A client for `target` with the key and the certificate of `args`. Raises ConfigError for files it cannot read."""
    from kakeya import Client

    return _made(Client, args, target)


def connect_async(args: argparse.Namespace, target: str, **options: Any) -> AsyncClient:
    """As `connect`, for asyncio. options: those of the client."""
    from kakeya import AsyncClient

    return _made(AsyncClient, args, target, **options)


def in_flags(said: str) -> str:
    """What the SDK says of an error, with the command's flags in the place of Python's arguments."""
    for argument, flags in _IN_FLAGS.items():
        said = said.replace(argument, flags)
    return said


def _made(kind: Callable[..., C], args: argparse.Namespace, target: str, **options: Any) -> C:
    from kakeya import TLS

    try:
        if args.api_key_file:
            options = {"api_key": _first_line(args.api_key_file), **options}
        certificate, own_key = _path(args.tls_client_cert_file), _path(args.tls_client_key_file)
        has_files = bool(args.tls_ca_file or certificate or own_key)
        tls: TLS | bool = args.tls
        if has_files:
            tls = TLS(root_certificates=_path(args.tls_ca_file), certificate=certificate, key=own_key)
        return kind(target, tls=tls, **options)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the key or the certificate for {target}: {error}") from error


def _path(given: str | None) -> Path | None:
    return in_full(given) if given else None


def _first_line(path: str) -> str:
    lines = in_full(path).read_text(encoding="utf-8").splitlines()
    if not lines or not lines[0].strip():
        raise ConfigError(f"{path} holds no key on its first line")
    if lines[0].startswith(("sha256:", "#")):
        raise ConfigError(
            f"{path} is a server's key file: it holds digests. Pass a file with the key that `kakeya keys add` printed"
        )
    return lines[0].strip()
