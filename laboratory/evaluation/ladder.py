"""The ladder: what each strategy finds, how far it is from full, what it holds and how fast it is, length by length.

    length   strategy      single  multi  values …   KL   bytes   first token   tokens/s
     1,400   full
             sink_window
     5,600   full …

Recall is `needle`'s, with its control that must miss in every cell; KL is `fidelity`'s; bytes and times are `cost`'s,
in turns with full. Beyond `--trained` tokens there are bytes and times only: nothing a model says there means anything.
`--random SHAPE` makes a model of a real one's shape with random weights and measures just these (`bytes_and_speed.py`).

Baselines from papers: `sink_window` is StreamingLLM (arXiv 2309.17453); `--published` adds Quest, Loki, SnapKV and
ShadowKV (`published_methods.py`), on the same prompts and passages, with their bytes and without times.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inference_engine.errors import InvalidArgument
from inference_engine.kv.strategies import parse_strategy
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from laboratory.evaluation import bytes_and_speed, cost, fidelity, needle, published, record
from laboratory.evaluation.arguments import geometry_of, require_at_least, strategy_argument
from laboratory.evaluation.divergence import Scores
from laboratory.evaluation.haystack import KINDS
from laboratory.evaluation.made_models import SHAPES, MadeTarget
from laboratory.evaluation.models import Target
from laboratory.evaluation.passages import Passage
from laboratory.evaluation.published_methods import METHODS, Method, held_bytes
from laboratory.evaluation.tasks import TASKS, Grade
from laboratory.evaluation.timing import Run

logger = logging.getLogger(__name__)

LENGTHS = (1400, 5600, 21_000, 64_000, 100_000)
RECALL = ("single", "multi", "values", "variables", "aggregation")
_TIMED_TEXT = 20_000  # ids
_QUICK = {"trials": 5, "count": 32, "rounds": 1, "tokens": 8, "prefills": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategies", nargs="+", type=strategy_argument, default=[SinkWindow(sink=4, window=256)], metavar="SPEC",
        help="what to compare with full, such as gather:scorer=bounds (full and the control always run)",
    )  # fmt: skip
    parser.add_argument(
        "--published", nargs="+", choices=tuple(METHODS), default=[], help="methods of papers, on a model on torch"
    )
    parser.add_argument(
        "--published-budget", type=int, default=800, metavar="N", help="of a prompt, that these read or keep"
    )
    parser.add_argument(
        "--random", choices=tuple(SHAPES),
        help="instead of a model: this shape with random weights, made in memory; bytes and times only, on random ids",
    )  # fmt: skip
    parser.add_argument(
        "--prefills", type=int, default=2, metavar="N",
        help="with --random: of each strategy and length; the first is not counted if there are more",
    )  # fmt: skip
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), metavar="N", help="ids of a history")
    parser.add_argument(
        "--trained", type=int, metavar="N",
        help="ids up to which recall and KL are measured (default: what the model was trained for)",
    )  # fmt: skip
    parser.add_argument("--task", nargs="+", choices=tuple(TASKS), default=list(RECALL), help="what is asked")
    parser.add_argument("--kind", choices=KINDS, default="prose", help="of text around facts, forced and timed")
    parser.add_argument("--trials", type=int, default=40, metavar="N", help="of each task and length")
    parser.add_argument("--count", type=int, default=128, metavar="N", help="ids that are forced for KL, of each text")
    parser.add_argument("--texts", type=int, default=2, metavar="N", help="that KL is measured on, at every length")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="timed, after one that is not")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="that are decoded in a round")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of codes and texts")
    parser.add_argument(
        "--control", type=strategy_argument, default=parse_strategy(needle.CONTROL), metavar="SPEC",
        help=f"a sink_window that must miss what lies outside it (default: {needle.CONTROL})",
    )  # fmt: skip


def main(
    arguments: argparse.Namespace,
    target: Target | MadeTarget,
    save: Callable[[dict[str, Any]], object] = lambda _: None,
) -> dict[str, Any]:
    """Measure and return the record's payload.

    save: called with what there is whenever a length is done. Interrupted, it returns that. Raises EvaluationVoid if a
    control finds what it cannot see, InvalidArgument or NoCapacity for what cannot run.
    """
    require_at_least(
        arguments, lengths=1, trials=1, count=1, texts=1, rounds=1, tokens=2, prefills=1, published_budget=1
    )
    if not isinstance(arguments.control, SinkWindow):
        raise InvalidArgument("control", f"must be a sink_window, got {arguments.control}")
    if arguments.quick:
        for name, most in _QUICK.items():
            setattr(arguments, name, min(most, getattr(arguments, name)))
    if isinstance(target, MadeTarget):
        return bytes_and_speed.main(arguments, target, save)
    methods = [METHODS[name](arguments.published_budget) for name in arguments.published]
    if methods:
        published.seam_of(target)  # what is refused is refused before anything runs
    trained = target.engine.info().facts.trained_positions if arguments.trained is None else arguments.trained
    further = max(arguments.count, *(TASKS[name].answer_tokens for name in arguments.task))
    lengths = sorted(set(arguments.lengths))
    done: list[_Length] = []
    for length in lengths:
        try:
            done.append(_measure(arguments, target, methods, length, is_spoken=length + further <= trained))
        except KeyboardInterrupt:
            if not done:
                raise
            logger.warning("interrupted at %d tokens: the record has the lengths before", length)
            break
        save(_reported(arguments, target, methods, done, trained))
    return _reported(arguments, target, methods, done, trained)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Length:
    """What was measured at one length; beyond the trained one only `runs`."""

    length: int
    cells: Sequence[needle.Cell]
    scores: Mapping[fidelity.Cell, list[Scores]]
    published: Sequence[Mapping[str, Any]]
    runs: dict[cost.Cell, list[Run]]
    left_out: Mapping[str, str]


def _measure(
    arguments: argparse.Namespace, target: Target, methods: Sequence[Method], length: int, *, is_spoken: bool
) -> _Length:
    strategies, kind, seed = arguments.strategies, arguments.kind, arguments.seed
    cells: list[needle.Cell] = []
    scores: dict[fidelity.Cell, list[Scores]] = {}
    left_out: dict[str, str] = {}
    others: list[dict[str, Any]] = []
    if is_spoken:
        cells = needle.measure(
            target,
            strategies=strategies,
            control=arguments.control,
            tasks=[TASKS[name] for name in arguments.task],
            kinds=[kind],
            lengths=[length],
            trials=arguments.trials,
            seed=seed,
        )
        passages, left_out = fidelity.cut_all(
            target.texts, [kind], [length], count=arguments.count, texts=arguments.texts, seed=seed
        )
        scores, refused = fidelity.measure(target.engine, strategies, passages)
        left_out = left_out | refused
        others = _published(target, methods, cells, passages, kind=kind, seed=seed, trials=arguments.trials)
    # Text is read round and round: beyond what there is of a kind, a time does not depend on the words.
    text = target.texts.filler(kind, min(max(arguments.lengths), _TIMED_TEXT), seed)
    runs, untimed = cost.measure(
        target.engine, strategies, text, lengths=[length], rounds=arguments.rounds, tokens=arguments.tokens
    )
    return _Length(
        length=length, cells=cells, scores=scores, published=others, runs=runs, left_out={**left_out, **untimed}
    )


def _reported(
    arguments: argparse.Namespace, target: Target, methods: Sequence[Method], done: Sequence[_Length], trained: int
) -> dict[str, Any]:
    seed, kind, trials, strategies = arguments.seed, arguments.kind, arguments.trials, arguments.strategies
    cells = [cell for one in done for cell in one.cells]
    scores = {cell: found for one in done for cell, found in one.scores.items()}
    runs = {cell: found for one in done for cell, found in one.runs.items()}
    others = [row for one in done for row in one.published]
    lengths = [one.length for one in done]
    names = dict.fromkeys(map(str, (Full(), *strategies, arguments.control)))
    rows = _rows(list(names), cells, fidelity.rows(scores), cost.rows(runs), lengths, trials)
    recalled = needle.payload(cells, target, control=arguments.control, trials=trials, seed=seed) if cells else None
    left_out = {cell: reason for one in done for cell, reason in one.left_out.items()}
    left_out |= {f"all at {length}": "ended before it" for length in set(arguments.lengths) - set(lengths)}
    return {
        "what": "Recall, KL, bytes, first token and decode of each strategy beside full, length by length.",
        "config": {
            **target.describe(),
            "strategies": [str(one) for one in (Full(), *strategies)],
            "control": str(arguments.control),
            "lengths": lengths,
            "recall and KL up to": trained,
            "tasks": arguments.task,
            "kind": kind,
            "trials": trials,
            "forced_tokens": arguments.count,
            "texts": arguments.texts,
            "rounds": arguments.rounds,
            "tokens": arguments.tokens,
            "published": [str(method) for method in methods],
            "texts_sha256": target.texts.digest(kind),
        },
        "seeds": [seed],
        "values": {
            **(recalled["values"] if recalled else {}),
            **fidelity.values(scores, seed=seed),
            **cost.values(runs),
            **_published_values(others),
        },
        "baseline": "full, on the same prompts and passages and in the same rounds",
        "tables": {
            "ladder": rows,
            **({"as published": others} if others else {}),
            **({name: recalled["tables"][name] for name in ("base rate", "control")} if recalled else {}),
            "left out": [{"cell": cell, "reason": reason} for cell, reason in left_out.items()],
        },
    }


def _published(
    target: Target,
    methods: Sequence[Method],
    cells: Sequence[needle.Cell],
    passages: Sequence[Passage],
    *,
    kind: str,
    seed: int,
    trials: int,
) -> list[dict[str, Any]]:
    """A line for each length and method: what `_rows` has, but for times."""
    geometry = geometry_of(target)
    published.calibrate(target, methods, kind, seed)
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for cell in cells if methods else ():
        for name, grades in published.grade_all(target, methods, cell.prompts, cell.task).items():
            found = sum(grade is Grade.EXACT for grade in grades)
            logger.info("%s, %s as published: %d of %d", cell, name, found, trials)
            row = rows.setdefault((cell.length, name), {"length": cell.length, "method": name})
            row |= {cell.task: found, "trials": trials}
    for length in dict.fromkeys(len(passage.prefix) for passage in passages if methods):
        some = [passage for passage in passages if len(passage.prefix) == length]
        for name, parts in published.divergences(target, methods, some).items():
            rows[length, name]["KL"] = float(np.concatenate(parts).mean())
    for length, name in rows:
        (method,) = (one for one in methods if str(one) == name)
        on, off = held_bytes(method, geometry, length)
        rows[length, name] |= {"bytes": on, "bytes off the device": off}
    return list(rows.values())


def _published_values(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        where = f"{row['method']}, as published, at {row['length']}"
        found |= {f"{where}: {task}": record.exact(row[task], f"of {row['trials']}") for task in TASKS if task in row}
        if "KL" in row:
            found[f"KL to full, mean, {where}"] = record.exact(row["KL"], "nats")
    return found


def _rows(
    names: Sequence[str],
    cells: Sequence[needle.Cell],
    fidelity_rows: Sequence[Mapping[str, Any]],
    cost_rows: Sequence[Mapping[str, Any]],
    lengths: Sequence[int],
    trials: int,
) -> list[dict[str, Any]]:
    """A line for each length and strategy that ran, in the order of `names`. What was not measured there is None."""
    kl = {(row["length"], row["strategy"]): row["kl"] for row in fidelity_rows}
    costs = {(row["length"], row["strategy"]): row for row in cost_rows}
    found = {(cell.length, name, cell.task): sum(cell.hits(name)) for cell in cells for name in cell.grades}
    parts = {
        (cell.length, name, f"{cell.task}, in part"): sum(grade is Grade.PART for grade in grades)
        for cell in cells
        for name, grades in cell.grades.items()
        if any(Grade.PART in others for others in cell.grades.values())
    }
    found |= parts
    tasks = dict.fromkeys((*(cell.task for cell in cells), *(task for _, _, task in parts)))
    rows = []
    for length in lengths:
        for name in names:
            one = costs.get((length, name))
            if one is None and (length, name) not in kl and not any((length, name, task) in found for task in tasks):
                continue
            rows.append(
                {
                    "length": length,
                    "strategy": name,
                    **{task: found.get((length, name, task)) for task in tasks},
                    **({"trials": trials} if tasks else {}),
                    "KL": kl.get((length, name)),
                    "bytes": None if one is None else one["kv_bytes"],
                    "bytes at most": None if one is None else one["kv_peak_bytes"],
                    "first token seconds": None if one is None else one["first_token_seconds"],
                    "tokens/s": None if one is None else 1 / one["token_seconds"],
                }
            )
    return rows
