"""Fidelity: how far from full attention a strategy's next-token distributions are, on text it did not write.

    append `prefix`, then force `forced`     … x x x x | y y y y y y
                                             appended  | read and scored as if generated

Each strategy sees the same passages as `full`, in the same run. An argmax can flip where full attention itself hardly
decides, so agreement is reported by the margin between full's two likeliest tokens, too. Perplexity and recall see
different failures: measure both. What holds on one kind of text need not hold on another, so the worst is named.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategy import KVStrategy
from laboratory.evaluation import pictures
from laboratory.evaluation.arguments import bytes_table, require_at_least, strategy_argument
from laboratory.evaluation.divergence import FULL, Floats, Scores, compare
from laboratory.evaluation.haystack import KINDS, Texts
from laboratory.evaluation.models import Target
from laboratory.evaluation.passages import Passage, describe, text_passage
from laboratory.evaluation.pictures import Course, Panel
from laboratory.evaluation.sessions import check_fits

logger = logging.getLogger(__name__)

MARGINS = ((0.0, 0.1), (0.1, 1.0), (1.0, math.inf))  # of logits
_RESAMPLES = 200
_QUICK_COUNT = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Where scores belong: one strategy, one kind of text, one length of prefix."""

    strategy: str
    kind: str
    length: int

    def __str__(self) -> str:
        return f"{self.strategy}, {self.kind} at {self.length}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategies", nargs="+", type=strategy_argument, required=True, metavar="SPEC",
        help="what to compare with full; full itself among them shows what rounding does",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[512, 1024], metavar="N", help="ids before the forced"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["prose", "code"], help="of text")
    parser.add_argument("--count", type=int, default=128, metavar="N", help="ids that are forced, of each text")
    parser.add_argument("--texts", type=int, default=4, metavar="N", help="of each kind, at every length")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of texts, and of their resampling")


