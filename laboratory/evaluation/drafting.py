"""Drafting: how many draft tokens are right, what that gains, and that it changes no token.

    acceptance   drafts of one fixed length; tokens that a step commits, and how often each place of a draft is right
    speed        drafts as long as pays, beside no drafting, turn by turn after the same prompts
    identity     drafts of one fixed length; the same ids as without, greedy and sampled with the same seed?

Plain is the same engine without a drafter, K/V kept. How many draft tokens are right depends on the text, so texts
end where the model ends them, and every part has texts of each kind, greedy and sampled.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from inference_engine.decode.draft import Drafter
from inference_engine.errors import InvalidArgument
from inference_engine.kv.strategies.full import Full
from laboratory.evaluation import draft_identity, draft_speed, pictures, record
from laboratory.evaluation.arguments import require_at_least, strategy_argument
from laboratory.evaluation.asking import Asked
from laboratory.evaluation.draft_identity import AGAIN, NEAR_TIE, SAME_TOKENS
from laboratory.evaluation.draft_trials import LONGEST, PLAIN, Cell, drafting, prompts, short_prompts
from laboratory.evaluation.haystack import KINDS
from laboratory.evaluation.models import Target
from laboratory.evaluation.pictures import Bar, Course
from laboratory.evaluation.sessions import check_fits
from laboratory.evaluation.writing import Step, Text, write_all

logger = logging.getLogger(__name__)

PARTS = ("acceptance", "speed", "identity")
_QUICK = {"texts": 2, "timed_texts": 1, "rounds": 1, "identity_prompts": 6, "tokens": 24}

READING = (
    ("acceptance length", "tokens that a step commits: 1 is none accepted; steps without a draft count, too"),
    ("steps with a draft", "share of steps in which the drafter had something to say"),
    ("÷ plain", "speed over plain's in the same round, above 1 a gain; as time, below 1 a gain"),
    ("near-ties", f"texts that part where the two tokens are closer than {NEAR_TIE:g}, in logits or in scores"),
    (AGAIN, "no drafts, other sessions beside it: what rounding alone does"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drafters", nargs="+", metavar="NAME|FOLDER", help="as --drafter names one (default: what that says)"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["chat", "code", "prose"], help="of prompts")
    parser.add_argument(
        "--strategy", dest="kept", type=strategy_argument, default=Full(), metavar="SPEC",
        help="of all sessions (default: full)",
    )  # fmt: skip
    parser.add_argument("--length", type=int, default=256, metavar="N", help="ids of a prompt that is no question")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="to write after each prompt, at most")
    parser.add_argument("--texts", type=int, default=16, metavar="N", help="of each kind, for acceptance")
    parser.add_argument(
        "--draft-tokens", type=int, default=7, metavar="N", help="draft tokens in drafts of a fixed length"
    )
    parser.add_argument("--timed-texts", type=int, default=4, metavar="N", help="of each kind and batch, a round")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="that are timed")
    parser.add_argument("--batches", nargs="+", type=int, default=[1], metavar="N", help="sessions that write at once")
    parser.add_argument(
        "--identity-prompts", type=int, default=200, metavar="N", help="of all kinds, whose ids compare"
    )
    parser.add_argument("--temperature", type=float, default=0.7, help="of what is sampled")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and of sampling")


def main(arguments: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Measure and return the record's payload.

    Raises InvalidArgument, ModelError or NoCapacity, before anything runs, for what cannot be had; EvaluationVoid if a
    drafter fails.
    """
    require_at_least(
        arguments, length=1, tokens=2, texts=1, draft_tokens=1, timed_texts=1, rounds=1, batches=1, identity_prompts=1
    )
    if arguments.quick:
        for name, most in _QUICK.items():
            setattr(arguments, name, min(most, getattr(arguments, name)))
    check_fits(target.engine, arguments.kept, max(arguments.length + arguments.tokens, LONGEST + SAME_TOKENS))
    names = arguments.drafters or [target.model.drafter]
    drafters = find(target, names)
    identities = dict(zip(drafters, map(target.drafter_identity, names), strict=True))
    asked = prompts(target, arguments)
    short = short_prompts(target, arguments) if "identity" in arguments.parts else {}
    values: dict[str, dict[str, Any]] = {}
    tables: dict[str, list[dict[str, Any]]] = {
        "how to read it": [{"number": number, "says": says} for number, says in READING]
    }
    if "acceptance" in arguments.parts:
        texts = accept(target, drafters, asked, tokens=arguments.tokens, draft_tokens=arguments.draft_tokens)
        values |= acceptance_values(texts)
        tables |= {"acceptance length": acceptance_table(texts), "by place": place_table(texts)}
    if "speed" in arguments.parts:
        paces = draft_speed.time_all(
            target,
            drafters,
            asked,
            texts=arguments.timed_texts,
            tokens=arguments.tokens,
            batches=arguments.batches,
            rounds=arguments.rounds,
        )
        values |= draft_speed.values(paces)
        tables["speed"] = draft_speed.rows(paces)
    if "identity" in arguments.parts:
        same = draft_identity.compare(target, drafters, short, draft_tokens=arguments.draft_tokens)
        values |= draft_identity.values(same)
        tables |= {"identity": draft_identity.rows(same), "differences": draft_identity.differences(same)}
    return {
        "what": "How often draft tokens are right, what that gains beside no drafting, and whether any token changes.",
        "config": {
            **target.describe(),
            "threads": torch.get_num_threads(),
            "strategy": str(arguments.kept),
            "drafters": {
                name: {"kind": one.name, "longest": one.longest, **identities[name]} for name, one in drafters.items()
            },
            "parts": arguments.parts,
            "kinds": arguments.kinds,
            "prompt_tokens": arguments.length,
            "tokens": arguments.tokens,
            "texts": arguments.texts,
            "draft_tokens": arguments.draft_tokens,
            "timed_texts": arguments.timed_texts,
            "rounds": arguments.rounds,
            "batches": arguments.batches,
            "identity_prompts": arguments.identity_prompts,
            "temperature": arguments.temperature,
            "prompts_sha256": _digest(one for some in (*asked.values(), *short.values()) for one in some),
        },
        "seeds": [arguments.seed],
        "values": values,
        "baseline": "the same engine without a drafter, K/V kept, after the same prompts with the same seeds",
        "tables": tables,
    }


