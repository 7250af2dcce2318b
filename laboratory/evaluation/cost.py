"""Cost: seconds and bytes of each strategy at each length, beside `full` in the same run.

    round 1   full  a  b      round 2   a  b  full      round 3   b  full  a          all of them at every length

A strategy's speed is reported as a ratio within a round, so what the machine does meanwhile happens to both sides. What
a run is and when its clock runs: `timing.py`.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument, NoCapacity
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategy import KVStrategy
from laboratory.evaluation import pictures, record, traffic
from laboratory.evaluation.arguments import geometry_of, require_at_least, strategy_argument
from laboratory.evaluation.haystack import KINDS
from laboratory.evaluation.models import Target
from laboratory.evaluation.pictures import Course
from laboratory.evaluation.sessions import circular, turned
from laboratory.evaluation.timing import Run, run

logger = logging.getLogger(__name__)

_TEXT_BEYOND = 20_000  # ids of text beyond the longest history, so that histories differ


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Where runs belong. The length is what was appended before decoding began."""

    strategy: str
    length: int
    batch: int

    def __str__(self) -> str:
        return f"{self.strategy}, at {self.length}" + (f", batch {self.batch}" if self.batch > 1 else "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategies", nargs="+", type=strategy_argument, default=[], metavar="SPEC",
        help="what to measure beside full, which always runs",
    )  # fmt: skip
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048], metavar="N", help="ids of history")
    parser.add_argument("--batches", nargs="+", type=int, default=[1], metavar="N", help="sessions that decode at once")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="measured, after one that is not")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="that each session decodes")
    parser.add_argument("--kind", choices=KINDS, default="prose", help="of text in the histories")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the text")


