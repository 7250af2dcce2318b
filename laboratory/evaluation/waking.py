"""Waking: what idle sessions hold, and how soon one that is spoken to goes on.

    slept      a session of each strategy: from the append of a few tokens to the first that is generated
    anew       a new session of full, given the whole history: what a runtime without sessions does
    kept       full, every KV entry in place: the fastest, and the most bytes
    saved      full's entries read back from a file (`saved_entries.py`), from storage and from the system's cache

All go on from histories of the same length, in turns, so what the machine does meanwhile happens to all; a ratio is of
one round. A session keeps what it was given and what it generated: anew and saved get what the one of full holds.
What sessions hold is counted apart (`idle.py`), with many of them idle at once.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inference_engine.engine import Engine
from inference_engine.errors import BackendError, InvalidArgument, NoCapacity
from inference_engine.kv.strategies import parse_strategy
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategy import KVStrategy
from laboratory.evaluation import pictures, record
from laboratory.evaluation.arguments import geometry_of, require_at_least, strategy_argument
from laboratory.evaluation.haystack import KINDS
from laboratory.evaluation.idle import Idle, fill
from laboratory.evaluation.models import Target
from laboratory.evaluation.pictures import Course
from laboratory.evaluation.saved_entries import CAN_DROP, SavedEntries, filesystem
from laboratory.evaluation.sessions import append_all, opened, turned
from laboratory.evaluation.timing import start

logger = logging.getLogger(__name__)

KEPT = "full"
ANEW = "full, prefilled anew"
STORED = "full, read from storage"
CACHED = "full, read from the system's cache"
DEFAULT = (
    "sink_window:window=256",
    "restored:window=256,source=latent",
    "restored:window=256",
    "full:codec=lloyd4",
)
_QUICK_SESSIONS = 3
_TEXT_BEYOND = 20_000  # ids of text beyond the longest history, so that histories differ

Seconds = dict[str, list[float]]  # by variant, one for each round


@dataclass(frozen=True, slots=True)
class Cell:
    """Where bytes belong. The length is what was appended before the session became idle."""

    strategy: str
    length: int

    def __str__(self) -> str:
        return f"{self.strategy}, at {self.length}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategies", nargs="+", type=strategy_argument, default=[parse_strategy(one) for one in DEFAULT],
        metavar="SPEC", help=f"idle strategies beside full, which is always measured (default: {' '.join(DEFAULT)})",
    )  # fmt: skip
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096], metavar="N", help="ids of history")
    parser.add_argument("--sessions", type=int, default=100, metavar="N", help="idle at once; 0: count no bytes")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="of wakings, beside one that does not count")
    parser.add_argument("--appended", type=int, default=16, metavar="N", help="ids that a waking session is given")
    parser.add_argument("--kind", choices=KINDS, default="prose", help="of text in the histories")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the text")
    parser.add_argument(
        "--disk", type=Path, metavar="DIR", help="where entries are saved (default: the system's choice)"
    )


def main(arguments: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Measure and return the record's payload.

    Raises InvalidArgument for numbers that are too small, InvalidArgument or NoCapacity where full itself cannot be
    had; other strategies that cannot are reported with their reason.
    """
    require_at_least(arguments, lengths=1, sessions=0, rounds=0, appended=1)
    if not arguments.rounds and not arguments.sessions:
        raise InvalidArgument("rounds", "must be at least 1 where no bytes are counted, got 0")
    rounds, sessions = arguments.rounds, arguments.sessions
    if arguments.quick:
        rounds, sessions = min(1, rounds), min(_QUICK_SESSIONS, sessions)
    by_name = {str(one): one for one in (Full(), *arguments.strategies)}
    text = target.texts.filler(arguments.kind, max(arguments.lengths) + _TEXT_BEYOND, arguments.seed)
    held: dict[Cell, Idle] = {}
    left_out: dict[str, str] = {}
    seconds: dict[int, Seconds] = {}
    with tempfile.TemporaryDirectory(dir=arguments.disk) as folder:
        disk = filesystem(Path(folder))
        for length in arguments.lengths:
            some = rest_of(by_name, target, length + 1 + (rounds + 1) * (arguments.appended + 1), left_out, length)
            if rounds:
                seconds[length] = wake_all(
                    target, some, text, length, rounds=rounds, appended=arguments.appended, folder=Path(folder)
                )
            for name, one in some.items() if sessions else ():
                cell = Cell(name, length)
                try:
                    held[cell] = fill(
                        target, one, length, sessions=sessions, appended=arguments.appended, token_ids=text
                    )
                except (BackendError, InvalidArgument, NoCapacity) as refusal:
                    left_out[f"{cell}, {sessions} idle"] = str(refusal)
                    continue
                logger.info("%s: %.2f MiB allocated", cell, held[cell].allocated_bytes / 2**20)
    return {
        "what": "Seconds until a session that was idle goes on, and the bytes it holds while it is idle.",
        "config": {
            **target.describe(),
            "threads": torch.get_num_threads(),
            "strategies": list(by_name),
            "lengths": arguments.lengths,
            "sessions": sessions,
            "rounds": rounds,
            "appended": arguments.appended,
            "kind": arguments.kind,
            "texts_sha256": target.texts.digest(arguments.kind),
            "saved_on": disk,
            "page_cache": "the system was asked to drop it" if CAN_DROP else "cannot be dropped on this system",
        },
        "seeds": [arguments.seed],
        "values": {**_time_values(seconds), **_byte_values(held)},
        "baseline": "full: every KV entry kept, prefilled anew, and read from a file, in the same rounds",
        "tables": {
            "time to first token": _time_table(seconds),
            "idle": _bytes_table(held),
            "left out": [{"cell": cell, "reason": reason} for cell, reason in left_out.items()],
        },
    }


