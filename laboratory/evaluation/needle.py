"""Needles: is a fact that was planted far back still found, strategy by strategy, on the same prompts?

Greedy, stopping at the end of a turn, by exact match. Every cell (task, kind of text, length) has a control that must
miss: sink + window on those of its prompts whose fact no query from the question on can see. If the control finds one,
or there is none to miss, whatever else was counted says nothing, and nothing is recorded.

Recall of a needle is the easiest of tasks: read it together with fidelity, at the same lengths.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inference_engine.errors import InvalidArgument
from inference_engine.kv.strategies import parse_strategy
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy
from laboratory.evaluation import pictures, record
from laboratory.evaluation.arguments import bytes_table, require_at_least, strategy_argument
from laboratory.evaluation.asking import Asked, answer_all
from laboratory.evaluation.haystack import KINDS
from laboratory.evaluation.models import Target
from laboratory.evaluation.pictures import Course
from laboratory.evaluation.prompts import Prompt, Prompts
from laboratory.evaluation.sessions import check_fits
from laboratory.evaluation.tasks import TASKS, TOOL_CALL, Grade, Task
from laboratory.evaluation.trials import EvaluationVoid, pair, wilson

logger = logging.getLogger(__name__)

CONTROL = "sink_window:sink=4,window=64"
QUICK_TRIALS = 10
_TITLES = {"single": "A planted fact is found", TOOL_CALL: "A tool call is repeated"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """What was asked, and how each strategy's answers were graded: one grade a trial, in the order of trials."""

    task: str
    kind: str
    length: int
    prompts: tuple[Prompt, ...]
    eligible: tuple[int, ...]  # trials whose fact is out of the control's reach
    grades: Mapping[str, tuple[Grade, ...]]

    def hits(self, strategy: str) -> list[bool]:
        return [grade is Grade.EXACT for grade in self.grades[strategy]]

    def control_hits(self, control: str) -> int:
        """Trials of which the control found a fact though it can see none: 0, or the run is void."""
        return sum(self.grades[control][trial] in (Grade.EXACT, Grade.PART) for trial in self.eligible)

    def __str__(self) -> str:
        return f"{self.task}, {self.kind} at {self.length}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategies", nargs="+", type=strategy_argument, default=[Full()], metavar="SPEC",
        help="what to compare with full, such as sink_window:window=256 (full and the control always run)",
    )  # fmt: skip
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024], metavar="N", help="ids of a prompt")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["looped", "prose"], help="of text around facts")
    parser.add_argument("--task", nargs="+", choices=tuple(TASKS), default=["single"], help="what is planted and asked")
    parser.add_argument("--trials", type=int, default=40, metavar="N", help="of each task, kind and length")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of codes, texts and their order")
    record.add_items(parser)
    parser.add_argument(
        "--control", type=strategy_argument, default=parse_strategy(CONTROL), metavar="SPEC",
        help=f"a sink_window that must miss what lies outside it (default: {CONTROL})",
    )  # fmt: skip


