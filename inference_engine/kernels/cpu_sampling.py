"""Sampling on a CPU: no full sort of the vocabulary; only ids that can win get Gumbel noise.

    top_p, top_k    the largest numbers, a few hundred, are sorted and weighed; the rest is summed up roughly
    neither         a smaller number wins only by noise that few ids have: bits show which, without logarithms

The token is the one that `filters.draw` gives, bit for bit: numbers and noise of what is drawn from are worked out as
there. Where a rough sum leaves open how many ids top_p keeps, or the row is so flat that few do not decide, there is no
answer, and `filters.draw` is asked.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_engine.kernels.gumbel_noise import BITS, noise_on_host, steps_of_all
from inference_engine.types import Sampling

Row = NDArray[np.float32]
Ids = NDArray[np.int64]
Bits = NDArray[np.uint8]

_ROWS = 64  # of the table in which large numbers are looked for
_FEW, MOST = 64, 8192  # ids that are looked at first, and at most: more are not worth it
# Relative errors, with room: of float64 weights and of their sum in any order; of float32 weights, whose arguments are
# rounded, too: numbers of up to 100, three times by 2 ** -24.
_EXACT, _ROUGH = 1e-11, 4e-5
# Weights from which more ids are looked at, where the largest weighs 1, and by how much less each time.
_LIGHT, _LIGHTER = 2.0**-12, 4.0
_AT_ONCE = 16_384  # so many, and torch wakes no threads
# Noise that more ids than few have; steps by which a bound on them may be wrong.
_LEAST_LIFT, _STEPS_ASIDE = 2.0, 2.0**20
_own = threading.local()


@dataclass(frozen=True, slots=True)
class Heavy:
    """The largest logits of a row, all from some number on. ids: ascending.

    rest: what all others weigh, roughly, where the largest weighs 1.
    """

    ids: Ids
    rest: float


# Of each row [V], of what its mask allows, at its temperature; None where that would be many.
Weigh = Callable[[Sequence[Row], Sequence[Bits | None], Sequence[float]], Sequence[Heavy | None]]


class HostRow(NamedTuple):
    """A row of logits [V] to draw from. key: of its noise. few: the ids that it may be, ascending; None: all that are
    not -inf, which are many. mask: [⌈V / 8⌉], a bit for each id, the lowest first, set if it may be one; None: all may.
    """

    logits: Row
    sampling: Sampling
    key: int
    few: Ids | None = None
    mask: Bits | None = None

    @property
    def is_weighed(self) -> bool:
        """May it be drawn by what is heavy alone?"""
        return self.sampling.top_p < 1.0 and not self.sampling.top_k and len(self.logits) >= _ROWS * _FEW

    def unmasked(self) -> HostRow:
        """With -inf for what the mask does not allow."""
        if self.mask is None:
            return self
        refused = np.unpackbits(~self.mask, count=len(self.logits), bitorder="little").view(np.bool_)
        left = self.logits.copy()
        np.copyto(left, np.float32(-np.inf), where=refused)
        return self._replace(logits=left, mask=None)


def drawn_from_few(rows: Sequence[HostRow], weigh: Weigh | None = None) -> list[int | None]:
    """A token of each row, or None. No sampling is greedy. weigh: the device's own; None: there is none."""
    heavy: dict[int, Heavy | None] = {}
    whole = [place for place, row in enumerate(rows) if row.few is None]
    if whole and weigh is not None and any(row.sampling.top_p < 1.0 for row in rows):
        chosen = [rows[place] for place in whole]
        weighed = weigh(
            [row.logits for row in chosen],
            [row.mask for row in chosen],
            [row.sampling.temperature for row in chosen],
        )
        heavy = dict(zip(whole, weighed, strict=True))
    found = [_found(row, heavy.get(place)) for place, row in enumerate(rows)]
    known = [ids for ids in found if ids is not None]
    if not known:
        return [None] * len(rows)
    counts = [0 if ids is None else len(ids) for ids in found]
    keys = np.array([row.key for row in rows], dtype=np.int64)
    added = _noise(np.repeat(keys, counts), np.concatenate(known), len(rows[0].logits))
    drawn: list[int | None] = []
    first = 0
    for row, ids, count in zip(rows, found, counts, strict=True):
        if ids is None:
            drawn.append(None)
            continue
        scores = row.logits[ids].astype(np.float64) / row.sampling.temperature + added[first : first + count]
        drawn.append(int(ids[scores.argmax()]))
        first += count
    return drawn


