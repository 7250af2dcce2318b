"""Input and output of a recorded step: integers come from the host, what tokens are drawn from goes to it.

    host    numbers of the step ──▶ ids · positions · …        on top, ids that the host does not know yet
    step    logits ──▶ peaks, noise ──▶ ids, for the next step ──▶ ids · smallest · largest        host

Plain copies and reductions are here. Each takes a device longer to begin than to do, and beside a step of a millisecond
they are some percent: kernels do it in a launch each (`triton/graph_io.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inference_engine.kernels.filters import draw_with
from inference_engine.kernels.gumbel_noise import noise_of_all
from inference_engine.kernels.transfer import ids_of_bits, on_device
from inference_engine.types import Sampling


class Peaks(NamedTuple):
    """Of each row of logits, and of each part of a row: the id of the largest number, that number and the smallest one.

    All [rows, parts], int64 and float32. The id is the lower one of equals; of a part with NaN, the smallest is NaN.
    """

    ids: Tensor
    largest: Tensor
    smallest: Tensor


class KeyedRows(NamedTuple):
    """What a token of each row is drawn with, whatever the other rows are.

    keys: of its noise, int64 [rows]. options: float64 [rows, 3], of its sampling, which has no top_k: the temperature,
    0 for the id of the largest number; the logarithm of min_p, and top_p, each cutting nothing if it is off.
    has_min_p, has_top_p: has any row one?
    """

    samplings: Sequence[Sampling]
    keys: Tensor
    options: Tensor
    has_min_p: bool
    has_top_p: bool

    @staticmethod
    def of(samplings: Sequence[Sampling], keys: Tensor) -> KeyedRows:
        options = [
            (
                sampling.temperature,
                math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf,
                sampling.top_p if sampling.top_p < 1.0 else math.inf,
            )
            for sampling in samplings
        ]
        return KeyedRows(
            samplings=samplings,
            keys=keys,
            options=on_device(np.array(options, dtype=np.float64), keys.device),
            has_min_p=any(sampling.min_p > 0.0 for sampling in samplings),
            has_top_p=any(not each.is_greedy and each.top_p < 1.0 for each in samplings),
        )


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
        bits = _bits(allowed, logits)
        smallest = torch.where(largest.isfinite(), smallest, torch.nan)
        largest, ids = torch.where(bits, logits, -torch.inf).max(dim=-1, keepdim=True)
        return Peaks(ids, largest, smallest)

    def draw(
        self, logits: Tensor, peaks: Peaks, rows: KeyedRows, allowed: Tensor | None = None
    ) -> tuple[Peaks, Tensor]:
        """The peaks of the first rows with the ids that are drawn; what they are compared by, float64 [rows, parts].

        peaks, allowed: of the `logits`, as `peaks` returned and had them.
        """
        count = len(rows.keys)
        left = logits[:count]
        if allowed is not None:
            left = left.masked_fill(~_bits(allowed[:count], logits), -torch.inf)
        tokens = [
            own.argmax(dim=-1) if sampling.is_greedy else draw_with(own, [sampling], key, noise_of_all, {})
            for own, sampling, key in zip(torch.split(left, 1), rows.samplings, torch.split(rows.keys, 1), strict=True)
        ]
        first = Peaks(*(each[:count] for each in peaks))
        drawn = torch.cat(tokens)[:, None].expand_as(first.ids)
        return first._replace(ids=drawn), torch.zeros_like(first.largest, dtype=torch.float64)

    def publish(self, peaks: Peaks, count: int, host: Tensor, scores: Tensor | None = None) -> Tensor:
        """The ids [count] int64 of the first rows, on the device; and all that is known of them to `host`.

        scores: what `draw` returned with the peaks; None: of each row the id of the largest number is meant.
        host: float32 [4 · count], pinned: ids as the pairs of words that they are, the smallest and the largest number
        of each row. Does not wait. Ids are within the vocabulary, whatever the logits.
        """
        largest, where = peaks.largest[:count].max(dim=-1, keepdim=True)
        if scores is not None:
            where = scores[:count].argmax(dim=-1, keepdim=True)
        ids = peaks.ids[:count].gather(1, where)[:, 0]
        smallest = peaks.smallest[:count].amin(dim=-1)
        host.copy_(torch.cat([ids.view(torch.float32), smallest, largest[:, 0]]), non_blocking=True)
        return ids


def _bits(allowed: Tensor, logits: Tensor) -> Tensor:
    return ids_of_bits(allowed.view(torch.uint8).to(logits.device, non_blocking=True), logits.shape[1])


PLAIN_ENDS = StepEnds()
