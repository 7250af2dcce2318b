"""CUDA graphs: a computation on a GPU, captured once and replayed with new inputs.

    Recording         inputs are whole numbers from the host, copied over those of the last run in one transfer
    TensorRecording   inputs are tensors on the device, copied over those of the last run one by one

The rest is one launch; the host does not wait. Where an operation depends on what the host knows, a recording is cut:

    graph | operation | graph | operation | graph        what is between is launched as it is, for each run anew

The outputs lie in memory that the next run of this recording, and of any other of the same GraphMemory, overwrites.
"""

from __future__ import annotations

import gc
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.backends.pinned import Outbox
from inference_engine.kernels.graph_io import PLAIN_ENDS, StepEnds

Numbers = NDArray[np.int64]
T = TypeVar("T")
# What a run does between two graphs, given what it was called with: launches, which wait for nothing.
Between = Callable[[Any], None]
_WARM_UPS = 2  # runs before recording: libraries allocate in their first


class GraphPiece(NamedTuple):
    """A graph of a recording. behind: what is called behind it; None: it is the last one."""

    graph: torch.cuda.CUDAGraph
    behind: Between | None

    @staticmethod
    def run(pieces: Sequence[GraphPiece], given: object = None) -> None:
        for graph, behind in pieces:
            graph.replay()
            if behind is not None:
                behind(given)