def draw(payload: Mapping[str, Any], folder: Path) -> None:
    """Seconds to the first token, and MiB allocated for an idle session, over length."""
    for name, table, y_label, column, unit in (
        ("waking", "time to first token", "seconds to the first token", "seconds", 1.0),
        ("idle", "idle", "MiB allocated for an idle session", "allocated_bytes", 2.0**20),
    ):
        if lines := payload["tables"].get(table):
            key = "strategy" if "strategy" in lines[0] else "who"  # as the first records have it
            pictures.lines(
                folder / f"{name}.svg",
                title=f"{y_label[0].upper()}{y_label[1:]}",
                x_label="history, tokens",
                y_label=y_label,
                is_log_x=True,
                is_log_y=True,
                courses=[
                    Course(own, [line["length"] for line in mine], [line[column] / unit for line in mine])
                    for own in dict.fromkeys(line[key] for line in lines)
                    if (mine := [line for line in lines if line[key] == own])
                ],
            )


# -- time -------------------------------------------------------------------------------------------------------------


def rest_of(
    strategies: Mapping[str, KVStrategy], target: Target, limit: int, left_out: dict[str, str], length: int
) -> dict[str, KVStrategy]:
    """The strategies of which the engine can hold a session of `limit`; why not the others is noted."""
    able = {}
    for name, one in strategies.items():
        try:
            with opened(target.engine, one, limit):
                able[name] = one
        except (InvalidArgument, NoCapacity) as refusal:
            if name == KEPT:
                raise
            left_out[str(Cell(name, length))] = refusal.message
    return able


def wake_all(
    target: Target,
    strategies: Mapping[str, KVStrategy],
    text: Sequence[int],
    length: int,
    *,
    rounds: int,
    appended: int,
    folder: Path,
) -> Seconds:
    """Let sessions of the first `length` ids of `text` become idle and wake each once a round, in turns.

    Full is among them. One round more is run at first and not kept. Each gives a session what comes next in the text.
    """
    engine, found = target.engine, Seconds()
    history = text[:length]
    with ExitStack() as stack:
        idle = {name: stack.enter_context(_idle(engine, one, history, (rounds + 1) * (appended + 1)))
                for name, one in strategies.items()}  # fmt: skip
        sessions = {name: session for name, (session, _) in idle.items()}
        held = [*history, idle[KEPT][1]]  # by full's; the entry of the last is computed when it goes on
        saved = stack.enter_context(_saved(target, history, (rounds + 1) * (appended + 1), folder))
        names = [*sessions, ANEW, CACHED, *([STORED] if CAN_DROP else [])]
        for number in range(rounds + 1):
            given = list(text[length + number * appended :][:appended])
            tokens = {}
            for name in turned(names, number):
                if name in sessions:
                    tokens[name], seconds = _go_on(engine, sessions[name], given)
                elif name == ANEW:
                    tokens[name], seconds = _begin(engine, [*held, *given])
                else:
                    tokens[name], seconds = saved.first_token([held[-1], *given], drop_cache=name == STORED)
                logger.info("round %d of %d, %s, at %d: %.1f ms", number, rounds, name, length, 1e3 * seconds)
                if number:
                    found.setdefault(name, []).append(seconds)
            saved.extend([held[-1], *given])
            held += [*given, tokens[KEPT]]
    return {name: found[name] for name in names}


