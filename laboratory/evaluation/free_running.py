"""Free running: what a strategy writes when it is left alone, beside what full writes after the same prompt.

    prompt of a kind of text | some 2,000 tokens, greedy, or sampled with the seed that full samples with

Fidelity judges each token on a text that is given. Here a strategy goes on from its own words, so small errors may feed
on themselves. That a text parts from full's is no harm by itself: full, run again among other sessions, parts from
itself where rounding turns a near-tie, and that is the yardstick. Harm shows in the text: it repeats itself more than
full's does, or full finds it less likely. What ends a turn ends nothing here, so that every text has the same length.
"""

from __future__ import annotations

import argparse
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument, NonFiniteLogits
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Sampling
from laboratory.evaluation.arguments import require_at_least, strategy_argument
from laboratory.evaluation.asking import GREEDY, Asked, answer_all
from laboratory.evaluation.divergence import FULL, Floats
from laboratory.evaluation.haystack import KINDS
from laboratory.evaluation.models import Target
from laboratory.evaluation.passages import Passage, describe, force, text_passage
from laboratory.evaluation.record import exact, save_figure, summarize
from laboratory.evaluation.sessions import check_fits

logger = logging.getLogger(__name__)

REPEATED = f"{FULL}, repeated"
GRAM = 4
PARTS = 8  # of a text, to see how it goes on
LOOPING = 0.25  # of a text's last part: fewer distinct runs of GRAM tokens than this share is a loop
_ELEMENTS_AT_ONCE = 2**24  # of logits
_QUICK_TOKENS = 200

READING = (
    ("first difference", "tokens that are the same as full's before the first other one; rounding alone does this too"),
    ("distinct 4-grams", "runs of four tokens that are not repeats, as a share; near 0 the text goes round in circles"),
    ("texts that loop", f"texts in whose last part fewer than {LOOPING:.0%} of those runs are distinct"),
    ("perplexity under full", "how surprised full is by the text; far above full's own: drift; far below: a loop"),
    ("÷ full", "that perplexity over the one of full's own text after the same prompt, text by text"),
    ("unusable tokens", "share of tokens asked for that were not written, or that full gives no finite probability"),
    ("blank texts", "texts with nothing to read in them"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Where texts belong: one strategy, the kind of their prompts, and how tokens were chosen."""

    strategy: str
    kind: str
    method: str

    def __str__(self) -> str:
        return f"{self.strategy}, {self.kind}, {self.method}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Text:
    """What was written: `losses` [n] are of its tokens under full, in nats; `same` is how many began as full's."""

    token_ids: tuple[int, ...]
    losses: Floats
    same: int
    is_blank: bool

    @property
    def perplexity(self) -> float | None:
        return perplexity(self.losses)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategies", nargs="+", type=strategy_argument, required=True, metavar="SPEC",
        help="what to compare with full, which always runs, twice",
    )  # fmt: skip
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["chat", "prose", "code"], help="of prompts")
    parser.add_argument("--length", type=int, default=1024, metavar="N", help="ids of a prompt")
    parser.add_argument("--tokens", type=int, default=2000, metavar="N", help="to write after each prompt")
    parser.add_argument("--texts", type=int, default=2, metavar="N", help="prompts of each kind")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the texts that are sampled")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and of sampling")


