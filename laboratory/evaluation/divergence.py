"""How far strategies' next-token distributions are from full's on one passage, token by token.

KL(full ‖ strategy) is in nats: log-softmax in float32, sums in float64. Full's distributions stay on the device while
the others are compared with them; nothing larger than the logits of a few tokens is held beside them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.engine import Engine
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategy import KVStrategy
from laboratory.evaluation.passages import Passage, force, force_all

FULL = "full"
_ELEMENTS_AT_ONCE = 2**24  # of logits, so that a large vocabulary needs no large temporaries

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scores:
    """What was found at each forced token [n]: its loss under the strategy, KL(full ‖ strategy), whether both have the
    same likeliest token, and the margin between full's two likeliest. Nats, nats, truth, logits.
    """

    loss: Floats
    divergence: Floats
    agrees: NDArray[np.bool_]
    margin: Floats


def compare(
    engine: Engine, strategies: Sequence[KVStrategy], passage: Passage
) -> tuple[dict[str, Scores], dict[str, str]]:
    """Scores of `full` and of each strategy on a passage, by name, and why some have none.

    `full` among the strategies is run a second time: what it then differs by is rounding. A strategy that the engine
    refuses for this length is reported with its reason. Full's distributions are held on the device until this returns.
    """
    baseline = _Baseline(passage)
    force(engine, Full(), passage, baseline)
    found = {FULL: baseline.scores()}
    names = [f"{FULL}, repeated" if str(strategy) == FULL else str(strategy) for strategy in strategies]
    comparisons = [_Comparison(passage, baseline) for _ in strategies]
    refused = force_all(engine, passage, list(zip(strategies, comparisons, strict=True)))
    for number, (name, comparison) in enumerate(zip(names, comparisons, strict=True)):
        if number not in refused:
            found[name] = comparison.scores()
    return found, {names[number]: reason for number, reason in refused.items()}


class _Collector(ABC):
    """Takes logits [n, V] as they come, in pieces small enough for their temporaries, on the engine's thread."""

    def __init__(self, passage: Passage) -> None:
        self._first = len(passage.prefix)
        self._forced = passage.forced
        self._columns: list[Tensor] = []  # each [n, 4], float64: loss, divergence, agrees, margin

    @torch.inference_mode()
    def __call__(self, position: int, logits: Tensor) -> None:
        count = max(1, _ELEMENTS_AT_ONCE // logits.shape[-1])
        for start in range(0, len(logits), count):
            place = position - self._first + start
            piece = logits[start : start + count]
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

    def log_probs(self, place: int, count: int) -> tuple[Tensor, Tensor]:
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
        theirs, margins = self._baseline.log_probs(place, len(ours))
        divergence = (theirs.exp() * (theirs - ours)).sum(dim=-1, dtype=torch.float64)
        return divergence, theirs.argmax(dim=-1) == ours.argmax(dim=-1), margins
