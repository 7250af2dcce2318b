"""What the scripted model says about a history, in closed form: no engine, no batch, no K/V memory.

query p sees  every entry up to p                                       full, and whatever equals it
              the first `sink`, and those from (start of p's segment) − window on      sink_window
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from laboratory.scripted import CELL, ScriptedModel
from tests.kernels.plain_noise import plain_key, plain_noise

FLOAT32_ERROR = 1e-6  # of an average of numbers below 1


@dataclass(frozen=True, slots=True)
class Sight:
    """What a query of one layer may read. window None: everything before it."""

    sink: int = 0
    window: int | None = None

    def visible(self, queries: Tensor, keys: Tensor, segment: int) -> Tensor:
        """[T, S] bool"""
        seen = keys[None, :] <= queries[:, None]
        if self.window is None:
            return seen
        first = queries - queries % segment - self.window
        return seen & ((keys[None, :] < self.sink) | (keys[None, :] >= first[:, None]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Solo:
    """The law that every stream has to obey. sights: one a layer."""

    model: ScriptedModel
    sights: tuple[Sight, ...]
    segment: int

    def logits(self, history: Sequence[int], first: int) -> Tensor:
        """float32 [len(history) + 1 - first, V]: vector j is what the model says about position `first + j`."""
        return self.model.logits(self._averages(history, first))

    def _averages(self, history: Sequence[int], first: int) -> list[Tensor]:
        ids = np.array(history, dtype=np.int64)
        positions = np.arange(len(ids))
        places = torch.from_numpy(positions)
        averages = []
        for layer, sight in enumerate(self.sights):
            queries, keys, values = self.model.states(layer, ids, positions)
            scores = queries[first - 1 :] @ keys.T
            scores[~sight.visible(places[first - 1 :], places, self.segment)] = -torch.inf
            averages.append(scores.softmax(dim=1) @ values)
        return averages

    def is_certain(self, history: Sequence[int], first: int) -> bool:
        """Are the tokens from `first` on the same though averages are added up in float32, in any order?"""
        places = torch.cat(self._averages(history, first), dim=1) / CELL
        return bool(((places - places.round()).abs() > FLOAT32_ERROR / CELL).all())

    def tokens(self, history: Sequence[int], first: int, *, seed: int | None = None) -> list[int]:
        """The token that belongs to each position from `first` on, the one after the end included.

        seed None: greedy. Otherwise drawn at temperature 1.
        """
        logits = self.logits(history, first)
        if seed is None:
            return logits.argmax(dim=1).tolist()
        return [_drawn(one, seed, first + number) for number, one in enumerate(logits)]

    def check(self, history: Sequence[int], first: int, seed: int | None) -> None:
        """The history's tokens from `first` on are those that belong there. The error has all that gives them again."""
        found, law = list(history[first:]), self.tokens(history[:-1], first, seed=seed)
        assert found == law, f"{found}, and the law says {law}, behind {list(history[:first])}, with the seed {seed}"

    def continued(self, history: Sequence[int], count: int, *, seed: int | None = None) -> list[int]:
        """The `count` tokens that follow."""
        ids = list(history)
        for _ in range(count):
            ids += self.tokens(ids, len(ids), seed=seed)
        return ids[len(history) :]


def _drawn(logits: Tensor, seed: int, position: int) -> int:
    scores = logits.double().numpy() + plain_noise(plain_key(seed, position), len(logits))
    return int(scores.argmax())
