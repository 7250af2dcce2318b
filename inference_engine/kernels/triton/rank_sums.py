"""Sums and collections over GPUs that read each other's memory, each in one kernel, in Triton.

    own room ◀── states        each program: write its part, set a flag in each rank, wait for theirs, read their parts
    flags    call number of each program and rank, in each rank's memory, written by the others

A program's calls use its two places in turn. When it begins the next but one, all ranks have finished the one between,
so they have read what it writes over: one round of flags is enough. All ranks make the same calls in the same order.
Numbers are added in float32 in the order of the ranks, and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.triton.dependent_launch import chained

BLOCK = 1024  # numbers of a program


class SharedRoom:
    """Memory of each rank that the others read. rooms, flags: addresses, of each rank's, first zeros: of the former two
    places of `numbers`, of the latter one of each rank for each program."""

    def __init__(
        self, rank: int, rooms: Sequence[int], flags: Sequence[int], numbers: int, device: torch.device
    ) -> None:
        """numbers: a multiple of BLOCK."""
        self._rank, self._ranks, self.numbers = rank, len(rooms), numbers
        self._rooms = torch.tensor(list(rooms), dtype=torch.int64, device=device)
        self._flags = torch.tensor(list(flags), dtype=torch.int64, device=device)
        self._calls = torch.zeros(numbers // BLOCK, dtype=torch.int64, device=device)

    def sum(self, states: Tensor) -> Tensor:
        """The sum of what each rank gives, at most `numbers` in all."""
        out = torch.empty_like(states)
        self._run(states, out, width=0)
        return out

    def gather(self, parts: Tensor) -> Tensor:
        """[n, ranks · V] of [n, V] on each."""
        count, width = parts.shape
        out = parts.new_empty(count, self._ranks * width)
        self._run(parts, out, width=width)
        return out

    def _run(self, states: Tensor, out: Tensor, *, width: int) -> None:
        count = states.numel()
        assert count <= self.numbers and states.is_contiguous()
        _exchange[(triton.cdiv(count, BLOCK),)](
            states,
            out,
            self._rooms,
            self._flags,
            self._calls,
            count,
            self.numbers,
            width,
            RANK=self._rank,
            RANKS=self._ranks,
            GATHERS=width > 0,
            BLOCK=BLOCK,
            num_warps=4,
            **chained(states.device),
        )


@triton.jit(do_not_specialize=["count"])
def _exchange(
    p_states,
    p_out,
    p_rooms,
    p_flags,
    p_calls,
    count,
    place_numbers,
    width,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    GATHERS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    kind: tl.constexpr = tl.pointer_type(p_states.dtype.element_ty)
    program = tl.program_id(0)
    o = program * BLOCK + tl.arange(0, BLOCK)
    m = o < count
    call = tl.load(p_calls + program) + 1
    o_place = o + (call % 2) * place_numbers
    tl.store(tl.load(p_rooms + RANK).to(kind) + o_place, tl.load(p_states + o, mask=m, other=0.0), mask=m)
    tl.debug_barrier()  # one thread sets the flag for what all have written
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            p_flag = tl.load(p_flags + rank).to(tl.pointer_type(tl.int64)) + program * RANKS + RANK
            tl.atomic_xchg(p_flag, call, sem="release", scope="sys")
    p_own = tl.load(p_flags + RANK).to(tl.pointer_type(tl.int64)) + program * RANKS
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            while tl.atomic_add(p_own + rank, 0, sem="acquire", scope="sys") < call:
                pass
    tl.debug_barrier()
    b_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in tl.static_range(RANKS):
        p_room = tl.load(p_rooms + rank).to(kind)
        b = tl.load(p_room + o_place, mask=m, other=0.0, volatile=True)
        if GATHERS:
            tl.store(p_out + (o // width) * width * RANKS + rank * width + o % width, b, mask=m)
        else:
            b_sum += b.to(tl.float32)
    if not GATHERS:
        tl.store(p_out + o, b_sum.to(p_out.dtype.element_ty), mask=m)
    tl.store(p_calls + program, call)
