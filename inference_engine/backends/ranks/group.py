"""What ranks of one model add up and collect within a step: two reductions, on a CPU and between GPUs.

    gloo              between processes on a CPU
    symmetric memory  between GPUs that can read each other's memory: each adds what all have written, in one kernel
    NCCL              between other GPUs

Sums have the order of the ranks, so all of them get the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from inference_engine.errors import BackendError
from inference_engine.kernels.graph_io import Peaks

logger = logging.getLogger(__name__)

WAIT_SECONDS = 60.0  # for another rank, in a step or at the start
_PUSHED_BYTES = 2**23  # that a rank writes to all others at once
_GATHERED_BYTES = 2**20
_MOST_SUM_BYTES = 2**26
_SHARE = 128  # numbers that a share of a sum must be a multiple of


class RankGroup(Protocol):
    """The ranks of a model; this process is one of them."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def name(self) -> str:
        """How they add up, for the log and records."""

    def sum(self, states: Tensor) -> Tensor:
        """The sum over ranks of [N, H] states, which it may write over."""

    def gather(self, numbers: Tensor) -> Tensor:
        """[n, ranks · V] of float32 [n, V] on each."""

    def collect(self, data: Tensor) -> Sequence[Tensor]:
        """Each rank's bytes: uint8 [n]."""

    def spread(self, data: Tensor) -> Tensor:
        """The first rank's bytes: uint8 [n], which others may write over."""


class Alone:
    """A model in one process. Implements RankGroup."""

    rank, ranks, name = 0, 1, "alone"

    def sum(self, states: Tensor) -> Tensor:
        return states

    def gather(self, numbers: Tensor) -> Tensor:
        return numbers

    def collect(self, data: Tensor) -> Sequence[Tensor]:
        return [data]

    def spread(self, data: Tensor) -> Tensor:
        return data


ALONE = Alone()


class LibraryGroup:
    """By torch's library: gloo, or NCCL. Implements RankGroup."""

    def __init__(self, rank: int, ranks: int, name: str) -> None:
        self.rank, self.ranks, self.name = rank, ranks, name

    def sum(self, states: Tensor) -> Tensor:
        states = states.contiguous()
        dist.all_reduce(states)
        return states

    def gather(self, numbers: Tensor) -> Tensor:
        numbers = numbers.contiguous()
        parts = [torch.empty_like(numbers) for _ in range(self.ranks)]
        dist.all_gather(parts, numbers)
        return torch.cat(parts, dim=-1)

    def collect(self, data: Tensor) -> Sequence[Tensor]:
        parts = [torch.empty_like(data) for _ in range(self.ranks)]
        dist.all_gather(parts, data)
        return parts

    def spread(self, data: Tensor) -> Tensor:
        dist.broadcast(data, 0)
        return data


class SymmetricGroup(LibraryGroup):
    """Over memory of each GPU that the others read. Implements RankGroup.

    Each rank writes its part to all others, which add up, in a kernel of ours. Of much, and more than two ranks, each
    adds up a share, in torch's.
    """

    def __init__(self, rank: int, ranks: int, device: torch.device, dtype: torch.dtype) -> None:
        """Raises RuntimeError where it cannot be."""
        super().__init__(rank, ranks, "symmetric memory")
        import torch.distributed._symmetric_memory as symmetric

        from inference_engine.kernels.triton.rank_sums import ABSENT, BLOCK, SharedRoom, room_numbers

        world = dist.group.WORLD
        assert world is not None
        self._group, self._dtype = world.group_name, dtype
        kept: list[Tensor] = []

        def shared(count: int, kind: torch.dtype) -> Any:
            kept.append(symmetric.empty(count, dtype=kind, device=device).fill_(ABSENT))
            return symmetric.rendezvous(kept[-1], world)

        def room(nbytes: int, kind: torch.dtype) -> SharedRoom:
            numbers = nbytes // kind.itemsize // (ranks - 1) // BLOCK * BLOCK  # links bring ranks - 1 parts
            rooms = shared(room_numbers(ranks, numbers), kind)
            return SharedRoom(rank, rooms.buffer_ptrs, numbers, device)

        self._sums = room(_PUSHED_BYTES, torch.int16 if dtype.itemsize == 2 else torch.int32)
        self._gathers = room(_GATHERED_BYTES, torch.int32)
        shares = _MOST_SUM_BYTES // dtype.itemsize if ranks > 2 else 0
        self._shared = symmetric.empty(max(1, shares), dtype=dtype, device=device)
        symmetric.rendezvous(self._shared, world)
        self._kept = kept
        torch.cuda.synchronize(device)
        dist.barrier()  # nothing is written before all is ABSENT

    def check(self) -> None:
        """Try sums of each kind, beside the others. Raises RuntimeError if one is wrong."""
        for nbytes in (256, 2**19, 2 * _PUSHED_BYTES, _PUSHED_BYTES // (self.ranks - 1), 256):
            for _ in range(4):
                count = nbytes // self._dtype.itemsize
                given = torch.full((1, count), self.rank + 1.0, dtype=self._dtype, device=self._shared.device)
                if not bool((self.sum(given) == self.ranks * (self.ranks + 1) / 2).all()):
                    raise RuntimeError(f"a sum of {count} numbers is wrong")

    def sum(self, states: Tensor) -> Tensor:
        states, count = states.contiguous(), states.numel()
        if count <= self._sums.numbers or self.ranks == 2:
            return self._sums.sum(states)
        if count > len(self._shared) or count % _SHARE:
            return super().sum(states)
        shared = self._shared[:count]
        shared.copy_(states.view(-1))
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self._group)
        return shared.clone().view_as(states)

    def gather(self, numbers: Tensor) -> Tensor:
        numbers = numbers.contiguous()
        fits = numbers.numel() <= self._gathers.numbers
        return self._gathers.gather(numbers) if fits else super().gather(numbers)


