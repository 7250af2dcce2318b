"""Sums and collections over GPUs that read each other's memory, each in one kernel, in Triton.

    states ──▶ a place of this rank in each other's memory        all programs write all of their blocks first,
    own memory, places of the others ──▶ their sum                then they wait for what the others wrote

No flags: a number that has not come is `ABSENT`, bits that are never sent, so what arrives says itself that it is
there. A block has three sets of places, which its calls use in turn, and clears the set of the call before. That is
used in the next but one, which another rank begins once it has what this one wrote in the next: behind the clearing.
All ranks make the same calls in the same order. Numbers are added in float32 in the order of the ranks, and rounded
once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.triton.dependent_launch import chained

BLOCK = 1024  # numbers that a program writes or reads at once
PLACES = 3
ABSENT = -1  # as an integer; as a number NaN, which is sent with other bits
# Each waits for the same one of another rank, so all of them run at the same time: 8 of 4 warps on a multiprocessor.
_PROGRAMS = 1024


def room_numbers(ranks: int, numbers: int) -> int:
    """Of the memory of a rank, for calls of at most `numbers`, a multiple of BLOCK."""
    return PLACES * ranks * numbers


class SharedRoom:
    """Memory of each rank that the others write: rooms are the addresses of each rank's `room_numbers`, first all
    ABSENT."""

    def __init__(self, rank: int, rooms: Sequence[int], numbers: int, device: torch.device) -> None:
        """numbers: that are sent at once."""
        self._rank, self._ranks, self.numbers = rank, len(rooms), numbers
        self._rooms = torch.tensor(list(rooms), dtype=torch.int64, device=device)
        self._calls = torch.zeros(numbers // BLOCK + _PROGRAMS, dtype=torch.int32, device=device)

    def sum(self, states: Tensor) -> Tensor:
        """The sum of what each rank gives."""
        out = torch.empty_like(states)
        for first in range(0, states.numel(), self.numbers):
            some = slice(first, first + self.numbers)
            self._run(states.view(-1)[some], out.view(-1)[some], width=0)
        return out

    def gather(self, parts: Tensor) -> Tensor:
        """[n, ranks · V] of [n, V] on each, at most `numbers`."""
        count, width = parts.shape
        out = parts.new_empty(count, self._ranks * width)
        self._run(parts, out, width=width)
        return out

    def _run(self, states: Tensor, out: Tensor, *, width: int) -> None:
        count = states.numel()
        assert count <= self.numbers and states.is_contiguous()
        blocks = triton.cdiv(count, BLOCK)
        _exchange[(min(blocks, _PROGRAMS),)](
            states,
            out,
            self._rooms,
            self._calls,
            count,
            self.numbers,
            width,
            RANK=self._rank,
            RANKS=self._ranks,
            GATHERS=width > 0,
            TURNS=triton.cdiv(blocks, _PROGRAMS),
            BLOCK=BLOCK,
            PLACES=PLACES,
            ABSENT=ABSENT,
            num_warps=4,
            **chained(states.device),
        )


@triton.jit
def _exchange(
    p_states,
    p_out,
    p_rooms,
    p_calls,
    count,
    numbers,
    width,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    GATHERS: tl.constexpr,
    TURNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
    ABSENT: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    number: tl.constexpr = p_states.dtype.element_ty
    whole: tl.constexpr = tl.int16 if number.primitive_bitwidth == 16 else tl.int32
    o_block = tl.arange(0, BLOCK)
    for turn in range(TURNS):
        block = turn * tl.num_programs(0) + tl.program_id(0)
        o = block * BLOCK + o_block
        m = o < count
        b = tl.load(p_states.to(tl.pointer_type(whole)) + o, mask=m, other=0)
        b = tl.where(b == ABSENT, b & (2 ** (whole.primitive_bitwidth - 1) - 1), b)  # of NaN, another one
        own_place = (tl.load(p_calls + block) % PLACES * RANKS + RANK).to(tl.int64) * numbers
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                p_room = tl.multiple_of(tl.load(p_rooms + rank).to(tl.pointer_type(whole)), 16)
                tl.store(p_room + own_place + o, b, mask=m)
    p_own = tl.multiple_of(tl.load(p_rooms + RANK).to(tl.pointer_type(whole)), 16)
    for turn in range(TURNS):
        block = turn * tl.num_programs(0) + tl.program_id(0)
        o = block * BLOCK + o_block
        m = o < count
        m_block = (block * BLOCK < count) & (o_block < BLOCK)
        call = tl.load(p_calls + block)
        b_sum = tl.zeros((BLOCK,), dtype=tl.float32)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                b_part = tl.load(p_states + o, mask=m, other=0.0)
            else:
                p_part = p_own + (call % PLACES * RANKS + rank).to(tl.int64) * numbers + o
                b = tl.load(p_part, mask=m, other=0, volatile=True)
                while tl.max((b == ABSENT).to(tl.int32), axis=0) > 0:
                    b = tl.load(p_part, mask=m, other=0, volatile=True)
                b_part = b.to(number, bitcast=True)
                p_before = p_own + ((call + PLACES - 1) % PLACES * RANKS + rank).to(tl.int64) * numbers + o
                tl.store(p_before, tl.full((BLOCK,), ABSENT, whole), mask=m_block)
            if GATHERS:
                tl.store(p_out + (o // width) * width * RANKS + rank * width + o % width, b_part, mask=m)
            else:
                b_sum += b_part.to(tl.float32)
        if not GATHERS:
            tl.store(p_out + o, b_sum.to(number), mask=m)
        tl.store(p_calls + block, call + 1, mask=block * BLOCK < count)
