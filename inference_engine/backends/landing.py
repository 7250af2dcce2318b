"""Pinned memory of the host that a device writes to, and the host reads once it is done.

A piece is used again when no step holds it any more and the device has written it: a step may be given up before it was
read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor

from inference_engine.kv.memory.events import event_now

_LEAST = 256  # numbers of a piece: most steps have few


class Event(Protocol):
    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Landed:
    """Numbers that a device writes. memory: float32, pinned."""

    def __init__(self, memory: Tensor, event: Event | None = None) -> None:
        self.memory = memory
        self._event = event

    def wait(self) -> None:
        """Until the device has written them."""
        if self._event is not None:
            self._event.synchronize()


class _Piece(NamedTuple):
    memory: Tensor
    event: Event
    holder: ref[Landed]


class Landing:
    """Used by one thread."""

    def __init__(
        self, allocate: Callable[[int], Tensor] | None = None, now: Callable[[torch.device], Event] | None = None
    ) -> None:
        """Both are CUDA's own unless given.

        allocate: returns that many float32 of host memory. now: an event of all work of a device until now.
        """
        self._allocate = allocate or _pinned
        self._now = now or event_now
        self._pieces: list[_Piece] = []

    def take(self, count: int, device: torch.device, write: Callable[[Tensor], object]) -> Landed:
        """Let `write` make the device write to `count` numbers, and do not wait for it."""
        memory = self._free(count)
        write(memory[:count])
        event = self._now(device)
        landed = Landed(memory[:count], event)
        self._pieces.append(_Piece(memory, event, ref(landed)))
        return landed

    def _free(self, count: int) -> Tensor:
        for index, piece in enumerate(self._pieces):
            if piece.holder() is None and len(piece.memory) >= count and piece.event.query():
                return self._pieces.pop(index).memory
        return self._allocate(max(count, _LEAST))


def _pinned(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.float32, pin_memory=True)
