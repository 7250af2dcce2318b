"""The second tier: memory for entries that are kept, but not on the device.

    device CUDA    pinned host memory, allocated chunk by chunk as entries come
    device CPU     none, unless the server's tier_bytes asks for it: the same memory, of which entries are read slower

All bytes that a session may need are reserved when it is created. Its entries lie in a `Store`: chunks of equal shape,
each with `chunk_tokens` consecutive positions of several layers, in the dtype that they have on the device.

    chunk   [layers, K and V, Hkv, chunk_tokens, D]
"""

from __future__ import annotations

import logging
import math
import mmap
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inference_engine.errors import InvalidArgument, NoCapacity
from inference_engine.kv.memory.events import Wait, mark
from inference_engine.kv.memory.host import free_host_bytes
from inference_engine.kv.memory.inbound import Inbound

logger = logging.getLogger(__name__)

_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable

# count(kind, bytes): called with every transfer; the kinds are those of `metrics.py`.
Count = Callable[[str, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkShape:
    """The chunks of a store. parts: of an entry of one KV head, of `head_dim` numbers each: its key and its value."""

    chunks: int
    layers: int
    parts: int = 2
    kv_heads: int
    chunk_tokens: int
    head_dim: int
    dtype: torch.dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.layers, self.parts, self.kv_heads, self.chunk_tokens, self.head_dim)

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


class Tier:
    """Host memory. When it is pinned, the device copies from it asynchronously, and it is never swapped out.

    A separate thread pins and unpins memory. A copy from it may be running, and unpinning may wait for the device, but
    stores are closed under the lock of all sessions, by threads that serve every client. The bytes can still be
    reserved again at once: a caller that evicts a session for them asks for them next, and would otherwise evict
    another one. Instead the next new chunk waits, on the engine's thread, until the bytes are free. So there is never
    more memory in use than was reserved.

    `reserve` and `release` are safe from any thread.
    """

    def __init__(
        self, capacity_bytes: int, count: Count | None = None, *, pinned_for: torch.device | None = None
    ) -> None:
        """pinned_for: the CUDA device that copies from it; None: it is not pinned."""
        self.capacity_bytes = capacity_bytes
        self.count: Count = count or (lambda _kind, _bytes: None)
        is_read_by_copies = pinned_for is not None and pinned_for.type == "cuda"
        # Copies to the device, where they need not be waited for.
        self.inbound = Inbound(pinned_for) if is_read_by_copies and pinned_for is not None else None
        self._reserved_bytes = 0
        self._lock = threading.Lock()
        self._pinned_for = pinned_for
        # One thread, so that memory is pinned only after what was let go before is free.
        self._pinning = ThreadPoolExecutor(1, thread_name_prefix="pinning")
        self._leaving: list[Future[None]] = []

    @property
    def reserved_bytes(self) -> int:
        with self._lock:
            return self._reserved_bytes

    def refuse_what_can_never_fit(self, count: int) -> None:
        """Raise NoCapacity if `count` bytes do not even fit an empty tier."""
        if count > self.capacity_bytes:
            raise NoCapacity(
                f"the session needs {count} bytes of host memory for entries that leave the device, and the server "
                f"may use {self.capacity_bytes} in all; ask for a smaller limit_tokens or another strategy, or give "
                "the server more tier_bytes",
                needed_bytes=count,
                capacity_bytes=self.capacity_bytes,
            )

    def reserve(self, count: int) -> None:
        """Reserve `count` bytes for a session. Raises NoCapacity, with nothing taken."""
        with self._lock:
            self._refuse_beside(self._reserved_bytes, count)
            self._reserved_bytes += count

    def refuse_without(self, freed: int, count: int) -> None:
        """Raise as `reserve` would if `freed` bytes were released before. Nothing is taken."""
        self._refuse_beside(self.reserved_bytes - freed, count)

    def _refuse_beside(self, reserved: int, count: int) -> None:
        if reserved + count > self.capacity_bytes:
            raise NoCapacity(
                f"the session needs {count} bytes of host memory for entries that leave the device; the server "
                f"has {self.capacity_bytes}, too few of them free now. Close sessions, ask for a smaller "
                "limit_tokens, or give the server more tier_bytes",
                retry_after_seconds=1.0,
                needed_bytes=count,
                capacity_bytes=self.capacity_bytes,
            )

    def release(self, count: int) -> None:
        with self._lock:
            self._reserved_bytes -= count
            assert self._reserved_bytes >= 0, "released twice"

    def open(self, shape: ChunkShape) -> Store:
        """A store in bytes that were reserved."""
        return Store(self, shape)

    def allocate(self, count: int) -> Tensor:
        """`count` bytes, once those that were released are free. Engine's thread.

        Raises OSError, or RuntimeError if the device has failed meanwhile.
        """
        with self._lock:
            leaving, self._leaving = self._leaving, []
        for gone in leaving:
            gone.result()
        return self._allocated(count)

    def prepare(self, count: int) -> Future[Tensor] | None:
        """As `allocate`, by another thread: pinning takes as long as computing what will lie there.

        None where nothing is pinned: such memory comes as it is written.
        """
        return None if self._pinned_for is None else self._pinning.submit(self._allocated, count)

    def _allocated(self, count: int) -> Tensor:
        space = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = torch.frombuffer(space, dtype=torch.uint8)
        if self._pinned_for is not None:
            if hasattr(mmap, "MADV_HUGEPAGE"):  # a Mac has none
                with suppress(OSError):  # nor has every kernel
                    space.madvise(mmap.MADV_HUGEPAGE)  # they take a third of the time
            memory.zero_()  # here, not while the system's memory is locked
            _pin(memory, self._pinned_for)
        return memory

    def let_go(self, chunks: list[Tensor], coming: Future[Tensor] | None = None) -> None:
        """Free allocated chunks that are no longer read, and a prepared one. Does not wait; safe from any thread."""
        if self._pinned_for is not None and (chunks or coming is not None):
            gone = self._pinning.submit(_unpin, chunks, coming, self._pinned_for)
            with self._lock:
                self._leaving.append(gone)


class NoTier(Tier):
    """For an engine without a second tier: nothing can be reserved."""

    def __init__(self) -> None:
        super().__init__(0)

    def refuse_what_can_never_fit(self, count: int) -> None:
        if count:
            raise InvalidArgument(
                "strategy",
                f"it keeps up to {count} bytes of entries off the device, and a server on a CPU has no other memory "
                "for them, where tiered decodes at a tenth of the speed of full; choose full or gather, or start the "
                "server with tier_bytes",
            )


class Store:
    """One session's offloaded entries of a set of layers. Engine's thread only, but for `close`.

    Each chunk is its own mapping from the system, of exactly its size, which goes back when it is freed.
    """

    def __init__(self, tier: Tier, shape: ChunkShape) -> None:
        self._tier = tier
        self._shape = shape
        self._chunks: dict[int, Tensor] = {}
        self._coming: Future[Tensor] | None = None  # the memory of the next chunk
        self._written: Wait | None = None  # until the device has written everything

    def read(self, chunk: int) -> Tensor:
        """The chunk, [layers, parts, Hkv, chunk_tokens, D], in host memory: a view, valid until the next `write`."""
        if self._written is not None:
            self._written()
            self._written = None
        return self._chunks[chunk]

    def lend(self, chunk: int) -> Tensor:
        """As `read`, for later work of the device alone: what was written may still be on its way from there."""
        return self._chunks[chunk]

    def write(self, chunk: int, first: int, states: Tensor) -> None:
        """Write entries [layers, parts, Hkv, n, D] to the chunk, from its position `first` on. Raises OSError."""
        assert chunk < self._shape.chunks, f"there is no room for chunk {chunk}"
        if chunk not in self._chunks:
            self._chunks[chunk] = self._memory().view(self._shape.dtype).view(self._shape.sizes)
            if len(self._chunks) < self._shape.chunks:
                self._coming = self._tier.prepare(self._shape.chunk_bytes)
        place = self._chunks[chunk][:, :, :, first : first + states.shape[3]]
        if states.device.type == "cpu":
            place.copy_(states)
            return
        # Piece by piece, each contiguous in the host's memory: other copies from a device wait for it.
        source = states.to(place.dtype).contiguous()
        targets, sources = (each.view(-1, *each.shape[3:]).unbind() for each in (place, source))
        torch._foreach_copy_(targets, sources, non_blocking=True)
        self._written = mark(states.device)

    def _memory(self) -> Tensor:
        """Of one more chunk. Raises OSError."""
        coming, self._coming = self._coming, None
        if coming is not None:
            with suppress(OSError, RuntimeError):  # there may be memory now
                return coming.result()
            del coming  # with the memory that could not be pinned
        return self._tier.allocate(self._shape.chunk_bytes)

    def held_bytes(self, count: int) -> int:
        """Bytes in use when the first `count` positions have been written."""
        chunks = -(-count // self._shape.chunk_tokens) + (self._coming is not None)
        return chunks * self._shape.chunk_bytes

    def clear(self) -> None:
        """Drop all entries."""
        chunks, self._chunks = self._chunks, {}
        coming, self._coming = self._coming, None
        self._tier.let_go(list(chunks.values()), coming)

    def close(self) -> None:
        """Give all memory back, without waiting for the device. Safe to call twice."""
        self.clear()


def _pin(memory: Tensor, device: torch.device) -> None:
    """Pin memory that torch did not allocate: torch's pinned memory comes in powers of two, and is never given back."""
    error = int(_cuda_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, _FOR_ALL_DEVICES))
    if error:
        # CUDA reports the error to the next launch on this thread, which is this one: nothing depends on it.
        with suppress(RuntimeError):
            torch.ones(1, device=device)
        raise OSError(f"{memory.nbytes} bytes of host memory cannot be pinned: CUDA error {error}")


def _unpin(chunks: list[Tensor], coming: Future[Tensor] | None, device: torch.device) -> None:
    """Drop the only references to pinned memory, once no copy from it is running. coming: done by now, or failed."""
    torch.cuda.synchronize(device)
    if coming is not None and coming.exception() is None:
        chunks.append(coming.result())
        coming = None
    while chunks:
        memory = chunks.pop()
        error = int(_cuda_runtime().cudaHostUnregister(memory.data_ptr()))
        if error:
            logger.error("%d bytes of host memory cannot be unpinned: CUDA error %d", memory.nbytes, error)


def _cuda_runtime() -> Any:
    cuda: Any = torch.cuda
    return cuda.cudart()


def open_tier(device: torch.device, *, capacity_bytes: int, share: int, count: Count | None) -> Tier:
    """The second tier of an engine on `device`.

    capacity_bytes: bytes that can be reserved; 0: one part in `share` of what is free, or none if the device is a CPU,
    whose entries lie in the same memory either way.
    """
    if device.type == "cpu" and not capacity_bytes:
        return NoTier()
    pinned_for = device if device.type == "cuda" else None
    return Tier(capacity_bytes or free_host_bytes() // share, count, pinned_for=pinned_for)