def main(arguments: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Measure and return the record's payload.

    Raises EvaluationVoid if a control finds what it cannot see, InvalidArgument or NoCapacity for what cannot run.
    """
    require_at_least(arguments, trials=1, lengths=1)
    trials = min(arguments.trials, QUICK_TRIALS) if arguments.quick else arguments.trials
    if not isinstance(arguments.control, SinkWindow):
        raise InvalidArgument("control", f"must be a sink_window, got {arguments.control}")
    cells = measure(
        target,
        strategies=arguments.strategies,
        control=arguments.control,
        tasks=[TASKS[name] for name in arguments.task],
        kinds=arguments.kinds,
        lengths=arguments.lengths,
        trials=trials,
        seed=arguments.seed,
    )
    return payload(cells, target, control=arguments.control, trials=trials, seed=arguments.seed)


# -- asking -----------------------------------------------------------------------------------------------------------


def measure(
    target: Target,
    *,
    strategies: Sequence[KVStrategy],
    control: SinkWindow,
    tasks: Sequence[Task],
    kinds: Sequence[str],
    lengths: Sequence[int],
    trials: int,
    seed: int,
) -> list[Cell]:
    """Every task at every kind and length, with `full`, the control and `strategies`, side by side on one engine.

    What can be refused is refused before anything runs.
    """
    engine = target.engine
    by_name = {str(strategy): strategy for strategy in (Full(), control, *strategies)}
    longest = max(lengths) + max(task.answer_tokens for task in tasks)
    for strategy in by_name.values():
        check_fits(engine, strategy, longest)
    build = Prompts(target.texts)
    segment_tokens = engine.config.segment_tokens
    unasked = [
        _unasked(build, task, kind, length, trials, seed, control, segment_tokens)
        for task in tasks
        for kind in kinds
        for length in lengths
    ]
    cells = []
    for cell in unasked:
        grades = grade_all(target, by_name.values(), cell.prompts, answer_tokens=TASKS[cell.task].answer_tokens)
        cells.append(replace(cell, grades=grades))
        _log_cell(cells[-1])
        check_control(cells[-1], str(control))
    return cells


def grade_all(
    target: Target, strategies: Iterable[KVStrategy], prompts: Sequence[Prompt], *, answer_tokens: int
) -> dict[str, tuple[Grade, ...]]:
    """Each strategy's grades, in the order of the prompts."""
    specs = list(strategies)
    # Prompt by prompt, so that no strategy has a quieter machine or emptier pool than another.
    asked = [Asked(strategy=spec, token_ids=prompt.token_ids) for prompt in prompts for spec in specs]
    answers = answer_all(target.engine, asked, answer_tokens=answer_tokens, stop_ids=target.stop_ids)
    texts = [target.tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    return {
        str(spec): tuple(
            prompt.question.grade(text) for prompt, text in zip(prompts, texts[place :: len(specs)], strict=True)
        )
        for place, spec in enumerate(specs)
    }


def _unasked(
    build: Prompts, task: Task, kind: str, length: int, trials: int, seed: int, control: SinkWindow, segment_tokens: int
) -> Cell:
    """A cell before any strategy answered. Raises EvaluationVoid if the control could see every fact of it."""
    prompts = tuple(
        build.build(
            kind,
            length,
            task.make(trial, seed),
            task.depths(trial, trials),
            f"{seed}/{task.haystack(trial)}",
        )
        for trial in range(trials)
    )
    eligible = tuple(
        trial
        for trial, prompt in enumerate(prompts)
        if prompt.is_out_of_reach(sink=control.sink, window=control.window, segment_tokens=segment_tokens)
    )
    cell = Cell(task=task.name, kind=kind, length=length, prompts=prompts, eligible=eligible, grades={})
    if not eligible:
        raise EvaluationVoid(
            f"{cell}: all {trials} facts are within reach of {control} and a segment of {segment_tokens} tokens, so "
            "nothing must miss; ask for longer prompts, a narrower --control or smaller --segment-tokens"
        )
    return cell


def check_control(cell: Cell, control: str) -> None:
    """Raise EvaluationVoid if the control found a fact that it cannot see.

    A code of five digits is not found by chance.
    """
    if found := cell.control_hits(control):
        raise EvaluationVoid(
            f"{cell}: the control {control} found {found} of {len(cell.eligible)} facts that it cannot see; "
            "the run is void"
        )


def _log_cell(cell: Cell) -> None:
    for name in cell.grades:
        hits = cell.hits(name)
        logger.info("%s, %s: %d of %d", cell, name, sum(hits), len(hits))
    if not any(cell.hits(str(Full()))):
        logger.warning("%s: full finds nothing itself, so this cell compares nothing", cell)


# -- reporting --------------------------------------------------------------------------------------------------------


def payload(cells: Sequence[Cell], target: Target, *, control: SinkWindow, trials: int, seed: int) -> dict[str, Any]:
    """What `write_record` needs, but for the command."""
    kinds = list(dict.fromkeys(cell.kind for cell in cells))
    prompts = hashlib.sha256()
    for cell in cells:
        for prompt in cell.prompts:
            prompts.update(",".join(map(str, prompt.token_ids)).encode() + b"\n")
    return {
        "what": "Planted facts found, by exact match of greedy answers, on the same prompts for every strategy.",
        "config": {
            **target.describe(),
            "strategies": list(cells[0].grades),
            "control": str(control),
            "tasks": list(dict.fromkeys(cell.task for cell in cells)),
            "kinds": kinds,
            "lengths": list(dict.fromkeys(cell.length for cell in cells)),
            "trials": trials,
            "prompt_form": "chat template" if target.can_chat else "bare text",
            "texts_sha256": {kind: target.texts.digest(kind) for kind in kinds},
            "prompts_sha256": prompts.hexdigest(),
        },
        "seeds": [seed],
        "values": _values(cells, str(control)),
        "baseline": "full, on the same prompts",
        "tables": {
            "recall": [_recall_line(cell, name) for cell in cells for name in cell.grades],
            "against full": [_paired_line(cell, name) for cell in cells for name in cell.grades if name != str(Full())],
            "base rate": [_base_line(cell) for cell in cells],
            "control": [_control_line(cell, str(control)) for cell in cells],
            "bytes": bytes_table(target, map(parse_strategy, cells[0].grades)),
            **_notes(cells),
        },
        "items": {
            "trials": [
                {
                    "task": cell.task,
                    "kind": cell.kind,
                    "length": cell.length,
                    "fact_at": [prompt.fact_at for prompt in cell.prompts],
                    "hits": {name: cell.hits(name) for name in cell.grades},
                }
                for cell in cells
            ]
        },
    }


def _notes(cells: Sequence[Cell]) -> dict[str, list[dict[str, Any]]]:
    """A table of what trials do not say by themselves, where there is such a thing."""
    asked = {cell.task: len(cell.prompts) for cell in cells}
    lines = [
        {"task": name, "note": f"there are {most} questions; of {count} trials the others ask one again, in other text"}
        for name, count in asked.items()
        if (most := TASKS[name].questions) is not None and most < count
    ]
    return {"notes": lines} if lines else {}


def _values(cells: Sequence[Cell], control: str) -> dict[str, dict[str, Any]]:
    found = {}
    for cell in cells:
        for name in cell.grades:
            found[f"{name}: {cell}"] = record.exact(sum(cell.hits(name)), f"of {len(cell.prompts)}")
        found[f"control, facts out of its reach: {cell}"] = record.exact(
            cell.control_hits(control), f"of {len(cell.eligible)}"
        )
    return found


def draw(payload: Mapping[str, Any], folder: Path) -> None:
    """Recall over length, a line for each strategy with its Wilson interval: an image for each task and kind."""
    rows = payload["tables"]["recall"]
    for task, kind in dict.fromkeys((row["task"], row["kind"]) for row in rows):
        here = [row for row in rows if (row["task"], row["kind"]) == (task, kind)]
        names = list(dict.fromkeys(row["strategy"] for row in here))
        apart = 1.015 if len({row["length"] for row in here}) > 1 else 1.0
        courses = []
        for place, name in enumerate(names):
            mine = [row for row in here if row["strategy"] == name]
            # A little apart, or strategies that find everything would hide one another.
            xs = [row["length"] * apart ** (place - (len(names) - 1) / 2) for row in mine]
            shares = [row["hits"] / row["trials"] for row in mine]
            courses.append(Course(name, xs, shares, [(row["low"], row["high"]) for row in mine]))
        pictures.lines(
            folder / f"recall_{task}_{kind}.svg",
            title=f"{_TITLES.get(task, f'Task {task}')}, in {kind}",
            x_label="prompt, tokens",
            y_label="share found, and its interval of 95 %",
            courses=courses,
            is_log_x=True,
            x_ticks=sorted({row["length"] for row in here}),
            y_range=(0.0, 1.0),
        )


def _recall_line(cell: Cell, name: str) -> dict[str, Any]:
    hits = sum(cell.hits(name))
    trials = len(cell.prompts)
    low, high = wilson(hits, trials)
    others = Counter(grade for grade in cell.grades[name] if grade not in (Grade.EXACT, Grade.WRONG))
    return {
        **_where(cell),
        "strategy": name,
        "hits": hits,
        "trials": trials,
        "low": low,
        "high": high,
        **({"valid calls": hits + others[Grade.VALID_CALL]} if cell.task == TOOL_CALL else {}),
        "misses by kind": ", ".join(f"{count} {grade.value}" for grade, count in sorted(others.items(), key=str)),
    }


def _paired_line(cell: Cell, name: str) -> dict[str, Any]:
    paired = pair(cell.hits(str(Full())), cell.hits(name))
    return {
        **_where(cell),
        "strategy": name,
        "both": paired.both,
        "only full": paired.only_baseline,
        "only it": paired.only_other,
        "neither": paired.neither,
        "discordant": paired.discordant,
        "p": paired.p_value,
    }


def _base_line(cell: Cell) -> dict[str, Any]:
    """Whether the model itself can do the task: where full is not surely above chance, a cell compares little."""
    hits, chance = sum(cell.hits(str(Full()))), TASKS[cell.task].chance
    low, _ = wilson(hits, len(cell.prompts))
    return {
        **_where(cell),
        "full finds": hits,
        "trials": len(cell.prompts),
        "at least (95 %)": low,
        "chance": chance,
        "says something": low > chance,
    }


def _control_line(cell: Cell, name: str) -> dict[str, Any]:
    return {
        **_where(cell),
        "out of its reach": len(cell.eligible),
        "of those found": cell.control_hits(name),
        "trials": len(cell.prompts),
    }


def _where(cell: Cell) -> dict[str, Any]:
    return {"task": cell.task, "kind": cell.kind, "length": cell.length}
