"""The regime map: where each strategy pays, from what was measured and from the traffic model fitted on it.

The model (`traffic.py`) is fitted on dense rows and has to predict the others; how well it does, on rows it never saw,
is printed beside it. The recommendation is of measured cells only: the fastest strategy whose answers were shown to
be good enough for the task, within the memory that there is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_engine.errors import InvalidArgument
from inference_engine.evaluation import record
from inference_engine.evaluation.traffic import (
    Bill,
    Step,
    fit,
    fit_finding,
    leave_one_out,
    r_squared,
    relative_errors,
    speedups,
)

FULL = "full"
MEMORIES = (("as much as full needs", 1.0), ("half of what full needs", 0.5), ("a tenth of what full needs", 0.1))
FACTS = "finds facts anywhere in the context"
FLUENT = "goes on fluently; far facts may be lost"
MOST_PERPLEXITY = 1.02  # ÷ full, of the worst kind of text
MOST_DIFFERING = 0.03  # of the answers may be unlike full's: 1 in 40, 3 in 100
NOBODY = "none of those measured"
_LATE = 3  # times full's
_NOISE = 0.05  # of speed: within it, fewer bytes win


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cost", type=Path, required=True, metavar="RECORD", help="what was measured of speed and bytes (record.json)"
    )
    parser.add_argument(
        "--needle", type=Path, nargs="+", default=[], metavar="RECORD", help="recall, on the same model and device"
    )
    parser.add_argument(
        "--fidelity",
        type=Path,
        nargs="+",
        default=[],
        metavar="RECORD",
        help="perplexity, on the same model and device",
    )


def main(arguments: argparse.Namespace, _target: object) -> dict[str, Any]:
    """Fit, predict and recommend from records; no model is needed. Returns the payload of a record.

    Raises InvalidArgument for records that cannot be read, are of another experiment, or are not of one model.
    """
    cost = read_record(arguments.cost, "cost", "cost")
    needles = [read_record(path, "needle", "against full") for path in arguments.needle]
    fidelities = [read_record(path, "fidelity", "fidelity") for path in arguments.fidelity]
    for other in (*needles, *fidelities):
        for key in ("model", "dtype"):
            if other["config"][key] != cost["config"][key]:
                raise InvalidArgument(
                    "cost", f"is of {key} {cost['config'][key]!r}, another record of {other['config'][key]!r}"
                )
    rows = cost["tables"]["cost"]
    try:
        dense, others = steps_of(rows)
        bill, told = values(dense, others, cost["config"]["weight_bytes"])
    except ValueError as error:
        raise InvalidArgument("cost", str(error)) from None
    return {
        "what": "Where each strategy pays: a decode step told by the bytes it moves, fitted on full alone.",
        "config": {
            **cost["config"],
            "measured_on": cost["machine"],
            "measured_at": cost["commit"],
            "records": [f"{one['experiment']}, {one['date']}" for one in (cost, *needles, *fidelities)],
        },
        "seeds": cost["seeds"],
        "values": told,
        "headlines": list(told),
        "baseline": "the measured times of the cost record; rows of full are fitted, the others predicted",
        "tables": {
            "recommendation": recommend(candidates(rows, needles, fidelities)),
            "steps": lines(bill, [*dense, *others]),
        },
    }


def draw(payload: Mapping[str, Any], folder: Path) -> None:
    plot(folder / "regime_map.png", payload["tables"]["steps"])


def read_record(path: Path, experiment: str, table: str) -> dict[str, Any]:
    """A record that has that table. Raises InvalidArgument, naming the experiment it should be of."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        record.validate_record(found)
    except (OSError, ValueError) as error:
        raise InvalidArgument(experiment, f"{path}: not a record: {error}") from None
    if table not in found.get("tables", {}):
        raise InvalidArgument(experiment, f"{path}: no record of `kakeya evaluate {experiment}`: no table {table!r}")
    return found


# -- the model -------------------------------------------------------------------------------------------------------


def steps_of(cost_rows: Sequence[Mapping[str, Any]]) -> tuple[list[Step], list[Step]]:
    """Dense steps and the others, from the rows of a cost record. Raises ValueError if there are no dense ones."""
    steps = [
        Step(
            strategy=row["strategy"],
            length=row["length"],
            batch=row["batch"],
            bytes_read=row["bytes_read"],
            seconds=row["token_seconds"],
            finds=row["finds"],
        )
        for row in cost_rows
    ]
    dense = [step for step in steps if step.strategy == FULL]
    if not dense:
        raise ValueError("the cost record has no rows of full: nothing to fit the traffic model on")
    return dense, [step for step in steps if step.strategy != FULL]


