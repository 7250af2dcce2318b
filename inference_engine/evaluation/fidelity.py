"""Fidelity: how far from full attention a strategy's next-token distributions are, on text it did not write.

    append `prefix`, then force `forced`     … x x x x | y y y y y y
                                             appended  | read and scored as if generated

Each strategy sees the same passages as `full`, in the same run. KL(full ‖ strategy) is in nats: log-softmax in float32,
sums in float64. An argmax can flip where full attention itself hardly decides, so agreement is told by the margin
between full's two likeliest tokens, too. Perplexity and recall see different failures: measure both.
"""

from __future__ import annotations

import argparse
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument, NoCapacity
from inference_engine.evaluation.answers import check_fits
from inference_engine.evaluation.arguments import require_at_least, strategy_argument
from inference_engine.evaluation.haystack import KINDS, digest, filler
from inference_engine.evaluation.models import Target
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategy import KVStrategy

logger = logging.getLogger(__name__)

FULL = "full"
MARGINS = ((0.0, 0.1), (0.1, 1.0), (1.0, math.inf))  # of logits
_RESAMPLES = 200
_QUICK_COUNT = 32
_ELEMENTS_AT_ONCE = 2**24  # of logits, so that a large vocabulary needs no large temporaries

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """A text cut in two: `prefix` is appended, `forced` is scored. `kind` says what it is: prose, code, …"""

    kind: str
    prefix: tuple[int, ...]
    forced: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.prefix or not self.forced:
            raise ValueError(
                f"a passage needs tokens to append and to force, got {len(self.prefix)} and {len(self.forced)}"
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scores:
    """What was found at each forced token [n]: its loss under the strategy, KL(full ‖ strategy), whether both have the
    same likeliest token, and the margin between full's two likeliest. Nats, nats, truth, logits.
    """

    loss: Floats
    divergence: Floats
    agrees: NDArray[np.bool_]
    margin: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Where scores belong: one strategy, one kind of text, one length of prefix."""

    strategy: str
    kind: str
    length: int

    def __str__(self) -> str:
        return f"{self.strategy}, {self.kind} at {self.length}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategies", nargs="+", type=strategy_argument, required=True, metavar="SPEC",
        help="what to compare with full; full itself among them shows what rounding does",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[512, 1024], metavar="N", help="ids before the forced"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["prose", "code"], help="of text")
    parser.add_argument("--count", type=int, default=128, metavar="N", help="ids that are forced, of each text")
    parser.add_argument("--texts", type=int, default=4, metavar="N", help="of each kind, at every length")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of texts, and of their resampling")


def main(arguments: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Measure and return the record's payload.

    Raises InvalidArgument for numbers below 1 or lengths that full cannot hold, NoCapacity if memory cannot.
    """
    require_at_least(arguments, lengths=1, count=1, texts=1)
    count, texts = (_QUICK_COUNT, 1) if arguments.quick else (arguments.count, arguments.texts)
    # Everything is told against full: without it nothing can be said, and that should not come out at the end.
    check_fits(target.engine, Full(), max(arguments.lengths) + count)
    passages = [
        text_passage(target.tokenizer, kind, length, count, f"{arguments.seed}/{number}")
        for length in arguments.lengths
        for kind in arguments.kinds
        for number in range(texts)
    ]
    found, left_out = measure(target.engine, arguments.strategies, passages)
    lines = rows(found)
    return {
        "what": "Next-token distributions on text that was forced, beside those of full on the same text.",
        "config": {
            **target.describe(),
            "strategies": [str(one) for one in arguments.strategies],
            "kinds": arguments.kinds,
            "lengths": arguments.lengths,
            "forced_tokens": count,
            "texts": texts,
            "texts_sha256": {kind: digest(kind) for kind in arguments.kinds},
        },
        "seeds": [arguments.seed],
        "values": values(found, seed=arguments.seed),
        "baseline": "full, on the same texts",
        "tables": {"fidelity": lines, "left out": [{"cell": cell, "reason": why} for cell, why in left_out.items()]},
    }


def draw(payload: Mapping[str, Any], folder: Path) -> None:
    """KL to full over length, a line for each strategy: an image for each kind of text."""
    from matplotlib.figure import Figure  # drawing is optional, and slow to import

    lines = [line for line in payload["tables"]["fidelity"] if line["kl"] > 0]
    for kind in dict.fromkeys(line["kind"] for line in lines):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        here = [line for line in lines if line["kind"] == kind]
        for name in dict.fromkeys(line["strategy"] for line in here):
            own = [line for line in here if line["strategy"] == name]
            axes.plot([line["length"] for line in own], [line["kl"] for line in own], marker="o", label=name)
        lengths = sorted({line["length"] for line in here})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.minorticks_off()
        axes.set_yscale("log")
        axes.set(title=f"KL to full, {kind}", xlabel="context, tokens", ylabel="nats a token, mean")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        figure.savefig(folder / f"kl_{kind}.png", dpi=120)


# -- texts ------------------------------------------------------------------------------------------------------------


def text_passage(tokenizer: Any, kind: str, length: int, count: int, seed: str) -> Passage:
    """A passage of that kind of text, begun with the ids that the tokenizer itself would begin a text with."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    begun = tokenizer.encode("a")
    opening = list(begun[: begun.index(plain[0])])
    return cut(kind, opening + filler(tokenizer, kind, length + count, seed), length, count)


def cut(kind: str, token_ids: Sequence[int], length: int, count: int) -> Passage:
    """The first `length` tokens as prefix and the next `count` to be forced. Raises ValueError if there are fewer."""
    if len(token_ids) < length + count:
        raise ValueError(f"{kind}: {length} + {count} tokens are wanted, the text has {len(token_ids)}")
    return Passage(kind=kind, prefix=tuple(token_ids[:length]), forced=tuple(token_ids[length : length + count]))


# -- one passage -----------------------------------------------------------------------------------------------------


def compare(
    engine: Engine, strategies: Sequence[KVStrategy], passage: Passage
) -> tuple[dict[str, Scores], dict[str, str]]:
    """Scores of `full` and of each strategy on a passage, by name, and why some have none.

    `full` among the strategies is run a second time: what it then differs by is rounding. A strategy that the engine
    refuses for this length is told by its reason. Full's distributions are held on the device until this returns.
    """
    baseline = _Baseline(passage)
    force(engine, Full(), passage, baseline)
    found = {FULL: baseline.scores()}
    refused: dict[str, str] = {}
    for strategy in strategies:
        name = f"{FULL}, repeated" if str(strategy) == FULL else str(strategy)
        comparison = _Comparison(passage, baseline)
        try:
            force(engine, strategy, passage, comparison)
        except (InvalidArgument, NoCapacity) as refusal:
            refused[name] = refusal.message
        else:
            found[name] = comparison.scores()
    return found, refused


def force(engine: Engine, strategy: KVStrategy, passage: Passage, on_logits: Callable[[int, Tensor], None]) -> None:
    """Append and force the passage on a session of its own, `on_logits` being told of every forced token's logits."""
    prefix, limit = passage.prefix, len(passage.prefix) + len(passage.forced)
    session = engine.create_session(strategy=strategy, limit_tokens=limit).session_id
    try:
        most = engine.config.max_append_tokens
        for start in range(0, len(prefix), most):
            engine.append(session, prefix[start : start + most])
        for _ in engine.score(session, passage.forced, on_logits):
            pass
    finally:
        engine.close_session(session)


class _Collector(ABC):
    """Takes logits [n, V] as they come, in pieces small enough for their temporaries, on the engine's thread."""

    def __init__(self, passage: Passage) -> None:
        self._first = len(passage.prefix)
        self._forced = passage.forced
        self._columns: list[Tensor] = []  # each [n, 4], float64: loss, divergence, agrees, margin

    @torch.inference_mode()
    def __call__(self, position: int, logits: Tensor) -> None:
        rows = max(1, _ELEMENTS_AT_ONCE // logits.shape[-1])
        for start in range(0, len(logits), rows):
            place = position - self._first + start
            piece = logits[start : start + rows]
            forced = torch.tensor(self._forced[place : place + len(piece)], device=logits.device)
            ours = torch.log_softmax(piece, dim=-1, dtype=torch.float32)
            loss = -ours.gather(1, forced[:, None])[:, 0]
            divergence, agrees, margin = self._against(place, piece, ours)
            self._columns.append(torch.stack([column.double() for column in (loss, divergence, agrees, margin)], 1))

    @abstractmethod
    def _against(self, place: int, logits: Tensor, ours: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Divergence, agreement and full's margin [n] for the forced tokens from number `place` on."""

    def scores(self) -> Scores:
        """Once the session is done."""
        table = torch.cat(self._columns).cpu().numpy()
        assert table.shape == (len(self._forced), 4), "every forced token is predicted exactly once"
        return Scores(loss=table[:, 0], divergence=table[:, 1], agrees=table[:, 2] != 0, margin=table[:, 3])


class _Baseline(_Collector):
    """Full attention on one passage. Keeps its log-probabilities, [n, V] float32 on the device."""

    def __init__(self, passage: Passage) -> None:
        super().__init__(passage)
        self._log_probs: Tensor | None = None
        self._margins: list[Tensor] = []

    def rows(self, place: int, count: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities [count, V] and margins [count] from forced token number `place` on."""
        assert self._log_probs is not None
        return self._log_probs[place : place + count], torch.cat(self._margins)[place : place + count]

    def _against(self, place: int, logits: Tensor, ours: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self._log_probs is None:
            self._log_probs = ours.new_empty(len(self._forced), ours.shape[-1])
        self._log_probs[place : place + len(ours)] = ours
        best = logits.float().topk(2, dim=-1).values
        self._margins.append(best[:, 0] - best[:, 1])
        none = torch.zeros_like(self._margins[-1])
        return none, none == 0, self._margins[-1]


class _Comparison(_Collector):
    """A strategy on the passage whose baseline is known."""

    def __init__(self, passage: Passage, baseline: _Baseline) -> None:
        super().__init__(passage)
        self._baseline = baseline

    def _against(self, place: int, logits: Tensor, ours: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        theirs, margins = self._baseline.rows(place, len(ours))
        divergence = (theirs.exp() * (theirs - ours)).sum(dim=-1, dtype=torch.float64)
        return divergence, theirs.argmax(dim=-1) == ours.argmax(dim=-1), margins


# -- many passages ---------------------------------------------------------------------------------------------------


def measure(
    engine: Engine, strategies: Sequence[KVStrategy], passages: Sequence[Passage]
) -> tuple[dict[Cell, list[Scores]], dict[str, str]]:
    """Scores by cell, one for each passage of the cell, and why some cells have none."""
    found: dict[Cell, list[Scores]] = {}
    left_out: dict[str, str] = {}
    for passage in passages:
        kind, length = passage.kind, len(passage.prefix)
        scores, refused = compare(engine, strategies, passage)
        for name, one in scores.items():
            logger.info("%s at %d, %s: KL to full %.4g", kind, length, name, one.divergence.mean())
            found.setdefault(Cell(strategy=name, kind=kind, length=length), []).append(one)
        for name, reason in refused.items():
            left_out[str(Cell(strategy=name, kind=kind, length=length))] = reason
    return found, left_out


def values(found: Mapping[Cell, Sequence[Scores]], *, seed: int = 0) -> dict[str, dict[str, Any]]:
    """What a record says of the cells.

    A value stands for all forced tokens of its cell; its low and high are the middle 95 % of what comes out when the
    texts are drawn anew with replacement, for tokens of one text are not independent.
    """
    told: dict[str, dict[str, Any]] = {}
    for cell, scores in found.items():
        losses = [one.loss for one in scores]
        told[f"perplexity, {cell}"] = _pooled(losses, _perplexity, "perplexity", seed)
        if cell.strategy == FULL:
            continue
        full = found[Cell(strategy=FULL, kind=cell.kind, length=cell.length)]
        more = [one.loss - other.loss for one, other in zip(scores, full, strict=True)]
        told[f"perplexity ÷ full, {cell}"] = _pooled(more, _perplexity, "ratio", seed)
        divergences = [one.divergence for one in scores]
        told[f"KL to full, mean, {cell}"] = _pooled(divergences, np.mean, "nats", seed)
        told[f"KL to full, median, {cell}"] = _pooled(divergences, np.median, "nats", seed)
        told[f"KL to full, p99, {cell}"] = _pooled(divergences, _p99, "nats", seed)
        agrees = [one.agrees.astype(np.float64) for one in scores]
        told[f"top-1 agreement, {cell}"] = _pooled(agrees, np.mean, "share", seed)
        for low, high in MARGINS:
            chosen = [one.agrees[_between(one, low, high)].astype(np.float64) for one in scores]
            if any(map(len, chosen)):
                told[f"top-1 agreement, {_margin_words(low, high)}, {cell}"] = _pooled(chosen, np.mean, "share", seed)
    return told


def rows(found: Mapping[Cell, Sequence[Scores]]) -> list[dict[str, Any]]:
    """A line for each cell: the numbers that tables are made of."""
    lines = []
    for cell, scores in found.items():
        loss, divergence, agrees = (
            np.concatenate([getattr(one, name) for one in scores]) for name in ("loss", "divergence", "agrees")
        )
        full = np.concatenate([one.loss for one in found[Cell(strategy=FULL, kind=cell.kind, length=cell.length)]])
        line = {
            "strategy": cell.strategy,
            "kind": cell.kind,
            "length": cell.length,
            "texts": len(scores),
            "tokens": len(loss),
            "perplexity": _perplexity(loss),
            "perplexity ÷ full": _perplexity(loss - full),
            "kl": float(divergence.mean()),
            "kl median": float(np.median(divergence)),
            "kl p99": _p99(divergence),
            "top-1 agreement": float(agrees.mean()),
        }
        for low, high in MARGINS:
            chosen = np.concatenate([one.agrees[_between(one, low, high)] for one in scores])
            line[f"agreed, {_margin_words(low, high)}"] = f"{int(chosen.sum())} of {len(chosen)}"
        lines.append(line)
    return lines


def _between(scores: Scores, low: float, high: float) -> NDArray[np.bool_]:
    return (scores.margin >= low) & (scores.margin < high)


def _margin_words(low: float, high: float) -> str:
    if low == 0.0:
        return f"margin below {high:g}"
    return f"margin {low:g} to {high:g}" if math.isfinite(high) else f"margin {low:g} and more"


def _perplexity(losses: Floats) -> float:
    return math.exp(float(np.mean(losses)))


def _p99(divergences: Floats) -> float:
    return float(np.quantile(divergences, 0.99))


def _pooled(texts: Sequence[Floats], statistic: Callable[[Floats], Any], unit: str, seed: int) -> dict[str, Any]:
    """A record's value: the statistic over all texts' tokens, and what resampling the texts makes of it."""
    texts = [text for text in texts if len(text)]
    everything = np.concatenate(texts)
    value = low = high = float(statistic(everything))
    if len(texts) > 1:
        draws = np.random.default_rng(seed).integers(len(texts), size=(_RESAMPLES, len(texts)))
        resampled = [float(statistic(np.concatenate([texts[index] for index in draw]))) for draw in draws]
        low, high = (float(bound) for bound in np.quantile(resampled, [0.025, 0.975]))
    return {
        "unit": unit,
        "median": value,
        "low": min(value, low),
        "high": max(value, high),
        "count": len(everything),
    }
