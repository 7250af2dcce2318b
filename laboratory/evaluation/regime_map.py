"""The regime map: where each strategy pays, from what was measured and from the traffic model fitted on it.

The model (`traffic.py`) is fitted on rows of full and has to predict the others; how well it does, on rows it never
saw, is printed beside it. The recommendation (`recommendation.py`) is of measured cells only.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inference_engine.errors import InvalidArgument
from laboratory.evaluation import pictures, record
from laboratory.evaluation.pictures import Course, Panel
from laboratory.evaluation.recommendation import FULL, candidates, recommend
from laboratory.evaluation.traffic import (
    Bill,
    Step,
    fit,
    fit_finding,
    leave_one_out,
    r_squared,
    relative_errors,
    speedups,
)

logger = logging.getLogger(__name__)

_FITTED = "the time of a decode step from the bytes it moves, fitted on full alone."
_UNFITTED = "measured cells alone, for no traffic model fits them."


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
    cost = record.read_record(arguments.cost, "cost", "cost")
    needles = [record.read_record(path, "needle", "against full") for path in arguments.needle]
    fidelities = [record.read_record(path, "fidelity", "fidelity") for path in arguments.fidelity]
    for other in (*needles, *fidelities):
        for key in ("model", "dtype"):
            if other["config"][key] != cost["config"][key]:
                raise InvalidArgument(
                    "cost", f"is of {key} {cost['config'][key]!r}, another record of {other['config'][key]!r}"
                )
    rows = cost["tables"]["cost"]
    try:
        dense, others = steps_of(rows)
    except ValueError as error:
        raise InvalidArgument("cost", str(error)) from None
    terms, steps, unfitted = _model(dense, others, cost["config"]["weight_bytes"])
    reported = {"cells measured": record.exact(len(rows), "cells"), **terms}
    return {
        "what": "Where each strategy pays: " + (_UNFITTED if unfitted else _FITTED),
        "config": {
            **cost["config"],
            "measured_on": cost["machine"],
            "measured_at": cost["commit"],
            "records": [f"{one['experiment']}, {one['date']}" for one in (cost, *needles, *fidelities)],
        },
        "seeds": cost["seeds"],
        "values": reported,
        "headlines": list(reported),
        "baseline": "the measured times of the cost record; rows of full are fitted, the others predicted",
        "tables": {
            "recommendation": recommend(candidates(rows, needles, fidelities)),
            "steps": steps,
            **({"not fitted": [{"what": "traffic model", "reason": unfitted}]} if unfitted else {}),
        },
    }


def draw(payload: Mapping[str, Any], folder: Path) -> None:
    """Nothing where no model was fitted."""
    if steps := payload["tables"]["steps"]:
        plot(folder / "regime_map.svg", steps)


# -- the model -------------------------------------------------------------------------------------------------------


def _model(
    dense: Sequence[Step], others: Sequence[Step], weight_bytes: int
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]], str]:
    """Values and steps of the fitted model, or none and why. What was measured is recommended in either case."""
    try:
        bill, reported = values(dense, others, weight_bytes)
    except ValueError as error:
        logger.warning("no traffic model: %s", error)
        return {}, [], str(error)
    return reported, lines(bill, [*dense, *others]), ""


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

    With rows of several batches it is the form with sessions; how the source's form does on the same rows is reported,
    too.
    """
    source, source_unseen = fit_finding(fit(dense, weight_bytes), others)
    with_sessions = len({step.batch for step in dense}) > 1 and len({step.length for step in dense}) > 1
    bill, unseen = source, source_unseen
    if with_sessions:
        bill, unseen = fit_finding(fit(dense, weight_bytes, with_sessions=True), others)
    reported = {
        "effective bandwidth": record.exact(bill.bytes_per_second, "bytes/s"),
        "fixed cost of a step": record.exact(bill.step_seconds, "s"),
    }
    if bill.session_seconds is not None:
        reported["cost of a session in a step"] = record.exact(bill.session_seconds, "s")
    for name, seconds in bill.finding_seconds.items():
        reported[f"price of finding, {name}"] = record.exact(seconds, "s")
    reported |= _quality(bill, dense, unseen)
    if errors := leave_one_out(dense, weight_bytes, with_sessions=with_sessions):
        reported["error on dense rows, each left out of its fit"] = record.summarize(errors, "share")
        reported["error on dense rows, each left out of its fit, largest"] = record.exact(max(errors), "share")
    for name in dict.fromkeys(step.strategy for step in unseen):
        errors = relative_errors(bill, [step for step in unseen if step.strategy == name])
        reported[f"error on rows never fitted, {name}"] = record.summarize(errors, "share")
        reported[f"error on rows never fitted, {name}, largest"] = record.exact(max(errors), "share")
    if with_sessions:
        reported |= {
            f"{name}, without a cost of sessions": value
            for name, value in _quality(source, dense, source_unseen).items()
        }
    return bill, reported


def _quality(bill: Bill, dense: Sequence[Step], unseen: Sequence[Step]) -> dict[str, dict[str, Any]]:
    reported = {
        "R² on dense rows, in sample": record.exact(
            r_squared([step.seconds for step in dense], [bill.predict(step) for step in dense]), "R²"
        ),
        "error on dense rows, in sample": record.summarize(relative_errors(bill, dense), "share"),
    }
    if unseen:
        reported["error on rows never fitted"] = record.summarize(relative_errors(bill, unseen), "share")
    pairs = speedups(bill, dense, unseen)
    if len({measured for _, measured, _ in pairs}) > 1:
        fitted = r_squared([measured for _, measured, _ in pairs], [predicted for _, _, predicted in pairs])
        reported["R² on speed ÷ full of rows never fitted"] = record.exact(fitted, "R²")
    return reported


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


def plot(path: Path, reported: Sequence[Mapping[str, Any]]) -> None:
    """Draw `lines` into an image: measured against predicted, and a token's time against the context."""
    batches = sorted({line["batch"] for line in reported})
    dots, courses = [], []
    for color, name in enumerate(dict.fromkeys(line["strategy"] for line in reported)):
        own = [line for line in reported if line["strategy"] == name]
        measured, predicted = ([1e3 * line[f"{key}_seconds"] for line in own] for key in ("measured", "predicted"))
        dots.append(Course(name, predicted, measured, color=color, has_line=False, has_label=False))
        for batch in dict.fromkeys((batches[0], batches[-1])):
            is_first = batch == batches[0]
            steps = sorted((line for line in own if line["batch"] == batch), key=lambda line: int(line["length"]))
            lengths = [line["length"] for line in steps]
            for key, has_line in (("predicted", True), ("measured", False)):
                courses.append(
                    Course(
                        name,
                        lengths,
                        [1e3 * line[f"{key}_seconds"] for line in steps],
                        color=color,
                        has_line=has_line,
                        has_dots=not has_line,
                        has_label=has_line and is_first,
                        is_dashed=not is_first,
                    )
                )
    batch_words = f"batch {batches[0]}" + (f", and {batches[-1]} dashed" if len(batches) > 1 else "")
    left = Panel("predicted, ms", "a decode step measured, ms", dots, is_log_x=True, is_log_y=True, is_diagonal=True)
    right = Panel(
        "context, tokens",
        f"ms a step, dots measured, lines predicted; {batch_words}",
        courses,
        is_log_x=True,
        is_log_y=True,
        x_ticks=sorted({line["length"] for line in reported}),
    )
    pictures.panels(path, title="Decode step: measured against predicted", shown=[left, right])
