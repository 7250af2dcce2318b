"""Restoration at equal bytes: what a session can do with as many bytes between Generates as the latent takes.

    latent    sink and window exact, a thin code of every other token; sets the bytes, at each length and rate
    window    a longer window                          recompute   a longer window, the rest computed at each Generate
    int8 …    a longer window, old entries coded      tiered      a longer window, the rest off the device

The latent's bytes at a length decide how long the others' windows are: as long as their own bounds allow. Every one is
then measured as `fidelity` and `needle` measure, on the same texts, and asked what it holds. One that cannot be as
small is left out, with its reason. What the bytes do not show is time: `cost` and `waking` do.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument
from inference_engine.kv.archives.latent import default_bytes_per_token
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.strategies import parse_strategy
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy, check_strategy
from laboratory.evaluation import fidelity, needle, record
from laboratory.evaluation.arguments import (
    bytes_per_token,
    geometry_of,
    require_at_least,
    tier_bytes_per_token,
)
from laboratory.evaluation.haystack import KINDS
from laboratory.evaluation.models import Target
from laboratory.evaluation.passages import Passage, describe, forced, text_passage
from laboratory.evaluation.sessions import check_fits
from laboratory.evaluation.tasks import TASKS

logger = logging.getLogger(__name__)

FULL, LATENT = "full", "latent"
NEEDLES = "needles, {task}"  # a column for each task
# {size} is what a family spends its bytes on; {window} is the latent's; {budget} holds that and distant blocks.
FAMILIES = {
    "window": "sink_window:window={size}",
    "int8": "sink_window:window={size},codec=int8,exact_window={window}",
    "int4": "sink_window:window={size},codec=int4,exact_window={window}",
    "lloyd3": "sink_window:window={size},codec=lloyd3,exact_window={window}",
    "recompute": "restored:window={size},source=recompute",
    "tiered": "tiered:resident_tokens={size},window={window},block=16,sink=16,budget={budget}",
}
_LATENT_SPEC = "restored:window={window},source=latent,bytes_per_token={rate}"
_BUDGET = 128  # entries that a token of `tiered` reads, where the window takes up to half of them
_ANSWER_TOKENS = max(task.answer_tokens for task in TASKS.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Matched:
    """Strategies of about the same bytes for sessions of one length. left_out: families that cannot be as small."""

    length: int
    rate: int
    allowed_bytes: int
    strategies: Mapping[str, KVStrategy]
    left_out: Mapping[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rates", nargs="+", type=int, default=[], metavar="N",
        help="bytes that the latent keeps of a token (default: a twentieth and a fortieth of its entries in bfloat16)",
    )  # fmt: skip
    parser.add_argument("--window", type=int, default=64, metavar="N", help="positions that the latent keeps exact")
    parser.add_argument(
        "--families", nargs="+", choices=tuple(FAMILIES), default=list(FAMILIES), help="beside full and the latent"
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096], metavar="N", help="of histories")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["looped", "prose", "code"], help="of text")
    parser.add_argument("--count", type=int, default=128, metavar="N", help="ids that are forced, of each text")
    parser.add_argument("--texts", type=int, default=4, metavar="N", help="of each kind, at every length, for KL")
    parser.add_argument("--task", nargs="+", choices=tuple(TASKS), default=["single"], help="what is planted and asked")
    parser.add_argument("--trials", type=int, default=20, metavar="N", help="of each task and kind; 0: none")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of texts and of what is planted")


def main(
    arguments: argparse.Namespace, target: Target, save: Callable[[dict[str, Any]], object] = lambda _: None
) -> dict[str, Any]:
    """Measure and return the record's payload.

    save: called with what there is whenever a length is done, for long histories take hours on a small machine.
    Interrupted, it returns that. Raises InvalidArgument or NoCapacity for what cannot run, a model without a latent
    included; EvaluationVoid as `needle` does.
    """
    require_at_least(arguments, rates=1, window=1, lengths=1, count=1, texts=1, trials=0)
    geometry = geometry_of(target)
    default = default_bytes_per_token(geometry)
    rates = arguments.rates or [default, default // 2]
    texts, trials = (1, min(4, arguments.trials)) if arguments.quick else (arguments.texts, arguments.trials)
    beyond = max(arguments.count, _ANSWER_TOKENS)
    matches = {
        length: [
            match(geometry, arguments.families, length=length + beyond, rate=rate, window=arguments.window)
            for rate in rates
        ]
        for length in arguments.lengths
    }
    # What is refused should not come out at the end.
    for length, matched in matches.items():
        for one in (Full(), *(strategy for each in matched for strategy in each.strategies.values())):
            check_fits(target.engine, one, length + beyond)
    passages = {
        length: [
            text_passage(target.texts, kind, length, arguments.count, f"{arguments.seed}/{number}")
            for kind in arguments.kinds
            for number in range(texts)
        ]
        for length in matches
    }
    lines: list[dict[str, Any]] = []
    found: dict[str, dict[str, Any]] = {}

    def reported() -> dict[str, Any]:
        lengths = list(dict.fromkeys(line["length"] for line in lines))
        undone = [
            {"length": length, "latent bytes per token": rate, "family": "all", "reason": "ended before they were done"}
            for length in arguments.lengths
            if length not in lengths
            for rate in rates
        ]
        left_out = [
            {"length": length, "latent bytes per token": each.rate, "family": family, "reason": reason}
            for length in lengths
            for each in matches[length]
            for family, reason in each.left_out.items()
        ]
        return {
            "what": "Strategies that hold about as many bytes between Generates as the latent does, on the same texts.",
            "config": describe(
                target,
                [parse_strategy(name) for name in dict.fromkeys(line["strategy"] for line in lines)],
                arguments.kinds,
                lengths=lengths,
                rates=rates,
                window=arguments.window,
                forced_tokens=arguments.count,
                texts=texts,
                tasks=arguments.task,
                trials=trials,
            ),
            "seeds": [arguments.seed],
            "values": found,
            "headlines": [name for name in found if name.startswith("KL")],
            "baseline": "full, on the same texts; the latent sets the bytes",
            "tables": {"equal bytes": lines, "left out": left_out + undone},
        }

    for length, matched in matches.items():
        try:
            own, values = _measure(
                target, matched, passages[length], tasks=arguments.task, trials=trials, seed=arguments.seed
            )
        except KeyboardInterrupt:
            if not lines:
                raise
            logger.warning("interrupted at %d tokens: the record has the lengths before", length)
            break
        lines += [{"length": length, **line} for line in own]
        found |= values
        save(reported())
    return reported()


def draw(payload: Mapping[str, Any], folder: Path) -> None:
    """KL to full over length, a line for each family: an image for each rate and kind of text."""
    lines = [line for line in payload["tables"]["equal bytes"] if line["kl"] > 0]
    for rate, kind in dict.fromkeys((line["latent bytes per token"], line["kind"]) for line in lines):
        here = [line for line in lines if (line["latent bytes per token"], line["kind"]) == (rate, kind)]
        title = f"KL to full at equal bytes, {kind}: a latent of {rate:,} bytes a token"
        fidelity.draw_kl(folder / f"kl_{kind}_{rate}.svg", title, here, "family")


# -- equal bytes ------------------------------------------------------------------------------------------------------


def match(geometry: Geometry, families: Sequence[str], *, length: int, rate: int, window: int) -> Matched:
    """Each family's strategy with the most that a latent's sustained bytes allow, for sessions of `length` tokens.

    Raises InvalidArgument if the latent itself cannot be had.
    """
    latent = parse_strategy(_LATENT_SPEC.format(window=window, rate=rate)).resolved(geometry)
    check_strategy(latent, geometry)
    allowed = latent.bound(geometry, length).sustained_bytes
    strategies: dict[str, KVStrategy] = {LATENT: latent}
    left_out: dict[str, str] = {}
    for family in families:
        try:
            strategies[family] = _largest(family, geometry, length, allowed, window)
        except InvalidArgument as refusal:
            left_out[family] = refusal.message
    return Matched(length=length, rate=rate, allowed_bytes=allowed, strategies=strategies, left_out=left_out)


def spec(family: str, size: int, window: int) -> str:
    """The family's strategy as people write it."""
    return FAMILIES[family].format(size=size, window=window, budget=_BUDGET + max(0, window - _BUDGET // 2))


def _largest(family: str, geometry: Geometry, length: int, allowed: int, window: int) -> KVStrategy:
    """The strategy with the largest size that holds at most `allowed` bytes.

    Raises InvalidArgument if even one of the latent's window cannot be had, or holds more.
    """

    def fitting(size: int) -> KVStrategy:
        strategy = parse_strategy(spec(family, size, window)).resolved(geometry)
        check_strategy(strategy, geometry)
        if (held := strategy.bound(geometry, length).sustained_bytes) > allowed:
            raise InvalidArgument(
                "window", f"cannot hold as few as {allowed:,} bytes with a window of {window}, but {held:,}"
            )
        return strategy

    best = fitting(window)
    low, high = window, length + 1
    while high - low > 1:
        middle = (low + high) // 2
        try:
            low, best = middle, fitting(middle)
        except InvalidArgument:
            high = middle
    return best


# -- measuring --------------------------------------------------------------------------------------------------------


def _measure(
    target: Target,
    matches: Sequence[Matched],
    passages: Sequence[Passage],
    *,
    tasks: Sequence[str],
    trials: int,
    seed: int,
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """A line for each rate, family and kind of text at one length, and the record's values."""
    length = len(passages[0].prefix)
    strategies = {str(one): one for each in matches for one in each.strategies.values()}
    scores, refused = fidelity.measure(target.engine, list(strategies.values()), passages)
    assert not refused, "every one was found to fit"
    measured = {(row["strategy"], row["kind"]): row for row in fidelity.rows(scores)}
    values = fidelity.values(scores, seed=seed)
    facts: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    if trials:
        control = parse_strategy(needle.CONTROL)
        assert isinstance(control, SinkWindow)
        reported = needle.payload(
            needle.measure(
                target,
                strategies=list(strategies.values()),
                control=control,
                tasks=[TASKS[name] for name in tasks],
                kinds=list(dict.fromkeys(passage.kind for passage in passages)),
                lengths=[length],
                trials=trials,
                seed=seed,
            ),
            target,
            control=control,
            trials=trials,
            seed=seed,
        )
        facts = {(row["strategy"], row["kind"], row["task"]): row for row in reported["tables"]["recall"]}
        values |= reported["values"]
    held = {name: _held(target.engine, one, passages[0]) for name, one in {FULL: Full(), **strategies}.items()}
    for name, (on_device, _) in held.items():
        values[f"bytes held between Generates, {name} at {length}"] = record.exact(on_device, "bytes")
    geometry = geometry_of(target)
    lines = []
    for one in matches:
        for family, strategy in {FULL: Full(), **one.strategies}.items():
            name = str(strategy)
            for kind in dict.fromkeys(passage.kind for passage in passages):
                row = measured[name, kind]
                found = {task: facts[name, kind, task] for task in tasks if (name, kind, task) in facts}
                lines.append(
                    {
                        "latent bytes per token": one.rate,
                        "kind": kind,
                        "family": family,
                        "strategy": name,
                        "bytes allowed": one.allowed_bytes,
                        "bytes held": held[name][0],
                        "bytes held off the device": held[name][1],
                        "bytes of a further token": bytes_per_token(strategy, geometry),
                        "tier bytes of a further token": tier_bytes_per_token(strategy, geometry),
                        "kl": row["kl"],
                        "kl p99": row["kl p99"],
                        "top-1 agreement": row["top-1 agreement"],
                        "perplexity ÷ full": row["perplexity ÷ full"],
                        **{
                            NEEDLES.format(task=task): f"{own['hits']} of {own['trials']}"
                            for task, own in found.items()
                        },
                    }
                )
    return lines, values


def _held(engine: Engine, strategy: KVStrategy, passage: Passage) -> tuple[int, int]:
    """Bytes that a session of the passage's length holds between Generates: on the device, and off it."""
    short = Passage(kind=passage.kind, prefix=passage.prefix, forced=passage.forced[:1])
    with forced(engine, strategy, short, lambda _position, _logits: None) as session:
        info = engine.session_info(session)
    return info.kv_live_bytes, info.tier_live_bytes
