"""How the first rank has another one run what it runs: short messages, and their numbers in memory that both have.

    pipe      (name, arguments …)          in the order in which the other rank acts on them
    memory    done │ numbers │ numbers │ … a ring: the reader says how far it is; the rest is not written over

The numbers of a prefill are megabytes; through a pipe they would take as long as an operation of the step.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_engine.errors import EngineStalled

Numbers = NDArray[np.int64]
Message = tuple[Any, ...]
_RING = 2**23  # numbers: memory that is never written to takes none
_LOOK_SECONDS = 2e-5


class Link:
    """One end of it. The first rank sends; the other receives, and answers only at the start."""

    def __init__(self, pipe: Connection, memory: int, wait_seconds: float) -> None:
        """memory: the descriptor of a file in memory, of `ring_file`."""
        self.pipe = pipe
        self._wait_seconds = wait_seconds
        words = np.frombuffer(mmap.mmap(memory, 8 * (_RING + 1)), dtype=np.int64)
        self._done, self._ring = words[:1], words[1:]
        self._sent = 0  # numbers, with those that were skipped at the ring's end

    def send(self, name: str, *arguments: Any, numbers: Sequence[Numbers] = ()) -> None:
        """Raises EngineStalled if the other end is gone, or does not read on."""
        flat = [part.reshape(-1) for part in numbers]
        count = sum(map(len, flat))
        assert count <= _RING, f"{count} numbers of a step"
        first = self._sent % _RING
        if first + count > _RING:
            self._sent, first = self._sent + _RING - first, 0
        self._sent += count
        self._wait_until(self._sent - _RING)
        place = first
        for part in flat:
            self._ring[place : place + len(part)] = part
            place += len(part)
        try:
            self.pipe.send((name, arguments, first, count, self._sent))
        except OSError as error:
            raise EngineStalled from error

    def _wait_until(self, done: int) -> None:
        began = time.monotonic()
        while self._done[0] < done:
            if time.monotonic() - began > self._wait_seconds:
                raise EngineStalled
            time.sleep(_LOOK_SECONDS)

    def receive(self) -> tuple[str, Message, Numbers]:
        """The next message and a copy of its numbers. Raises EOFError once the other end is gone."""
        name, arguments, first, count, sent = self.pipe.recv()
        numbers = self._ring[first : first + count].copy()
        self._done[0] = sent
        return name, arguments, numbers


def ring_file() -> int:
    """A descriptor of memory for both ends."""
    memory = os.memfd_create("kakeya-rank")
    os.ftruncate(memory, 8 * (_RING + 1))
    return memory
