"""What matching past queries saves, layer by layer, and what it costs: `mac` on text it did not write.

    hit rate      query heads of forced tokens that took over what an earlier token read
    skipped       KV entries, of those present, that were not read: by each head for itself, and by the heads that
                  share K and V, which together read what the one of them that reads most does
    reused mass   of full attention's weight in a hit, the share on entries that were reused: the error grows with it
    band mass     the share on the band before the match, or, without one, before the token itself

A text is appended but for its last tokens, which are forced, and so read as generated ones; only they can be matched.
KL, agreement and perplexity are those of `evaluation/fidelity.py`, on the same texts.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from inference_engine.engine import Engine
from inference_engine.kv.strategy import KVStrategy
from kakeya_mac import Mac
from kakeya_mac.kernel import MatchTotals
from laboratory.evaluation import pictures
from laboratory.evaluation.arguments import require_at_least, strategy_argument
from laboratory.evaluation.fidelity import measure, rows, values
from laboratory.evaluation.haystack import KINDS
from laboratory.evaluation.models import Target
from laboratory.evaluation.passages import Passage, describe, forced, text_passage
from laboratory.evaluation.pictures import Course
from laboratory.evaluation.record import exact
from laboratory.evaluation.sessions import check_fits

_QUICK_COUNT = 64
_SHARES = ("hit rate", "skipped by heads", "skipped by groups", "band mass")

Line = dict[str, Any]  # of a table: one layer, of one strategy, on one kind of text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategies", nargs="+", type=strategy_argument, default=[Mac()], metavar="SPEC",
        help="variants of mac; the default one, if none is given",
    )  # fmt: skip
    parser.add_argument("--length", type=int, default=1024, metavar="N", help="ids before the forced")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["prose", "code"], help="of text")
    parser.add_argument("--count", type=int, default=512, metavar="N", help="ids that are forced, of each text")
    parser.add_argument("--texts", type=int, default=1, metavar="N", help="of each kind")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of texts, and of their resampling")


def main(arguments: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Measure and return the record's payload.

    Raises InvalidArgument for numbers below 1 or a length that a strategy cannot hold, NoCapacity if memory cannot.
    """
    require_at_least(arguments, length=1, count=1, texts=1)
    count, texts = (_QUICK_COUNT, 1) if arguments.quick else (arguments.count, arguments.texts)
    for strategy in arguments.strategies:
        check_fits(target.engine, strategy, arguments.length + count)
    passages = [
        text_passage(target.texts, kind, arguments.length, count, f"{arguments.seed}/{number}")
        for kind in arguments.kinds
        for number in range(texts)
    ]
    lines = [
        line
        for strategy in arguments.strategies
        for kind in arguments.kinds
        for line in layer_lines(target.engine, strategy, [one for one in passages if one.kind == kind])
    ]
    found, _ = measure(target.engine, arguments.strategies, passages)
    return {
        "what": "Attention taken over from earlier tokens of forced text, by layer, and what it does to predictions.",
        "config": describe(
            target, arguments.strategies, arguments.kinds, length=arguments.length, forced_tokens=count, texts=texts
        ),
        "seeds": [arguments.seed],
        "values": {**overall(lines), **values(found, seed=arguments.seed)},
        "baseline": "full, on the same texts",
        "tables": {"layers": lines, "fidelity": rows(found)},
    }


def layer_lines(engine: Engine, strategy: KVStrategy, passages: Sequence[Passage]) -> list[Line]:
    """What happened in each layer that matches queries, over passages of one kind."""
    sums: dict[int, MatchTotals] = {}
    for passage in passages:
        with forced(engine, strategy, passage, _ignore) as session:
            matched = engine.layer_statistics(session)
        for layer, totals in matched.items():
            sums[layer] = sums[layer].plus(totals) if layer in sums else totals
    return [
        {"strategy": str(strategy), "kind": passages[0].kind, "layer": layer, **shares(sums[layer])}
        for layer in sorted(sums)
    ]


def shares(totals: MatchTotals) -> dict[str, float]:
    """The sums as means over queries and heads; the least and the most of the heads' hit rates."""
    hit_rates = totals.hits.double() / totals.queries
    hits = int(totals.hits.sum())
    return {
        "hit rate": float(hit_rates.mean()),
        "hit rate, least head": float(hit_rates.min()),
        "hit rate, most head": float(hit_rates.max()),
        "skipped by heads": 1 - float(totals.entries_read.double().mean()) / totals.entries_present,
        "skipped by groups": 1 - float(totals.group_entries_read.double().mean()) / totals.entries_present,
        "reused mass": float(totals.reused_mass.sum()) / hits if hits else 0.0,
        "band mass": float(totals.band_mass.double().mean()) / totals.queries,
    }


def overall(lines: Sequence[Line]) -> dict[str, dict[str, Any]]:
    """The record's values: means over the layers, for each strategy and kind."""
    cells = dict.fromkeys((line["strategy"], line["kind"]) for line in lines)
    reported = {}
    for strategy, kind in cells:
        here = [line for line in lines if (line["strategy"], line["kind"]) == (strategy, kind)]
        for share in _SHARES:
            mean = sum(line[share] for line in here) / len(here)
            reported[f"{share}, {strategy}, {kind}"] = exact(mean, "share")
    return reported


def draw(payload: Mapping[str, Any], folder: Any) -> None:
    """Hit rate and skipped entries by layer: an image for each kind of text."""
    lines = payload["tables"]["layers"]
    for kind in dict.fromkeys(line["kind"] for line in lines):
        courses = []
        for color, name in enumerate(dict.fromkeys(line["strategy"] for line in lines)):
            own = [line for line in lines if (line["strategy"], line["kind"]) == (name, kind)]
            layers = [line["layer"] for line in own]
            courses.append(Course(name, layers, [line["hit rate"] for line in own], color=color))
            skipped = [line["skipped by groups"] for line in own]
            courses.append(Course(name, layers, skipped, color=color, is_dashed=True, has_label=False))
        pictures.lines(
            folder / f"matches_{kind}.svg",
            title=f"Attention taken over, {kind}",
            x_label="layer",
            y_label="share of hits; dashed: entries skipped, shared K and V",
            courses=courses,
            y_range=(0.0, 1.0),
        )


def _ignore(position: int, logits: torch.Tensor) -> None:
    """The logits are not wanted here."""
