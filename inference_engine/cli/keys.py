"""`kakeya keys`: the API keys of a server.

A running server applies a change with the next call, without interruption. A key is shown once, when it is made; the
file holds its digest only.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock
from rich.console import Console
from rich.table import Table

from inference_engine.cli import process
from inference_engine.cli.settings import add_config_file, add_settings, settings
from inference_engine.config import ServerConfig, in_full
from inference_engine.errors import ConfigError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

KEY_BYTES = 32
_STORED = {False: "its digest", True: "in plain text: run `kakeya keys hash`"}  # by whether the key itself is there
_HEAD = "# Made by `kakeya keys`. One key a line: its SHA-256 digest and its owner.\n"


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "keys",
        help="make, list and remove the API keys of a server",
        description="The keys in a server's api_key_file. A running server applies every change at once.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = _action(actions, "add", run_add, "make a key and print it, this once")
    add.add_argument("owner", help="name of the user; several keys may have one owner and then share its sessions")
    _action(actions, "list", run_list, "show owners and the ids of their keys")
    remove = _action(actions, "remove", run_remove, "remove keys: the next call with them is refused")
    remove.add_argument("key", metavar="KEY_ID|OWNER", help="one key by its id, or all keys of an owner")
    _action(actions, "hash", run_hash, "replace plain-text keys in the file by their digests")


def _action(
    actions: Subparsers, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    add_config_file(parser)
    add_settings(parser, ServerConfig, only=("api_key_file",))
    parser.set_defaults(run=run)
    return parser


def run_add(args: argparse.Namespace) -> int:
    """Prints the key alone on standard output. Raises ConfigError."""
    from inference_engine.server.auth import OWNER_NAME, Key

    if OWNER_NAME.fullmatch(args.owner) is None:
        raise ConfigError(
            f"an owner is an ASCII letter or digit, then up to 63 letters, digits or . _ @ -, got {args.owner!r}"
        )
    key = f"kakeya_{secrets.token_urlsafe(KEY_BYTES)}"
    made = Key.of(key, args.owner)
    with _changing(_path(args)) as lines:
        lines.append(made.line)
        if failed := process.announce(key):
            raise ConfigError(f"the key cannot be printed ({failed.strerror}), so it is not added")
    print(f"key {made.key_id} of {made.owner}: it will not be shown again, so store it now", file=sys.stderr)
    return 0


def run_list(args: argparse.Namespace) -> int:
    """Raises ConfigError."""
    from inference_engine.server.auth import parse_line

    table = Table("owner", "key id", "in the file")
    for number, line in enumerate(_lines(_path(args)), start=1):
        try:
            key = parse_line(line)
        except ValueError as complaint:
            table.add_row("", "", f"line {number} is ignored: {complaint}")
        else:
            if key is not None:
                table.add_row(key.owner, key.key_id, _STORED[key.is_plain])
    Console().print(table)
    return 0


def run_remove(args: argparse.Namespace) -> int:
    """Raises ConfigError if there is no such key."""
    from inference_engine.server.auth import parse_line

    removed = 0
    with _changing(_path(args)) as lines:
        kept = []
        for line in lines:
            try:
                key = parse_line(line)
            except ValueError:
                key = None
            if key is not None and args.key in (key.owner, key.key_id):
                removed += 1
            else:
                kept.append(line)
        if not removed:
            raise ConfigError(f"there is no key and no owner {args.key!r}; see `kakeya keys list`")
        lines[:] = kept
    print(f"{removed} removed", file=sys.stderr)
    return 0


def run_hash(args: argparse.Namespace) -> int:
    """Raises ConfigError for an invalid line."""
    from inference_engine.server.auth import parse_line

    path, hashed = _path(args), 0
    with _changing(path) as lines:
        for index, line in enumerate(lines):
            try:
                key = parse_line(line)
            except ValueError as complaint:
                raise ConfigError(f"{path}, line {index + 1}: {complaint}") from None
            if key is not None and key.is_plain:
                lines[index] = key.line
                hashed += 1
    print(f"{hashed} hashed", file=sys.stderr)
    return 0


def _path(args: argparse.Namespace) -> Path:
    path = settings(args, ServerConfig).api_key_file
    if not path:
        raise ConfigError("no key file given: pass --api-key-file with the server's value, or --config")
    return in_full(path)


def _lines(path: Path) -> list[str]:
    from inference_engine.server.auth import why_unreadable

    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the key file {path}: {why_unreadable(error)}") from error


@contextmanager
def _changing(path: Path) -> Iterator[list[str]]:
    """The lines of the file, to be changed in place. The file is replaced at once, so no reader sees half of it."""
    try:
        # The target of a link is replaced, not the link.
        path = path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", mode=0o600):
            lines = _lines(path) if path.exists() else [_HEAD.strip()]
            yield lines
            _replace(path, lines)
    except OSError as error:
        raise ConfigError(f"cannot write the key file {path}: {error.strerror}") from error


def _replace(path: Path, lines: Sequence[str]) -> None:
    """An existing file keeps its mode and owner, so that its server can read it; a new one is private to this user.

    Raises OSError.
    """
    before = path.stat() if path.exists() else None
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
            if before is not None:
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), before.st_mode & 0o777)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
