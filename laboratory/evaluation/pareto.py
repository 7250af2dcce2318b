"""Bytes against what they buy: every method of keeping KV entries on the same axes, from records of other experiments.

    fidelity      KL and perplexity beside full      needle   planted facts found, tool calls repeated
    codec_error   what a codec loses of a vector     bytes    of a further token, as the strategy accounts for it, on
                                                              the device and off it

Nothing is measured here. A strategy is compared if a further token takes bytes, and fewer than under full: one that
keeps nothing of a token, or keeps it as full does, has no place on this axis. All are compared on the cells (kind of
text, length) that every one of them was measured on, so that a hard cell counts for all or for none. One wins at a
number of bytes if nothing with as few is as good; of trials, 3 in a hundred more count as no better.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from inference_engine.errors import InvalidArgument
from inference_engine.kv.strategies import parse_strategy
from laboratory.evaluation import pictures, record
from laboratory.evaluation.pictures import Mark, Panel
from laboratory.evaluation.tasks import TOOL_CALL

FULL = "full"
SINGLE = "single"
_CHANCE = 0.03  # of the trials, by which a share has to be better: 1 in 40, 3 in 100 say nothing
_TIER = "tier bytes per token"
_OWN_MEAN = "less own mean"  # what a session takes off a vector before it codes it

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Measure:
    """What is reported of each strategy. full: what full itself has, where that follows without measuring.

    is_share: of trials, more is better, and little more is chance; otherwise less is better.
    """

    name: str
    words: str
    unit: str = "share"
    is_share: bool = False
    full: float | None = None

    def is_better(self, one: float, other: float) -> bool:
        return one > other + _CHANCE if self.is_share else one < other


KEY_ERROR = Measure("key error", "relative squared error of keys", full=0.0)
VALUE_ERROR = Measure("value error", "relative squared error of values", full=0.0)
KL = Measure("kl", "KL to full, mean", "nats", full=0.0)
PERPLEXITY = Measure("perplexity", "perplexity ÷ full", "ratio", full=1.0)
FACTS = Measure("facts", "share of planted facts found", is_share=True)
CALLS = Measure("tool calls", "share of tool calls repeated exactly", is_share=True)
VALID = Measure("valid calls", "share of answers that are valid tool calls", is_share=True)
MEASURES = (KEY_ERROR, VALUE_ERROR, KL, PERPLEXITY, FACTS, CALLS, VALID)

Points = dict[str, dict[str, float]]  # by measure, by strategy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, words in (
        ("needle", "records of `kakeya evaluate needle` with task single or tool_call"),
        ("fidelity", "records of `kakeya evaluate fidelity` on the same model"),
    ):
        parser.add_argument(f"--{name}", type=Path, nargs="+", default=[], metavar="RECORD", help=words)
    parser.add_argument(
        "--error", type=Path, metavar="RECORD", help="the record of `kakeya bench codecs` on the same model"
    )


def main(arguments: argparse.Namespace, _target: object) -> dict[str, Any]:
    """Join records; no model is needed. Returns the payload of a record.

    Raises InvalidArgument for records that cannot be read, do not belong together, or leave nothing to compare.
    """
    needles = [record.read_record(path, "needle", "recall") for path in arguments.needle]
    fidelities = [record.read_record(path, "fidelity", "fidelity") for path in arguments.fidelity]
    errors = record.read_record(arguments.error, "error", None) if arguments.error else None
    if not needles and not fidelities:
        raise InvalidArgument("fidelity", "give records of fidelity or of needle: there is nothing to compare")
    sources = [*fidelities, *needles, *([errors] if errors else [])]
    _check_alike("fidelity", fidelities, ("segment_tokens", "forced_tokens", "texts"), same_texts=True)
    for task in (SINGLE, TOOL_CALL):
        asked = [one for one in needles if task in one["config"]["tasks"]]
        _check_alike("needle", asked, ("segment_tokens", "trials", "prompt_form"), same_texts=True)
    _check_alike("needle", [*fidelities, *needles], ("dtype",))
    _check_alike("error", sources, ("model", "weights_sha256"))

    sizes, tiers = _bytes([*fidelities, *needles])
    _check_latents([*fidelities, *needles])
    compared = {name: size for name, size in sizes.items() if 0 < size < sizes[FULL]}
    if not compared:
        raise InvalidArgument("fidelity", "no strategy keeps a token in fewer bytes than full, but in more than none")
    points, cells = gather(compared, needles, fidelities, errors)
    config = {key: sources[0]["config"][key] for key in ("model", "weights_sha256", "dtype", "segment_tokens")}
    return {
        "what": "What keeping a token in fewer bytes does: every method of keeping KV entries on the same axes.",
        "config": {**config, "cells": cells, "sources": [_source(one) for one in sources]},
        "seeds": sorted({seed for one in sources for seed in one["seeds"]}),
        "values": values(compared, points),
        "headlines": [_words(measure, name) for measure, name in _headlines(compared, points)],
        "baseline": f"full, {sizes[FULL]:,} bytes a token, in the same records",
        "tables": {
            "winners": winners(compared, points),
            "all": table({**compared, FULL: sizes[FULL]}, tiers, points),
            "not compared": [
                {"strategy": name, "bytes per token": size, "reason": _why_not(size)}
                for name, size in sizes.items()
                if name not in compared and name != FULL
            ],
        },
    }


def draw(payload: Mapping[str, Any], folder: Path) -> None:
    """Each measure over bytes a token: an image for each, the winners joined by a line, the value of full dashed."""
    lines = payload["tables"]["all"]
    for measure in MEASURES:
        found = {line["strategy"]: line[measure.name] for line in lines if line.get(measure.name) is not None}
        full = found.pop(FULL, None)
        if not found:
            continue
        sizes = {name: line["bytes per token"] for line in lines if (name := line["strategy"]) in found}
        best = front(sizes, found, measure)
        names = {name: words.removeprefix("full, ") for name, words in pictures.distinct(found).items()}
        is_log = measure in (KL, KEY_ERROR, VALUE_ERROR) and min(found.values()) > 0
        panel = Panel(
            "bytes a token",
            f"{measure.unit}; joined: nothing with as few bytes is as good",
            marks=[Mark(names[name], sizes[name], value, name in best) for name, value in found.items()],
            is_log_x=True,
            is_log_y=is_log,
            x_ticks=sorted({sizes[name] for name in best} | {min(sizes.values()), max(sizes.values())}),
            reference=None if full is None or is_log else (full, "full"),
        )
        title = f"{measure.words[0].upper()}{measure.words[1:]}, {payload['config']['model']}"
        pictures.panels(folder / f"{measure.name.replace(' ', '_')}.svg", title=title, shown=[panel])


# -- joining ----------------------------------------------------------------------------------------------------------


def gather(
    sizes: Iterable[str], needles: Sequence[Mapping[str, Any]], fidelities: Sequence[Mapping[str, Any]], errors: Any
) -> tuple[Points, dict[str, list[str]]]:
    """One number for each measure and strategy, full among them, and the cells that each stands for.

    KL is the mean over cells, perplexity ÷ full the mean of logarithms, shares are of all trials.
    """
    points: Points = {}
    cells: dict[str, list[str]] = {}
    names = [FULL, *sizes]

    def add(measure: Measure, rows: Rows, summary: Callable[[Rows], float]) -> None:
        by_strategy, common = _common_cells(rows, names)
        if common:
            points[measure.name] = {name: summary(own) for name, own in by_strategy.items()}
            cells[measure.name] = [f"{kind} at {length:,}" for kind, length in common]

    forced = [row for one in fidelities for row in one["tables"]["fidelity"]]
    add(KL, forced, lambda rows: statistics.fmean(row["kl"] for row in rows))
    add(PERPLEXITY, forced, lambda rows: math.exp(statistics.fmean(math.log(row["perplexity ÷ full"]) for row in rows)))
    asked = [row for one in needles for row in one["tables"]["recall"]]
    for measure, task, column in (
        (FACTS, SINGLE, "hits"),
        (CALLS, TOOL_CALL, "hits"),
        (VALID, TOOL_CALL, "valid calls"),
    ):
        add(measure, [row for row in asked if row["task"] == task and column in row], _share_of(column))
    if errors is not None:
        for measure, letter in ((KEY_ERROR, "K"), (VALUE_ERROR, "V")):
            found = {name: _error(errors["values"], name, letter) for name in sizes}
            points[measure.name] = {name: error for name, error in found.items() if error is not None}
            cells[measure.name] = [str(text) for text in errors["config"]["texts"]]
    return points, cells


def _common_cells(rows: Rows, names: Sequence[str]) -> tuple[dict[str, list[Mapping[str, Any]]], list[tuple[str, int]]]:
    """The rows of each strategy that has any, in the cells that all of those have; one measured twice counts once."""
    found: dict[str, dict[tuple[str, int], Mapping[str, Any]]] = {}
    for row in rows:
        if row["strategy"] in names:
            found.setdefault(row["strategy"], {}).setdefault((row["kind"], row["length"]), row)
    common = [cell for cell in found.get(FULL, {}) if all(cell in own for own in found.values())]
    return {name: [own[cell] for cell in common] for name, own in found.items()}, common


def _share_of(column: str) -> Callable[[Rows], float]:
    def share(rows: Rows) -> float:
        return float(sum(row[column] for row in rows) / sum(row["trials"] for row in rows))

    return share


def _error(found: Mapping[str, Any], strategy: str, letter: str) -> float | None:
    """What the record of errors says of the strategy's codec; None if it has none, or the record does not know it."""
    codec = parse_strategy(strategy).options().get("codec")
    value = found.get(f"{letter} error, {codec}, {_OWN_MEAN}")
    return None if value is None else float(value["median"])