def main(arguments: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Measure and return the record's payload.

    Raises InvalidArgument for numbers below 1 or lengths that full cannot hold, NoCapacity if memory cannot.
    """
    require_at_least(arguments, lengths=1, count=1, texts=1)
    count, texts = (_QUICK_COUNT, 1) if arguments.quick else (arguments.count, arguments.texts)
    # Everything is compared with full: if full cannot run, fail now and not at the end.
    check_fits(target.engine, Full(), max(arguments.lengths) + count)
    passages, too_long = cut_all(
        target.texts, arguments.kinds, arguments.lengths, count=count, texts=texts, seed=arguments.seed
    )
    found, refused = measure(target.engine, arguments.strategies, passages)
    left_out = {**too_long, **refused}
    lines = rows(found)
    worst = worst_kinds(lines)
    reported = values(found, seed=arguments.seed)
    return {
        "what": "Next-token distributions on text that was forced, beside those of full on the same text.",
        "config": describe(
            target,
            arguments.strategies,
            arguments.kinds,
            lengths=arguments.lengths,
            forced_tokens=count,
            texts=texts,
        ),
        "seeds": [arguments.seed],
        "values": {**reported, **worst_values(worst, reported)},
        "baseline": "full, on the same texts",
        "tables": {
            "fidelity": lines,
            "worst kind": worst,
            "bytes": bytes_table(target, (Full(), *arguments.strategies)),
            "left out": [{"cell": cell, "reason": why} for cell, why in left_out.items()],
        },
    }


def draw(payload: Mapping[str, Any], folder: Path) -> None:
    """KL to full, a line for each strategy: over lengths for each kind of text, over kinds for each length."""
    lines = [line for line in payload["tables"]["fidelity"] if line["kl"] > 0]
    for length in dict.fromkeys(line["length"] for line in lines):
        _draw_kinds([line for line in lines if line["length"] == length], folder / f"kl_kinds_{length}.svg")
    for kind in dict.fromkeys(line["kind"] for line in lines):
        here = [line for line in lines if line["kind"] == kind]
        draw_kl(folder / f"kl_{kind}.svg", f"KL to full, {kind}", here, "strategy")


def draw_kl(path: Path, title: str, lines: Sequence[Mapping[str, Any]], column: str) -> None:
    """KL to full over lengths: a course for each value of a column."""
    courses = [
        Course(str(name), [line["length"] for line in own], [line["kl"] for line in own])
        for name in dict.fromkeys(line[column] for line in lines)
        if (own := [line for line in lines if line[column] == name])
    ]
    pictures.lines(
        path,
        title=title,
        x_label="context, tokens",
        y_label="nats a token, mean",
        courses=courses,
        is_log_x=True,
        is_log_y=True,
    )


def _draw_kinds(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Mean and p99 of each strategy on every kind of text of one length, side by side; nothing for a single kind."""
    kinds = list(dict.fromkeys(line["kind"] for line in lines))
    if len(kinds) == 1:
        return
    shown = []
    for key, y_label in (("kl", "nats a token, mean"), ("kl p99", "nats a token, p99")):
        courses = []
        for name in dict.fromkeys(line["strategy"] for line in lines):
            own = sorted((kinds.index(line["kind"]), line[key]) for line in lines if line["strategy"] == name)
            has_label = key == "kl p99"  # once, at the right
            courses.append(Course(name, [at for at, _ in own], [value for _, value in own], has_label=has_label))
        shown.append(Panel("", y_label, courses, is_log_y=True, places=kinds))
    pictures.panels(path, title=f"KL to full at {lines[0]['length']:,} tokens", shown=shown)


# -- many passages ---------------------------------------------------------------------------------------------------


def cut_all(
    texts_of: Texts, kinds: Sequence[str], lengths: Sequence[int], *, count: int, texts: int, seed: int
) -> tuple[list[Passage], dict[str, str]]:
    """Passages of every kind and length, and why some have none: there is only so much text of a kind.

    Raises InvalidArgument if there is none at all.
    """
    passages: list[Passage] = []
    too_long: dict[str, str] = {}
    for length, kind in itertools.product(lengths, kinds):
        try:
            passages += [text_passage(texts_of, kind, length, count, f"{seed}/{number}") for number in range(texts)]
        except InvalidArgument as refusal:
            if refusal.field != "lengths":
                raise
            too_long[f"{kind} at {length}"] = refusal.message
    if not passages:
        raise InvalidArgument("lengths", "; ".join(too_long.values()))
    return passages, too_long


def measure(
    engine: Engine, strategies: Sequence[KVStrategy], passages: Sequence[Passage]
) -> tuple[dict[Cell, list[Scores]], dict[str, str]]:
    """Scores by cell, one for each passage of the cell, and why some cells have none."""
    found: dict[Cell, list[Scores]] = {}
    left_out: dict[str, str] = {}
    for passage in passages:
        kind, length = passage.kind, len(passage.prefix)
        scores, refused = compare(engine, strategies, passage)
        for name, one in scores.items():
            logger.info("%s at %d, %s: KL to full %.4g", kind, length, name, one.divergence.mean())
            found.setdefault(Cell(strategy=name, kind=kind, length=length), []).append(one)
        for name, reason in refused.items():
            left_out[str(Cell(strategy=name, kind=kind, length=length))] = reason
    return found, left_out


def values(found: Mapping[Cell, Sequence[Scores]], *, seed: int = 0) -> dict[str, dict[str, Any]]:
    """What a record says of the cells.

    A value stands for all forced tokens of its cell; its low and high are the middle 95 % of what comes out when the
    texts are drawn anew with replacement, for tokens of one text are not independent.
    """
    reported: dict[str, dict[str, Any]] = {}
    for cell, scores in found.items():
        losses = [one.loss for one in scores]
        reported[f"perplexity, {cell}"] = _pooled(losses, _perplexity, "perplexity", seed)
        if cell.strategy == FULL:
            continue
        full = found[Cell(strategy=FULL, kind=cell.kind, length=cell.length)]
        more = [one.loss - other.loss for one, other in zip(scores, full, strict=True)]
        reported[f"perplexity ÷ full, {cell}"] = _pooled(more, _perplexity, "ratio", seed)
        divergences = [one.divergence for one in scores]
        reported[f"KL to full, mean, {cell}"] = _pooled(divergences, np.mean, "nats", seed)
        reported[f"KL to full, median, {cell}"] = _pooled(divergences, np.median, "nats", seed)
        reported[f"KL to full, p99, {cell}"] = _pooled(divergences, _p99, "nats", seed)
        agrees = [one.agrees.astype(np.float64) for one in scores]
        reported[f"top-1 agreement, {cell}"] = _pooled(agrees, np.mean, "share", seed)
    return reported


def rows(found: Mapping[Cell, Sequence[Scores]]) -> list[dict[str, Any]]:
    """A line for each cell: the numbers that tables are made of."""
    lines = []
    for cell, scores in found.items():
        loss, divergence, agrees = (
            np.concatenate([getattr(one, name) for one in scores]) for name in ("loss", "divergence", "agrees")
        )
        full = np.concatenate([one.loss for one in found[Cell(strategy=FULL, kind=cell.kind, length=cell.length)]])
        line = {
            "strategy": cell.strategy,
            "kind": cell.kind,
            "length": cell.length,
            "texts": len(scores),
            "tokens": len(loss),
            "perplexity": _perplexity(loss),
            "perplexity ÷ full": _perplexity(loss - full),
            "kl": float(divergence.mean()),
            "kl median": float(np.median(divergence)),
            "kl p99": _p99(divergence),
            "top-1 agreement": float(agrees.mean()),
        }
        for low, high in MARGINS:
            chosen = np.concatenate([one.agrees[_between(one, low, high)] for one in scores])
            line[f"agreed, {_margin_words(low, high)}"] = f"{int(chosen.sum())} of {len(chosen)}"
        lines.append(line)
    return lines


def worst_kinds(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each strategy and length the kinds of text on which it is furthest from full: what must hold, holds there."""
    reported = []
    others = [line for line in lines if line["strategy"] != FULL]
    for strategy, length in dict.fromkeys((line["strategy"], line["length"]) for line in others):
        here = [line for line in others if (line["strategy"], line["length"]) == (strategy, length)]
        mean, p99 = (max(here, key=itemgetter(key)) for key in ("kl", "kl p99"))
        reported.append(
            {
                "strategy": strategy,
                "length": length,
                "kinds": len(here),
                "worst kind": mean["kind"],
                "kl": mean["kl"],
                "worst kind of p99": p99["kind"],
                "kl p99": p99["kl p99"],
            }
        )
    return reported


def worst_values(
    worst: Sequence[Mapping[str, Any]], reported: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The same as a record's values."""
    found = {}
    for line in worst:
        for statistic, column in (("mean", "worst kind"), ("p99", "worst kind of p99")):
            cell = Cell(strategy=line["strategy"], kind=line[column], length=line["length"])
            name = f"KL to full, {statistic}, worst kind, {line['strategy']} at {line['length']}"
            found[name] = dict(reported[f"KL to full, {statistic}, {cell}"])
    return found


def _between(scores: Scores, low: float, high: float) -> NDArray[np.bool_]:
    return (scores.margin >= low) & (scores.margin < high)


def _margin_words(low: float, high: float) -> str:
    if low == 0.0:
        return f"margin below {high:g}"
    return f"margin {low:g} to {high:g}" if math.isfinite(high) else f"margin {low:g} and more"


def _perplexity(losses: Floats) -> float:
    return math.exp(float(np.mean(losses)))


def _p99(divergences: Floats) -> float:
    return float(np.quantile(divergences, 0.99))


def _pooled(texts: Sequence[Floats], statistic: Callable[[Floats], Any], unit: str, seed: int) -> dict[str, Any]:
    """A record's value: the statistic over all texts' tokens, and what resampling the texts makes of it."""
    texts = [text for text in texts if len(text)]
    everything = np.concatenate(texts)
    value = low = high = float(statistic(everything))
    if len(texts) > 1:
        draws = np.random.default_rng(seed).integers(len(texts), size=(_RESAMPLES, len(texts)))
        resampled = [float(statistic(np.concatenate([texts[index] for index in draw]))) for draw in draws]
        low, high = (float(bound) for bound in np.quantile(resampled, [0.025, 0.975]))
    return {
        "unit": unit,
        "median": value,
        "low": min(value, low),
        "high": max(value, high),
        "count": len(everything),
    }
