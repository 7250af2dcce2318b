"""Samples a token from each of many logits vectors, by keyed Gumbel noise.

Order: repetition penalty (whole history), presence and frequency penalty (this Generate), bias, ids that may not be
drawn, mask of a constraint, temperature, top_k, top_p, min_p; log-probabilities are of the raw logits. The token is the
id with the largest logit ÷ temperature + noise among those that are left, and the lower one of equals. Noise is a
function of (seed, position, id) alone (`kernels/gumbel_noise.py`), so neither how a history was built nor drafting can
change it.

All tokens of a step are drawn together, whatever their samplings, in a few operations; on a CPU row by row, from as few
ids as decide (`cpu_sampling.py`). A token depends on its own row of logits alone, bit for bit, so each operation here
treats a row the same, whatever rows are beside it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from inference_engine.kernels.cpu_sampling import MOST, Weigh, drawn_from_few, only
from inference_engine.kernels.gumbel_noise import FACTORS, GOLDEN, SHIFTS, NoiseOfAll, key, noise_of_all
from inference_engine.kernels.transfer import on_device
from inference_engine.types import Sampling, TopLogprobs

# Of one float64 array over the vocabulary, for as many rows of logits as fit, and at least one. Four of that size are
# there at once on a CPU, whatever the sampling; where a GPU sorts, more. A GPU needs few operations: 85 rows of 49,152
# ids, 16 of 262,144. On a CPU, larger arrays are slower: the system takes their memory back, and clears it, at every
# operation.
MAX_ARRAY_BYTES = 32 << 20
MAX_ARRAY_BYTES_ON_CPU = 1 << 20
_UNKNOWN_VOCABULARY = 0  # draws of the largest logits alone do not depend on it
STEPS_OF_KEYS = 64  # that are worked out at once, where one step is drawn behind another


Mask = NDArray[np.uint8]  # [ceil(V / 8)]: a bit for each id, the lowest first, set if it may be drawn


class Masks(Protocol):
    """What a constraint allows for the next tokens of one Generate."""

    def along(self, drafted: Sequence[int]) -> Sequence[Mask | None]:
        """For the token after the first r of `drafted`, for each r. None: whatever is drawn there is not used."""


@dataclass(slots=True)
class Sampler:
    """One Generate's sampling, with what it must remember of the history on the device.

    looks_back: a draw depends on the tokens before it, not on their logits alone.
    """

    sampling: Sampling
    seed: int
    seen: Tensor | None = None  # [V] bool: ids in the history, kept only under a repetition penalty
    # Only under a presence or frequency penalty: how often the Generate has given each id, and [V], what that costs it.
    counts: Counter[int] | None = None
    penalties: Tensor | None = None
    bias: Tensor | None = None  # [V]; -inf of what may not be drawn
    few: NDArray[np.int64] | None = None  # what may be drawn, ascending, where that is not many
    ends: Tensor | None = None  # ids that may not be drawn before the position `ends_from`
    ends_from: int = 0
    masks: Masks | None = None
    looks_back: bool = field(init=False)

    def __post_init__(self) -> None:
        self.looks_back = self.sampling.reads_history or self.sampling.counts_tokens

    @staticmethod
    def start(
        sampling: Sampling,
        seed: int,
        seen: NDArray[np.bool_] | None,
        vocab_size: int,
        device: torch.device,
        *,
        generated: Sequence[int] = (),
        ends: Sequence[int] = (),
        ends_from: int = 0,
    ) -> Sampler:
        """seen: bool [vocab_size], which ids are in the history, if the sampling reads it. It is not kept.
        generated: the tokens that the Generate has already. ends: ids not to be drawn before the position `ends_from`.
        """
        sampler = Sampler(sampling, seed)
        if sampling.reads_history:
            assert seen is not None
            sampler.seen = torch.tensor(seen, device=device)
        if sampling.counts_tokens:
            sampler.counts = Counter(generated)
            costs = np.zeros(vocab_size, dtype=np.float32)
            for token_id, count in sampler.counts.items():
                costs[token_id] = sampler.cost_of(count)
            sampler.penalties = on_device(costs, device).clone()
        if sampling.logit_bias:
            sampler.bias = torch.zeros(vocab_size, device=device)
            ids = torch.tensor(list(sampling.logit_bias), device=device)
            sampler.bias[ids] = torch.tensor(list(sampling.logit_bias.values()), device=device)
        if (permitted := permitted_by(sampling, vocab_size)) is not None:
            refused = on_device(np.where(permitted, np.float32(0.0), np.float32(-np.inf)), device)
            sampler.bias = refused.clone() if sampler.bias is None else sampler.bias + refused
            sampler.few = permitted.nonzero()[0] if np.count_nonzero(permitted) <= MOST else None
        if ends:
            sampler.ends, sampler.ends_from = on_device(np.array(sorted(ends)), device), ends_from
        return sampler

    @property
    def is_plain(self) -> bool:
        """Raw logits are drawn from as they are."""
        return not self.looks_back and self.bias is None and self.ends is None and self.masks is None

    @property
    def is_unweighted(self) -> bool:
        """Neither a penalty, a bias nor an id that may not be drawn changes the logits."""
        return not self.looks_back and self.bias is None and self.ends is None

    def adjusted(self, logits: Tensor, draft_tokens: Sequence[int], position: int = 0) -> Tensor:
        """Raw float32 `logits` [n, V] with penalties, bias and mask.

        Row r follows the first r of `draft_tokens` [n - 1], which have not been observed. position: of the first row's
        token.
        """
        logits = self.weighted(logits, draft_tokens, position)
        return logits if self.masks is None else _masked(logits, self.masks.along(draft_tokens))

    def weighted(self, logits: Tensor, draft_tokens: Sequence[int], position: int = 0) -> Tensor:
        """As `adjusted`, without the mask."""
        sampling = self.sampling
        if self.seen is not None:
            seen = self.seen
            if draft_tokens:
                seen = seen.expand(len(logits), -1).clone()
                after = [(index, draft_token) for index in range(len(logits)) for draft_token in draft_tokens[:index]]
                places, ids = on_device(np.array(after, dtype=np.int64).T, logits.device)
                seen[places, ids] = True
            penalised = torch.where(
                logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty
            )
            logits = torch.where(seen, penalised, logits)
        if self.penalties is not None:
            logits = logits - self._penalties_along(draft_tokens)
        if self.bias is not None:
            logits = logits + self.bias
        if self.ends is not None and (early := min(self.ends_from - position, len(logits))) > 0:
            logits = logits.clone()
            logits[:early].index_fill_(1, self.ends, -torch.inf)
        return logits

    def cost_of(self, count: int) -> float:
        """What the logit of an id loses that was given so often."""
        sampling = self.sampling
        return sampling.frequency_penalty * count + sampling.presence_penalty if count else 0.0

    def _penalties_along(self, draft_tokens: Sequence[int]) -> Tensor:
        """[V], or [n, V]: in row r after the first r of `draft_tokens` [n - 1]."""
        assert self.penalties is not None and self.counts is not None
        if not draft_tokens:
            return self.penalties
        rows = len(draft_tokens) + 1
        counts, costs = Counter[int](), dict[tuple[int, int], float]()  # by row and id
        for place, token_id in enumerate(draft_tokens, start=1):
            counts[token_id] += 1
            cost = self.cost_of(self.counts[token_id] + counts[token_id])
            costs |= {(row, token_id): cost for row in range(place, rows)}
        penalties = self.penalties.expand(rows, -1).clone()
        places, ids = on_device(np.array(list(costs), dtype=np.int64).T, penalties.device)
        penalties[places, ids] = on_device(np.array(list(costs.values()), dtype=np.float32), penalties.device)
        return penalties

    def observe(self, token_id: int) -> None:
        """Remember a committed token."""
        if self.seen is not None:
            self.seen[token_id] = True
        if self.counts is not None and self.penalties is not None:
            self.counts[token_id] += 1
            self.penalties[token_id] = self.cost_of(self.counts[token_id])


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

    def __init__(self, draws: Sequence[Draw], *, ahead: int = 0, plans: dict[int, _Plan] | None = None) -> None:
        """ahead: positions by which all draws come later. plans: by vocabulary size, for draws like these."""
        self._draws, self._ahead = draws, ahead
        self._plans = {} if plans is None else plans
        self._are_greedy: bool | None = None
        self._are_largest: bool | None = None

    def __len__(self) -> int:
        return len(self._draws)

    @overload
    def __getitem__(self, where: int) -> Draw: ...

    @overload
    def __getitem__(self, where: slice) -> Sequence[Draw]: ...

    def __getitem__(self, where: int | slice) -> Draw | Sequence[Draw]:
        if isinstance(where, slice):
            return [self[index] for index in range(*where.indices(len(self)))]
        draw = self._draws[where]
        return replace(draw, position=draw.position + self._ahead) if self._ahead else draw

    def __iter__(self) -> Iterator[Draw]:
        return map(self.__getitem__, range(len(self))) if self._ahead else iter(self._draws)

    def following(self) -> Draws:
        """The same draws one position later."""
        draws = Draws(self._draws, ahead=self._ahead + 1, plans=self._plans)
        draws._are_greedy, draws._are_largest = self._are_greedy, self._are_largest
        return draws

    @property
    def rows(self) -> list[range]:
        """The indices of each."""
        return [each.indices for each in self._draws]

    @property
    def are_greedy(self) -> bool:
        """Is there any, and are all samples ids of the largest raw logits?"""
        if self._are_greedy is None:
            self._are_greedy = len(self._draws) > 0 and all(each.is_plainly_greedy for each in self._draws)
        return self._are_greedy

    @property
    def are_largest(self) -> bool:
        """Is each draw the id of the largest raw logit of one row, and the rows those of the logits in their order?"""
        if self._are_largest is None:
            rows = self.rows
            self._are_largest = self.are_greedy and rows == [range(place, place + 1) for place in range(len(rows))]
        return self._are_largest

    def drawn(self, ids: Tensor, table: Arriving) -> Drawing:
        """Draws that `are_largest`, drawn elsewhere. ids, table: as `Drawing` has them."""
        if _UNKNOWN_VOCABULARY not in self._plans:
            self._plans[_UNKNOWN_VOCABULARY] = _Plan(self._draws, _UNKNOWN_VOCABULARY)
        plan = self._plans[_UNKNOWN_VOCABULARY]
        assert plan.has_one_each, "their rows are in the order of the draws"
        return Drawing(plan, ids, table)

    def start(self, logits: Tensor, noise_of_all: NoiseOfAll) -> Drawing:
        """See `start_drawing`."""
        vocab = logits.shape[-1]
        if vocab not in self._plans:
            self._plans[vocab] = _Plan(self._draws, vocab)
        return self._plans[vocab].start(logits, self._ahead, noise_of_all)


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
        self._seeds = _words([place.draw.sampler.seed for place in keyed])
        self._positions = _words([place.draw.position + place.offset for place in keyed])
        self._filters: dict[tuple[int, int], Filters] = {}
        # Of several steps, so that they travel once: [steps, rows], from step `_keys_from` on.
        self._keys: Tensor | None = None
        self._keys_from = 0

    def start(self, logits: Tensor, ahead: int, noise_of_all: NoiseOfAll) -> Drawing:
        if self._indices != list(range(len(logits))):
            logits = logits.index_select(0, on_device(np.array(self._indices, dtype=np.int64), logits.device))
        adjusted = logits if self._is_plain else _adjusted(logits, self.places, ahead)
        tokens = [adjusted[: self._greedy].argmax(dim=-1)] if self._greedy else []
        if self._samplings:
            keys = self._keys_of(ahead, logits.device)
            tokens.append(_draw(adjusted[self._greedy :], self._samplings, keys, noise_of_all, self._filters))
        ids = _joined(tokens)
        # A row's smallest and largest number show whether all are finite, in a pass that writes no array.
        numbers = [*logits.aminmax(dim=-1)]
        if any(self.needs_logprobs):
            numbers += logprobs(logits, ids, self.most_top)
        # One copy for all: ids as the pairs of words that they are, then the others.
        table = _Sent(torch.cat([ids.view(torch.float32), *numbers]))
        ids = ids if self.order is None else ids.index_select(0, on_device(self.order, ids.device))
        return Drawing(self, ids, table)

    def _keys_of(self, ahead: int, device: torch.device) -> Tensor:
        """The keys of the rows, [rows], in the step that is so many steps behind."""
        place = ahead - self._keys_from
        if self._keys is None or not 0 <= place < len(self._keys):
            steps = np.arange(ahead, ahead + (STEPS_OF_KEYS if ahead else 1), dtype=np.uint64)
            self._keys = on_device(_keys(self._seeds, self._positions + steps[:, None]), device)
            self._keys_from, place = ahead, 0
        return self._keys[place]


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
    samples: list[list[Sample]] = [[] for _ in draws]
    rows: list[NDArray[np.float32]] = []
    samplings: list[Sampling] = []
    keys: list[int] = []
    places: list[tuple[list[Sample], int]] = []
    allowed: list[NDArray[np.int64] | None] = []
    for each, own in zip(draws, samples, strict=True):
        sampler, indices = each.sampler, each.indices
        weighted = raw[indices.start : indices.stop]
        if not sampler.is_unweighted:
            own_logits = logits[indices.start : indices.stop]
            weighted = sampler.weighted(own_logits, each.drafted, each.position).numpy()
        masks = itertools.repeat(None, len(indices)) if sampler.masks is None else sampler.masks.along(each.drafted)
        for offset, (index, row, mask) in enumerate(zip(indices, weighted, masks, strict=True)):
            largest = _largest_of(raw[index]) if peaks is None else peaks[index]
            own.append(largest)
            if not largest.is_finite:
                continue
            is_greedy = sampler.sampling.is_greedy
            if is_greedy and not sampler.is_unweighted:
                largest = own[-1] = largest._replace(token_id=int(row.argmax()))
            if is_greedy and (mask is None or mask[largest.token_id >> 3] >> (largest.token_id & 7) & 1):
                continue
            left, ids = row, sampler.few
            if mask is not None:
                bits = _bits(mask, len(row))
                if np.count_nonzero(bits) > MOST:
                    left, ids = np.where(bits, row, np.float32(-np.inf)), None
                else:
                    ids = bits.nonzero()[0]
                if is_greedy or (ids is not None and len(ids) == 1):
                    token_id = left.argmax() if ids is None else ids[row[ids].argmax()]
                    own[-1] = largest._replace(token_id=int(token_id))
                    continue
            rows.append(left)
            samplings.append(sampler.sampling)
            keys.append(key(sampler.seed, each.position + offset))
            places.append((own, offset))
            allowed.append(ids)
    found_of = drawn_from_few(rows, samplings, keys, weigh, allowed)
    for row, ids, sampling, own_key, (own, offset), found in zip(
        rows, allowed, samplings, keys, places, found_of, strict=True
    ):
        token_id = found
        if token_id is None:
            left = row if ids is None else only(row, ids)
            token_id = int(draw(torch.from_numpy(left)[None], [sampling], [own_key], noise_of_all))
        own[offset] = Sample(token_id, None, is_finite=True)
    return samples


def permitted_by(sampling: Sampling, vocab: int) -> NDArray[np.bool_] | None:
    """Which ids [V] may be drawn by the sampling's own sets; None: all."""
    if sampling.allowed_token_ids is None and sampling.banned_token_ids is None:
        return None
    permitted = np.full(vocab, sampling.allowed_token_ids is None)
    for token_ids, may in ((sampling.allowed_token_ids, True), (sampling.banned_token_ids, False)):
        for first, behind in () if token_ids is None else token_ids.ranges:
            permitted[first:behind] = may
    return permitted