def values(dense: Sequence[Step], others: Sequence[Step], weight_bytes: int) -> tuple[Bill, dict[str, dict[str, Any]]]:
    """The fitted model, and what a record says of it.

    With rows of several batches it is the form with sessions; how the source's form does on the same rows is told, too.
    """
    source, source_unseen = fit_finding(fit(dense, weight_bytes), others)
    with_sessions = len({step.batch for step in dense}) > 1 and len({step.length for step in dense}) > 1
    bill, unseen = source, source_unseen
    if with_sessions:
        bill, unseen = fit_finding(fit(dense, weight_bytes, with_sessions=True), others)
    told = {
        "effective bandwidth": record.exact(bill.bytes_per_second, "bytes/s"),
        "fixed cost of a step": record.exact(bill.step_seconds, "s"),
    }
    if bill.session_seconds is not None:
        told["cost of a session in a step"] = record.exact(bill.session_seconds, "s")
    for name, seconds in bill.finding_seconds.items():
        told[f"price of finding, {name}"] = record.exact(seconds, "s")
    told |= _quality(bill, dense, unseen)
    if errors := leave_one_out(dense, weight_bytes, with_sessions=with_sessions):
        told["error on dense rows, each left out of its fit"] = record.summarize(errors, "share")
        told["error on dense rows, each left out of its fit, largest"] = record.exact(max(errors), "share")
    for name in dict.fromkeys(step.strategy for step in unseen):
        errors = relative_errors(bill, [step for step in unseen if step.strategy == name])
        told[f"error on rows never fitted, {name}"] = record.summarize(errors, "share")
        told[f"error on rows never fitted, {name}, largest"] = record.exact(max(errors), "share")
    if with_sessions:
        told |= {
            f"{name}, without a cost of sessions": value
            for name, value in _quality(source, dense, source_unseen).items()
        }
    return bill, told


def _quality(bill: Bill, dense: Sequence[Step], unseen: Sequence[Step]) -> dict[str, dict[str, Any]]:
    told = {
        "R² on dense rows, in sample": record.exact(
            r_squared([step.seconds for step in dense], [bill.predict(step) for step in dense]), "R²"
        ),
        "error on dense rows, in sample": record.summarize(relative_errors(bill, dense), "share"),
    }
    if unseen:
        told["error on rows never fitted"] = record.summarize(relative_errors(bill, unseen), "share")
    pairs = speedups(bill, dense, unseen)
    if len({measured for _, measured, _ in pairs}) > 1:
        fitted = r_squared([measured for _, measured, _ in pairs], [predicted for _, _, predicted in pairs])
        told["R² on speed ÷ full of rows never fitted"] = record.exact(fitted, "R²")
    return told


def lines(bill: Bill, steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Measured and predicted, for tables and plots."""
    return [
        {
            "strategy": step.strategy,
            "length": step.length,
            "batch": step.batch,
            "bytes_read": step.bytes_read,
            "measured_seconds": step.seconds,
            "predicted_seconds": bill.predict(step),
        }
        for step in steps
    ]


def plot(path: Path, told: Sequence[Mapping[str, Any]]) -> None:
    """Draw `lines` into an image: measured against predicted, and a token's time against the context."""
    from matplotlib.figure import Figure  # drawing is optional, and slow to import

    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(line["strategy"] for line in told))
    batches = sorted({line["batch"] for line in told})
    for number, name in enumerate(names):
        color, own = f"C{number % 10}", [line for line in told if line["strategy"] == name]
        left.scatter(
            [1e3 * line["predicted_seconds"] for line in own],
            [1e3 * line["measured_seconds"] for line in own],
            s=18,
            color=color,
            label=name,
        )
        for batch, dash in zip((batches[0], batches[-1]), ("-", "--"), strict=True):
            course = sorted((line for line in own if line["batch"] == batch), key=lambda line: int(line["length"]))
            lengths = [line["length"] for line in course]
            right.plot(lengths, [1e3 * line["predicted_seconds"] for line in course], dash, color=color, linewidth=1)
            right.scatter(lengths, [1e3 * line["measured_seconds"] for line in course], s=18, color=color)
    ends = [1e3 * line[key] for line in told for key in ("predicted_seconds", "measured_seconds")]
    left.plot([0, max(ends)], [0, max(ends)], color="0.7", linewidth=1, zorder=0)
    left.set(title="Decode step: measured against predicted", xlabel="predicted, ms", ylabel="measured, ms")
    left.legend(fontsize=7)
    left.set_xlim(left=0)
    left.set_ylim(bottom=0)
    batch_words = f"batch {batches[0]}" + (f" (solid) and {batches[-1]} (dashed)" if len(batches) > 1 else "")
    right.set(title=f"Dots measured, lines predicted; {batch_words}", xlabel="context, tokens", ylabel="step, ms")
    right.set_xscale("log", base=2)
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