@contextmanager
def _idle(engine: Engine, strategy: KVStrategy, history: Sequence[int], room: int) -> Iterator[tuple[str, int]]:
    """A session with that history and its first token generated, and that token."""
    with opened(engine, strategy, len(history) + 1 + room) as session:
        token, _ = _go_on(engine, session, history)
        yield session, token


@contextmanager
def _saved(target: Target, history: Sequence[int], room: int, folder: Path) -> Iterator[SavedEntries]:
    saved = SavedEntries(
        target.forward, geometry_of(target), history, room=room, path=folder / f"{len(history)}.entries"
    )
    try:
        yield saved
    finally:
        saved.close()


def _begin(engine: Engine, token_ids: Sequence[int]) -> tuple[int, float]:
    """The first token of a new session of full that is given everything, and the seconds until it came."""
    began = time.perf_counter()
    with opened(engine, Full(), len(token_ids) + 1) as session:
        return _go_on(engine, session, token_ids, began=began)


def _go_on(engine: Engine, session: str, token_ids: Sequence[int], *, began: float | None = None) -> tuple[int, float]:
    """The first token after an append, and the seconds until it came from `began`, or else from the append.

    The session is idle again afterwards.
    """
    began = time.perf_counter() if began is None else began
    append_all(engine, session, token_ids)
    (watch,) = start(engine, [session], tokens=1)
    watch.wait()
    return watch.token_ids[0], watch.token_times[0] - began


# -- reporting --------------------------------------------------------------------------------------------------------


def _time_values(found: Mapping[int, Seconds]) -> dict[str, dict[str, Any]]:
    reported = {}
    for length, seconds in found.items():
        for name, own in seconds.items():
            reported[f"first token, {name}, at {length}"] = record.summarize(own, "s")
            for other in (ANEW, KEPT, STORED):
                if name != other and other in seconds:
                    ratios = [one / base for one, base in zip(own, seconds[other], strict=True)]
                    reported[f"first token ÷ ({other}), {name}, at {length}"] = record.summarize(ratios, "ratio")
    return reported


def _time_table(found: Mapping[int, Seconds]) -> list[dict[str, Any]]:
    lines = []
    for length, seconds in found.items():
        for name, own in seconds.items():
            summary = record.summarize(own, "s")
            line = {"strategy": name, "length": length, "seconds": summary["median"]}
            line |= {"low": summary["low"], "high": summary["high"]}
            for words, other in (("÷ prefilled anew", ANEW), ("÷ kept", KEPT), ("÷ read from storage", STORED)):
                if other in seconds:
                    ratios = [one / base for one, base in zip(own, seconds[other], strict=True)]
                    line[words] = record.summarize(ratios, "ratio")["median"]
            lines.append(line)
    return lines


def _byte_values(held: Mapping[Cell, Idle]) -> dict[str, dict[str, Any]]:
    reported = {}
    for cell, one in held.items():
        reported[f"K/V reported, idle, {cell}"] = record.exact(one.reported_bytes, "bytes")
        if one.tier_bytes:
            reported[f"K/V off the device, idle, {cell}"] = record.exact(one.tier_bytes, "bytes")
        reported[f"K/V reserved, idle, {cell}"] = record.exact(one.reserved_bytes, "bytes")
        reported[f"allocated, idle, {cell}"] = record.exact(one.allocated_bytes, "bytes")
        reported[f"K/V reported, at most in a Generate, {cell}"] = record.exact(one.peak_bytes, "bytes")
        if one.transient_bytes is not None:
            reported[f"allocated in a Generate beyond the buffers, {cell}"] = record.exact(one.transient_bytes, "bytes")
        if full := held.get(Cell(KEPT, cell.length)):
            ratio = one.allocated_bytes / full.allocated_bytes
            reported[f"allocated, idle ÷ full, {cell}"] = record.exact(ratio, "ratio")
    return reported


def _bytes_table(held: Mapping[Cell, Idle]) -> list[dict[str, Any]]:
    return [
        {
            "strategy": cell.strategy,
            "length": cell.length,
            "sessions": one.sessions,
            "reported_bytes": one.reported_bytes,
            "tier_bytes": one.tier_bytes,
            "reserved_bytes": one.reserved_bytes,
            "allocated_bytes": round(one.allocated_bytes),
            "peak_reported_bytes": one.peak_bytes,
            "transient_bytes": one.transient_bytes,
            "bound_sustained_bytes": one.bound.sustained_bytes,
            "bound_peak_bytes": one.bound.peak_bytes,
            "bound_tier_bytes": one.bound.tier_bytes,
        }
        for cell, one in held.items()
    ]
