"""Going back: a session rewound to a place in its history, against a new session that is given those ids.

    within     the place is in the open segment, so that nothing has been evicted or compressed since
    behind     it is in an earlier segment

Both are given the same ids of their own and generate. Every round does both for each strategy and place, in turns; a
ratio is of one round. Afterwards the rewound session is given what it had lost, so that the next round begins alike.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inference_engine.engine import Engine
from inference_engine.kv.strategies import parse_strategy
from inference_engine.kv.strategy import KVStrategy
from laboratory.evaluation import record
from laboratory.evaluation.arguments import geometry_of, require_at_least, strategy_argument
from laboratory.evaluation.haystack import KINDS
from laboratory.evaluation.models import Target
from laboratory.evaluation.sessions import append_all, turned
from laboratory.evaluation.timing import start

logger = logging.getLogger(__name__)

DEFAULT = (
    "full",
    "full:codec=int8",
    "sink_window:window=1024",
    "gather:scorer=bounds",
    "restored:source=latent,mode=select,window=256",
)
REWOUND, ANEW = "rewound", "anew"
_TOKENS = 8  # that both generate, to be compared


@dataclass(frozen=True, kw_only=True, slots=True)
class Return:
    """What came of one session. first_token_seconds: from the call that rewinds or creates it. prefilled_tokens: before
    that token."""

    first_token_seconds: float
    prefilled_tokens: int
    token_ids: tuple[int, ...]


Found = dict[tuple[str, str, str], list[Return]]  # by strategy, place and method, one for each round


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategies", nargs="+", type=strategy_argument, default=[parse_strategy(one) for one in DEFAULT],
        metavar="SPEC", help=f"of the sessions (default: {' '.join(DEFAULT)})",
    )  # fmt: skip
    parser.add_argument("--segments", type=int, default=5, metavar="N", help="whole ones in the history")
    parser.add_argument("--appended", type=int, default=18, metavar="N", help="ids that a session then is given")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="beside one that does not count")
    parser.add_argument("--kind", choices=KINDS, default="prose", help="of text in the histories")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the text")


def main(arguments: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Measure and return the record's payload. Raises InvalidArgument for numbers that are too small."""
    require_at_least(arguments, segments=1, appended=1, rounds=1)
    if arguments.quick:
        arguments.segments, arguments.rounds = 1, 1
    segment, own = geometry_of(target).segment_tokens, arguments.appended
    length = arguments.segments * segment + segment * 3 // 4
    text = target.texts.filler(arguments.kind, length + own, arguments.seed)
    places = {"within": length - segment // 2, "behind": length - segment}
    strategies = {str(one): one for one in arguments.strategies}
    found = measure(target.engine, strategies, text[:length], text[length:], places=places, rounds=arguments.rounds)
    return {
        "what": "Time to the first token after a session was rewound, beside a new session that is given the same ids.",
        "config": {
            **target.describe(),
            "threads": torch.get_num_threads(),
            "strategies": list(strategies),
            "length": length,
            "places": places,
            "appended": own,
            "rounds": arguments.rounds,
            "kind": arguments.kind,
            "texts_sha256": target.texts.digest(arguments.kind),
        },
        "seeds": [arguments.seed],
        "values": _values(found),
        "baseline": "a new session that is given the ids that stay and those appended, in the same rounds",
    }


def measure(
    engine: Engine,
    strategies: Mapping[str, KVStrategy],
    history: Sequence[int],
    own: Sequence[int],
    *,
    places: Mapping[str, int],
    rounds: int,
) -> Found:
    """The first round gets kernels and memory ready, and does not count."""
    found: Found = {}
    for name, strategy in strategies.items():
        session = engine.create_session(strategy=strategy).session_id
        append_all(engine, session, history)
        _first_token(engine, session, 1)
        for number in range(rounds + 1):
            for place in turned(list(places), number):
                at = places[place]
                for method in turned([REWOUND, ANEW], number):
                    began = time.perf_counter()
                    if method == REWOUND:
                        one = session = engine.rewind_session(session, at).session_id
                        engine.append(one, own)
                    else:
                        one = engine.create_session(strategy=strategy).session_id
                        append_all(engine, one, [*history[:at], *own])
                    done = _first_token(engine, one, _TOKENS, began)
                    if method == REWOUND:
                        session = engine.rewind_session(session, at).session_id
                        append_all(engine, session, history[at:])
                        _first_token(engine, session, 1)
                    else:
                        engine.close_session(one)
                    if number:
                        found.setdefault((name, place, method), []).append(done)
            logger.info("round %d of %d, %s", number, rounds, name)
        engine.close_session(session)
    return found


def _first_token(engine: Engine, session: str, tokens: int, began: float = 0.0) -> Return:
    (watch,) = start(engine, [session], tokens=tokens)
    end = watch.wait()
    return Return(
        first_token_seconds=watch.token_times[0] - began,
        prefilled_tokens=end.prefilled_tokens,
        token_ids=tuple(watch.token_ids),
    )


def _values(found: Found) -> dict[str, dict[str, Any]]:
    reported: dict[str, dict[str, Any]] = {}
    for (name, place, method), rounds in found.items():
        where = f"{name}, {place}"
        seconds = [one.first_token_seconds for one in rounds]
        reported[f"first_token_seconds, {method}, {where}"] = record.summarize(seconds, "s")
        reported[f"prefilled_tokens, {method}, {where}"] = record.exact(rounds[0].prefilled_tokens, "tokens")
        if method == REWOUND:
            bases = found[name, place, ANEW]
            ratios = [a.first_token_seconds / b.first_token_seconds for a, b in zip(rounds, bases, strict=True)]
            reported[f"first_token_seconds ÷ {ANEW}, {where}"] = record.summarize(ratios, "ratio")
            equal = sum(a.token_ids == b.token_ids for a, b in zip(rounds, bases, strict=True)) / len(rounds)
            reported[f"rounds with the tokens of {ANEW}, {where}"] = record.exact(equal, "share")
    return reported