def _found(row: HostRow, heavy: Heavy | None) -> Ids | None:
    if row.few is not None:
        return _candidates_of(row.few, row.logits, row.sampling)
    if row.mask is not None:  # which is worth a copy of the row only where it has to be
        if heavy is not None and row.is_weighed and (kept := _of_heavy(row.logits, row.sampling, heavy)) is not None:
            return _likely(row.logits, kept, row.sampling)
        row = row.unmasked()
        found = _candidates(row.logits, row.sampling, row.key, heavy)
        # Noise lifts ids that are refused, too, and those that are drawn have their own logits.
        return None if found is None else found[row.logits[found] > -math.inf]
    return _candidates(row.logits, row.sampling, row.key, heavy)


def _candidates(row: Row, sampling: Sampling, key: int, heavy: Heavy | None = None) -> Ids | None:
    """Ids, ascending, among which the token is; None if it would take more than few to be sure."""
    if len(row) < _ROWS * _FEW:
        return None
    top_k = sampling.top_k if 0 < sampling.top_k < len(row) else 0
    if sampling.top_p < 1.0:
        kept = _nucleus(row, sampling, top_k, heavy)
    elif top_k:
        kept = _largest(row, top_k)[:top_k] if top_k <= len(row) // _ROWS else None
    elif sampling.min_p > 0.0:
        least = row.max() + sampling.temperature * math.log(sampling.min_p)
        kept = np.flatnonzero(row >= least - _ROUGH * abs(least))
    else:
        return _lifted(row, sampling.temperature, key)
    return None if kept is None or len(kept) > MOST else _likely(row, kept, sampling)


def _candidates_of(allowed: Ids, row: Row, sampling: Sampling) -> Ids | None:
    """As `_candidates`, of the ids that are allowed alone."""
    kept = allowed
    if sampling.top_k or sampling.top_p < 1.0:
        kept = _ranked(row, allowed)[: sampling.top_k or None]
    if sampling.top_p < 1.0:
        kept = kept[: _share(row, kept, sampling, 0.0)]
        if not len(kept):
            return None
    return _likely(row, kept, sampling)


def _likely(row: Row, kept: Ids, sampling: Sampling) -> Ids:
    """Those of `kept` that min_p leaves, ascending."""
    if sampling.min_p > 0.0:
        left = row[kept].astype(np.float64) / sampling.temperature
        kept = kept[left >= left.max() + math.log(sampling.min_p)]
    return np.sort(kept)


def only(row: Row, ids: Ids) -> Row:
    """The numbers of `ids`, and -inf of all others."""
    left = np.full_like(row, -np.inf)
    left[ids] = row[ids]
    return left


def _largest(row: Row, count: int) -> Ids:
    """At least `count` ids of the largest numbers, and all of equals; the largest first, of equals the lower id.

    count: at most as many as the table has columns. Each of the columns with the largest maxima has one such number.
    """
    columns = len(row) // _ROWS
    maxima = np.maximum.reduce(row[: columns * _ROWS].reshape(_ROWS, columns), axis=0)
    maxima.partition(columns - count)
    return _ranked(row, (row >= maxima[columns - count]).nonzero()[0])


def _ranked(row: Row, ids: Ids) -> Ids:
    ranked: Ids = ids[(-row[ids]).argsort(kind="stable")]
    return ranked


