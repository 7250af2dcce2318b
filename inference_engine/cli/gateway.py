"""`kakeya gateway`: other people's APIs for a running server, each conversation one session.

A process of its own, over the SDK. Standard output gets one line, once clients can connect.
"""

from __future__ import annotations

import argparse
import logging
import socket
from typing import TYPE_CHECKING, Any

from inference_engine.cli import process
from inference_engine.cli.connection import add_connection, connect, connect_async
from inference_engine.cli.ports import bind_error
from inference_engine.config import ModelConfig
from inference_engine.errors import ConfigError
from inference_engine.server.address import Address, cannot_bind, names_this_machine, resolve_bind

if TYPE_CHECKING:
    from kakeya import AsyncClient, ServerInfo

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

logger = logging.getLogger(__name__)


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "gateway",
        usage="%(prog)s [OPTION ...]",
        help="serve OpenAI's and Anthropic's APIs from a running server's sessions",
        description="Serve /v1/responses, /v1/chat/completions and /v1/messages. Every conversation is a session of "
        "the server, so a turn computes what is new in it. Callers' API keys are the server's.",
    )
    add_connection(parser, target="127.0.0.1:50051", names=("--target", "--server"), has_key=False)
    parser.add_argument("--tokenizer", metavar="MODEL", help="a model's name or folder (default: the server's model)")
    parser.add_argument(
        "--tool-format",
        choices=("hermes", "llama", "code_block"),
        help="of tool calls, if the template has none",
    )
    parser.add_argument("--cache-dir", metavar="DIR", help="where downloaded models are")
    port = parser.add_argument_group("the gateway's own port")
    port.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    port.add_argument("--port", type=int, default=8080, help="(default: 8080; 0: any)")
    port.add_argument("--tls-cert-file", metavar="FILE", help="certificate, in PEM format; needed beyond loopback")
    port.add_argument("--tls-key-file", metavar="FILE", help="its private key")
    port.add_argument("--allow-plaintext", action="store_true", help="beyond loopback, a proxy in front ends TLS")
    port.add_argument("--drain-seconds", type=float, default=30.0, metavar="S", help="for answers at the end (30)")
    held = parser.add_argument_group("sessions")
    held.add_argument("--name", default="gateway", help="begins the labels of its sessions; one for each gateway")
    held.add_argument("--sessions-per-key", type=int, default=64, metavar="N", help="held for one API key (64)")
    held.add_argument("--idle-seconds", type=float, default=1800.0, metavar="S", help="then a session is closed (1800)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises ConfigError, ModelError and the SDK's errors."""
    try:
        from kakeya_gateway.app import Gateway, create_app, serve
        from kakeya_gateway.texts import Texts
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "starlette", "uvicorn", "kakeya_gateway"):
            raise
        raise ConfigError(f"the gateway needs {error.name}: pip install 'kakeya-runtime[gateway]'") from error
    address = resolve_bind("--host", f"[{args.host}]:{args.port}" if ":" in args.host else f"{args.host}:{args.port}")
    if bool(args.tls_cert_file) != bool(args.tls_key_file):
        raise ConfigError("--tls-cert-file and --tls-key-file belong together; give both, or neither")
    for option, value in (("--sessions-per-key", args.sessions_per_key), ("--idle-seconds", args.idle_seconds)):
        if value < 1:
            raise ConfigError(f"{option} must be at least 1, got {value:g}")
    if bind_error(address):
        raise cannot_bind("--port", address)
    info = _without_key(args)
    if info is None:
        connect_async(args, args.target, api_key="any")  # refused now, and not with each request: a key in the clear
    if not address.is_loopback:
        _refuse_open_doors(address, args, has_keys=info is None)
    with process.progress().status("getting ready"):
        texts = Texts(_tokenizer(args, info), tool_format=args.tool_format)

    def client(key: str) -> AsyncClient:
        return connect_async(args, args.target, api_key=key or None)

    most, idle_seconds = args.sessions_per_key, args.idle_seconds
    gateway = Gateway(client, texts, name=args.name, most=most, idle_seconds=idle_seconds)
    app = create_app(gateway, is_own_host=names_this_machine if address.is_loopback else lambda _: True)
    with _listening(address) as listening:
        host, port = listening.getsockname()[:2]
        bound = Address(host=host, port=port, is_loopback=address.is_loopback)
        scheme = "https" if args.tls_cert_file else "http"
        process.end_if_stopped()
        process.announce_aside(
            f"ready at {scheme}://{bound}: the sessions of {args.target}",
            lambda failed: logger.info("the ready line cannot be written to standard output: %s", failed.strerror),
        )
        serve(
            app,
            listening,
            certificate=args.tls_cert_file,
            key=args.tls_key_file,
            drain_seconds=args.drain_seconds,
        )
    return 0


def _without_key(args: argparse.Namespace) -> ServerInfo | None:
    """What the server says to a caller without a key; None: nothing, it has keys."""
    from kakeya import Unauthenticated

    with connect(args, args.target) as client:
        try:
            return client.server_info()
        except Unauthenticated:
            return None


def _refuse_open_doors(address: Address, args: argparse.Namespace, *, has_keys: bool) -> None:
    if not has_keys:
        raise ConfigError(
            f"{address} can be reached from other machines, and the server at {args.target} answers without a key, so "
            "both would be open to them: give the server an api_key_file, or bind 127.0.0.1"
        )
    if not (args.tls_cert_file or args.allow_plaintext):
        raise ConfigError(
            f"{address} can be reached from other machines: set --tls-cert-file with --tls-key-file, or bind 127.0.0.1 "
            "(or --allow-plaintext, if a proxy in front of this gateway terminates TLS)"
        )


def _tokenizer(args: argparse.Namespace, info: ServerInfo | None) -> Any:
    from inference_engine.cli.conversation import served_chat_tokenizer

    if info is None and args.tokenizer is None:
        raise ConfigError("the server tells its model to callers with a key alone: --tokenizer names the model")
    cache = ModelConfig(**({"cache_dir": args.cache_dir} if args.cache_dir else {})).cache_path
    return served_chat_tokenizer(info, args.tokenizer, cache, option="--tokenizer")


def _listening(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((address.host, address.port))
    listening.listen()
    return listening
