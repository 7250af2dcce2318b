"""What is done to rows again and again, as CUDA graphs: coding a segment of them, and making rows of codes.

A code is dozens of small operations, which take the host several times longer to launch than the device to run. Rows
leave the exact window by whole segments and are read by chunks, so there are few numbers of rows to record for; a few
rows less are computed with some others beside them. More rows than that keep a device busy as they are.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from inference_engine.backends.recording import GraphMemory, RowRecording
from inference_engine.kv.context import OfRows

logger = logging.getLogger(__name__)

MOST = 256  # recordings that are kept: a rate's codes of every layer that is streamed, a few times over

Shapes = Sequence[tuple[torch.Size, torch.dtype]]


class Recorded(Protocol):
    def run(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]: ...


Record = Callable[[Shapes, torch.device, OfRows], Recorded]


class RecordedRows:
    """A `Compute`. Of one thread."""

    def __init__(self, sizes: Sequence[int], memory: GraphMemory, record: Record | None = None) -> None:
        """sizes: numbers of rows to record for. record: CUDA's own unless given; raises RuntimeError if it cannot."""
        self._sizes = sorted(sizes)
        self._record: Record = record or partial(RowRecording, memory=memory)
        self._recorded: OrderedDict[Hashable, Recorded] = OrderedDict()
        self._refused: set[Hashable] = set()

    def __call__(self, name: Hashable, of_rows: OfRows, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        count = len(tensors[0])
        size = next((size for size in self._sizes if size >= count), None)
        if size is None or not count or name in self._refused:
            return of_rows(tensors)
        recorded = self._recorded_for(name, size, of_rows, tensors)
        return of_rows(tensors) if recorded is None else [part[:count] for part in recorded.run(tensors)]

    def _recorded_for(self, name: Hashable, size: int, of_rows: OfRows, tensors: Sequence[Tensor]) -> Recorded | None:
        shapes = tuple((torch.Size((size, *tensor.shape[1:])), tensor.dtype) for tensor in tensors)
        wanted = (name, shapes)
        if wanted not in self._recorded:
            try:
                self._recorded[wanted] = self._record(shapes, tensors[0].device, of_rows)
            except RuntimeError:
                logger.exception("what is done to rows (%s) runs unrecorded", name)
                self._refused.add(name)
                return None
            if len(self._recorded) > MOST:
                self._recorded.popitem(last=False)
        self._recorded.move_to_end(wanted)
        return self._recorded[wanted]