def draw(payload: Mapping[str, Any], folder: Path) -> None:
    """Acceptance length, how often each place is right, speed over plain's: an image each, where it was measured."""
    tables = payload["tables"]
    for name, y_label, columns in (
        ("acceptance length", "tokens a step", ("acceptance length", "low", "high")),
        ("speed", "tokens/s ÷ plain", ("speed ÷ plain", "speed low", "speed high")),
    ):
        if lines := [line for line in tables.get(name, ()) if line[columns[0]] is not None]:
            pictures.bars(
                folder / f"{name.replace(' ', '_')}.svg",
                title=f"Drafting: {y_label}",
                label=f"{y_label}; 1 is without a drafter",
                reference=1.0,
                groups={
                    kind: [Bar(_cell_name(line), *(line[column] for column in columns)) for line in own]
                    for kind, own in _by(lines, lambda line: str(line["kind"])).items()
                },
            )
    if lines := tables.get("by place"):
        pictures.lines(
            folder / "by_place.svg",
            title="Drafts whose draft tokens are right up to here",
            x_label="place in the draft",
            y_label="share of drafts that reach it",
            courses=[
                Course(name, [one["place"] for one in own], [one["right"] for one in own])
                for name, own in _by(lines, lambda line: f"{_cell_name(line)}, {line['kind']}").items()
            ],
        )


def _cell_name(line: Mapping[str, Any]) -> str:
    """The drafter; how it sampled, of how many sessions. Records of before July call the method `way`."""
    batch = line.get("batch", 1)
    method = line["method"] if "method" in line else line["way"]
    return f"{line['drafter']}, {method}" + (f", batch {batch}" if batch > 1 else "")


def _by(
    lines: Sequence[Mapping[str, Any]], read: Callable[[Mapping[str, Any]], str]
) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        found.setdefault(read(line), []).append(line)
    return found


