"""Host memory that numbers leave for a GPU from, so that the host can go on while the device is at earlier work.

What is copied from ordinary memory is waited for: the copy comes after all that was asked of the device before. Copies
from pinned memory are not, and the memory must not change until the copy has been made. So there are a few pieces of
it, used in turn, each not before its last copy has been made. The host gets as many copies ahead as there are pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kv.memory.events import Wait
from inference_engine.kv.memory.events import mark as mark_of_device

Numbers = NDArray[np.int64]
_PIECES = 2


class _Piece:
    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.int64)
        self.wait: Wait | None = None  # until its last copy has been made


class Outbox:
    """Whole numbers on their way to a GPU. Of one thread."""

    def __init__(
        self, allocate: Callable[[int], Tensor] | None = None, mark: Callable[[torch.device], Wait] | None = None
    ) -> None:
        """Both are CUDA's own unless given.

        allocate: so many int64 of host memory. mark: what waits until a device has done all it was asked to until now.
        """
        self._allocate = allocate or _pinned
        self._mark = mark or mark_of_device
        self._pieces = tuple(_Piece() for _ in range(_PIECES))
        self._next = 0

    def send(self, parts: Sequence[Numbers], target: Tensor) -> None:
        """Copy `parts`, one after another, over `target` [n], which they fill. They may change as soon as this returns.

        Waits only for the copy before the last, if that has not been made yet.
        """
        piece = self._take(len(target))
        numbers = piece.memory.numpy()
        first = 0
        for part in parts:
            flat = part.reshape(-1)
            numbers[first : first + len(flat)] = flat
            first += len(flat)
        assert first == len(target), (first, len(target))
        target.copy_(piece.memory[:first], non_blocking=True)
        piece.wait = self._mark(target.device)

    def _take(self, count: int) -> _Piece:
        """The piece whose turn it is, once its last copy has been made."""
        piece = self._pieces[self._next]
        self._next = (self._next + 1) % _PIECES
        if piece.wait is not None:
            piece.wait()
            piece.wait = None
        if len(piece.memory) < count:
            piece.memory = self._allocate(count)
        return piece


def _pinned(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.int64, pin_memory=True)
