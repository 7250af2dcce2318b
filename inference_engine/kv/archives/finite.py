"""Whether rows are finite: asked of the device when they pass, looked at when it has answered, so that nobody waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inference_engine.errors import NonFiniteEntries
from inference_engine.kv.memory.events import Wait, mark


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """extremes: the least and the greatest number of the keys of each layer, and of the values: four of [L]."""

    layers: tuple[int, ...]
    come_back: bool
    extremes: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """The extremes of some questions, one after another, on their way to the host; wait: until they are there."""

    questions: tuple[_Question, ...]
    numbers: Tensor
    wait: Wait


class FiniteCheck:
    """Those of one session. Not finite once, they stay so until `forget`."""

    def __init__(self) -> None:
        self._questions: list[_Question] = []
        self._answers: list[_Answer] = []

    def ask(self, layers: Sequence[int], keys: Tensor, values: Tensor, *, come_back: bool) -> None:
        """Of keys and values [L, n, Hkv, D], which may change afterwards; come_back: they were restored."""
        if keys.numel():
            # What is not a number is both the least and the greatest.
            extremes = (*keys.flatten(1).aminmax(dim=1), *values.flatten(1).aminmax(dim=1))
            self._questions.append(_Question(tuple(layers), come_back, extremes))

    def send(self) -> None:
        """Let the answers come to the host."""
        if self._questions:
            extremes = torch.cat([extreme for question in self._questions for extreme in question.extremes])
            numbers = extremes.to("cpu", non_blocking=True)
            self._answers.append(_Answer(tuple(self._questions), numbers, mark(extremes.device)))
            self._questions = []  # not before: they must not be lost

    def require(self) -> None:
        """Raise NonFiniteRows, naming the layer, if any of those whose answers were sent for are not."""
        while self._answers:
            _look_at(self._answers[0])
            self._answers.pop(0)

    def forget(self) -> None:
        self._questions, self._answers = [], []


def _look_at(answer: _Answer) -> None:
    answer.wait()
    are_finite = iter(answer.numbers.isfinite().tolist())
    for question in answer.questions:
        least, greatest, least_value, greatest_value = (
            [next(are_finite) for _ in question.layers] for _ in question.extremes
        )
        for part, lows, highs in (("keys", least, greatest), ("values", least_value, greatest_value)):
            for layer, *ends in zip(question.layers, lows, highs, strict=True):
                if not all(ends):
                    raise NonFiniteEntries(layer, part, come_back=question.come_back)
