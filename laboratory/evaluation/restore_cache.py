"""Restore cache: what room for restored entries gains, of a strategy that restores those that a token chooses.

    full, gather   beside which it is measured
    one            room for one choice, which its bound must have
    bound          awake_bytes as the strategy has them, for a Generate alone: the control
    N choices      and rooms of what is free, kept between Generates

A round gives each session a few ids and generates, in turns, so what the machine does meanwhile happens to all; a ratio
is of one round. Engines that differ in the setting share the model.
"""

from __future__ import annotations

import argparse
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument
from inference_engine.kv.archives.latent import bytes_of_position
from inference_engine.kv.strategies import parse_strategy
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.restored import Restored
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Bound, GenerateParams, Sampling
from laboratory.evaluation import record
from laboratory.evaluation.arguments import geometry_of, require_at_least, strategy_argument
from laboratory.evaluation.haystack import KINDS
from laboratory.evaluation.models import Target
from laboratory.evaluation.sessions import append_all, opened, turned
from laboratory.evaluation.timing import Watch

logger = logging.getLogger(__name__)

FULL, GATHER, ONE, BOUND = "full", "gather", "one", "bound"
_DEFAULT = "restored:source=latent,mode=select,sink=16,window=256,budget=912"
_SETTLED = 16  # tokens of a Generate before its decode speed counts


@dataclass(frozen=True, slots=True)
class Side:
    strategy: KVStrategy
    choices: int  # the setting restore_cache_choices


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """first_seconds: from the append to the first token. token_seconds: of a later one, the median. answer_seconds: of
    all. spare_bytes: held after it beyond the bound."""

    first_seconds: float
    token_seconds: float
    answer_seconds: float
    spare_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--restored", type=strategy_argument, default=parse_strategy(_DEFAULT), metavar="SPEC",
        help=f"a strategy of mode select (default: {_DEFAULT})",
    )  # fmt: skip
    parser.add_argument("--choices", nargs="+", type=int, default=[4, 1000], metavar="N", help="of a cache with rooms")
    parser.add_argument("--length", type=int, default=7400, metavar="N", help="ids of history in the first round")
    parser.add_argument("--appended", type=int, default=32, metavar="N", help="ids that a turn begins with")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="that a turn generates")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="measured, after one that is not")
    parser.add_argument("--kind", choices=KINDS, default="prose", help="of text in the histories")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the text")


