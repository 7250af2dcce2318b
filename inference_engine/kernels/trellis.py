"""Trellis-coded quantisation: the numbers of a vector as codes of few bits each, chosen together.

A number of b bits has 2**(b + 1) levels, twice as many as it has codes. Level l is of subset l mod 4. A code is

    | b − 1 bits: which level of the subset | 1 bit: u |

and the subset follows from the u of this number and of the three before it, so that which levels a code can reach
depends on its neighbours' codes:

    subset  =  2 · (u ⊕ u₋₁ ⊕ u₋₃)  +  u₋₂

Decoding a number reads four bits. Encoding looks for the path through the 8 states (u₋₁, u₋₂, u₋₃) whose levels cost
least (Viterbi), and so chooses among levels half as far apart: at 1 to 4 bits a Gaussian variable loses 0.7 to 1.7 dB
less than with the best levels for each number alone.
Source: Marcellin and Fischer, IEEE Trans. Communications 38(1), 1990; the code is Ungerboeck's with 8 states (IEEE
Trans. Inf. Theory 28(1), 1982, Table I, parity checks 13 and 04), its encoder fed forward.

A vector's numbers are distributed over `chains`: number c is step c ÷ chains of chain c mod chains. A chain begins with
zeros.

Before, a vector is divided by its scale, of which a byte is stored, sixteen steps to a doubling. Its logarithm is three
quarters of that of the numbers' root mean square: numbers of one vector rise and fall together, but not all of them.
One half loses more on text unlike the calibration text, the whole loses more at few bits. Afterwards codes are packed
bit by bit into whole bytes, the most significant bit of each first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SUBSETS = 4
MEMORY = 3  # how many earlier u a subset depends on
STATES = 1 << MEMORY
STEPS = 256  # of a chain, at most: a chain's first steps have less choice
SCALE_STEPS = 16  # to a doubling
SCALE_ONE = 128  # the code of scale 1
FOLLOWED = 0.75  # how far a scale goes
_VECTORS_AT_ONCE = 256  # that are encoded at once: each needs some 60 bytes a number

# numbers [n, C] float32 → codes, int32 [n, C]; and codes → the levels they stand for, float32 [n, C].
Choose = Callable[[Tensor, "Levels"], Tensor]
LevelsOf = Callable[[Tensor, "Levels"], Tensor]
# numbers [n, C] float32 → the same divided by their vectors' scales, whose codes are written: uint8 [n, 1].
Scale = Callable[[Tensor, Tensor], Tensor]
# codes int32 [n, C] are written as bytes, uint8 [n, bytes].
Pack = Callable[[Tensor, "BitPlaces", Tensor], None]


class TableRun(NamedTuple):
    """Neighbouring numbers with one table, [first, behind), and where the table lies: [start, stop)."""

    first: int
    behind: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Levels:
    """What the numbers of a vector may become, and what an error in each costs. C numbers, of at least one bit each.

    values: the tables in use, one after another, each ascending, float32. first, size [C]: where in them a number's
    table begins, and how many levels it has; int32. weights [C]: what a squared error costs, float32. runs: the same on
    the host, which need not ask the device. longest: the largest size.
    """

    values: Tensor
    first: Tensor
    size: Tensor
    weights: Tensor
    runs: tuple[TableRun, ...]
    longest: int

    @property
    def count(self) -> int:
        return len(self.weights)

    @property
    def chains(self) -> int:
        return -(-self.count // STEPS)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.values, self.first, self.size, self.weights))

    def to(self, device: torch.device | str) -> Levels:
        return replace(
            self,
            values=self.values.to(device),
            first=self.first.to(device),
            size=self.size.to(device),
            weights=self.weights.to(device),
        )


@dataclass(frozen=True, slots=True, eq=False)
class BitPlaces:
    """Where the bits of packed codes come from, [8 · bytes] each: of which code one is, and how many bits of that code
    follow it, int32. What fills up the last byte is a bit that no code has.
    """

    code: Tensor
    left: Tensor


@dataclass(frozen=True, slots=True)
class Trellis:
    """The operations, of one kind: `PLAIN`, or a device's own."""

    choose: Choose
    levels_of: LevelsOf
    scale: Scale
    pack: Pack


def make_levels(tables: Sequence[Tensor], weights: Tensor) -> Levels:
    """From the table of each number: 2**(bits + 1) levels, ascending. Lies where `weights` [C] do.

    Numbers whose table is the same tensor share it. Raises ValueError for a table of another length.
    """
    for table in tables:
        if len(table) < 2 or len(table) & (len(table) - 1):
            raise ValueError(f"a number's levels must be a power of two, at least 2, got {len(table)}")
    starts: dict[int, int] = {}
    distinct: list[Tensor] = []
    end = 0
    for table in tables:
        if id(table) not in starts:
            starts[id(table)] = end
            distinct.append(table.float())
            end += len(table)
    runs, first = [], 0
    for table_id, alike in groupby(tables, key=id):
        own = list(alike)
        runs.append(TableRun(first, first + len(own), starts[table_id], starts[table_id] + len(own[0])))
        first += len(own)
    return Levels(
        values=torch.cat(distinct),
        first=torch.tensor([starts[id(table)] for table in tables], dtype=torch.int32),
        size=torch.tensor([len(table) for table in tables], dtype=torch.int32),
        weights=weights.detach().float().cpu(),
        runs=tuple(runs),
        longest=max(len(table) for table in distinct),
    ).to(weights.device)


