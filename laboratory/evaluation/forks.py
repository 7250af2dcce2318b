"""Forks: one session that several others go on from, against as many that are given the whole history.

    shared     forks that read the shared prefix where the first session holds it
    copied     forks with KV entries of their own, copied
    early      forks of a session that was not prefilled before they were made
    alike      new sessions of the same history, where `share_prefixes` is "owner"
    closed     the same, after one that had it before was closed
    anew       new sessions of the same history, prefilled: what a runtime without forks does

Each of them is given a few ids of its own and generates; all generate at once. Every round does all of them, in turns,
so that what the machine does meanwhile happens to all; a ratio is of one round. The first session was prefilled before,
but for `early` and `alike`: there one of them prefills the history, and the others wait for it. Nothing is kept of
sessions of `alike` when they are closed.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.kv.strategies.full import Full
from laboratory.evaluation import record
from laboratory.evaluation.arguments import geometry_of, require_at_least
from laboratory.evaluation.haystack import KINDS
from laboratory.evaluation.models import Target
from laboratory.evaluation.sessions import append_all, circular, turned
from laboratory.evaluation.timing import start, step_seconds

logger = logging.getLogger(__name__)

SHARED, COPIED, EARLY, ALIKE, CLOSED, ANEW = "shared", "copied", "early", "alike", "closed", "anew"
_METHODS = [SHARED, COPIED, EARLY, ALIKE, CLOSED, ANEW]
_NEW = (ALIKE, CLOSED, ANEW)  # are no forks
_QUICK = {"lengths": [256], "forks": 4, "rounds": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Branches:
    """What came of several sessions with a common history.

    made_seconds: until all of them could be called. first_token_seconds: until all had their first token, the making
    included. next_seconds: the same of one more such session, alone, after the others. token_seconds: of a step that
    gives each its next token. reserved_bytes, held_bytes: of all of them
    together, without the first session. token_ids: of each.
    """

    made_seconds: float
    first_token_seconds: float
    next_seconds: float
    token_seconds: float
    reserved_bytes: int
    held_bytes: int
    token_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Parent:
    """The session that others go on from. The KV entry of its history's last token is not computed yet."""

    engine: Engine
    session: str
    history: tuple[int, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048], metavar="N", help="ids of common history")
    parser.add_argument("--forks", type=int, default=16, metavar="N", help="sessions that go on from it")
    parser.add_argument("--appended", type=int, default=16, metavar="N", help="ids of its own that each is given")
    parser.add_argument("--tokens", type=int, default=16, metavar="N", help="that each generates")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="beside one of few ids that does not count")
    parser.add_argument("--kind", choices=KINDS, default="prose", help="of text in the histories")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the text")