def join_group(place: Path, rank: int, ranks: int, device: torch.device, dtype: torch.dtype) -> RankGroup:
    """Wait for the other ranks. place: a file of theirs alone. Raises BackendError if they do not come, or cannot talk.

    A process is in one group at a time.
    """
    if dist.is_initialized():
        raise BackendError("tensor_parallel: this process has ranks of another model already; close that one first")
    is_cuda = device.type == "cuda"
    try:
        if is_cuda:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=FileStore(str(place), ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=WAIT_SECONDS),
            device_id=device if is_cuda else None,
        )
    except (RuntimeError, ValueError) as error:
        raise BackendError(f"tensor_parallel={ranks}: rank {rank} does not reach the others ({error})") from error
    if not is_cuda:
        return LibraryGroup(rank, ranks, "gloo")
    group: RankGroup = LibraryGroup(rank, ranks, "NCCL")
    why = ""

    def all_can() -> bool:
        agreed = torch.tensor([float(not why)], device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        return bool(agreed.item())

    symmetric: SymmetricGroup | None = None
    try:
        symmetric = SymmetricGroup(rank, ranks, device, dtype)
    except (RuntimeError, ImportError, AttributeError) as error:
        why = f" ({error})"
    if all_can():
        assert symmetric is not None
        try:
            symmetric.check()
        except RuntimeError as error:
            why = f" ({error})"
        group = symmetric if all_can() else group
    if group.name == "NCCL":
        logger.warning("ranks add up by NCCL, which takes longer: no symmetric memory between these GPUs%s", why)
    return group


def gather_peaks(group: RankGroup, own: Peaks, vocabulary: int) -> Peaks:
    """The peaks of all ranks' logits, one behind the other. vocabulary: of each."""
    if group.ranks == 1:
        return own
    rows, parts = own.ids.shape
    ids = own.ids + group.rank * vocabulary if group.rank else own.ids
    packed = torch.cat([ids.view(torch.float32), own.largest, own.smallest], dim=1)
    found = group.gather(packed).view(rows, group.ranks, 4 * parts)
    all_ids, largest, smallest = torch.split(found, [2 * parts, parts, parts], dim=2)
    return Peaks(all_ids.reshape(rows, -1).view(torch.int64), largest.reshape(rows, -1), smallest.reshape(rows, -1))


def bytes_of(views: Sequence[Tensor]) -> Tensor:
    """What lies in them, one behind the other: uint8 [n]."""
    return torch.cat([view.reshape(-1) for view in views]).view(torch.uint8)


def like_views(data: Tensor, views: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `bytes_of`: a tensor as each of the views is."""
    parts = torch.split(data.view(views[0].dtype), [view.numel() for view in views])
    return [part.view(view.shape) for part, view in zip(parts, views, strict=True)]


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
