"""Repeated computations over KV entries as CUDA graphs: encoding a segment of them, and decoding codes to entries.

A codec is dozens of small operations, which the host launches several times slower than the device runs them. Entries
leave the exact window by whole segments and are read by chunks, so there are few sizes to record; smaller inputs are
padded to one of them. Larger or wider inputs keep the device busy without graphs: they are not recorded, which also
bounds the memory that recordings share.

The first call of each kind runs unrecorded: clients choose compression rates, and one that is used once is not worth a
recording. It is padded as a recorded one is, because a product's bits depend on its size: entries restored twice are
the same, whatever was recorded between.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_engine.backends.recording import GraphMemory, Recordings, TensorRecording
from inference_engine.kv.context import BatchFunction

logger = logging.getLogger(__name__)

MOST = 512  # recordings at a time
MOST_BYTES = 64 * 2**20  # inputs and outputs of one recording
STALE_CALLS = 8 * MOST  # a recording unused for this many calls may be replaced
_REMEMBERED = 4 * MOST  # computations, recorded or not

Shapes = Sequence[tuple[torch.Size, torch.dtype]]


class Recorded(Protocol):
    def run(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]: ...


Record = Callable[[Shapes, torch.device, BatchFunction], Recorded]


@dataclass(slots=True)
class _Computation:
    """A computation of a name and shape that ran before."""

    is_padded: bool  # to a size; False for what is too wide
    can_record: bool


class RecordedCompute:
    """A `Compute` that records. Used by one thread."""

    def __init__(self, sizes: Sequence[int], memory: GraphMemory, record: Record | None = None) -> None:
        """sizes: numbers of entries to record for. record: CUDA's unless given; raises RuntimeError if it cannot."""
        self._sizes = sorted(sizes)
        self._record: Record = record or partial(TensorRecording, memory=memory)
        # By name and shapes; least recently used first.
        self._known: OrderedDict[Hashable, _Computation] = OrderedDict()
        self._recorded: Recordings[Recorded] = Recordings(MOST, STALE_CALLS)

    def __call__(self, name: Hashable, function: BatchFunction, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        count = len(tensors[0])
        size = next((size for size in self._sizes if size >= count), None)
        if size is None or not count:
            return function(tensors)
        shapes = tuple((torch.Size((size, *tensor.shape[1:])), tensor.dtype) for tensor in tensors)
        key = (name, shapes)
        known, recorded = self._known.get(key), self._recorded.find(key)
        if known is None and sum(part[:1].nbytes for part in tensors) * size > MOST_BYTES:
            known = _Computation(is_padded=False, can_record=False)
            self._remember(key, known)
        if known is None:
            results = _padded(function, size, tensors)
            bytes_each = sum(part[:1].nbytes for part in (*tensors, *results))
            is_padded = bytes_each * size <= MOST_BYTES
            self._remember(key, _Computation(is_padded=is_padded, can_record=is_padded))
            return results if is_padded else function(tensors)
        self._known.move_to_end(key)
        if recorded is None and known.can_record and self._recorded.has_place():
            recorded = self._try_to_record(key, known, shapes, function, tensors[0].device)
        if recorded is None:
            return _padded(function, size, tensors) if known.is_padded else function(tensors)
        return [part[:count] for part in recorded.run(tensors)]

    def _remember(self, key: Hashable, known: _Computation) -> None:
        self._known[key] = known
        if len(self._known) > _REMEMBERED:
            oldest, _ = self._known.popitem(last=False)
            self._recorded.drop(oldest)

    def _try_to_record(
        self, key: Hashable, known: _Computation, shapes: Shapes, function: BatchFunction, device: torch.device
    ) -> Recorded | None:
        try:
            recorded = self._record(shapes, device, function)
        except torch.OutOfMemoryError:
            logger.warning("no memory to record a computation over KV entries now; the next call tries again")
        except RuntimeError:
            logger.exception("a computation over %s runs unrecorded", [tuple(shape) for shape, _ in shapes])
            known.can_record = False
        else:
            self._recorded.keep(key, recorded)
            return recorded
        return None


def _padded(function: BatchFunction, size: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    count = len(tensors[0])
    padded = [F.pad(part, (0, 0) * (part.dim() - 1) + (0, size - count)) for part in tensors]
    return [part[:count] for part in function(padded)]
