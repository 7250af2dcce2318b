"""Samples a token from each of many logits vectors, by keyed Gumbel noise.

Order: penalties, bias and masks (`sampler.py`), temperature, top_k, top_p, min_p (`filters.py`); log-probabilities are
of the raw logits. The token is the id with the largest logit ÷ temperature + noise among those that are left, and the
lower one of equals. Noise is a function of (seed, position, id) alone (`gumbel_noise.py`), so neither how a history was
built nor drafting can change it.

All tokens of a step are drawn together, whatever their samplings, in a few operations; on a CPU row by row, from as few
ids as decide (`cpu_sampling.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kernels.cpu_sampling import MOST, HostRow, Weigh, drawn_from_few, only
from inference_engine.kernels.filters import Filters, draw, draw_with, joined, logprobs, ranks
from inference_engine.kernels.graph_io import KeyedRows
from inference_engine.kernels.gumbel_noise import NoiseOfAll, key, keys_of, noise_of_all
from inference_engine.kernels.sampler import Mask, Sampler, bits_of, masked
from inference_engine.kernels.transfer import on_device
from inference_engine.types import TopLogprobs

_IN_ORDER = 0  # in the place of a vocabulary's size: rows are not put side by side
STEPS_OF_KEYS = 64  # that are worked out at once, where one step is drawn behind another


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Samples to draw from consecutive rows of a step's logits, each as if every draft token before it were right.

    indices: of those rows, in the logits that were computed. position: of the token that the first row gives.
    drafted: the draft tokens, one fewer than the indices. top_logprobs: of how many of the likeliest tokens the
    log-probabilities are wanted, too; 0 without needs_logprob.
    """

    indices: range
    sampler: Sampler
    position: int
    drafted: Sequence[int] = ()
    needs_logprob: bool = False
    top_logprobs: int = 0

    @property
    def is_plainly_greedy(self) -> bool:
        """Are its samples the ids of the largest raw logits, and nothing else?"""
        sampler = self.sampler
        return sampler.is_plain and sampler.sampling.temperature == 0.0 and not self.needs_logprob


class Sample(NamedTuple):
    """The result of one row of logits. `is_finite` is False if the logits were not: then there is no token.

    A tuple, because every token makes one.
    """

    token_id: int
    logprob: float | None
    is_finite: bool
    top_logprobs: TopLogprobs = ()


@dataclass(frozen=True, slots=True)
class _DrawPlace:
    """Row number `offset` of a draw. index: which draw."""

    index: int
    draw: Draw
    offset: int