def main(arguments: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Measure and return the record's payload.

    Raises InvalidArgument or NoCapacity, before anything runs, for what some strategy cannot hold.
    """
    require_at_least(arguments, length=1, tokens=GRAM * PARTS, texts=1)
    tokens, texts = (_QUICK_TOKENS, 1) if arguments.quick else (arguments.tokens, arguments.texts)
    methods = {"greedy": [GREEDY] * texts, f"at {arguments.temperature:g}": _sampled(arguments, texts)}
    most = target.engine.config.max_generate_tokens
    if tokens > most:
        raise InvalidArgument("tokens", f"must be at most {most}, got {tokens}")
    for strategy in (Full(), *arguments.strategies):
        check_fits(target.engine, strategy, arguments.length + tokens)
    prompts = {
        kind: [
            text_passage(target.texts, kind, arguments.length, 1, f"{arguments.seed}/{number}").prefix
            for number in range(texts)
        ]
        for kind in arguments.kinds
    }
    found = measure(target, arguments.strategies, prompts, methods, tokens)
    return {
        "what": "Texts that strategies write on their own, beside those of full after the same prompts.",
        "config": describe(
            target,
            arguments.strategies,
            arguments.kinds,
            prompt_tokens=arguments.length,
            tokens=tokens,
            texts=texts,
            methods=list(methods),
        ),
        "seeds": [arguments.seed],
        "values": values(found, tokens),
        "baseline": "full, after the same prompts with the same seeds",
        "tables": {
            "how to read it": [{"number": number, "says": says} for number, says in READING],
            "free running": rows(found, tokens),
            "course": [line for cell, written in found.items() for line in _course(cell, written, tokens)],
        },
    }


def draw(payload: Mapping[str, Any], folder: Path) -> None:
    """Perplexity under full and distinct 4-grams along the text: one image by kind and method, one line by strategy."""
    from matplotlib.figure import Figure  # drawing is optional, and slow to import

    lines = payload["tables"]["course"]
    for kind, method in dict.fromkeys((line["kind"], line["method"]) for line in lines):
        figure = Figure(figsize=(8, 7), layout="constrained")
        above, below = figure.subplots(2, sharex=True)
        here = [line for line in lines if (line["kind"], line["method"]) == (kind, method)]
        for name in dict.fromkeys(line["strategy"] for line in here):
            own = [line for line in here if line["strategy"] == name and line["perplexity under full"] is not None]
            ends = [line["to"] for line in own]
            above.plot(ends, [line["perplexity under full"] for line in own], marker=".", label=name, linewidth=1.2)
            below.plot(ends, [line["distinct 4-grams"] for line in own], marker=".", linewidth=1.2)
        above.set(title=f"Left alone after {kind}, {method}", ylabel="perplexity under full", yscale="log")
        below.set(xlabel="tokens written", ylabel="distinct 4-grams, share", ylim=(-0.03, 1.03))
        for axes in (above, below):
            axes.grid(alpha=0.3)
        above.legend(fontsize="x-small")
        save_figure(figure, folder / f"free_running_{kind}_{method.replace(' ', '_')}.png")


# -- writing ----------------------------------------------------------------------------------------------------------


def measure(
    target: Target,
    strategies: Sequence[KVStrategy],
    prompts: Mapping[str, Sequence[tuple[int, ...]]],
    methods: Mapping[str, Sequence[Sampling]],
    tokens: int,
) -> dict[Cell, list[Text]]:
    """The texts by cell, one for each prompt. `methods` say how tokens are chosen after each prompt of a kind.

    All are written side by side, then each is read by full.
    """
    named = [(FULL, Full()), (REPEATED, Full()), *((str(one), one) for one in strategies if str(one) != FULL)]
    asked = [
        (Cell(strategy=name, kind=kind, method=method), Asked(strategy=strategy, token_ids=prompt, sampling=sampling))
        for method, samplings in methods.items()
        for kind, own in prompts.items()
        for prompt, sampling in zip(own, samplings, strict=True)
        for name, strategy in named
    ]
    answers = answer_all(
        target.engine,
        [one for _, one in asked],
        answer_tokens=tokens,
        stop_ids=(),
        may_fail_with=(NonFiniteLogits,),
    )
    found: dict[Cell, list[Text]] = {}
    baseline: list[int] = []
    for (cell, one), answer in zip(asked, answers, strict=True):
        baseline = answer if cell.strategy == FULL else baseline  # it comes first after each prompt
        text = Text(
            token_ids=tuple(answer),
            losses=read(target.engine, one.token_ids, answer),
            same=agreed(baseline, answer),
            is_blank=not target.tokenizer.decode(answer, skip_special_tokens=True).strip(),
        )
        logger.info("%s: as full for %d tokens, then perplexity %s", cell, text.same, text.perplexity)
        found.setdefault(cell, []).append(text)
    return found


def read(engine: Engine, prompt: Sequence[int], written: Sequence[int]) -> Floats:
    """The loss of each written token under full, in nats [n]."""
    if not written:
        return np.empty(0)
    passage = Passage(kind="written", prefix=tuple(prompt), forced=tuple(written))
    losses: list[Tensor] = []
    force(engine, Full(), passage, partial(_take_losses, passage, losses))
    return torch.cat(losses).cpu().numpy()


@torch.inference_mode()
def _take_losses(passage: Passage, losses: list[Tensor], position: int, logits: Tensor) -> None:
    for piece in torch.split(logits, max(1, _ELEMENTS_AT_ONCE // logits.shape[-1])):
        place = position - len(passage.prefix)
        forced = torch.tensor(passage.forced[place : place + len(piece)], device=logits.device)
        losses.append(torch.nn.functional.cross_entropy(piece.float(), forced, reduction="none").double())
        position += len(piece)


def _sampled(arguments: argparse.Namespace, texts: int) -> list[Sampling]:
    first = arguments.seed * 1000
    return [Sampling(temperature=arguments.temperature, seed=first + number) for number in range(texts)]


# -- counting ---------------------------------------------------------------------------------------------------------


def agreed(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


def distinct(token_ids: Sequence[int]) -> float:
    """Runs of GRAM ids that are not repeats of earlier ones, as a share; 1 where there is no such run."""
    runs = [tuple(token_ids[place : place + GRAM]) for place in range(len(token_ids) - GRAM + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0


def perplexity(losses: Floats) -> float | None:
    """exp of the mean of the finite losses; None where there are none."""
    finite = losses[np.isfinite(losses)]
    return float(np.exp(finite.mean())) if len(finite) else None


def unusable(texts: Sequence[Text], tokens: int) -> float:
    """Share of the tokens asked for that were not written or have no finite loss."""
    return 1.0 - sum(int(np.isfinite(text.losses).sum()) for text in texts) / (tokens * len(texts))


def loops(text: Text, tokens: int) -> bool:
    """Whether the last part of the text goes round in circles."""
    return distinct(text.token_ids[-(tokens // PARTS) :]) < LOOPING


def rows(found: Mapping[Cell, Sequence[Text]], tokens: int) -> list[dict[str, Any]]:
    """A line for each cell: the numbers that tables are made of, pooled over its texts."""
    lines = []
    for cell, texts in found.items():
        ratios = _ratios(found, cell)
        same = [text.same for text in texts]
        lines.append(
            {
                "strategy": cell.strategy,
                "kind": cell.kind,
                "method": cell.method,
                "texts": len(texts),
                "first difference": float(np.median(same)),
                "earliest": min(same),
                "distinct 4-grams": float(np.mean([distinct(text.token_ids) for text in texts])),
                "texts that loop": sum(loops(text, tokens) for text in texts),
                "perplexity under full": perplexity(np.concatenate([text.losses for text in texts])),
                "÷ full": float(np.exp(np.log(ratios).mean())) if ratios else None,
                "unusable tokens": unusable(texts, tokens),
                "blank texts": sum(text.is_blank for text in texts),
            }
        )
    return lines


def values(found: Mapping[Cell, Sequence[Text]], tokens: int) -> dict[str, dict[str, Any]]:
    """What a record says of the cells; a spread is that of the texts."""
    reported: dict[str, dict[str, Any]] = {}
    for cell, texts in found.items():
        reported[f"first difference, {cell}"] = summarize([text.same for text in texts], "tokens")
        reported[f"distinct 4-grams, {cell}"] = summarize([distinct(text.token_ids) for text in texts], "share")
        reported[f"texts that loop, {cell}"] = exact(sum(loops(text, tokens) for text in texts), f"of {len(texts)}")
        if own := [text.perplexity for text in texts if text.perplexity is not None]:
            reported[f"perplexity under full, {cell}"] = summarize(own, "perplexity")
        if ratios := _ratios(found, cell):
            reported[f"perplexity ÷ full's own, {cell}"] = summarize(ratios, "ratio")
        reported[f"unusable tokens, {cell}"] = exact(unusable(texts, tokens), "share")
    return reported


def _ratios(found: Mapping[Cell, Sequence[Text]], cell: Cell) -> list[float]:
    """Text by text, its perplexity over that of what full wrote after the same prompt."""
    full = found[Cell(strategy=FULL, kind=cell.kind, method=cell.method)]
    pairs = zip(found[cell], full, strict=True)
    return [one.perplexity / other.perplexity for one, other in pairs if one.perplexity and other.perplexity]


def _course(cell: Cell, texts: Sequence[Text], tokens: int) -> Iterator[dict[str, Any]]:
    """PARTS lines: how the texts of a cell go on. A part is judged alone, so its 4-grams repeat only themselves."""
    cuts = [tokens * part // PARTS for part in range(PARTS + 1)]
    for start, end in itertools.pairwise(cuts):
        parts = [text.token_ids[start:end] for text in texts]
        yield {
            "strategy": cell.strategy,
            "kind": cell.kind,
            "method": cell.method,
            "from": start,
            "to": end,
            "perplexity under full": perplexity(np.concatenate([text.losses[start:end] for text in texts])),
            "distinct 4-grams": float(np.mean([distinct(part) for part in parts])),
        }