def _bytes(records: Sequence[Mapping[str, Any]]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of a further token by strategy: all of them, and those of them that lie off the device.

    Raises InvalidArgument if a record does not say, or two disagree.
    """
    sizes: dict[str, int] = {}
    tiers: dict[str, int] = {}
    for one in records:
        rows = one["tables"].get("bytes", ())
        if not rows or any(_uses_tier(row["strategy"]) and _TIER not in row for row in rows):
            raise InvalidArgument(
                "fidelity", f"{_source(one)}: does not say what a token takes; make it again: {one['command']}"
            )
        for row in rows:
            name, tier = row["strategy"], row.get(_TIER, 0)
            size = row["bytes per token"] + tier
            if sizes.setdefault(name, size) != size:
                raise InvalidArgument("fidelity", f"{name} takes {sizes[name]} bytes a token in one, {size} in another")
            tiers[name] = tier
    return sizes, tiers


def _uses_tier(strategy: str) -> bool:
    """Records that were made before they reported bytes off the device are whole for all other strategies."""
    options = parse_strategy(strategy).options()
    return any(options.get(name) is not None for name in ("resident_tokens", "resident_latent_bytes"))


def _check_latents(records: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidArgument if two latents were measured under one name. A record that does not say, does not."""
    said = {
        latent["tensors_sha256"]: one
        for one in records
        if "tensors_sha256" in (latent := one["config"].get("latent", {}))
        and any(parse_strategy(row["strategy"]).options().get("source") == "latent" for row in one["tables"]["bytes"])
    }
    _refuse_two("fidelity", "the latent", said)


def _check_alike(
    field: str, records: Sequence[Mapping[str, Any]], keys: Sequence[str], *, same_texts: bool = False
) -> None:
    """Raise InvalidArgument if two records differ in what their numbers depend on. One that does not say, does not."""
    for key in keys:
        said = {repr(one["config"][key]): one for one in records if one["config"].get(key) is not None}
        _refuse_two(field, key, said)
    if same_texts:
        _refuse_two(field, "seeds", {repr(one["seeds"]): one for one in records})
        for kind in {kind for one in records for kind in one["config"]["texts_sha256"]}:
            texts = [(one["config"]["texts_sha256"].get(kind), one) for one in records]
            _refuse_two(field, f"texts of kind {kind}", {text: one for text, one in texts if text is not None})


def _refuse_two(field: str, what: str, said: Mapping[str, Mapping[str, Any]]) -> None:
    if len(said) > 1:
        (here, one), (there, other), *_ = said.items()
        raise InvalidArgument(
            field, f"not comparable: {what} is {here} in {_source(one)}, and {there} in {_source(other)}"
        )


def _source(one: Mapping[str, Any]) -> str:
    return f"{one['experiment']}, {one['date']}, {record.machine_name(one['machine'])}, commit {one['commit'][:12]}"


def _why_not(size: int) -> str:
    return "keeps a token in no fewer bytes than full" if size else "keeps nothing of a token that left its window"


# -- winners ----------------------------------------------------------------------------------------------------------


def front(sizes: Mapping[str, int], found: Mapping[str, float], measure: Measure) -> list[str]:
    """Strategies that nothing of as few bytes equals, by bytes: the fewest first."""
    best: list[str] = []
    for name in sorted(found, key=lambda name: (sizes[name], -found[name] if measure.is_share else found[name])):
        if not best or measure.is_better(found[name], found[best[-1]]):
            best.append(name)
    return best


def winners(sizes: Mapping[str, int], points: Points) -> list[dict[str, Any]]:
    """For each measure, the winners, each from which number of bytes to which."""
    reported = []
    for measure in MEASURES:
        found = {name: value for name, value in points.get(measure.name, {}).items() if name in sizes}
        best = front(sizes, found, measure)
        for name, after in zip_longest(best, best[1:]):
            reported.append(
                {
                    "measure": measure.words,
                    "from bytes a token": sizes[name],
                    "wins": name,
                    "value": found[name],
                    "full": points[measure.name].get(FULL, measure.full),
                    "until": f"{sizes[after]:,} bytes a token" if after else "nothing larger was better",
                }
            )
    return reported


def table(sizes: Mapping[str, int], tiers: Mapping[str, int], points: Points) -> list[dict[str, Any]]:
    """A line for each strategy, by bytes, with each measure it has. tiers: bytes of them off the device."""
    return [
        {
            "strategy": name,
            "bytes per token": sizes[name],
            "of them off the device": tiers[name],
            **{
                measure.name: points[measure.name].get(name, measure.full if name == FULL else None)
                for measure in MEASURES
                if measure.name in points
            },
        }
        for name in sorted(sizes, key=lambda name: sizes[name])
    ]


def values(sizes: Mapping[str, int], points: Points) -> dict[str, dict[str, Any]]:
    """The points as a record's values."""
    reported = {f"bytes a token, {name}": record.exact(size, "bytes") for name, size in sizes.items()}
    for measure in MEASURES:
        for name, value in points.get(measure.name, {}).items():
            reported[_words(measure, name)] = record.exact(value, measure.unit)
    return reported


def _headlines(sizes: Mapping[str, int], points: Points) -> list[tuple[Measure, str]]:
    """The strategies that win at some number of bytes, measure by measure."""
    return [
        (measure, name)
        for measure in MEASURES
        if measure.name in points
        for name in front(sizes, {own: one for own, one in points[measure.name].items() if own in sizes}, measure)
    ]


def _words(measure: Measure, name: str) -> str:
    return f"{measure.words}, {name}"
