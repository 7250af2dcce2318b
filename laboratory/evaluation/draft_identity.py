"""Whether drafting changes a token: texts written with drafts beside plain ones, after the same prompts and seeds.

Where an engine is fixed in shape none may differ. Elsewhere rounding may turn a token whatever is drafted, so plain is
run a second time, in another batch, and where two texts differ first, the distance of their tokens is reported:

    greedy     the distance of the two logits
    sampled    the distance of the two scores that a draw compares: logit ÷ temperature + noise (`kernels/sampling.py`)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from inference_engine.decode.draft import Drafter
from inference_engine.engine import Engine
from inference_engine.kernels.gumbel_noise import key, noise
from inference_engine.types import Sampling
from laboratory.evaluation import record
from laboratory.evaluation.asking import Asked
from laboratory.evaluation.draft_trials import PLAIN, drafting
from laboratory.evaluation.models import Target
from laboratory.evaluation.passages import Passage, force
from laboratory.evaluation.writing import SIDE_BY_SIDE, Text, write_all

logger = logging.getLogger(__name__)

AGAIN = f"{PLAIN}, in another batch"
NEAR_TIE = 1e-3
SAME_TOKENS = 48  # that follow each prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where a text first parts from plain's. margin: how close the two tokens were, as NEAR_TIE says."""

    prompt: int
    place: int
    margin: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """Texts of one drafter, or of plain again, beside plain's. drafted, accepted: draft tokens in all of them."""

    prompts: int
    differences: tuple[Difference, ...]
    drafted: int
    accepted: int

    @property
    def near_ties(self) -> int:
        return sum(one.margin < NEAR_TIE for one in self.differences)


def compare(
    target: Target, drafters: Mapping[str, Drafter], asked: Mapping[str, Sequence[Asked]], *, draft_tokens: int
) -> dict[tuple[str, str], Compared]:
    """By drafter, or AGAIN, and method of choosing tokens. Nothing ends a text but its length."""
    plain = {method: write_all(target.engine, some, tokens=SAME_TOKENS) for method, some in asked.items()}
    found: dict[tuple[str, str], Compared] = {}
    for method, some in asked.items():
        shift = min(SIDE_BY_SIDE // 2, len(some) // 2)
        again = write_all(target.engine, [*some[shift:], *some[:shift]], tokens=SAME_TOKENS)
        back = len(some) - shift
        found[AGAIN, method] = compare_texts(target.engine, some, plain[method], [*again[back:], *again[:back]])
    for name, drafter in drafters.items():
        with drafting(target, drafter, draft_tokens) as engine:
            for method, some in asked.items():
                texts = write_all(engine, some, tokens=SAME_TOKENS)
                found[name, method] = compare_texts(target.engine, some, plain[method], texts)
    return found


def compare_texts(engine: Engine, asked: Sequence[Asked], plain: Sequence[Text], other: Sequence[Text]) -> Compared:
    """How `other` differs from `plain`, prompt by prompt; margins are those of plain's logits, read once more."""
    differences = []
    for number, (one, first, second) in enumerate(zip(asked, plain, other, strict=True)):
        pairs = enumerate(zip(first.token_ids, second.token_ids, strict=True))
        if (place := next((place for place, (one_id, other_id) in pairs if one_id != other_id), None)) is not None:
            margin = margin_at(engine, one, first.token_ids[: place + 1], second.token_ids[place])
            differences.append(Difference(prompt=number, place=place, margin=margin))
    compared = Compared(
        prompts=len(asked),
        differences=tuple(differences),
        drafted=sum(text.drafted for text in other),
        accepted=sum(text.accepted for text in other),
    )
    logger.info("%d of %d texts differ, %d near-ties", len(differences), len(asked), compared.near_ties)
    return compared


def margin_at(engine: Engine, asked: Asked, written: Sequence[int], other: int) -> float:
    """How close the last token of `written`, which followed the prompt, was to the token `other` in its place."""
    passage = Passage(kind="written", prefix=asked.token_ids, forced=tuple(written))
    found: list[float] = []
    at = len(asked.token_ids) + len(written) - 1
    force(engine, asked.strategy, passage, partial(_note_margin, found, asked.sampling, at, written[-1], other))
    (margin,) = found
    return margin


def _note_margin(
    found: list[float], sampling: Sampling, at: int, own: int, other: int, position: int, logits: Tensor
) -> None:
    if position <= at < position + len(logits):
        found.append(margin(logits[at - position], sampling, at, own, other))


@torch.inference_mode()
def margin(logits: Tensor, sampling: Sampling, position: int, own: int, other: int) -> float:
    """Between two tokens, of which `own` was chosen for `position`, from logits [V]; a draw needs its seed.

    Filters count for nothing here: a token that one of them cuts has the score it would have without.
    """
    ids = torch.tensor([own, other], device=logits.device)
    scores = logits[ids]
    if not sampling.is_greedy:
        assert sampling.seed is not None
        place = torch.tensor(key(sampling.seed, position), device=logits.device)
        scores = scores.double() / sampling.temperature + noise(place, ids)
    return abs(float(scores[0] - scores[1]))


def values(found: Mapping[tuple[str, str], Compared]) -> dict[str, dict[str, Any]]:
    reported = {}
    for (name, method), one in found.items():
        cell = f"{name}, {method}"
        parted = len(one.differences)
        reported[f"same ids as plain, {cell}"] = record.exact((one.prompts - parted) / one.prompts, "share")
        reported[f"differ beyond near-ties, {cell}"] = record.exact(parted - one.near_ties, f"of {one.prompts}")
    return reported


def rows(found: Mapping[tuple[str, str], Compared]) -> list[dict[str, Any]]:
    return [
        {
            "drafter": name,
            "method": method,
            "prompts": one.prompts,
            "same ids": one.prompts - len(one.differences),
            "near-ties": one.near_ties,
            "other differences": len(one.differences) - one.near_ties,
            "largest margin": max((each.margin for each in one.differences), default=None),
            "draft_tokens": one.drafted,
            "right": one.accepted,
        }
        for (name, method), one in found.items()
    ]


def differences(found: Mapping[tuple[str, str], Compared]) -> list[dict[str, Any]]:
    return [
        {"drafter": name, "method": method, "prompt": each.prompt, "place": each.place, "margin": each.margin}
        for (name, method), one in found.items()
        for each in one.differences
    ]
