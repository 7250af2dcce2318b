"""Exact Top-K of each row of scores, found faster when a hint says where it was a step ago.

    estimate  two thresholds from the hinted values, their smallest and their mean; without a hint, one from all values
    verify    count the values ≥ threshold, a pass over the row each time, until the count fits: k ≤ count ≤ capacity
    refine    collect those few and choose among them exactly

The first pass counts at both thresholds: a good hint's smallest value is already low enough, a poor hint's mean is not
too low, and together they enclose the answer. Between a threshold that is too low and one that is too high the search
continues by secants, on the logarithm of the count, because the tails that matter fall off about exponentially. Each
pass also notes the nearest values on both sides, so equal values cannot hold it up, and every fourth round halves the
bit patterns between the two, so it ends after 4 · 32 rounds whatever the values (4 · 64 in float64).

Order of values: NaN > inf > … > -inf, as `torch.topk` has it, so a NaN is chosen and shows, never dropped; -0 equals 0;
among equals the lowest index comes first. `topk_by_sorting` is the definition: the same answer in one operation.
Source: the Guess-Verify-Refine Top-K for sparse attention, whose two passes come from hints of the previous step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_CAPACITY_PER_K = 3
_HALVING_EVERY = 4
_FLOATS = {torch.int32: torch.float32, torch.int64: torch.float64}
_INFINITY = {torch.int32: 0x7F80_0000, torch.int64: 0x7FF0_0000_0000_0000}


@dataclass(frozen=True, slots=True)
class TopK:
    """What was found in each row, and what finding it took.

    indices: [..., min(k, N)] int64, ascending; where a row has fewer candidates, -1 fills up the end.
    passes: [...] int64, how often all N values of the row were read, statistics and collection included.
    iterations: [...] int64, how many of these were counts of a threshold search.
    """

    indices: Tensor
    passes: Tensor
    iterations: Tensor


class Largest(Protocol):
    """The k largest of each row, as `topk_by_sorting` finds them."""

    def __call__(self, scores: Tensor, k: int, *, candidates: Tensor | None = None) -> Tensor: ...


def topk(
    scores: Tensor,
    k: int,
    hint: Tensor | None = None,
    *,
    candidates: Tensor | None = None,
    capacity: int | None = None,
) -> TopK:
    """The k largest of each row of `scores` [..., N]; the hint changes how fast they are found, never which.

    hint: [..., any] int64 indices that may be near the answer; what is out of range or no candidate is ignored.
    candidates: [..., N] bool, broadcast over the rows; only these may be chosen. None: all.
    capacity: how many values may be collected, at least k; a row with no more candidates than that is not searched.
    None: 3 · k. After each round the host asks whether a row is still searching, which on CUDA waits for the device.
    """
    count = scores.shape[-1]
    capacity = _CAPACITY_PER_K * k if capacity is None else capacity
    assert 0 <= k <= capacity, f"k is {k}, capacity {capacity}"
    shape, width = scores.shape[:-1], min(k, count)
    if count <= capacity or width == 0 or scores.numel() == 0:
        passes = torch.ones(shape, dtype=torch.int64, device=scores.device)
        return TopK(topk_by_sorting(scores, k, candidates=candidates), passes, torch.zeros_like(passes))
    keys = _keys(scores, candidates)
    search = _Search(keys, k, capacity)
    hinted = search.estimate(None if hint is None else hint.expand(*shape, -1).reshape(len(keys), -1))
    while bool(search.is_open.any()):
        search.step()
    indices = _ascending(_largest(keys, search.collect(), k), count)
    passes = 1 + search.iterations + (search.iterations > 0).logical_and(~hinted)
    return TopK(indices.view(*shape, width), passes.view(shape), search.iterations.view(shape))


def topk_by_sorting(scores: Tensor, k: int, *, candidates: Tensor | None = None) -> Tensor:
    """`topk(...).indices` by sorting whole rows: the definition, faster where rows are short, and it never waits."""
    shape, count = scores.shape[:-1], scores.shape[-1]
    everything = torch.arange(count, device=scores.device)
    if scores.numel() == 0:
        return everything.new_zeros((*shape, min(k, count)))
    keys = _keys(scores, candidates)
    indices = _ascending(_largest(keys, everything.expand_as(keys), k), count)
    return indices.view(*shape, min(k, count))


class _Search:
    """Thresholds `low` < `high` around the answer of each row [R], closing in on it.

    count(keys ≥ low) = low_count ≥ k or all there are, and count(keys ≥ high) = high_count < k. `low` and `high - 1`
    are keys of the row. A row is closed when what reaches `low` fits the capacity, or when only one key is between.
    """

    def __init__(self, keys: Tensor, k: int, capacity: int) -> None:
        self._keys = keys
        self._k = k
        self._capacity = capacity
        limits = torch.iinfo(keys.dtype)
        present = keys != limits.min
        self.low_count = present.sum(-1)
        self.high_count = torch.zeros_like(self.low_count)
        # The first counting pass gives a row's smallest and largest value too.
        self.low = keys.masked_fill(~present, limits.max).amin(-1)
        self.high = keys.amax(-1) + 1
        # Between k and capacity, equally far from both as factors.
        self._target = math.sqrt(k * capacity)
        self._low_gap = self._gap(self.low_count)
        self._high_gap = self._gap(self.high_count)
        self._moved_low = torch.zeros_like(present[:, 0])
        self._moved_high = torch.zeros_like(self._moved_low)
        self.is_open = self.low_count > capacity
        self.iterations = torch.zeros_like(self.low_count)
        self._rounds = 0

    def estimate(self, hint: Tensor | None) -> Tensor:
        """The first round. Returns [R], whether the row had a usable hint [R, any]."""
        values = _values(self._keys).double()
        usable = values.isfinite() & (self._keys != torch.iinfo(self._keys.dtype).min)
        smallest = mean = self._estimate(values, usable)
        hinted = torch.zeros_like(self.is_open)
        if hint is not None and hint.shape[-1]:
            inside = (hint >= 0) & (hint < values.shape[-1])
            index = hint.where(inside, 0)
            inside &= usable.gather(-1, index)
            picked = values.gather(-1, index)
            hinted = inside.any(-1)
            smallest = picked.where(inside, float("inf")).amin(-1).where(hinted, smallest)
            mean = _mean(picked, inside).where(hinted, mean)
        first = [self._clamped(_keys_of_values(estimate, self._keys.dtype)) for estimate in (smallest, mean)]
        self._rounds = 1
        self.iterations += self.is_open
        for threshold in first:  # one pass counts at both
            self._count(threshold)
        self._close()
        return hinted

    def step(self) -> None:
        """Another round: a secant through both ends, now and then a halving."""
        self._rounds += 1
        self.iterations += self.is_open
        middle = (self.low & self.high) + ((self.low ^ self.high) >> 1)  # their mean, without overflow
        if self._rounds % _HALVING_EVERY == 0:
            self._count(middle)
        else:
            left, right = _values(self.low).double(), _values(self.high - 1).double()
            value = left + (right - left) * (self._low_gap / (self._low_gap - self._high_gap))
            threshold = self._clamped(_keys_of_values(value, self._keys.dtype))
            self._count(threshold.where(value.isfinite(), middle))
        self._close()

    def _estimate(self, values: Tensor, usable: Tensor) -> Tensor:
        """The value that `target` candidates would reach in a normal distribution."""
        mean = _mean(values, usable)
        deviation = _mean((values - mean[:, None]).square(), usable).sqrt()
        share = 1 - self._target / self.low_count.clamp(min=int(self._target) + 1)
        estimate: Tensor = mean + deviation * torch.special.ndtri(share)
        return estimate.nan_to_num()

    def collect(self) -> Tensor:
        """Indices [R, capacity] that hold the answer, ascending, N where there are fewer."""
        count = self._keys.shape[-1]
        ties = self._keys == self.low[:, None]
        room = (self._k - self.high_count).where(self.low_count > self._capacity, self._capacity)
        kept = (self._keys > self.low[:, None]) | (ties & (ties.cumsum(-1) <= room[:, None]))
        width = min(self._capacity, count)
        place = (kept.cumsum(-1) - 1).where(kept, width)
        held = torch.full((len(kept), width + 1), count, device=kept.device)
        held.scatter_(-1, place, torch.arange(count, device=kept.device).expand_as(place))
        return held.narrow(-1, 0, width)

    def _count(self, threshold: Tensor) -> None:
        """One pass: move an end of each open row to the value next to `threshold` [R]."""
        limits = torch.iinfo(self._keys.dtype)
        reach = self._keys >= threshold[:, None]
        number = reach.sum(-1)
        next_above = self._keys.masked_fill(~reach, limits.max).amin(-1)
        next_below = self._keys.masked_fill(reach, limits.min).amax(-1)
        enough = number >= self._k
        moves_low = self.is_open & enough & (next_above > self.low)
        moves_high = self.is_open & ~enough & (next_below + 1 < self.high)
        self.low = next_above.where(moves_low, self.low)
        self.high = (next_below + 1).where(moves_high, self.high)
        self.low_count = number.where(moves_low, self.low_count)
        self.high_count = number.where(moves_high, self.high_count)
        # An end that stays where it is twice counts half (the Illinois rule), or a bent tail would pin it for long.
        gap = self._gap(number)
        stuck_low, stuck_high = moves_high & self._moved_high, moves_low & self._moved_low
        self._low_gap = gap.where(moves_low, self._low_gap * (1 - 0.5 * stuck_low))
        self._high_gap = gap.where(moves_high, self._high_gap * (1 - 0.5 * stuck_high))
        self._moved_low, self._moved_high = moves_low, moves_high

    def _close(self) -> None:
        self.is_open = (self.low_count > self._capacity) & (self.high > self.low + 1)

    def _clamped(self, threshold: Tensor) -> Tensor:
        return threshold.maximum(self.low + 1).minimum(self.high - 1)

    def _gap(self, number: Tensor) -> Tensor:
        return (number.double().clamp(min=0.5) / self._target).log()


def _keys(scores: Tensor, candidates: Tensor | None) -> Tensor:
    """[R, N] integers in the order of the scores; the smallest integer of all is no candidate."""
    keys = _keys_of_values(scores, torch.int64 if scores.dtype == torch.float64 else torch.int32)
    if candidates is not None:
        keys = keys.masked_fill(~candidates, torch.iinfo(keys.dtype).min)
    return keys.expand(scores.shape).reshape(-1, scores.shape[-1])


def _keys_of_values(values: Tensor, dtype: torch.dtype) -> Tensor:
    """IEEE numbers as integers of the same order: a negative number's bits are turned round; NaN is next to inf."""
    floats = values.to(_FLOATS[dtype]) + 0.0  # -0 becomes 0
    return _turned(floats.view(dtype)).masked_fill(floats.isnan(), _INFINITY[dtype] + 1)


def _values(keys: Tensor) -> Tensor:
    return _turned(keys).view(_FLOATS[keys.dtype])


def _turned(bits: Tensor) -> Tensor:
    limits = torch.iinfo(bits.dtype)
    negative: Tensor = bits >> (limits.bits - 1)  # all ones
    return bits.bitwise_xor(negative & limits.max)


def _mean(values: Tensor, usable: Tensor) -> Tensor:
    return values.where(usable, 0.0).sum(-1) / usable.sum(-1)


def _largest(keys: Tensor, held: Tensor, k: int) -> Tensor:
    """The k largest among the ascending indices `held` [R, any], best first; N where no candidate is left."""
    count = keys.shape[-1]
    inside = held < count
    of_held = keys.gather(-1, held.where(inside, 0)).masked_fill(~inside, torch.iinfo(keys.dtype).min)
    order = of_held.sort(dim=-1, descending=True, stable=True)
    best = held.gather(-1, order.indices[:, :k])
    return best.where(order.values[:, :k] != torch.iinfo(keys.dtype).min, count)


def _ascending(indices: Tensor, count: int) -> Tensor:
    ordered = indices.sort(dim=-1).values
    return ordered.where(ordered < count, -1)
