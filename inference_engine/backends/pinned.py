"""Pinned memory of the host, for copies to and from a GPU that nothing waits for.

A copy from pageable memory makes the host wait for all earlier work of the device. A copy from pinned memory does not,
but the memory must not change until the copy is done; and what a device writes must not be read before it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kernels.graph_io import PLAIN_ENDS, StepEnds
from inference_engine.kv.memory.events import Wait, event_now
from inference_engine.kv.memory.events import mark as mark_of_device

Numbers = NDArray[np.int64]
_PIECES = 2  # of an outbox
_LEAST = 256  # numbers of a piece of a landing: most steps have few


class _OutboxPiece:
    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.int64)
        self.wait: Wait | None = None  # until its last copy is done


class Outbox:
    """Sends whole numbers to a GPU. Used by one thread.

    A few pieces are used in turn, each only after its last copy is done: the host gets as many copies ahead as there
    are pieces.
    """

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
        self._allocate = allocate or _pinned_integers
        self._mark = mark or mark_of_device
        self._pieces = tuple(_OutboxPiece() for _ in range(_PIECES))
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

    def _take(self, count: int) -> _OutboxPiece:
        """The next piece, once its last copy is done."""
        piece = self._pieces[self._next]
        self._next = (self._next + 1) % _PIECES
        if piece.wait is not None:
            piece.wait()
            piece.wait = None
        if len(piece.memory) < count:
            piece.memory = self._allocate(count)
        return piece


class Event(Protocol):
    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class _Done:
    """Implements Event: of a CPU, which has done all its work."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Landed:
    """Numbers that a device writes. memory: float32, pinned."""

    def __init__(self, memory: Tensor, event: Event | None = None) -> None:
        self.memory = memory
        self._event = event

    def wait(self) -> None:
        """Until the device has written them."""
        if self._event is not None:
            self._event.synchronize()


class _LandingPiece(NamedTuple):
    memory: Tensor
    event: Event
    holder: ref[Landed]


class Landing:
    """Takes numbers that a device writes, which the host reads once they are there. Used by one thread.

    A piece is used again when no step holds it any more and the device has written it: a step may be given up before it
    was read.
    """

    def __init__(
        self, allocate: Callable[[int], Tensor] | None = None, now: Callable[[torch.device], Event] | None = None
    ) -> None:
        """Both are CUDA's own unless given.

        allocate: returns that many float32 of host memory. now: an event of all work of a device until now.
        """
        self._allocate = allocate or _pinned_floats
        self._now = now or _now
        self._pieces: list[_LandingPiece] = []

    def take(self, count: int, device: torch.device, write: Callable[[Tensor], object], *, read: int = 0) -> Landed:
        """Let `write` make the device write to `count` numbers, and do not wait for it.

        read: so many more behind them, which `write` fills in for the device to read.
        """
        memory = self._free(count + read)
        write(memory[: count + read])
        event = self._now(device)
        landed = Landed(memory[:count], event)
        self._pieces.append(_LandingPiece(memory, event, ref(landed)))
        return landed

    def _free(self, count: int) -> Tensor:
        for index, piece in enumerate(self._pieces):
            if piece.holder() is None and len(piece.memory) >= count and piece.event.query():
                return self._pieces.pop(index).memory
        return self._allocate(max(count, _LEAST))


def _pinned_integers(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.int64, pin_memory=True)


def _now(device: torch.device) -> Event:
    return event_now(device) if device.type == "cuda" else _Done()


def _pinned_floats(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.float32, pin_memory=torch.cuda.is_available())