class Draws(Sequence[Draw]):
    """The draws of a step, and how a device draws them, which is worked out once for this step and those behind it."""

    def __init__(self, draws: Sequence[Draw], *, ahead: int = 0, before: Draws | None = None) -> None:
        """ahead: positions by which all draws come later. before: the same draws of a step before."""
        self._draws, self._ahead = draws, ahead
        self._moved: Sequence[Draw] | None = None if ahead else draws
        # By size of the vocabulary; rows that nothing ties to others, or None.
        self._plans: dict[int, _Plan] = {} if before is None else before._plans
        self._keyed: dict[int, _Keyed | None] = {} if before is None else before._keyed
        self._are_greedy: bool | None = None
        self._are_peaks: bool | None = None
        self._are_in_order: bool | None = None

    def __len__(self) -> int:
        return len(self._draws)

    @overload
    def __getitem__(self, where: int) -> Draw: ...

    @overload
    def __getitem__(self, where: slice) -> Sequence[Draw]: ...

    def __getitem__(self, where: int | slice) -> Draw | Sequence[Draw]:
        return [*self][where]

    def __iter__(self) -> Iterator[Draw]:
        if self._moved is None:  # made once, where a host asks for them
            ahead = self._ahead
            self._moved = [replace(each, position=each.position + ahead) for each in self._draws]
        return iter(self._moved)

    def following(self) -> Draws:
        """The same draws one position later."""
        draws = Draws(self._draws, ahead=self._ahead + 1, before=self)
        draws._are_greedy, draws._are_peaks = self._are_greedy, self._are_peaks
        draws._are_in_order = self._are_in_order
        return draws

    @property
    def rows(self) -> list[range]:
        """The indices of each."""
        return [each.indices for each in self._draws]

    @property
    def have_masks(self) -> bool:
        return any(each.sampler.masks is not None for each in self._draws)

    @property
    def are_greedy(self) -> bool:
        """Is there any, and are all samples ids of the largest raw logits?"""
        if self._are_greedy is None:
            self._are_greedy = len(self._draws) > 0 and all(each.is_plainly_greedy for each in self._draws)
        return self._are_greedy

    def of_peaks(self, peaks: Sequence[Sample]) -> list[list[Sample]] | None:
        """The samples, if all are ids of the largest raw logits, or would be but for masks, which allow them. peaks:
        what is the largest of each row."""
        if not self._are_greedy_but_for_masks:
            return None
        found = []
        for each in self._draws:
            own = list(peaks[each.indices.start : each.indices.stop])
            if not each.sampler.takes(each.drafted, [sample.token_id for sample in own]):
                return None
            found.append(own)
        return found

    @property
    def _are_greedy_but_for_masks(self) -> bool:
        if self._are_peaks is None:
            self._are_peaks = len(self._draws) > 0 and all(
                each.sampler.sampling.is_greedy and each.sampler.is_unweighted and not each.needs_logprob
                for each in self._draws
            )
        return self._are_peaks

    @property
    def are_largest(self) -> bool:
        """Is each draw the id of the largest raw logit of one row, and the rows those of the logits in their order?"""
        return self.are_greedy and self._has_rows_in_order

    @property
    def are_largest_allowed(self) -> bool:
        """As `are_largest`, of the logits that masks allow, where there are masks."""
        return self._are_greedy_but_for_masks and self._has_rows_in_order

    def keyed(self, vocab: int, device: torch.device, *, cuts: bool = True) -> KeyedRows | None:
        """What draws all of them from one row each, the rows being those of the logits in their order. None: by a
        top_k, with a look at tokens before, or with log-probabilities. cuts: by a top_p, too, whose sum is another in
        its last bits than that of draws that are not `keyed`."""
        if vocab not in self._keyed:
            can = len(self._draws) > 0 and self._has_rows_in_order
            can = can and all(each.sampler.is_unweighted and not each.needs_logprob for each in self._draws)
            samplings = [each.sampler.sampling for each in self._draws]
            own = [each for each in samplings if not each.is_greedy]
            can = can and not any(0 < each.top_k < vocab or (each.top_p < 1 and not cuts) for each in own)
            self._keyed[vocab] = _Keyed(self._draws, device) if can else None
        rows = self._keyed[vocab]
        return None if rows is None else rows.at(self._ahead)

    @property
    def _has_rows_in_order(self) -> bool:
        if self._are_in_order is None:
            rows = self.rows
            self._are_in_order = rows == [range(place, place + 1) for place in range(len(rows))]
        return self._are_in_order

    def allow(self, bits: NDArray[np.uint8]) -> None:
        """Fill in which ids each may be, [draws, at least ⌈V / 8⌉], as masks have it."""
        for row, each in zip(bits, self._draws, strict=True):
            mask = None if each.sampler.masks is None else each.sampler.masks.along(())[0]
            if mask is None:
                row.fill(0xFF)
            else:
                row[: len(mask)] = mask

    def drawn(self, ids: Tensor, table: Arriving) -> Drawing:
        """Draws of one row each, in their order, drawn elsewhere. ids, table: as `Drawing` has them."""
        if _IN_ORDER not in self._plans:
            self._plans[_IN_ORDER] = _Plan(self._draws, _IN_ORDER)
        return Drawing(self._plans[_IN_ORDER], ids, table)

    def start(self, logits: Tensor, noise_of_all: NoiseOfAll) -> Drawing:
        """See `start_drawing`."""
        return self._plan(logits.shape[-1]).start(logits, self._ahead, noise_of_all)

    def _plan(self, vocab: int) -> _Plan:
        if vocab not in self._plans:
            self._plans[vocab] = _Plan(self._draws, vocab)
        return self._plans[vocab]