def find(target: Target, names: Sequence[str]) -> dict[str, Drafter]:
    """The drafters asked for, by what a record calls them: a folder by its last part, `auto` by what it is.

    Raises ModelError for one that cannot be had, InvalidArgument for none and for two of a name.
    """
    found: dict[str, Drafter] = {}
    for asked in names:
        drafter = target.drafter(asked)
        if drafter is None:
            raise InvalidArgument("drafters", f"there is nothing to measure in {asked!r}: it drafts nothing")
        name = drafter.name if asked in ("auto", drafter.name) else Path(asked).name
        if name in found or name in (PLAIN, AGAIN):
            raise InvalidArgument("drafters", f"{asked!r} would be called {name!r} in the record, as another one is")
        found[name] = drafter
    return found


def _digest(asked: Iterable[Asked]) -> str:
    """SHA-256 of the prompts' ids."""
    return hashlib.sha256("\n".join(",".join(map(str, one.token_ids)) for one in asked).encode()).hexdigest()


# -- acceptance ------------------------------------------------------------------------------------------------------


def accept(
    target: Target,
    drafters: Mapping[str, Drafter],
    asked: Mapping[tuple[str, str], Sequence[Asked]],
    *,
    tokens: int,
    draft_tokens: int,
) -> dict[Cell, list[Text]]:
    """Texts written with drafts of a fixed length, up to where the model ends them."""
    found: dict[Cell, list[Text]] = {}
    for name, drafter in drafters.items():
        with drafting(target, drafter, draft_tokens) as engine:
            for (kind, method), some in asked.items():
                cell = Cell(drafter=name, kind=kind, method=method)
                found[cell] = write_all(engine, some, tokens=tokens, stop_ids=target.stop_ids)
                logger.info("%s: acceptance length %.2f", cell, acceptance_length(_steps(found[cell])))
    return found


def acceptance_length(steps: Sequence[Step]) -> float:
    """Tokens that a step commits on average; 1 where there was none."""
    return sum(step.tokens for step in steps) / len(steps) if steps else 1.0


def _steps(texts: Sequence[Text]) -> list[Step]:
    return [step for text in texts for step in text.steps]


def right_by_place(steps: Sequence[Step]) -> list[float]:
    """For each place of a draft: of the drafts that reach it, the share whose draft tokens are right up to there.

    What a draft has beyond a stop id is neither right nor wrong.
    """
    shares = []
    for place in range(max((step.judged for step in steps), default=0)):
        reaching = [step.right > place for step in steps if step.judged > place]
        shares.append(sum(reaching) / len(reaching))
    return shares


def acceptance_values(found: Mapping[Cell, Sequence[Text]]) -> dict[str, dict[str, Any]]:
    return {
        f"acceptance length, {cell}": record.exact(acceptance_length(_steps(texts)), "tokens a step")
        for cell, texts in found.items()
    }


def acceptance_table(found: Mapping[Cell, Sequence[Text]]) -> list[dict[str, Any]]:
    """A line for each cell, pooled over its steps; low and high are quartiles of its texts."""
    lines = []
    for cell, texts in found.items():
        steps = _steps(texts)
        judged = sum(step.judged for step in steps)
        of_texts = [acceptance_length(text.steps) for text in texts]
        spread = record.summarize(of_texts, "tokens a step")
        lines.append(
            {
                "drafter": cell.drafter,
                "kind": cell.kind,
                "method": cell.method,
                "acceptance length": acceptance_length(steps),
                "low": spread["low"],
                "high": spread["high"],
                "steps": len(steps),
                "steps with a draft": sum(step.drafted > 0 for step in steps) / len(steps) if steps else None,
                "draft tokens that are right": sum(step.right for step in steps) / judged if judged else None,
            }
        )
    return lines


def place_table(found: Mapping[Cell, Sequence[Text]]) -> list[dict[str, Any]]:
    return [
        {"drafter": cell.drafter, "kind": cell.kind, "method": cell.method, "place": place, "right": share}
        for cell, texts in found.items()
        for place, share in enumerate(right_by_place(_steps(texts)), start=1)
    ]
