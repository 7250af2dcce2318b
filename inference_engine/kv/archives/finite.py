"""Checks that entries are finite: the device computes them, and the host reads the results later without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inference_engine.errors import NonFiniteEntries
from inference_engine.kv.memory.events import Wait, mark


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """numbers: float32 [rows, L], of each layer those that are not finite if its keys, the first half of the rows, or
    its values are not."""

    layers: tuple[int, ...]
    come_back: bool
    numbers: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _FoundNumbers:
    """The numbers of some questions, in a row, on their way to the host. wait: returns when they are there."""

    questions: tuple[_Question, ...]
    numbers: Tensor
    wait: Wait


class FiniteCheck:
    """The checks of one session. A failed check keeps failing until `forget`."""

    def __init__(self) -> None:
        self._questions: list[_Question] = []
        self._answers: deque[_FoundNumbers] = deque()
        self._sent = 0  # of all answers, those that were read included

    def ask(self, layers: Sequence[int], keys: Tensor, values: Tensor, *, come_back: bool) -> None:
        """Check keys and values [L, n, Hkv, D], which may change afterwards. come_back: they were restored."""
        if keys.numel():
            self._questions.append(_Question(tuple(layers), come_back, extremes(keys, values)))

    def note(self, layers: Sequence[int], found: Tensor, *, come_back: bool) -> None:
        """What devices found in entries: [n, L] of keys, then of values; not finite where they are not."""
        self._questions.append(_Question(tuple(layers), come_back, found))

    def send(self) -> int:
        """Start the copy of the results to the host. Returns how many were ever sent: `require` can ask up to here."""
        if self._questions:
            # By layer, as devices note what they find: that alone needs no operation but the copy.
            rows = [question.numbers.T.reshape(-1) for question in self._questions]
            together = rows[0] if len(rows) == 1 else torch.cat(rows)
            numbers = together.to("cpu", non_blocking=True, copy=True)  # more may be found in them meanwhile
            self._answers.append(_FoundNumbers(tuple(self._questions), numbers, mark(together.device)))
            self._questions = []  # not before: a failed copy must not lose them
            self._sent += 1
        return self._sent

    def require(self, upto: int | None = None) -> None:
        """Raise NonFiniteEntries, naming the layer, if a check failed whose result was sent.

        upto: of the first so many results alone. What was sent later is not waited for.
        """
        while self._answers and (upto is None or self._sent - len(self._answers) < upto):
            _look_at(self._answers[0])
            self._answers.popleft()

    def forget(self) -> None:
        self._questions = []
        self._answers.clear()


def extremes(keys: Tensor, values: Tensor) -> Tensor:
    """[4, L] of keys and values [L, n, Hkv, D]: the smallest and the largest. NaN is both."""
    return torch.stack((*keys.flatten(1).aminmax(dim=1), *values.flatten(1).aminmax(dim=1)))


def _look_at(answer: _FoundNumbers) -> None:
    answer.wait()
    are_finite = iter(answer.numbers.isfinite().tolist())
    for question in answer.questions:
        rows = len(question.numbers)
        for layer in question.layers:
            own = [next(are_finite) for _ in range(rows)]
            halves = (("keys", own[: rows // 2]), ("values", own[rows // 2 :]))
            broken = [part for part, finite in halves if not all(finite)]
            if broken:
                raise NonFiniteEntries(layer, " and ".join(broken), come_back=question.come_back)
