"""The backstop: how few layers, and which, have to keep every KV entry so that far facts are still found.

    rank    the layers by what windowing them does to answers (`layer_ranking.py`)
    sweep   keep the K highest full, and K evenly spaced ones as the dumb alternative; count needles found unlike full
    report  critical mass: the smallest K that finds what full does

`sink_window`, which keeps no layer full, must miss every fact behind its window, or the run says nothing. Layers with a
window of the model's own stay as they are and are no candidates; only that control narrows them, too.

Source: the kept-full layers of a windowed hybrid ("recall backstop").
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_engine.errors import InvalidArgument
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.strategies.full import Full
from laboratory.evaluation import needle, pictures, record
from laboratory.evaluation.arguments import geometry_of, require_at_least
from laboratory.evaluation.haystack import KINDS
from laboratory.evaluation.layer_ranking import (
    Windows,
    candidates,
    damage_to_answers,
    divergences,
    evenly,
    rank,
    right_answers,
)
from laboratory.evaluation.models import Target
from laboratory.evaluation.passages import text_passage
from laboratory.evaluation.pictures import Course
from laboratory.evaluation.tasks import TASKS
from laboratory.evaluation.trials import EvaluationVoid, pair

logger = logging.getLogger(__name__)

NONE, RANKED, EVEN = "none", "ranked", "evenly spaced"
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
FULL_FINDS = "needles found by full"
MOST_DIFFERING = 0.03  # of the needles may be found unlike full: 1 in 40, 3 in 100


@dataclass(frozen=True, slots=True)
class Kept:
    """A set of layers kept full, and how it was chosen."""

    order: str
    layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What was measured of one set.

    differing: needles that one of it and full finds and the other does not; lost: those that only full finds.
    reach_tokens: the farthest needle up to which none that full finds was missed. divergence: KL(full ‖ set), mean over
    the texts' forced tokens. bytes_per_token: what a session of this length may hold between Generates, by token.
    """

    kept: Kept
    hits: int
    trials: int
    differing: int
    lost: int
    reach_tokens: int
    divergence: float
    bytes_per_token: float

    @property
    def answers_as_full(self) -> bool:
        return self.differing <= MOST_DIFFERING * self.trials

    def row(self) -> dict[str, Any]:
        return {
            "chosen": self.kept.order,
            "layers full": len(self.kept.layers),
            "which": " ".join(map(str, self.kept.layers)),
            "found": self.hits,
            "trials": self.trials,
            "found unlike full": self.differing,
            "lost": self.lost,
            "as full": self.answers_as_full,
            "reach, tokens": self.reach_tokens,
            "kl": self.divergence,
            "bytes per token": self.bytes_per_token,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sink", type=int, default=4, metavar="N", help="first ids that windowed layers keep")
    parser.add_argument("--window", type=int, default=256, metavar="N", help="last ids that windowed layers keep")
    parser.add_argument("--length", type=int, default=2048, metavar="N", help="ids of a prompt, and of a text")
    parser.add_argument("--kind", choices=KINDS, default="prose", help="of text around the needles, and of texts")
    parser.add_argument("--task", choices=tuple(TASKS), default="single", help="what is planted and asked")
    parser.add_argument("--trials", type=int, default=40, metavar="N", help="needles that every set is asked for")
    parser.add_argument(
        "--counts", nargs="+", type=int, metavar="K", help="layers to keep full (default: some, and all)"
    )
    parser.add_argument(
        "--search", choices=("ablation", "greedy"), default="ablation",
        help="rank layers by windowing each alone, or by giving up one after the other (slower)",
    )  # fmt: skip
    parser.add_argument("--rank-prompts", type=int, default=6, metavar="N", help="other needles, to rank layers by")
    parser.add_argument("--texts", type=int, default=2, metavar="N", help="to measure KL to full on")
    parser.add_argument("--count", type=int, default=128, metavar="N", help="ids that are forced, of each text")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of needles and texts")


def main(arguments: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Measure and return the record's payload.

    Raises EvaluationVoid if `sink_window` finds what it cannot see or full finds nothing, InvalidArgument for layers,
    lengths or numbers that cannot be.
    """
    require_at_least(arguments, trials=1, rank_prompts=1, texts=1, count=1)
    trials, rank_prompts, texts = arguments.trials, arguments.rank_prompts, arguments.texts
    if arguments.quick:
        trials, rank_prompts, texts = min(needle.QUICK_TRIALS, trials), 1, 1
    task, kind, length, seed = TASKS[arguments.task], arguments.kind, arguments.length, arguments.seed
    geometry, windows = geometry_of(target), Windows(sink=arguments.sink, window=arguments.window)
    layers = candidates(geometry)
    counts = _counts(arguments.counts, len(layers))

    answers = right_answers(target, windows, arguments.task, kind, length, count=rank_prompts, sweep=trials, seed=seed)
    ranking = rank(layers, damage_to_answers(target.engine, windows, answers), is_greedy=arguments.search == "greedy")
    logger.info("layers, the most needed first: %s", ranking.order)
    sets = chosen_sets(ranking.order, layers, counts)
    strategies = [windows.keeping(kept.layers) for kept in sets]
    (cell,) = needle.measure(
        target,
        strategies=strategies,
        control=windows.control(),
        tasks=[task],
        kinds=[kind],
        lengths=[length],
        trials=trials,
        seed=seed,
    )
    passages = [
        text_passage(target.texts, kind, length, arguments.count, f"{seed}/{number}") for number in range(texts)
    ]
    found = describe(
        sets,
        windows,
        geometry,
        hits={name: cell.hits(name) for name in cell.grades},
        distances=[length - prompt.fact_end for prompt in cell.prompts],
        divergence=divergences(target.engine, strategies, passages),
        length=length,
    )
    reported = values(cell.hits(str(Full())), found)
    return {
        "what": "How few layers, and which, must keep every KV entry so that far facts are found as full finds them.",
        "config": {
            **target.describe(),
            "sink": windows.sink,
            "window": windows.window,
            "task": task.name,
            "kind": kind,
            "length": length,
            "trials": trials,
            "search": arguments.search,
            "rank_prompts": len(answers),
            "texts": texts,
            "forced_tokens": arguments.count,
            "candidates": list(layers),
            "texts_sha256": target.texts.digest(kind),
        },
        "seeds": [seed],
        "values": reported,
        "headlines": [name for name in reported if name == FULL_FINDS or "critical mass" in name],
        "baseline": "full, on the same prompts and texts; evenly spaced layers against ranked ones",
        "tables": {
            "sweep": [one.row() for one in found],
            "ranking": [
                {"place": place, "layer": layer, "harm, nats": ranking.harm[layer]}
                for place, layer in enumerate(ranking.order, start=1)
            ],
            "control": [{"strategy": str(windows.control()), "eligible": len(cell.eligible), "found": 0}],
        },
    }


def draw(payload: Mapping[str, Any], folder: Path) -> None:
    """Needles found, and KL to full, over the number of layers kept full."""
    rows = payload["tables"]["sweep"]
    for name, column, y_label in (("recall", "found", "needles found"), ("kl", "kl", "KL to full, nats")):
        pictures.lines(
            folder / f"backstop_{name}.svg",
            title=f"{y_label}, with K layers kept full",
            x_label="layers kept full",
            y_label=y_label,
            courses=[
                Course(
                    order,
                    [row["layers full"] for row in rows if row["chosen"] in (NONE, order)],
                    [row[column] for row in rows if row["chosen"] in (NONE, order)],
                )
                for order in (RANKED, EVEN)
            ],
        )


def _counts(asked: Sequence[int] | None, most: int) -> list[int]:
    if asked is None:
        return [*(count for count in COUNTS if count < most), most]
    if not 1 <= min(asked) <= max(asked) <= most:
        raise InvalidArgument("counts", f"must be from 1 to {most}, the layers that can be kept full, got {asked}")
    return sorted(set(asked))


# -- how many -------------------------------------------------------------------------------------------------------


def chosen_sets(order: Sequence[int], layers: Sequence[int], counts: Sequence[int]) -> list[Kept]:
    """The sets to measure: none, then for each count the first of `order`, and as many evenly spaced."""
    sets = [Kept(NONE, ())]
    for count in counts:
        sets += [Kept(RANKED, tuple(sorted(order[:count]))), Kept(EVEN, evenly(layers, count))]
    return sets


def describe(
    sets: Sequence[Kept],
    windows: Windows,
    geometry: Geometry,
    *,
    hits: Mapping[str, Sequence[bool]],
    distances: Sequence[int],
    divergence: Sequence[float],
    length: int,
) -> list[Found]:
    """What was measured of each set, beside full.

    hits: by strategy, needle by needle. distances: from each needle to the end of its prompt. divergence: of each set.
    Raises EvaluationVoid if full found nothing: then there is no recall to keep.
    """
    full = hits[str(Full())]
    if not any(full):
        raise EvaluationVoid(f"full attention found none of {len(full)} needles: there is no recall to keep")
    found = []
    for kept, nats in zip(sets, divergence, strict=True):
        strategy = windows.keeping(kept.layers)
        own = hits[str(strategy)]
        paired = pair(full, own)
        found.append(
            Found(
                kept=kept,
                hits=sum(own),
                trials=len(own),
                differing=paired.discordant,
                lost=paired.only_baseline,
                reach_tokens=reach(own, full, distances),
                divergence=nats,
                bytes_per_token=strategy.bound(geometry, length).sustained_bytes / length,
            )
        )
    return found


def reach(hits: Sequence[bool], full: Sequence[bool], distances: Sequence[int]) -> int:
    """The distance up to which no needle that full finds was missed; 0 if the nearest was."""
    farthest = 0
    for distance, hit, expected in sorted(zip(distances, hits, full, strict=True)):
        if expected and not hit:
            break
        farthest = distance
    return farthest


def critical_mass(found: Sequence[Found], order: str) -> Found | None:
    """The smallest set of that order that answers as full does."""
    able = [one for one in found if one.kept.order == order and one.answers_as_full]
    return min(able, key=lambda one: len(one.kept.layers), default=None)


def values(full: Sequence[bool], found: Sequence[Found]) -> dict[str, dict[str, Any]]:
    """What a record says of a sweep."""
    reported = {FULL_FINDS: record.exact(sum(full), f"of {len(full)}")}
    for order in (RANKED, EVEN):
        if mass := critical_mass(found, order):
            reported[f"critical mass, {order}"] = record.exact(len(mass.kept.layers), "layers")
            reported[f"bytes per token at critical mass, {order}"] = record.exact(mass.bytes_per_token, "bytes/token")
    for one in found:
        words = f"{one.kept.order}, {len(one.kept.layers)} layers full"
        reported[f"needles found, {words}"] = record.exact(one.hits, f"of {one.trials}")
        reported[f"needles found unlike full, {words}"] = record.exact(one.differing, f"of {one.trials}")
        reported[f"recall reach, {words}"] = record.exact(one.reach_tokens, "tokens")
        reported[f"KL to full, mean, {words}"] = record.exact(one.divergence, "nats")
        reported[f"bytes per token, {words}"] = record.exact(one.bytes_per_token, "bytes/token")
    return reported
