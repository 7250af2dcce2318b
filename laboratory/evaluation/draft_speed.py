"""The speed of drafting: drafts as long as pays, beside no drafting, turn by turn after the same prompts.

    prompt 1   plain  a  b      prompt 2   a  b  plain      prompt 3   b  plain  a

Times are of whole Generates, prefill and all, and of decoding alone. What the machine does meanwhile happens to all,
and a ratio is of one round.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from inference_engine.decode.draft import Drafter
from inference_engine.engine import Engine
from laboratory.evaluation import record
from laboratory.evaluation.asking import Asked
from laboratory.evaluation.draft_trials import PLAIN, Cell, drafting
from laboratory.evaluation.models import Target
from laboratory.evaluation.sessions import turned
from laboratory.evaluation.trials import EvaluationVoid
from laboratory.evaluation.writing import Written, write

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """What one round took. decode_*: once every session had its first token."""

    tokens: int
    seconds: float
    decode_tokens: int
    decode_seconds: float
    drafted: int
    accepted: int

    @property
    def token_seconds(self) -> float:
        return self.seconds / self.tokens

    @property
    def decode_token_seconds(self) -> float:
        if not self.decode_tokens:
            raise EvaluationVoid("the model ends every text at its first token: there is no decoding to be timed")
        return self.decode_seconds / self.decode_tokens


def time_all(
    target: Target,
    drafters: Mapping[str, Drafter],
    asked: Mapping[tuple[str, str], Sequence[Asked]],
    *,
    texts: int,
    tokens: int,
    batches: Sequence[int],
    rounds: int,
) -> dict[Cell, list[Pace]]:
    """Rounds by cell, plain among them; drafts are as long as pays. Prompts go round in turns: every
    drafter continues a prompt before the next.

    A first group of each cell warms up and is not kept.
    """
    found: dict[Cell, list[Pace]] = {}
    with ExitStack() as stack:
        engines = {PLAIN: target.engine}
        engines |= {name: stack.enter_context(drafting(target, one, 0)) for name, one in drafters.items()}
        for number in range(rounds + 1):
            for (kind, method), some in asked.items():
                for batch in batches:
                    groups = [some[start : start + batch] for start in range(0, max(1, texts // batch) * batch, batch)]
                    paces = _round(target, engines, groups if number else groups[:1], tokens, number)
                    for name, pace in paces.items():
                        cell = Cell(drafter=name, kind=kind, method=method, batch=batch)
                        per_token = 1e3 * pace.token_seconds
                        logger.info("round %d of %d, %s: %.2f ms a token", number, rounds, cell, per_token)
                        if number:
                            found.setdefault(cell, []).append(pace)
    return found


def _round(
    target: Target, engines: Mapping[str, Engine], groups: Sequence[Sequence[Asked]], tokens: int, number: int
) -> dict[str, Pace]:
    written: dict[str, list[Written]] = {name: [] for name in engines}
    for place, group in enumerate(groups):
        for name in turned(list(engines), number + place):
            written[name].append(write(engines[name], group, tokens=tokens, stop_ids=target.stop_ids))
    return {
        name: Pace(
            tokens=sum(one.tokens for one in own),
            seconds=sum(one.seconds for one in own),
            decode_tokens=sum(one.decode_tokens for one in own),
            decode_seconds=sum(one.decode_seconds for one in own),
            drafted=sum(text.drafted for one in own for text in one.texts),
            accepted=sum(text.accepted for one in own for text in one.texts),
        )
        for name, own in written.items()
    }


def _over_plain(found: Mapping[Cell, Sequence[Pace]], cell: Cell, attribute: str) -> list[float]:
    """Round by round, the cell's seconds over plain's."""
    pairs = zip(found[cell], found[replace(cell, drafter=PLAIN)], strict=True)
    return [getattr(one, attribute) / getattr(plain, attribute) for one, plain in pairs]


def values(found: Mapping[Cell, Sequence[Pace]]) -> dict[str, dict[str, Any]]:
    """Whole Generates, prefill and all, and decoding alone; ratios within a round."""
    reported = {}
    for cell, paces in found.items():
        reported[f"speed, {cell}"] = record.summarize([1 / one.token_seconds for one in paces], "tokens/s")
        reported[f"decode speed, {cell}"] = record.summarize(
            [1 / one.decode_token_seconds for one in paces], "tokens/s"
        )
        if cell.drafter != PLAIN:
            for words, attribute in (("", "token_seconds"), ("decode ", "decode_token_seconds")):
                times = _over_plain(found, cell, attribute)
                reported[f"{words}speed ÷ plain, {cell}"] = record.summarize([1 / one for one in times], "ratio")
                reported[f"{words}time ÷ plain, {cell}"] = record.summarize(times, "ratio")
    return reported


def rows(found: Mapping[Cell, Sequence[Pace]]) -> list[dict[str, Any]]:
    """A line for each cell: medians of rounds; quartiles of the ratio."""
    lines = []
    for cell, paces in found.items():
        line: dict[str, Any] = {"drafter": cell.drafter, "kind": cell.kind, "method": cell.method, "batch": cell.batch}
        line["tokens/s"] = record.summarize([1 / one.token_seconds for one in paces], "")["median"]
        line["tokens/s, decoding"] = record.summarize([1 / one.decode_token_seconds for one in paces], "")["median"]
        times = _over_plain(found, cell, "token_seconds") if cell.drafter != PLAIN else []
        speed = record.summarize([1 / one for one in times], "") if times else {}
        line |= {"speed ÷ plain": speed.get("median"), "speed low": speed.get("low"), "speed high": speed.get("high")}
        line["time ÷ plain"] = record.summarize(times, "")["median"] if times else None
        tokens, drafted = sum(one.tokens for one in paces), sum(one.drafted for one in paces)
        line["draft tokens a token"] = drafted / tokens
        line["draft tokens that are right"] = sum(one.accepted for one in paces) / drafted if drafted else None
        lines.append(line)
    return lines