def main(arguments: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Measure and return the record's payload. Raises InvalidArgument for numbers that are too small."""
    require_at_least(arguments, lengths=1, forks=1, appended=1, tokens=2, rounds=1)
    if arguments.quick:
        for name, value in _QUICK.items():
            setattr(arguments, name, value)
    count, own = arguments.forks, arguments.appended
    text = target.texts.filler(arguments.kind, max(arguments.lengths) + count * own, arguments.seed)
    found: dict[int, dict[str, list[Branches]]] = {}
    for length in arguments.lengths:
        found[length] = measure(
            target, text, length, forks=count, appended=own, tokens=arguments.tokens, rounds=arguments.rounds
        )
    return {
        "what": "Bytes and seconds of sessions that go on from one history: forked, or prefilled one by one.",
        "config": {
            **target.describe(),
            "threads": torch.get_num_threads(),
            "lengths": arguments.lengths,
            "forks": count,
            "appended": own,
            "tokens": arguments.tokens,
            "rounds": arguments.rounds,
            "kind": arguments.kind,
            "texts_sha256": target.texts.digest(arguments.kind),
        },
        "seeds": [arguments.seed],
        "values": _values(found),
        "baseline": "sessions that are given the whole history and prefill it, in the same rounds",
        "tables": {"forks": _rows(found)},
    }


def measure(
    target: Target, text: Sequence[int], length: int, *, forks: int, appended: int, tokens: int, rounds: int
) -> dict[str, list[Branches]]:
    """By method, one for each round: `forks` sessions that go on from the first `length` ids of `text`."""
    limit = length + 1 + appended + 1 + tokens
    given = [circular(text, length + number * appended, appended) for number in range(forks)]
    config = _config(target, limit, sessions=forks + 3)
    found: dict[str, list[Branches]] = {method: [] for method in _METHODS}
    copying = replace(config, share_forks=False)
    alike = replace(config, share_prefixes="owner", prefix_bytes=1)
    closed = replace(config, share_prefixes="owner", prefix_bytes=config.kv_bytes)
    with (
        _parent(target, config, text[:length], limit) as one,
        _parent(target, copying, text[:length], limit) as other,
        Engine(target.forward, alike) as third,
        Engine(target.forward, closed) as fourth,
    ):
        parents = {
            **dict.fromkeys((SHARED, EARLY, ANEW), one),
            COPIED: other,
            ALIKE: replace(one, engine=third),
            CLOSED: replace(one, engine=fourth),
        }
        for method, parent in parents.items():
            _branch(parent, method, given[:1], limit, tokens)  # kernels and memory get ready
        for number in range(rounds):
            for method in turned(_METHODS, number):
                branches = _branch(parents[method], method, given, limit, tokens)
                found[method].append(branches)
                seconds = branches.first_token_seconds
                logger.info("round %d of %d, %s, at %d: %.3f s", number + 1, rounds, method, length, seconds)
    return found


def _config(target: Target, limit: int, *, sessions: int) -> EngineConfig:
    bound = Full().bound(geometry_of(target), limit)
    config = target.engine.config
    return replace(config, kv_bytes=sessions * bound.peak_bytes, max_batch=max(sessions, config.max_batch))


@contextmanager
def _parent(target: Target, config: EngineConfig, history: Sequence[int], limit: int) -> Iterator[_Parent]:
    """An engine of its own, and a session in it that was given that history, and said one token."""
    with Engine(target.forward, config) as engine:
        session = engine.create_session(strategy=Full(), limit_tokens=limit, guaranteed=True).session_id
        append_all(engine, session, history)
        (watch,) = start(engine, [session], tokens=1)
        watch.wait()
        yield _Parent(engine, session, (*history, *watch.token_ids))


def _branch(parent: _Parent, method: str, given: Sequence[Sequence[int]], limit: int, tokens: int) -> Branches:
    engine = parent.engine
    reserved = engine.info().kv_reserved_bytes
    sessions: list[str] = []
    early = ""

    def make() -> str:
        if method in _NEW:
            made = engine.create_session(strategy=Full(), limit_tokens=limit, guaranteed=True).session_id
        else:
            made = engine.fork_session(early or parent.session).session_id
        sessions.append(made)
        return made

    def give(session: str, own: Sequence[int]) -> None:
        append_all(engine, session, [*parent.history, *own] if method in _NEW else own)

    if method == CLOSED:
        one = engine.create_session(strategy=Full(), limit_tokens=limit, guaranteed=True).session_id
        append_all(engine, one, parent.history)
        (watch,) = start(engine, [one], tokens=1)
        watch.wait()
        engine.close_session(one)
    began = time.perf_counter()
    try:
        if method == EARLY:
            early = engine.create_session(strategy=Full(), limit_tokens=limit, guaranteed=True).session_id
            append_all(engine, early, parent.history)
        for _ in given:
            make()
        made = time.perf_counter()
        for session, own in zip(sessions, given, strict=True):
            give(session, own)
        firsts = start(engine, sessions, tokens=1)
        for watch in firsts:
            watch.wait()
        rest = start(engine, sessions, tokens=tokens)
        for watch in rest:
            watch.wait()
        reserved_bytes = engine.info().kv_reserved_bytes - reserved
        held_bytes = sum(engine.session_info(session).kv_live_bytes for session in sessions)
        then = time.perf_counter()
        give(make(), given[0])
        (following,) = start(engine, sessions[-1:], tokens=1)
        following.wait()
        return Branches(
            made_seconds=made - began,
            first_token_seconds=max(watch.token_times[0] for watch in firsts) - began,
            next_seconds=following.token_times[0] - then,
            token_seconds=step_seconds([watch.token_times for watch in rest]),
            reserved_bytes=reserved_bytes,
            held_bytes=held_bytes,
            token_ids=tuple((*first.token_ids, *more.token_ids) for first, more in zip(firsts, rest, strict=True)),
        )
    finally:
        for session in (*sessions, *((early,) if early else ())):
            engine.close_session(session)


# -- reporting --------------------------------------------------------------------------------------------------------

_REPORTED = (("made_seconds", "s"), ("first_token_seconds", "s"), ("next_seconds", "s"), ("token_seconds", "s"))


def _values(found: Mapping[int, Mapping[str, Sequence[Branches]]]) -> dict[str, dict[str, Any]]:
    reported: dict[str, dict[str, Any]] = {}
    for length, by_method in found.items():
        for method, rounds in by_method.items():
            for name, unit in _REPORTED:
                reported[f"{name}, {method}, at {length}"] = record.summarize(
                    [getattr(one, name) for one in rounds], unit
                )
            reported[f"reserved_bytes, {method}, at {length}"] = record.exact(rounds[0].reserved_bytes, "bytes")
            reported[f"held_bytes, {method}, at {length}"] = record.exact(rounds[0].held_bytes, "bytes")
            if method == ANEW:
                continue
            for name in ("first_token_seconds", "next_seconds", "token_seconds"):
                ratios = [getattr(one, name) / getattr(base, name) for one, base in _pairs(rounds, by_method[ANEW])]
                reported[f"{name} ÷ {ANEW}, {method}, at {length}"] = record.summarize(ratios, "ratio")
            bytes_ratio = rounds[0].reserved_bytes / by_method[ANEW][0].reserved_bytes
            reported[f"reserved_bytes ÷ {ANEW}, {method}, at {length}"] = record.exact(bytes_ratio, "ratio")
            equal = _equal_sessions(rounds, by_method[ANEW])
            reported[f"sessions with the tokens of {ANEW}, {method}, at {length}"] = record.exact(equal, "share")
    return reported


def _rows(found: Mapping[int, Mapping[str, Sequence[Branches]]]) -> list[dict[str, Any]]:
    return [
        {
            "method": method,
            "length": length,
            **{
                name: record.summarize([getattr(one, name) for one in rounds], unit)["median"]
                for name, unit in _REPORTED
            },
            "reserved_bytes": rounds[0].reserved_bytes,
            "held_bytes": rounds[0].held_bytes,
        }
        for length, by_method in found.items()
        for method, rounds in by_method.items()
    ]


def _equal_sessions(some: Sequence[Branches], others: Sequence[Branches]) -> float:
    """The share of sessions that said the same, token for token. Sums in another order may decide a near tie."""
    pairs = [
        mine == theirs
        for one, base in _pairs(some, others)
        for mine, theirs in zip(one.token_ids, base.token_ids, strict=True)
    ]
    return sum(pairs) / len(pairs)


def _pairs(some: Sequence[Branches], others: Sequence[Branches]) -> list[tuple[Branches, Branches]]:
    return list(zip(some, others, strict=True))
