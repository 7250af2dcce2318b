"""Checks that entries are finite: the device computes them, and the host reads the results later without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inference_engine.errors import NonFiniteEntries
from inference_engine.kv.memory.events import Wait, mark


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """extremes: minimum and maximum of the keys of each layer, and of the values: four tensors [L]."""

    layers: tuple[int, ...]
    come_back: bool
    extremes: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """The extremes of some questions, concatenated, on their way to the host. wait: returns when they are there."""

    questions: tuple[_Question, ...]
    numbers: Tensor
    wait: Wait


class FiniteCheck:
    """The checks of one session. A failed check keeps failing until `forget`."""

    def __init__(self) -> None:
        self._questions: list[_Question] = []
        self._answers: list[_Answer] = []

    def ask(self, layers: Sequence[int], keys: Tensor, values: Tensor, *, come_back: bool) -> None:
        """Check keys and values [L, n, Hkv, D], which may change afterwards. come_back: they were restored."""
        if keys.numel():
            # NaN is both the minimum and the maximum.
            extremes = (*keys.flatten(1).aminmax(dim=1), *values.flatten(1).aminmax(dim=1))
            self._questions.append(_Question(tuple(layers), come_back, extremes))

    def note(self, layers: Sequence[int], found: Tensor, *, come_back: bool) -> None:
        """What a device found in entries: [2, L], not finite where keys, or values, are not."""
        extremes = (found[0], found[0], found[1], found[1])
        self._questions.append(_Question(tuple(layers), come_back, extremes))

    def send(self) -> None:
        """Start the copy of the results to the host."""
        if self._questions:
            extremes = torch.cat([extreme for question in self._questions for extreme in question.extremes])
            numbers = extremes.to("cpu", non_blocking=True)
            self._answers.append(_Answer(tuple(self._questions), numbers, mark(extremes.device)))
            self._questions = []  # not before: a failed copy must not lose them

    def require(self) -> None:
        """Raise NonFiniteEntries, naming the layer, if a check failed whose result was sent."""
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
        for layer, *ends in zip(question.layers, least, greatest, least_value, greatest_value, strict=True):
            broken = [part for part, pair in (("keys", ends[:2]), ("values", ends[2:])) if not all(pair)]
            if broken:
                raise NonFiniteEntries(layer, " and ".join(broken), come_back=question.come_back)