def main(arguments: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Measure and return the record's payload."""
    require_at_least(arguments, length=1, appended=1, rounds=1, tokens=_SETTLED + 2)
    rounds = 1 if arguments.quick else arguments.rounds
    asked = sides(target, arguments.restored, arguments.choices)
    text = target.texts.filler(arguments.kind, arguments.length + (rounds + 1) * arguments.appended, arguments.seed)
    bounds, found = measure(target, asked, text, arguments.length, arguments.appended, arguments.tokens, rounds)
    return {
        "what": "Speed, first token and bytes by the room for restored entries. A speed ÷ full above 1 is a gain.",
        "config": {
            **target.describe(),
            "threads": torch.get_num_threads(),
            "sides": {name: f"{side.strategy}; {side.choices} choices" for name, side in asked.items()},
            "length": arguments.length,
            "appended": arguments.appended,
            "tokens": arguments.tokens,
            "rounds": rounds,
            "kind": arguments.kind,
            "texts_sha256": target.texts.digest(arguments.kind),
        },
        "seeds": [arguments.seed],
        "values": values(bounds, found),
        "baseline": "full and gather, and the same strategy without rooms, in the same rounds",
    }


def sides(target: Target, strategy: KVStrategy, choices: Sequence[int]) -> dict[str, Side]:
    """What is measured, by name. Raises InvalidArgument for a strategy that chooses nothing."""
    if not isinstance(strategy, Restored) or not strategy.selects:
        raise InvalidArgument("restored", f"must be restored with mode=select, got {strategy}")
    geometry = geometry_of(target)
    whole = strategy.resolved(geometry)
    alike = ",".join(f"{name}={getattr(whole, name)}" for name in ("sink", "window", "budget", "rank", "bits", "run"))
    gather = f"gather:scorer=components,{alike}"
    one = replace(strategy, awake_bytes=whole.restorer().choice * bytes_of_position(geometry))
    return {
        FULL: Side(Full(), 0),
        GATHER: Side(parse_strategy(gather), 0),
        ONE: Side(one, 0),
        BOUND: Side(strategy, 0),
        **{f"{count} choices": Side(strategy, count) for count in choices},
    }


def measure(
    target: Target, asked: Mapping[str, Side], text: Sequence[int], length: int, appended: int, tokens: int, rounds: int
) -> tuple[dict[str, Bound], dict[str, list[Turn]]]:
    """By side, the session's bound, and its turns. One round more is run at first and not kept."""
    found: dict[str, list[Turn]] = {name: [] for name in asked}
    with ExitStack() as stack:
        engines = {
            count: stack.enter_context(
                Engine(
                    target.forward,
                    replace(target.engine.config, restore_cache_choices=count),
                    latent=target.latent,
                    components=target.components,
                )
            )
            for count in sorted({side.choices for side in asked.values()})
        }
        sessions = {}
        for name, side in asked.items():
            limit = length + (rounds + 1) * (appended + tokens)
            sessions[name] = stack.enter_context(opened(engines[side.choices], side.strategy, limit))
            append_all(engines[side.choices], sessions[name], text[:length])
        bounds = {name: engines[side.choices].session_info(sessions[name]).bound for name, side in asked.items()}
        for number in range(rounds + 1):
            given = text[length + number * appended :][:appended]
            for name in turned(list(asked), number):
                taken = _turn(engines[asked[name].choices], sessions[name], given, tokens, seed=number)
                logger.info("round %d of %d, %s: %.2f ms a token", number, rounds, name, 1e3 * taken.token_seconds)
                if number:
                    found[name].append(taken)
    return bounds, found


def _turn(engine: Engine, session: str, given: Sequence[int], tokens: int, *, seed: int) -> Turn:
    may_go_on = threading.Event()
    may_go_on.set()
    watch = Watch(engine, session, may_go_on, reads_bytes=False)
    began = time.perf_counter()
    append_all(engine, session, given)
    params = GenerateParams(max_tokens=tokens, sampling=Sampling(temperature=0.7, seed=seed))
    engine.generate(session, params, listener=watch)
    watch.wait()
    times = watch.token_times
    return Turn(
        first_seconds=times[0] - began,
        token_seconds=median(
            after - before for before, after in zip(times[_SETTLED:], times[_SETTLED + 1 :], strict=False)
        ),
        answer_seconds=times[-1] - began,
        spare_bytes=engine.session_info(session).spare_live_bytes,
    )


def values(bounds: Mapping[str, Bound], found: Mapping[str, Sequence[Turn]]) -> dict[str, dict[str, Any]]:
    """Medians with quartiles; ratios within a round."""
    reported: dict[str, dict[str, Any]] = {}
    for name, turns in found.items():
        reported[f"decode, {name}"] = record.summarize([1 / one.token_seconds for one in turns], "tokens/s")
        reported[f"first token of a turn, {name}"] = record.summarize([one.first_seconds for one in turns], "s")
        reported[f"K/V at most ÷ full, {name}"] = record.exact(
            bounds[name].peak_bytes / bounds[FULL].peak_bytes, "ratio"
        )
        reported[f"K/V beyond the bound, {name}"] = record.exact(max(one.spare_bytes for one in turns), "bytes")
        if name == FULL:
            continue
        for word, attribute in (("decode", "token_seconds"), ("answer", "answer_seconds")):
            pairs = zip(found[FULL], turns, strict=True)
            ratios = [getattr(full, attribute) / getattr(own, attribute) for full, own in pairs]
            reported[f"{word} speed ÷ full, {name}"] = record.summarize(ratios, "ratio")
        pairs = zip(found[GATHER], turns, strict=True)
        ratios = [own.first_seconds / gather.first_seconds for gather, own in pairs]
        reported[f"first token of a turn ÷ gather, {name}"] = record.summarize(ratios, "ratio")
    return reported
