"""Pinned staging buffers for asynchronous copies of whole numbers to a GPU.

A copy from pageable memory makes the host wait for all earlier work of the device. A copy from pinned memory does not,
but the memory must not change until the copy is done. So a few pinned pieces are used in turn, each only after its last
copy is done: the host gets as many copies ahead as there are pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kernels.step_ends import PLAIN_ENDS, StepEnds
from inference_engine.kv.memory.events import Wait
from inference_engine.kv.memory.events import mark as mark_of_device

Numbers = NDArray[np.int64]
_PIECES = 2


class _Piece:
    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.int64)
        self.wait: Wait | None = None  # until its last copy is done


class Outbox:
    """Sends whole numbers to a GPU. Used by one thread."""

    def __init__(
        self,
        allocate: Callable[[int], Tensor] | None = None,
        mark: Callable[[torch.device], Wait] | None = None,
        *,
        ends: StepEnds = PLAIN_ENDS,
    ) -> None:
        """The first two are CUDA's own unless given.

        allocate: returns that many int64 of host memory. mark: returns a wait for all work of a device until now.
        ends: copies to the device.
        """
        self._ends = ends
        self._allocate = allocate or _pinned
        self._mark = mark or mark_of_device
        self._pieces = tuple(_Piece() for _ in range(_PIECES))
        self._next = 0

    def send(self, parts: Sequence[Numbers], target: Tensor, fed: Tensor | None = None) -> None:
        """Copy `parts`, one after another, over `target` [n], which they fill. They may change as soon as this returns.

        fed: int64 [m], of the device, in place of the first m. Waits only for the copy before the last, if that is not
        done yet.
        """
        piece = self._take(len(target))
        numbers = piece.memory.numpy()
        first = 0
        for part in parts:
            flat = part.reshape(-1)
            numbers[first : first + len(flat)] = flat
            first += len(flat)
        assert first == len(target), (first, len(target))
        self._ends.bring(piece.memory[:first], target, fed)
        piece.wait = self._mark(target.device)

    def _take(self, count: int) -> _Piece:
        """The next piece, once its last copy is done."""
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
