"""`kakeya journal`: the sessions in a state folder, while no server uses it, or in a database."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from inference_engine.cli.settings import has_password
from inference_engine.config import in_full
from inference_engine.errors import ConfigError, HistoryCorrupt, counted

if TYPE_CHECKING:
    from inference_engine.session.postgres_journal import PostgresJournal
    from inference_engine.session.sqlite_journal import SQLiteJournal

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "journal",
        help="check, list, back up and purge the sessions in a state folder or a database",
        description="The sessions that a server keeps in its state_dir, which must be stopped; or those that servers "
        "keep in the database postgres:DSN, which may go on.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _action(actions, "check", run_check, "read every session, and name those that are damaged")
    _action(actions, "list", run_list, "show the sessions of all owners, a line each")
    backup = _action(
        actions, "backup", run_backup, "copy everything of a folder into a new one, which a server can use"
    )
    backup.add_argument("to", metavar="FOLDER")
    purge = _action(actions, "purge", run_purge, "delete sessions, damaged ones too")
    purge.add_argument(
        "session_ids", nargs="+", metavar="ID", help="as `list` shows it; behind -- if it begins with a dash"
    )


def _action(
    actions: Subparsers, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument("state_dir", metavar="STATE_DIR", help="or postgres:DSN")
    parser.set_defaults(run=run)
    return parser


def run_check(args: argparse.Namespace) -> int:
    """1 if anything is damaged. Raises ConfigError for a folder that cannot be opened."""
    damaged = 0
    with _opened(args.state_dir) as journal:
        entries = journal.everyone()
        for entry in entries:
            try:
                journal.read(entry.record.session_id)
            except HistoryCorrupt as damage:
                damaged += 1
                print(f"{entry.record.session_id}: {damage.message}")
            except KeyError:
                damaged += 1
                print(f"{entry.record.session_id}: the session's id is damaged")
        problem = journal.check()
    if problem:
        print(f"the database: {problem}")
    print(f"{counted(len(entries), 'session')}, {damaged} damaged")
    return 1 if damaged or problem else 0


def run_list(args: argparse.Namespace) -> int:
    with _opened(args.state_dir) as journal:
        for entry in journal.everyone():
            used = datetime.fromtimestamp(entry.used_at, UTC).isoformat(" ", "seconds")
            record = entry.record
            owner = f" of {record.owner}" if record.owner else ""
            label = f" {record.label!r}" if record.label else ""
            length = counted(entry.history_length, "token")
            print(f"{record.session_id}{owner}: {length}, {record.strategy}, used {used}{label}")
    return 0


def run_backup(args: argparse.Namespace) -> int:
    """Raises ConfigError for a folder within the one that is copied, and for a database."""
    state_dir, to = in_full(args.state_dir), in_full(args.to)
    if to.resolve().is_relative_to(state_dir.resolve()) and to.resolve() != state_dir.resolve():
        raise ConfigError(f"{to} would be a part of {state_dir}, and be lost with it; name a folder elsewhere")
    with _opened(args.state_dir) as journal:
        journal.back_up(to)
    return 0


def run_purge(args: argparse.Namespace) -> int:
    """Raises ConfigError, and deletes nothing, for an id that is not there."""
    with _opened(args.state_dir) as journal:
        owners = {entry.record.session_id: entry.record.owner for entry in journal.everyone()}
        damaged = journal.damaged()
        for session_id in args.session_ids:
            if session_id not in owners and session_id not in damaged:
                raise ConfigError(f"{journal.place} has no session {session_id}; nothing was deleted")
        for session_id in args.session_ids:
            journal.purge(session_id, owners.get(session_id, ""))
    return 0


@contextmanager
def _opened(place: str) -> Iterator[SQLiteJournal | PostgresJournal]:
    import apsw

    from inference_engine.session.journals import open_for_tools

    if has_password(place):
        raise ConfigError(
            "the database's name has a password, which others on this machine can read there: use PGPASSFILE or a "
            "service of libpq"
        )
    journal = open_for_tools(place)
    try:
        yield journal
    except apsw.CorruptError as error:
        raise ConfigError(
            f"the journal in {place} is damaged where this has to read it ({error}): `kakeya journal backup {place} "
            "FOLDER` makes a copy with new indexes, which helps if only an index is damaged; else restore "
            f"{place} from a backup"
        ) from error
    finally:
        journal.stop()