class _Keys:
    """The keys of rows, of several steps, so that they travel once."""

    def __init__(self, draws: Sequence[Draw], offsets: Sequence[int]) -> None:
        """offsets: of each row behind the first one of its draw."""
        self._seeds = np.array([each.sampler.seed for each in draws], dtype=np.uint64)
        positions = [each.position + offset for each, offset in zip(draws, offsets, strict=True)]
        self._positions = np.array(positions, dtype=np.uint64)
        self._keys: Tensor | None = None  # [steps, rows], from step `_from` on
        self._from = 0

    def at(self, ahead: int, device: torch.device) -> Tensor:
        """[rows], in the step that is so many steps behind."""
        place = ahead - self._from
        if self._keys is None or not 0 <= place < len(self._keys):
            steps = np.arange(ahead, ahead + (STEPS_OF_KEYS if ahead else 1), dtype=np.uint64)
            self._keys = on_device(keys_of(self._seeds, self._positions + steps[:, None]), device)
            self._from, place = ahead, 0
        return self._keys[place]


class _Keyed:
    """`KeyedRows` of some draws, for one step and those behind it."""

    def __init__(self, draws: Sequence[Draw], device: torch.device) -> None:
        self._keys, self._device = _Keys(draws, [0] * len(draws)), device
        self._first = KeyedRows.of([each.sampler.sampling for each in draws], self._keys.at(0, device))

    def at(self, ahead: int) -> KeyedRows:
        return self._first._replace(keys=self._keys.at(ahead, self._device))


class _Plan:
    """How a device draws some draws: greedy rows first, those that rank the vocabulary last."""

    def __init__(self, draws: Sequence[Draw], vocab: int) -> None:
        self.draws = draws
        self.places = _places(draws, vocab)
        self._indices = [place.draw.indices[place.offset] for place in self.places]
        order = sorted(range(len(self.places)), key=lambda row: (self.places[row].index, self.places[row].offset))
        self.order = None if order == list(range(len(order))) else np.array(order, dtype=np.int64)
        self.has_one_each = self.order is None and len(self.places) == len(draws)
        self.needs_logprobs = [place.draw.needs_logprob for place in self.places]
        self.most_top = max((each.top_logprobs for each in draws), default=0)
        self._is_plain = all(place.draw.sampler.is_plain for place in self.places)
        self._greedy = sum(place.draw.sampler.sampling.is_greedy for place in self.places)
        keyed = self.places[self._greedy :]
        self._samplings = [place.draw.sampler.sampling for place in keyed]
        self._keys = _Keys([place.draw for place in keyed], [place.offset for place in keyed])
        self._filters: dict[tuple[int, int], Filters] = {}

    def start(self, logits: Tensor, ahead: int, noise_of_all: NoiseOfAll) -> Drawing:
        if self._indices != list(range(len(logits))):
            logits = logits.index_select(0, on_device(np.array(self._indices, dtype=np.int64), logits.device))
        adjusted = logits if self._is_plain else _adjusted(logits, self.places, ahead)
        tokens = [adjusted[: self._greedy].argmax(dim=-1)] if self._greedy else []
        if self._samplings:
            keys = self._keys.at(ahead, logits.device)
            tokens.append(draw_with(adjusted[self._greedy :], self._samplings, keys, noise_of_all, self._filters))
        ids = joined(tokens)
        # A row's smallest and largest number show whether all are finite, in a pass that writes no array.
        numbers = [*logits.aminmax(dim=-1)]
        if any(self.needs_logprobs):
            numbers += logprobs(logits, ids, self.most_top)
        # One copy for all: ids as the pairs of words that they are, then the others.
        table = _Sent(torch.cat([ids.view(torch.float32), *numbers]))
        ids = ids if self.order is None else ids.index_select(0, on_device(self.order, ids.device))
        return Drawing(self, ids, table)


class Arriving(Protocol):
    """Numbers of a device on their way to the host. memory: float32, on the host once `wait` returned."""

    @property
    def memory(self) -> Tensor: ...

    def wait(self) -> None: ...