def main(arguments: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Measure and return the record's payload. Raises InvalidArgument for numbers that are too small."""
    require_at_least(arguments, lengths=1, batches=1, rounds=1, tokens=2)
    rounds, tokens = (1, min(8, arguments.tokens)) if arguments.quick else (arguments.rounds, arguments.tokens)
    found, left_out = measure(
        target.engine,
        arguments.strategies,
        target.texts.filler(arguments.kind, max(arguments.lengths) + _TEXT_BEYOND, arguments.seed),
        lengths=arguments.lengths,
        batches=arguments.batches,
        rounds=rounds,
        tokens=tokens,
    )
    by_name = {str(one): one for one in (Full(), *arguments.strategies)}
    return {
        "what": "Seconds and bytes of each strategy beside full, in turns. A speed ÷ full above 1 is a gain.",
        "config": {
            **target.describe(),
            "threads": torch.get_num_threads(),
            "weight_bytes": traffic.weight_bytes(target),
            "strategies": list(by_name),
            "lengths": arguments.lengths,
            "batches": arguments.batches,
            "rounds": rounds,
            "tokens": tokens,
            "kind": arguments.kind,
            "texts_sha256": target.texts.digest(arguments.kind),
        },
        "seeds": [arguments.seed],
        "values": values(found),
        "baseline": "full, in the same rounds",
        "tables": {
            "cost": with_traffic(rows(found), by_name, geometry_of(target), tokens),
            "left out": [{"cell": cell, "reason": reason} for cell, reason in left_out.items()],
        },
    }


def draw(payload: Mapping[str, Any], folder: Path) -> None:
    """Decode speed and bytes between Generates over length, a line for each strategy, at the smallest batch."""
    lines = payload["tables"]["cost"]
    batch = min(line["batch"] for line in lines)
    here = [line for line in lines if line["batch"] == batch]
    drawn: tuple[tuple[str, str, str, Callable[[Mapping[str, Any]], float]], ...] = (
        ("decode", "tokens/s", "of all sessions", lambda line: line["batch"] / line["token_seconds"]),
        ("kv_bytes", "MiB of K/V", "of a session between Generates", lambda line: line["kv_bytes"] / 2**20),
    )
    for name, y_label, unit, read in drawn:
        pictures.lines(
            folder / f"{name}.svg",
            title=f"{y_label} {unit}, batch {batch}",
            x_label="history, tokens",
            y_label=y_label,
            courses=[
                Course(own, [line["length"] for line in mine], [read(line) for line in mine])
                for own in dict.fromkeys(line["strategy"] for line in here)
                if (mine := [line for line in here if line["strategy"] == own])
            ],
        )


# -- many runs -------------------------------------------------------------------------------------------------------


def measure(
    engine: Engine,
    strategies: Sequence[KVStrategy],
    token_ids: Sequence[int],
    *,
    lengths: Sequence[int],
    batches: Sequence[int] = (1,),
    rounds: int,
    tokens: int,
) -> tuple[dict[Cell, list[Run]], dict[str, str]]:
    """Runs by cell, one for each round, and why some cells have none. `full` is always measured.

    Sessions of a batch begin at different places of `token_ids`, which is read round and round. One round more is run
    at first and not kept.
    """
    by_name = {str(strategy): strategy for strategy in (Full(), *strategies)}
    found: dict[Cell, list[Run]] = {}
    left_out: dict[str, str] = {}
    for number in range(rounds + 1):
        for length in lengths:
            for batch in batches:
                prompts = [circular(token_ids, (number * batch + index) * 997, length) for index in range(batch)]
                for name in turned(list(by_name), number):
                    cell = Cell(strategy=name, length=length, batch=batch)
                    if str(cell) in left_out:
                        continue
                    try:
                        result = run(engine, by_name[name], prompts, tokens)
                    except (InvalidArgument, NoCapacity) as refusal:
                        left_out[str(cell)] = refusal.message
                        continue
                    logger.info("round %d of %d, %s: %.2f ms a token", number, rounds, cell, 1e3 * result.token_seconds)
                    if number:
                        found.setdefault(cell, []).append(result)
    return found, left_out


def values(found: dict[Cell, list[Run]]) -> dict[str, dict[str, Any]]:
    """What a record says of the cells: medians with quartiles, and ratios to full within a round (above 1: better)."""
    reported: dict[str, dict[str, Any]] = {}
    for cell, runs in found.items():
        reported[f"decode, {cell}"] = record.summarize([cell.batch / one.token_seconds for one in runs], "tokens/s")
        reported[f"prefill, {cell}"] = record.summarize([cell.length / one.prefill_seconds for one in runs], "tokens/s")
        reported[f"first token, {cell}"] = record.summarize([one.first_token_seconds for one in runs], "s")
        reported[f"first token of a later Generate, {cell}"] = record.summarize(
            [one.resume_seconds for one in runs], "s"
        )
        reported[f"K/V between Generates, {cell}"] = record.exact(max(one.kv_bytes for one in runs), "bytes")
        if tier_bytes := max(one.tier_bytes for one in runs):
            reported[f"K/V off the device between Generates, {cell}"] = record.exact(tier_bytes, "bytes")
        reported[f"K/V at most, {cell}"] = record.exact(max(one.kv_peak_bytes for one in runs), "bytes")
        reported[f"bound, sustained, {cell}"] = record.exact(runs[0].bound.sustained_bytes, "bytes")
        reported[f"bound, peak, {cell}"] = record.exact(runs[0].bound.peak_bytes, "bytes")
        if transient := [one.transient_bytes for one in runs if one.transient_bytes is not None]:
            reported[f"allocated while decoding, {cell}"] = record.summarize(transient, "bytes")
        full = found.get(Cell(strategy=str(Full()), length=cell.length, batch=cell.batch))
        if full is None or full is runs:
            continue
        pairs = list(zip(full, runs, strict=True))
        for word, attribute in (("decode", "token_seconds"), ("prefill", "prefill_seconds")):
            ratios = [getattr(other, attribute) / getattr(one, attribute) for other, one in pairs]
            reported[f"{word} speed ÷ full, {cell}"] = record.summarize(ratios, "ratio")
        bytes_ratio = max(one.kv_bytes for one in runs) / max(one.kv_bytes for one in full)
        reported[f"K/V between Generates ÷ full, {cell}"] = record.exact(bytes_ratio, "ratio")
    return reported


def rows(found: dict[Cell, list[Run]]) -> list[dict[str, Any]]:
    """A line for each cell: medians of the times, the most of the bytes."""
    lines = []
    for cell, runs in found.items():
        line: dict[str, Any] = {"strategy": cell.strategy, "length": cell.length, "batch": cell.batch}
        for spec in fields(Run):
            taken = [getattr(one, spec.name) for one in runs]
            if spec.name == "bound":
                bound = taken[0]
                line |= {"bound_sustained_bytes": bound.sustained_bytes, "bound_peak_bytes": bound.peak_bytes}
                line["bound_tier_bytes"] = bound.tier_bytes
            elif spec.name.endswith("_seconds"):
                line[spec.name] = record.summarize(taken, "s")["median"]
            else:
                line[spec.name] = None if None in taken else max(taken)
        lines.append(line)
    return lines


def with_traffic(
    lines: Sequence[Mapping[str, Any]], strategies: Mapping[str, KVStrategy], geometry: Geometry, tokens: int
) -> list[dict[str, Any]]:
    """The lines with the inputs of the traffic model: bytes that a decoded token reads, on average, and whether it has
    to find them."""
    reported = []
    for line in lines:
        one, first = strategies[line["strategy"]], line["length"] + 2
        read = [traffic.bytes_read(one, geometry, length) for length in range(first, first + tokens - 1)]
        reported.append(
            {**line, "bytes_read": sum(read) / len(read), "finds": traffic.finds(one, geometry, first + tokens - 2)}
        )
    return reported