def choose(numbers: Tensor, levels: Levels) -> Tensor:
    """The codes whose levels cost least in all, of each vector of `numbers` [n, C]: int32 [n, C].

    The codes of a vector that is not finite are arbitrary.
    """
    if not len(numbers):
        return numbers.int()
    return torch.cat([_choose(some, levels) for some in torch.split(numbers, _VECTORS_AT_ONCE)])


def levels_of(codes: Tensor, levels: Levels) -> Tensor:
    """The inverse: float32 [n, C]."""
    bits = codes & 1
    one, two, three = (_earlier(bits, steps * levels.chains) for steps in (1, 2, 3))
    subset = ((bits ^ one ^ three) << 1) | two
    return levels.values[levels.first + ((codes >> 1) << 2) + subset]


def scale(numbers: Tensor, scale_codes: Tensor) -> Tensor:
    """See `Scale`. The code of a vector that is not finite is arbitrary."""
    energy = numbers.square().mean(dim=1, keepdim=True)
    steps = energy.clamp_min(torch.finfo(torch.float32).tiny).log2() * (SCALE_STEPS * FOLLOWED / 2)
    scale_codes.copy_((steps.round() + SCALE_ONE).clamp(0, 255))
    return numbers / scales(scale_codes)


def scales(codes: Tensor) -> Tensor:
    return ((codes.float() - SCALE_ONE) / SCALE_STEPS).exp2()


def pack(codes: Tensor, places: BitPlaces, packed: Tensor) -> None:
    """See `Pack`."""
    bits = (codes.int()[:, places.code] >> places.left) & 1
    shifts = torch.arange(7, -1, -1, dtype=torch.int32, device=codes.device)
    octets = bits.view(*packed.shape, 8) << shifts
    packed.copy_(octets.sum(-1, dtype=torch.int32))


PLAIN = Trellis(choose, levels_of, scale, pack)


def _earlier(bits: Tensor, by: int) -> Tensor:
    """What stood `by` places before, zeros where nothing did."""
    return F.pad(bits, (by, 0))[:, : bits.shape[1]]


def _choose(numbers: Tensor, levels: Levels) -> Tensor:
    vector_count, chains = len(numbers), levels.chains
    steps = -(-levels.count // chains)
    nearest = torch.empty((SUBSETS, steps * chains, vector_count), dtype=torch.int16, device=numbers.device)
    costs = numbers.new_empty((SUBSETS, steps * chains, vector_count))
    # What chains that end a step early are filled up with.
    for part in (nearest, costs):
        part[:, levels.count :] = 0
    # The same number of all vectors side by side, so that a step of all chains is one piece of memory.
    _nearest(numbers.T.contiguous(), levels, nearest, costs)
    bits, subsets = _cheapest_path(costs.view(SUBSETS, steps, chains * vector_count))
    chosen = nearest.view(SUBSETS, -1).gather(0, subsets.view(1, -1)).view(-1, vector_count)
    return (chosen.int() << 1 | bits.view(-1, vector_count))[: levels.count].T.contiguous()


def _nearest(numbers: Tensor, levels: Levels, nearest: Tensor, costs: Tensor) -> None:
    """Of numbers [C, n], into [4, ≥ C, n]: each subset's nearest level, counted in the subset, and what it costs."""
    for first, behind, start, stop in levels.runs:
        own = slice(first, behind)
        for subset in range(SUBSETS):
            table = levels.values[start + subset : stop : SUBSETS]
            index = torch.bucketize(numbers[own], (table[1:] + table[:-1]) / 2, out_int32=True)
            nearest[subset, own] = index
            missed = numbers[own] - table.index_select(0, index.flatten()).view_as(index)
            torch.mul(missed.square_(), levels.weights[own, None], out=costs[subset, own])


def _cheapest_path(costs: Tensor) -> tuple[Tensor, Tensor]:
    """costs [4, steps, N] of the subsets → u (uint8) and the subset (int64) of each step, [steps, N], on the best path.

    A state is u₋₁ + 2 u₋₂ + 4 u₋₃; the state 2 j + u can be reached from j and from j + 4.
    """
    _, steps, count = costs.shape
    subset_of = _SUBSET_OF.to(costs.device)
    branches = subset_of.flatten()
    spent = costs.new_full((STATES, count), torch.inf)
    spent[0] = 0.0
    from_above = torch.empty((steps, STATES, count), dtype=torch.bool, device=costs.device)
    for step in range(steps):
        sums = costs[:, step].index_select(0, branches).view(2, STATES // 2, 2, count)
        sums += spent.view(2, STATES // 2, 1, count)
        torch.lt(sums[1], sums[0], out=from_above[step].view(STATES // 2, 2, count))
        torch.minimum(sums[0], sums[1], out=spent.view(STATES // 2, 2, count))
        # What all states have spent says nothing, and would swamp the rest if one number lay far outside its levels.
        spent -= spent.amin(0)
    state = spent.argmin(0)
    taken = torch.empty((steps, count), dtype=torch.uint8, device=costs.device)  # state before, and u
    for step in range(steps - 1, -1, -1):
        above = from_above[step].gather(0, state[None])[0]
        branch = state | (above.long() << MEMORY)
        taken[step] = branch
        state = branch >> 1
    return taken & 1, branches[taken.long()]


def _subsets() -> Tensor:
    """[8 states, 2]: the subset that u leads to."""
    state, bit = torch.arange(STATES)[:, None], torch.arange(2)
    one, two, three = (state >> place & 1 for place in range(MEMORY))
    return (bit ^ one ^ three) << 1 | two


_SUBSET_OF = _subsets()