# -- the recommendation ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A strategy at a length, with `batch` sessions decoding at once, as measured. None: not measured.

    kv_bytes: of a session, between Generates. resume_seconds: until a later Generate has its first token.
    differing: answers unlike full's, of `trials` needles. perplexity: ÷ full, of the worst kind of text.
    """

    strategy: str
    length: int
    batch: int = 1
    tokens_per_second: float
    kv_bytes: int
    resume_seconds: float = 0.0
    differing: int | None = None
    trials: int = 0
    perplexity: float | None = None

    @property
    def recalls(self) -> bool:
        if self.strategy == FULL:
            return True
        return self.differing is not None and self.trials > 0 and self.differing <= MOST_DIFFERING * self.trials

    @property
    def is_fluent(self) -> bool:
        return self.strategy == FULL or (self.perplexity is not None and self.perplexity <= MOST_PERPLEXITY)

    def was_tried(self, task: str) -> bool:
        return self.strategy == FULL or (self.perplexity is not None and (task == FLUENT or self.differing is not None))

    def serves(self, task: str) -> bool:
        return self.is_fluent and (task == FLUENT or self.recalls)


def candidates(
    cost_rows: Sequence[Mapping[str, Any]],
    needles: Sequence[Mapping[str, Any]],
    fidelities: Sequence[Mapping[str, Any]],
) -> list[Candidate]:
    """What records of the three experiments say of each strategy, length and batch; the worst cell speaks."""
    recall: dict[tuple[str, int], tuple[int, int]] = {}
    for row in (row for needle in needles for row in needle["tables"]["against full"]):
        trials = row["both"] + row["only full"] + row["only it"] + row["neither"]
        place = (row["strategy"], row["length"])
        worst = recall.get(place, (0, trials))
        recall[place] = max(worst, (row["discordant"], trials), key=lambda one: one[0] / one[1])
    perplexity: dict[tuple[str, int], float] = {}
    for row in (row for fidelity in fidelities for row in fidelity["tables"]["fidelity"]):
        place = (row["strategy"], row["length"])
        perplexity[place] = max(perplexity.get(place, 0.0), row["perplexity ÷ full"])
    return [
        Candidate(
            strategy=row["strategy"],
            length=row["length"],
            batch=row["batch"],
            tokens_per_second=row["batch"] / row["token_seconds"],
            kv_bytes=row["kv_bytes"],
            resume_seconds=row["resume_seconds"],
            differing=recall[place][0] if (place := (row["strategy"], row["length"])) in recall else None,
            trials=recall[place][1] if place in recall else 0,
            perplexity=perplexity.get(place),
        )
        for row in cost_rows
    ]


def recommend(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """For each context, number of sessions, memory and task, the strategy to use and why: a table in plain words.

    The fastest that serves the task wins; of those within noise of it, the one that holds the fewest bytes. Where full
    was not measured, or nothing is that small, there is nothing to choose from, and no line.
    """
    table = []
    for length, batch in sorted({(candidate.length, candidate.batch) for candidate in candidates}):
        here = [candidate for candidate in candidates if (candidate.length, candidate.batch) == (length, batch)]
        full = next((candidate for candidate in here if candidate.strategy == FULL), None)
        if full is None:
            continue
        for words, share in MEMORIES:
            small = [one for one in here if one.kv_bytes <= share * full.kv_bytes]
            for task in (FACTS, FLUENT) if small else ():
                best = _best([one for one in small if one.serves(task)])
                table.append(
                    {
                        "context, tokens": length,
                        "sessions at once": batch,
                        "memory": words,
                        "task": task,
                        "strategy": best.strategy if best else NOBODY,
                        "because": _because(best, full, small, task),
                    }
                )
    return table


def _best(able: Sequence[Candidate]) -> Candidate | None:
    if not able:
        return None
    fastest = max(one.tokens_per_second for one in able)
    near = [one for one in able if one.tokens_per_second >= (1 - _NOISE) * fastest]
    return min(near, key=lambda one: (one.kv_bytes, one.strategy != FULL))


def _because(best: Candidate | None, full: Candidate, small: Sequence[Candidate], task: str) -> str:
    unknown = [one for one in small if not one.was_tried(task)]
    if best is None:
        return "what is that small was not shown to serve the task" if unknown else "what is that small fails the task"
    if best is full:
        if any(one.tokens_per_second > full.tokens_per_second for one in unknown):
            return "what was faster was not shown to serve the task"
        return "nothing that serves the task was faster, or as fast with fewer bytes"
    said = [
        f"{best.tokens_per_second / full.tokens_per_second:.2f} × full's speed",
        f"{best.kv_bytes / full.kv_bytes:.2f} × its bytes",
    ]
    if best.perplexity is not None:
        said.append(f"{best.perplexity:.3f} × its perplexity")
    if best.differing is not None:
        said.append(f"{best.differing} of {best.trials} answers unlike full's")
    if best.resume_seconds > _LATE * full.resume_seconds:
        said.append(f"but a later Generate begins after {best.resume_seconds:.2g} s, not {full.resume_seconds:.2g}")
    return ", ".join(said)