def ids_in(mask: Mask, vocab: int) -> NDArray[np.int64]:
    """The ids that a mask allows, ascending."""
    return _bits(mask, vocab).nonzero()[0]


def _bits(mask: Mask, vocab: int) -> NDArray[np.bool_]:
    return np.unpackbits(mask, count=vocab, bitorder="little").view(np.bool_)


def _masked(logits: Tensor, masks: Sequence[Mask | None]) -> Tensor:
    """`logits` [n, V] of what each row's mask allows, and -inf of all others."""
    every = np.full(-(-logits.shape[-1] // 8), 0xFF, dtype=np.uint8)
    packed = on_device(np.stack([every if mask is None else mask for mask in masks]), logits.device)
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (packed[:, :, None] >> places & 1).flatten(1)[:, : logits.shape[-1]]
    return torch.where(bits.bool(), logits, -torch.inf)


def _largest_of(row: NDArray[np.float32]) -> Sample:
    """The id of the largest of one row of logits on a CPU, the lower one of equals."""
    token_id = int(row.argmax())  # of NaN, if there is one
    is_finite = math.isfinite(row[token_id]) and math.isfinite(np.minimum.reduce(row))
    return Sample(token_id, None, is_finite)


def _places(draws: Sequence[Draw], vocab: int) -> list[_DrawPlace]:
    """The rows of all draws, each draw's in order. Greedy ones come first, those that rank the vocabulary last."""
    found = [_DrawPlace(index, each, offset) for index, each in enumerate(draws) for offset in range(len(each.indices))]

    def order(place: _DrawPlace) -> tuple[bool, bool]:
        sampling = place.draw.sampler.sampling
        return not sampling.is_greedy, not sampling.is_greedy and is_ranked(sampling, vocab)

    return sorted(found, key=order)


def _adjusted(logits: Tensor, places: Sequence[_DrawPlace], ahead: int) -> Tensor:
    """`logits` with the penalties and biases of the draws that have any; `logits` is not written to.

    ahead: positions by which the draws come later.
    """
    adjusted = logits
    for first, place in enumerate(places):
        if place.offset == 0 and not place.draw.sampler.is_plain:
            if adjusted is logits:
                adjusted = logits.clone()
            own = slice(first, first + len(place.draw.indices))
            adjusted[own] = place.draw.sampler.adjusted(logits[own], place.draw.drafted, place.draw.position + ahead)
    return adjusted


def draw(
    logits: Tensor, samplings: Sequence[Sampling], keys: Sequence[int], noise_of_all: NoiseOfAll = noise_of_all
) -> Tensor:
    """A token [n] from each row of `logits` [n, V], which have penalties and bias already. No synchronisation.

    keys: of the noise of each row, from `noise.key`. No sampling may be greedy. Neighbours are drawn together if all or
    none of them rank the vocabulary, so put those that do side by side.
    """
    return _draw(logits, samplings, on_device(np.array(keys, dtype=np.int64), logits.device), noise_of_all, {})


def _draw(
    logits: Tensor,
    samplings: Sequence[Sampling],
    keys: Tensor,
    noise_of_all: NoiseOfAll,
    filters: dict[tuple[int, int], Filters],
) -> Tensor:
    """As `draw`. filters: those of neighbouring rows, by the first one and the one behind the last, once made."""
    vocab = logits.shape[-1]
    if not filters:
        first = 0
        for _, alike in itertools.groupby(samplings, lambda sampling: is_ranked(sampling, vocab)):
            count = len(list(alike))
            for part in _parts(first, first + count, logits):
                filters[part.start, part.stop] = Filters.of(samplings[part], vocab, logits.device)
            first += count
        assert first == len(logits) == len(keys), (first, len(logits), len(keys))
    tokens: list[Tensor] = []
    for (first, last), own in filters.items():
        scores = own.left(logits[first:last])
        scores += noise_of_all(keys[first:last], vocab)
        tokens.append(scores.argmax(dim=-1))
    return _joined(tokens)


def is_ranked(sampling: Sampling, vocab: int) -> bool:
    """Does it need the vocabulary in order of probability?"""
    return 0 < sampling.top_k < vocab or sampling.top_p < 1.0


def logprobs(logits: Tensor, tokens: Tensor, most: int = 0) -> list[Tensor]:
    """Natural log-probabilities [n] of `tokens` [n] under raw float32 `logits` [n, V], and `most` times [n] the ids of
    the likeliest tokens, as float32, and `most` times their log-probabilities; of equals the lower ids, in any order.
    """
    # Not logits - logsumexp: how that adds up depends on the number of rows.
    vocab, found = logits.shape[-1], list[Tensor]()
    assert not most or vocab <= 2**24, "ids are exact as float32"
    for part in _parts(0, len(logits), logits):
        every = _aligned(logits[part]).log_softmax(dim=-1)[:, :vocab]
        of_part = [every.gather(1, tokens[part, None])]
        if most:
            counts = torch.full((len(every), 1), most, device=every.device)
            largest = _largest(every, counts, every.topk(most, dim=-1).values)
            values, ids = every.masked_fill(~largest, -torch.inf).topk(most, dim=-1)
            of_part += [ids.to(torch.float32), values]
        found.append(torch.cat(of_part, dim=-1))
    return list(_joined(found).T)


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """The filters of some rows, on the device. A filter that is off cuts nothing.

    temperature, top_k, top_p, min_p: float64 [n, 1] each; of min_p, the logarithm. is_ranked, has_top_p, has_min_p: of
    any row. most_k: the largest top_k.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    is_ranked: bool
    has_top_p: bool
    has_min_p: bool
    most_k: int

    @staticmethod
    def of(samplings: Sequence[Sampling], vocab: int, device: torch.device) -> Filters:
        options = [
            (
                sampling.temperature,
                sampling.top_k if 0 < sampling.top_k < vocab else vocab,
                sampling.top_p if sampling.top_p < 1.0 else math.inf,
                math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf,
            )
            for sampling in samplings
        ]
        temperature, top_k, top_p, min_p = on_device(np.array(options).T[:, :, None], device)
        return Filters(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            is_ranked=any(is_ranked(sampling, vocab) for sampling in samplings),
            has_top_p=any(sampling.top_p < 1.0 for sampling in samplings),
            has_min_p=any(sampling.min_p > 0.0 for sampling in samplings),
            most_k=max(sampling.top_k for sampling in samplings),
        )

    def left(self, logits: Tensor) -> Tensor:
        """`logits` [n, V] ÷ temperature, float64, and -inf where a filter cuts."""
        left = logits.to(torch.float64, copy=True).div_(self.temperature)
        if self.is_ranked:
            counts = self.top_k.long()
            if self.has_top_p:
                ranked = _ranked(logits)
                counts = _nucleus(ranked, self.temperature, counts, self.top_p)
            else:
                ranked = logits.topk(self.most_k, dim=-1).values
            left.masked_fill_(~_largest(logits, counts, ranked), -torch.inf)
        if self.has_min_p:
            left.masked_fill_(left < left.amax(dim=-1, keepdim=True) + self.min_p, -torch.inf)
        return left


def _words(numbers: Sequence[int]) -> NDArray[np.uint64]:
    return np.array(numbers, dtype=np.uint64)


def _keys(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.int64]:
    """`noise.key` of each seed [rows] and position [..., rows]."""
    return _mixed(_mixed(seeds + np.uint64(GOLDEN)) + positions * np.uint64(GOLDEN)).view(np.int64)


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = bits ^ bits >> np.uint64(SHIFTS[0])
    for factor, shift in zip(FACTORS, SHIFTS[1:], strict=True):
        bits = bits * np.uint64(factor)
        bits ^= bits >> np.uint64(shift)
    return bits


def _ranked(logits: Tensor) -> Tensor:
    """Each row of `logits` [n, V], sorted from its largest number down."""
    if logits.is_cuda:
        return logits.sort(dim=-1, descending=True).values
    # torch sorts the ids along, which are not needed here: that takes three times as long.
    return torch.from_numpy(-np.sort(-logits.numpy(), axis=-1))


def _nucleus(ranked: Tensor, temperature: Tensor, counts: Tensor, top_p: Tensor) -> Tensor:
    """How many [n, 1] of the first `counts` of each row top_p leaves: the fewest whose sum reaches it."""
    weights = ranked.double().sub_(ranked[:, :1]).div_(temperature).exp_()
    weights.masked_fill_(torch.arange(ranked.shape[-1], device=ranked.device) >= counts, 0.0)
    sums = _running_sums_(weights)
    short = (sums < top_p * sums[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(short + 1, counts)


def _largest(logits: Tensor, counts: Tensor, ranked: Tensor) -> Tensor:
    """Whether each number [n, V] is one of the `counts` [n, 1] largest of its row; of equals the lower ids are.

    ranked: the largest numbers of each row, sorted, as many as needed.
    """
    last = ranked.gather(1, counts - 1)
    above, equal = logits > last, logits == last
    room = counts - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= room))


def _parts(first: int, last: int, logits: Tensor) -> Iterator[slice]:
    """Slices of the rows first … last - 1, each as long as the limit of an array allows."""
    vocab = logits.shape[-1]
    if logits.is_cuda:
        # Up to V / 512 rows, torch adds up each row with 512 threads, and so in one order.
        count = max(min(MAX_ARRAY_BYTES // (8 * vocab), vocab // 512), 2)
    else:
        count = max(MAX_ARRAY_BYTES_ON_CPU // (8 * vocab), 1)
    for start in range(first, last, count):
        yield slice(start, min(start + count, last))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _aligned(logits: Tensor) -> Tensor:
    """`logits` [n, V]; on a GPU, padded with -inf until each row begins at a multiple of 16 bytes.

    On a GPU the order in which softmax adds depends on where in such a multiple a row begins.
    """
    missing = -logits.shape[-1] % 4 if logits.is_cuda else 0
    return functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def _running_sums_(numbers: Tensor) -> Tensor:
    """Running sums of each row of `numbers`, which may be written over."""
    if numbers.is_cuda and len(numbers) == 1:
        # On a GPU, torch gives a single row to cub, which adds in another order, and not always in the same.
        return numbers.repeat(2, 1).cumsum_(dim=-1)[:1]
    return numbers.cumsum_(dim=-1)
