"""Input and output of a recorded step: integers come from the host, what greedy tokens are drawn from goes to it.

    host    numbers of the step ──▶ ids · positions · …        on top, ids that the host does not know yet
    step    logits ──▶ peaks ──▶ ids, for the next step ──▶ ids · smallest · largest        host

Plain copies and reductions are here. Each takes a device longer to begin than to do, and beside a step of a millisecond
they are some percent: kernels do it in three launches (`triton/graph_io.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from inference_engine.kernels.transfer import ids_of_bits


class Peaks(NamedTuple):
    """Of each row of logits, and of each part of a row: the id of the largest number, that number and the smallest one.

    All [rows, parts], int64 and float32. The id is the lower one of equals; of a part with NaN, the smallest is NaN.
    """

    ids: Tensor
    largest: Tensor
    smallest: Tensor


class StepEnds:
    """In plain torch."""

    def bring(self, numbers: Tensor, target: Tensor, fed: Tensor | None) -> None:
        """Copy `numbers` [n] int64, of pinned memory, over `target` [n]; then `fed`, of the device, over its beginning.

        Does not wait.
        """
        target.copy_(numbers, non_blocking=True)
        if fed is not None:
            target[: len(fed)].copy_(fed)

    def peaks(self, logits: Tensor, allowed: Tensor | None = None) -> Peaks:
        """Of `logits` [n, V] float32, one part.

        allowed: int32 [n, ⌈V / 32⌉], pinned: a bit for each id, the lowest first, set if it may be the id of the
        largest. Then the smallest is NaN, too, if any number is not finite.
        """
        smallest, largest = logits.aminmax(dim=-1, keepdim=True)
        if allowed is None:
            return Peaks(logits.argmax(dim=-1, keepdim=True), largest, smallest)
        bits = ids_of_bits(allowed.view(torch.uint8).to(logits.device, non_blocking=True), logits.shape[1])
        smallest = torch.where(largest.isfinite(), smallest, torch.nan)
        largest, ids = torch.where(bits, logits, -torch.inf).max(dim=-1, keepdim=True)
        return Peaks(ids, largest, smallest)

    def publish(self, peaks: Peaks, count: int, host: Tensor) -> Tensor:
        """The ids [count] int64 of the first rows, on the device; and all that is known of them to `host`.

        host: float32 [4 · count], pinned: ids as the pairs of words that they are, the smallest and the largest number
        of each row. Does not wait. Ids are within the vocabulary, whatever the logits.
        """
        largest, where = peaks.largest[:count].max(dim=-1, keepdim=True)
        ids = peaks.ids[:count].gather(1, where)[:, 0]
        smallest = peaks.smallest[:count].amin(dim=-1)
        host.copy_(torch.cat([ids.view(torch.float32), smallest, largest[:, 0]]), non_blocking=True)
        return ids


PLAIN_ENDS = StepEnds()