class GraphMemory:
    """Memory that recordings share: one runs at a time, and its outputs are no longer needed when the next one runs."""

    def __init__(self, ends: StepEnds = PLAIN_ENDS) -> None:
        """ends: brings the numbers of a run to the device."""
        self.outbox = Outbox(ends=ends)
        self._rooms: dict[tuple[Hashable, torch.device, int], Tensor] = {}
        self._first: torch.cuda.CUDAGraph | None = None  # the memory lasts as long as a graph of it
        self._next: Callable[[Between], None] | None = None  # where something is recorded

    @property
    def handle(self) -> Any:
        return None if self._first is None else self._first.pool()

    def room(self, name: Hashable, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor at a fixed address, in memory shared by all tensors of that name and about as many bytes."""
        nbytes = math.prod(shape) * dtype.itemsize
        held = 1 << max(nbytes - 1, 1).bit_length()
        key = (name, device, held)
        if key not in self._rooms:
            with torch.inference_mode(False):  # else it could be written to in that mode only
                self._rooms[key] = torch.zeros(held, dtype=torch.uint8, device=device)
        return self._rooms[key][:nbytes].view(dtype).view(shape)

    def cut(self, between: Between) -> None:
        """Called by what is recorded: what it computed so far is a graph, behind which each run calls `between`.

        It must not run another recording.
        """
        if self._next is not None:
            self._next(between)

    def record(self, device: torch.device, compute: Callable[[], T]) -> tuple[list[GraphPiece], T]:
        """Record `compute` as graphs, which are to be run one after the other. Its outputs are valid after each run.

        Raises RuntimeError for what cannot be recorded.
        """
        new_stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
        stream, side = torch.cuda.current_stream(device), new_stream(device)
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                compute()
        stream.wait_stream(side)
        # Graphs of closed engines may be garbage, and collecting one would abort the capture.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            pieces: list[GraphPiece] = []
            with ExitStack() as stack:

                def begin(between: Between | None = None) -> None:
                    stack.close()
                    if pieces:
                        self._first = self._first or pieces[0].graph
                        pieces[-1] = pieces[-1]._replace(behind=between)
                    pieces.append(GraphPiece(torch.cuda.CUDAGraph(), None))
                    # Other threads may use the device meanwhile.
                    capture = torch.cuda.graph(pieces[-1].graph, pool=self.handle, capture_error_mode="thread_local")
                    stack.enter_context(capture)

                begin()
                self._next = begin
                result = compute()
        finally:
            self._next = None
            torch.cuda.set_stream(stream)  # a failed capture does not restore it
            if was_enabled:
                gc.enable()
        self._first = self._first or pieces[0].graph
        return pieces, result


class Recordings(Generic[T]):
    """At most so many recordings, by what they are of. A new one replaces one that the last `stale` looks passed over.

    No other is replaced: to record again and again what is in use would take longest.
    """

    def __init__(self, most: int, stale: int) -> None:
        self._most, self._stale = most, stale
        self._kept: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()  # least recently used first
        self._looks = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def find(self, key: Hashable) -> T | None:
        self._looks += 1
        if key not in self._kept:
            return None
        self.keep(key, self._kept[key][0])
        return self._kept[key][0]

    def has_place(self) -> bool:
        """Is there one for another recording, if need be that of a stale one?"""
        if len(self._kept) < self._most:
            return True
        oldest, (_, used_at) = next(iter(self._kept.items()))
        if self._looks - used_at < self._stale:
            return False
        del self._kept[oldest]
        return True

    def keep(self, key: Hashable, made: T) -> None:
        self._kept[key] = made, self._looks
        self._kept.move_to_end(key)

    def drop(self, key: Hashable) -> None:
        self._kept.pop(key, None)


class Recording(Generic[T]):
    """`compute(numbers)`, over tensors at fixed addresses. It may not wait for the device, nor read values."""

    def __init__(
        self, idle: Numbers, device: torch.device, compute: Callable[[Tensor], T], memory: GraphMemory
    ) -> None:
        """idle: numbers to record with, which must do no harm. Raises RuntimeError for what cannot be recorded."""
        self._numbers = torch.from_numpy(idle).to(device)
        self._outbox = memory.outbox
        with torch.inference_mode():
            self._pieces, self._result = memory.record(device, lambda: compute(self._numbers))

    def run(self, *parts: Numbers, fed: Tensor | None = None, given: object = None) -> T:
        """The outputs of `compute` for these numbers, the parts concatenated; valid until the next run.

        fed: int64 [n], on the device, in place of the first n. given: for what is called where it was cut. Returns
        before the device is done; the parts may change after it returned.
        """
        self._outbox.send(parts, self._numbers, fed)
        GraphPiece.run(self._pieces, given)
        return self._result


class TensorRecording:
    """`compute(tensors)`, for tensors of the given shapes. It may not wait for the device, nor read values."""

    def __init__(
        self,
        shapes: Sequence[tuple[torch.Size, torch.dtype]],
        device: torch.device,
        compute: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        memory: GraphMemory,
    ) -> None:
        """Raises RuntimeError for what cannot be recorded."""
        self._inputs = [
            memory.room(("input", place), shape, dtype, device) for place, (shape, dtype) in enumerate(shapes)
        ]
        # The graph reads tensors that `compute` refers to, so it is kept alive.
        self._compute = compute
        with torch.no_grad():
            self._results = [
                memory.room(("result", place), part.shape, part.dtype, device)
                for place, part in enumerate(compute(self._inputs))
            ]
            self._pieces, _ = memory.record(device, self._run_unrecorded)

    def _run_unrecorded(self) -> None:
        for result, fresh in zip(self._results, self._compute(self._inputs), strict=True):
            result.copy_(fresh)

    def run(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The outputs of `compute` for these tensors; valid until the next run.

        Their first dimension may be smaller than that of the shapes; the rest is computed from leftover values.
        """
        for mine, given in zip(self._inputs, tensors, strict=True):
            mine[: len(given)].copy_(given)
        GraphPiece.run(self._pieces)
        return self._results


def padded(numbers: Numbers, size: int) -> Numbers:
    """`numbers` [n, ...] with zeros after them, [size, ...]; they themselves, if none are missing."""
    if len(numbers) == size:
        return numbers
    wider = np.zeros((size, *numbers.shape[1:]), dtype=np.int64)
    wider[: len(numbers)] = numbers
    return wider