class _Sent:
    """A table of a device, which is copied to the host."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._is_done: torch.cuda.Event | None = None

    def send(self) -> None:
        if self.memory.is_cuda:
            on_host = torch.empty(self.memory.shape, dtype=self.memory.dtype, pin_memory=True)
            self.memory = on_host.copy_(self.memory, non_blocking=True)
            new_event: Callable[[], torch.cuda.Event] = torch.cuda.Event
            self._is_done = new_event()
            self._is_done.record()

    def wait(self) -> None:
        if self._is_done is not None:
            self._is_done.synchronize()


class Drawing:
    """Samples that a device may still be drawing.

    ids: int64 [rows], on the device: what was drawn from each row, the rows of a draw after those of the one before it.
    """

    def __init__(self, plan: _Plan, ids: Tensor, table: Arriving) -> None:
        """table: in the order of the plan, [2 · rows] words of the ids, [rows] each the smallest and the largest logit,
        and what `logprobs` returns if any draw needs it."""
        self._plan = plan
        self.ids = ids
        self._table = table

    def send(self) -> None:
        """Start the copy to the host, which later work of the device need not wait for."""
        if isinstance(self._table, _Sent):
            self._table.send()

    def samples(self) -> list[list[Sample]]:
        """For each draw a sample of each of its rows. Waits for the device."""
        self._table.wait()
        plan, table, rows = self._plan, self._table.memory.cpu().numpy(), len(self.ids)
        ids, numbers = table[: 2 * rows].view(np.int64), table[2 * rows :].reshape(-1, rows)
        # Not by numpy, which takes longer to begin than there is to do.
        extremes = zip(*numbers[:2].tolist(), strict=True)
        are_finite = [math.isfinite(smallest) and math.isfinite(largest) for smallest, largest in extremes]
        found: list[float | None] = [None] * rows
        if any(plan.needs_logprobs):
            found = [
                logprob if needs_logprob else None
                for logprob, needs_logprob in zip(numbers[2].tolist(), plan.needs_logprobs, strict=True)
            ]
        samples = list(map(Sample, ids.tolist(), found, are_finite, self._tops(numbers[3:])))
        if plan.has_one_each:
            return [[sample] for sample in samples]
        drawn: list[list[Sample]] = [[] for _ in plan.draws]
        for place, sample in zip(plan.places, samples, strict=True):
            drawn[place.index].append(sample)
        return drawn

    def _tops(self, numbers: NDArray[np.float32]) -> Iterable[TopLogprobs]:
        """Of each row the likeliest, as many as its draw wants. numbers: [most, rows] ids, and the same of logprobs."""
        most = self._plan.most_top
        if not most:
            return itertools.repeat(())
        tops = []
        for place, ids, values in zip(self._plan.places, numbers[:most].T, numbers[most:].T, strict=True):
            order = np.lexsort((ids, -values))[: place.draw.top_logprobs]  # a device gives equals in any order
            tops.append(tuple(zip(ids[order].astype(np.int64).tolist(), values[order].tolist(), strict=True)))
        return tops


def draw_all(
    logits: Tensor,
    draws: Sequence[Draw],
    noise_of_all: NoiseOfAll = noise_of_all,
    weigh: Weigh | None = None,
    peaks: Sequence[Sample] | None = None,
) -> list[list[Sample]]:
    """For each draw a sample of each of its rows of raw float32 `logits` [n, V]. One synchronisation for all.

    weigh: the device's own, on a CPU; None: there is none. peaks: the largest of each row, if it is known.
    """
    if logits.device.type == "cpu" and all(each.is_plainly_greedy for each in draws):
        raw = logits.numpy()
        return [[_largest_of(raw[index]) for index in each.indices] for each in draws]
    if logits.device.type == "cpu" and not any(each.needs_logprob for each in draws):
        return _drawn_on_host(logits, draws, noise_of_all, weigh, peaks)
    if not any(len(each.indices) for each in draws):
        return [[] for _ in draws]
    return start_drawing(logits, draws, noise_of_all).samples()


def start_drawing(logits: Tensor, draws: Sequence[Draw], noise_of_all: NoiseOfAll = noise_of_all) -> Drawing:
    """Draw as `draw_all` does, at least one row, and do not wait for it."""
    # A backend is given `Draws` by the verifier; others have a list.
    arranged = draws if isinstance(draws, Draws) else Draws(draws)
    return arranged.start(logits, noise_of_all)


def _drawn_on_host(
    logits: Tensor,
    draws: Sequence[Draw],
    noise_of_all: NoiseOfAll,
    weigh: Weigh | None,
    peaks: Sequence[Sample] | None,
) -> list[list[Sample]]:
    """Row by row: each is drawn from as few ids as decide, or else as rows are on a device."""
    raw = logits.numpy()
    samples: list[list[Sample]] = []
    rows: list[HostRow] = []
    places: list[tuple[list[Sample], int]] = []
    for each in draws:
        sampler, indices = each.sampler, each.indices
        own = [_largest_of(raw[index]) if peaks is None else peaks[index] for index in indices]
        samples.append(own)
        if sampler.takes(each.drafted, [sample.token_id for sample in own]):
            continue
        weighted = raw[indices.start : indices.stop]
        if not sampler.is_unweighted:
            own_logits = logits[indices.start : indices.stop]
            weighted = sampler.weighted(own_logits, each.drafted, each.position).numpy()
        masks = itertools.repeat(None, len(indices)) if sampler.masks is None else sampler.masks.along(each.drafted)
        for offset, (row, mask) in enumerate(zip(weighted, masks, strict=True)):
            if not own[offset].is_finite:
                continue
            is_greedy = sampler.sampling.is_greedy
            if is_greedy and not sampler.is_unweighted:
                own[offset] = own[offset]._replace(token_id=int(row.argmax()))
            largest = own[offset].token_id
            if is_greedy and (mask is None or mask[largest >> 3] >> (largest & 7) & 1):
                continue
            ids = sampler.few
            if mask is not None:
                ids = None if int(np.bitwise_count(mask).sum()) > MOST else bits_of(mask, len(row)).nonzero()[0]
            own_key = key(sampler.seed, each.position + offset)
            asked = HostRow(row, sampler.sampling, own_key, ids, mask if ids is None else None)
            if mask is not None and (is_greedy or (ids is not None and len(ids) == 1)):
                token_id = asked.unmasked().logits.argmax() if ids is None else ids[row[ids].argmax()]
                own[offset] = own[offset]._replace(token_id=int(token_id))
                continue
            rows.append(asked)
            places.append((own, offset))
    for row, (own, offset), found in zip(rows, places, drawn_from_few(rows, weigh), strict=True):
        token_id = found
        if token_id is None:
            left = row.unmasked().logits if row.few is None else only(row.logits, row.few)
            token_id = int(draw(torch.from_numpy(left)[None], [row.sampling], [row.key], noise_of_all))
        own[offset] = Sample(token_id, None, is_finite=True)
    return samples


def _largest_of(row: NDArray[np.float32]) -> Sample:
    """The id of the largest of one row of logits on a CPU, the lower one of equals."""
    token_id = int(row.argmax())  # of NaN, if there is one
    is_finite = math.isfinite(row[token_id]) and math.isfinite(np.minimum.reduce(row))
    return Sample(token_id, None, is_finite)


def _places(draws: Sequence[Draw], vocab: int) -> list[_DrawPlace]:
    """The rows of all draws, each draw's in order. Greedy ones come first, those that rank the vocabulary last, unless
    they stay as they are."""
    found = [_DrawPlace(index, each, offset) for index, each in enumerate(draws) for offset in range(len(each.indices))]
    if vocab == _IN_ORDER:
        return found

    def order(place: _DrawPlace) -> tuple[bool, int]:
        sampling = place.draw.sampler.sampling
        return not sampling.is_greedy, 0 if sampling.is_greedy else ranks(sampling, vocab)

    return sorted(found, key=order)


def _adjusted(logits: Tensor, places: Sequence[_DrawPlace], ahead: int) -> Tensor:
    """`logits` with the penalties, biases and masks of the draws that have any; `logits` is not written to.

    ahead: positions by which the draws come later.
    """
    adjusted, masks = logits, list[Mask | None]()
    for first, place in enumerate(places):
        if place.offset:
            continue
        draw, sampler = place.draw, place.draw.sampler
        if not sampler.is_unweighted:
            if adjusted is logits:
                adjusted = logits.clone()
            own = slice(first, first + len(draw.indices))
            adjusted[own] = sampler.weighted(logits[own], draw.drafted, draw.position + ahead)
        masks += [None] * len(draw.indices) if sampler.masks is None else sampler.masks.along(draw.drafted)
    return masked(adjusted, masks)
