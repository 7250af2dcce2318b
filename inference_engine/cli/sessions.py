"""`kakeya sessions`: the caller's own sessions on a running server."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import TYPE_CHECKING

from inference_engine.cli.connection import add_connection, connect
from inference_engine.config import ServerConfig
from inference_engine.errors import ConfigError, counted

if TYPE_CHECKING:
    from kakeya import Client, HistoryPiece, SessionSummary

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_SPANS = ((86_400, "d"), (3_600, "h"), (60, "min"), (0, "s"))


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "sessions",
        help="list, show and close your sessions on a running server",
        description="The sessions of the caller, that is, of the owner of the key or of the client certificate.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _action(actions, "list", run_list, "show your sessions, a line each")
    show = _action(actions, "show", run_show, "show one session")
    show.add_argument("session_id", metavar="ID", help="as `list` shows it; behind -- if it begins with a dash")
    show.add_argument("--ids", action="store_true", help="show the token ids of its history, too")
    close = _action(actions, "close", run_close, "close sessions and free what they hold")
    close.add_argument(
        "session_ids", nargs="*", metavar="ID", help="as `list` shows it; behind -- if it begins with a dash"
    )
    close.add_argument("--all", action="store_true", help="all that `list` shows")


def _action(
    actions: Subparsers, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    add_connection(parser, target=ServerConfig().bind)
    parser.set_defaults(run=run)
    return parser


def run_list(args: argparse.Namespace) -> int:
    with connect(args, args.target) as client:
        rows = [_row(one) for one in client.sessions()]
    _print_columns([("ID", "TOKENS", "AGE", "IDLE", "STATE", "STRATEGY", "LABEL"), *rows])
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Raises ConfigError for an id that is none of the caller's sessions."""
    with connect(args, args.target) as client, _named(args.session_id):
        session = client.session(args.session_id)
        info = session.info()
        limit = "" if info.limit_tokens is None else f" of at most {info.limit_tokens}"
        state = info.failure_reason or ("generating" if info.is_generating else f"idle for {_span(info.idle_seconds)}")
        facts = {
            "label": info.label,
            "model": session.model_id,
            "strategy": str(info.strategy),
            "history": f"{counted(info.history_length, 'token')}{limit}",
            "cached": f"{counted(info.cached_tokens, 'token')}, {info.evicted_tokens} of them evicted",
            "memory": f"{info.kv_live_bytes} bytes of KV, at most {info.peak_bytes}",
            "state": state if info.is_resident else f"{state}, on disk only",
            "durability": session.durability.value,
        }
        for name, value in facts.items():
            print(f"{name:<11} {value}".rstrip())
        if args.ids:
            for piece in session.history():
                _print_ids(piece)
    return 0


def run_close(args: argparse.Namespace) -> int:
    """Raises ConfigError unless ids or --all are given, or for an id that is none of the caller's sessions.

    Sessions before that are closed.
    """
    if bool(args.session_ids) == args.all:
        raise ConfigError("give the ids of the sessions to close, or --all")
    with connect(args, args.target) as client:
        for session_id in [one.id for one in client.sessions()] if args.all else args.session_ids:
            length = _close(client, session_id, may_be_gone=args.all)
            if length is not None:
                print(f"closed {session_id} with {counted(length, 'token')}")
    return 0


def _close(client: Client, session_id: str, *, may_be_gone: bool) -> int | None:
    """The final length of its history. may_be_gone: None for a session that was closed since it was listed."""
    try:
        with _named(session_id):
            return client.session(session_id).close()
    except ConfigError:
        if may_be_gone:
            return None
        raise


@contextmanager
def _named(session_id: str) -> Iterator[None]:
    """The server's refusal names no id, and several may have been typed."""
    from kakeya import SessionNotFound

    try:
        yield
    except SessionNotFound as error:
        raise ConfigError(f"you have no session {session_id} there; `kakeya sessions list` shows yours") from error


def _row(one: SessionSummary) -> tuple[str, ...]:
    state = one.failure_reason or ("generating" if one.is_generating else "idle" if one.is_resident else "on disk")
    spans = (_span(one.age_seconds), _span(one.idle_seconds))
    return (one.id, str(one.history_length), *spans, state, str(one.strategy), one.label)


def _print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Whole, however wide the terminal is: an id that is cut is of no use."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{value:<{width}}" for value, width in zip(row, widths, strict=True)).rstrip())


def _print_ids(piece: HistoryPiece) -> None:
    first = 0
    for kind, length in zip(cycle(("appended", "generated")), piece.run_lengths, strict=False):
        if length:
            print(f"{kind:<11} {_shown(piece.token_ids[first : first + length])}")
        first += length


def _shown(ids: Iterable[int]) -> str:
    return " ".join(map(str, ids))


def _span(seconds: float) -> str:
    size, unit = next((size, unit) for size, unit in _SPANS if seconds >= size)
    return f"{seconds / max(size, 1):.0f} {unit}"