def _nucleus(row: Row, sampling: Sampling, top_k: int, heavy: Heavy | None) -> Ids | None:
    """The fewest ids whose weights together reach top_p, of the `top_k` largest, or of all if that is 0."""
    if top_k:
        if top_k > len(row) // _ROWS:
            return None
        ranked = _largest(row, top_k)[:top_k]
        kept = _share(row, ranked, sampling, 0.0)
        return ranked[:kept] if kept else None
    if heavy is not None and (of_heavy := _of_heavy(row, sampling, heavy)) is not None:
        return of_heavy
    ranked = _largest(row, _FEW) if heavy is None else _ranked(row, heavy.ids)
    weights = np.subtract(row, row[ranked[0]], out=_scratch(len(row)))
    weights *= np.float32(1.0 / sampling.temperature)
    np.exp(weights, out=weights)
    others, least = ranked, _LIGHT
    # All ids whose weights are below this are together less than what top_p cuts. Most rows need far fewer.
    end = (1.0 - sampling.top_p) / len(row)
    while True:
        weights[others] = 0.0
        if kept := _share(row, ranked, sampling, float(np.add.reduce(weights))):
            return ranked[:kept]
        if least <= end / _LIGHTER:
            return None
        others, least = np.flatnonzero(weights >= max(least, end)), least / _LIGHTER
        if len(ranked) + len(others) > MOST:
            return None
        ranked = np.concatenate([ranked, _ranked(row, others)])


def _of_heavy(row: Row, sampling: Sampling, heavy: Heavy) -> Ids | None:
    ranked = _ranked(row, heavy.ids)
    kept = _share(row, ranked, sampling, heavy.rest)
    return ranked[:kept] if kept else None


def _share(row: Row, ranked: Ids, sampling: Sampling, rest: float) -> int:
    """How many of `ranked` together reach top_p of all; 0 if it takes more, or if it is not certain.

    rest: the weights of all others, roughly.
    """
    sums = np.exp((row[ranked].astype(np.float64) - row[ranked[0]]) / sampling.temperature).cumsum()
    whole = sums[-1] + rest
    unsure = sampling.top_p * _ROUGH * rest + _EXACT * whole
    wanted = sampling.top_p * whole
    at_least, at_most = sums.searchsorted((wanted - unsure, wanted + unsure)).tolist()
    return at_least + 1 if at_least == at_most < len(ranked) else 0


def _lifted(row: Row, temperature: float, key: int) -> Ids | None:
    """Without filters: the largest numbers, and those whose noise could lift them above the best of these."""
    ranked = np.sort(_largest(row, _FEW))
    numbers = row[ranked].astype(np.float64) / temperature
    if numbers.min() == -math.inf:  # of what is left, some may not be among them
        return None
    best = (numbers + _noise(np.full(len(ranked), key), ranked, len(row))).max()
    needed = best - numbers.min() - _EXACT * abs(best) - _EXACT * abs(numbers).max()
    if needed < _LEAST_LIFT:
        return None
    steps = steps_of_all(key, len(row))
    # Noise -log(-log(u)) is at least what is needed where u is at least this.
    least = math.exp(-math.exp(-needed)) * 2.0**BITS - _STEPS_ASIDE
    return np.union1d(ranked, np.flatnonzero(steps >= np.uint64(least)))


def _scratch(count: int) -> Row:
    """Memory of this thread's own: the system would take it back, and clear it, at every row."""
    memory: Row | None = getattr(_own, "memory", None)
    if memory is None or len(memory) != count:
        memory = _own.memory = np.empty(count, np.float32)
    return memory


def _noise(keys: NDArray[np.int64], ids: Ids, vocab: int) -> NDArray[np.float64]:
    found = [
        noise_on_host(keys[first : first + _AT_ONCE], ids[first : first + _AT_ONCE], vocab)
        for first in range(0, len(ids), _AT_ONCE)
    ]
    return found[0] if len(found) == 1 else np.concatenate(found)
