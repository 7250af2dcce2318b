"""The memory of the KV cache, shared by all sessions: one buffer, and runs of it that sessions take.

    vectors [R, Dk + Dv]  key | value of one entry of one KV head
    a region              consecutive vectors of one KV head; the regions of a layer lie head after head

Layers whose entries have other sizes see the same memory as vectors of their own. What is not entries, such as codes,
lies in runs of bytes. Vector 0 takes the writes of padding tokens. A session takes two things from the pool:

    address runs    where its entries lie, for the longest history; nothing is ever moved
    a grant         bytes that it may hold now, counted against the capacity

On a device both are the same memory. On a CPU the buffer is address space, whose pages become memory when they are
first written. There may be far more of it than memory, so sessions that are granted memory as they grow take whole
runs from the start (`ungranted`).

What is kept only as long as no session needs its memory is the pool's `spare`, and `rooms` that sessions have beyond
their bounds. It does not count as reserved, and is given back before a session is refused.

Released memory can be taken again at once. The one thread that writes soon cleans it (`clean`): it is zeroed, or its
pages go back to the system. Correctness does not need that, because slots are wiped again when they are opened.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kv.geometry import EntryShape, Geometry
from inference_engine.kv.memory.scratch import Scratch

TRASH_UNITS = 1
# On a CPU, memory is read in pieces of so many bytes, and zeroed only where it is not zero: pages that were never
# written must not become memory by being zeroed.
_PIECE_BYTES = 2**16
_DISCARD_UNITS = 1024  # discarding a run counts as cleaning so many units

Run = tuple[int, int]  # start and count, in units


class RunAllocator:
    """First-fit allocation of runs of units, neighbours merged when freed."""

    def __init__(self, total: int) -> None:
        self._starts = [0] if total else []
        self._lengths = [total] if total else []
        self.total = total
        self.free = total

    def take_last(self, count: int) -> int | None:
        """As `take`, but the end of the last one: what comes and goes lies apart from what stays."""
        for index in reversed(range(len(self._starts))):
            if self._lengths[index] > count > 0:
                self._lengths[index] -= count
                self.free -= count
                return self._starts[index] + self._lengths[index]
        return self.take(count)

    def take(self, count: int) -> int | None:
        """The start of a free run of `count` units, now taken; None if there is none that long."""
        if not count:
            return 0  # nothing is taken, so nothing can lie inside a free run
        for index, length in enumerate(self._lengths):
            if length >= count:
                start = self._starts[index]
                if length == count:
                    del self._starts[index], self._lengths[index]
                else:
                    self._starts[index] += count
                    self._lengths[index] -= count
                self.free -= count
                return start
        return None

    def give_back(self, start: int, count: int) -> None:
        if not count:
            return
        index = bisect_left(self._starts, start)
        assert index == len(self._starts) or start + count <= self._starts[index], "freed twice"
        assert index == 0 or self._starts[index - 1] + self._lengths[index - 1] <= start, "freed twice"
        self._starts.insert(index, start)
        self._lengths.insert(index, count)
        self.free += count
        for left in (index, index - 1):
            if 0 <= left < len(self._starts) - 1 and self._starts[left] + self._lengths[left] == self._starts[left + 1]:
                self._lengths[left] += self._lengths[left + 1]
                del self._starts[left + 1], self._lengths[left + 1]

    def least_given_back(
        self,
        given: Sequence[Collection[Run]],
        counts: Sequence[int],
        *,
        least: int = 0,
        beside: Collection[Run] = (),
    ) -> int | None:
        """How many of `given`, from the first one on and `least` or more, have to be given back so that `take` finds a
        run for each of `counts` in turn. None: all of them are too few. Nothing changes. beside: are given back, too.
        """

        known = [*zip(self._starts, self._lengths, strict=True), *beside]
        ends = list(accumulate(map(len, given), initial=len(known)))
        runs = np.array(known + [run for some in given for run in some], dtype=np.int64).reshape(-1, 2)

        def suffice(number: int) -> bool:
            return _fit(_merged(runs[: ends[number]]), counts)

        if suffice(least):
            return least
        if not suffice(len(given)):
            return None
        return bisect_left(range(len(given)), True, lo=least + 1, key=suffice)

    def free_within(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """The free runs, or parts of them, among these units: start and count of each."""
        end = start + count
        for index in range(max(0, bisect_right(self._starts, start) - 1), len(self._starts)):
            if self._starts[index] >= end:
                return
            first = max(start, self._starts[index])
            last = min(end, self._starts[index] + self._lengths[index])
            if first < last:
                yield first, last - first


def _merged(runs: NDArray[np.int64]) -> NDArray[np.int64]:
    """The lengths of these runs, which do not overlap, in order of their starts, with neighbours as one."""
    starts, ends = np.sort(runs[:, 0]), np.sort(runs.sum(axis=1))
    is_first = np.ones(len(starts), dtype=np.bool_)
    is_first[1:] = starts[1:] != ends[:-1]
    return ends[np.roll(is_first, -1)] - starts[is_first]


def _fit(lengths: NDArray[np.int64], counts: Sequence[int]) -> bool:
    """Does first fit find room for `counts` in runs of these lengths? They are used up."""
    for count in filter(None, counts):
        at = int(np.argmax(lengths >= count)) if len(lengths) else 0
        if not len(lengths) or lengths[at] < count:
            return False
        lengths[at] -= count
    return True


@dataclass(frozen=True, slots=True)
class KVBuffer:
    """The whole memory as entries of one shape: vectors [R, …], and views of them, K [R, Dk] and V [R, Dv].

    shares: do a key and its value share numbers?
    """

    vectors: Tensor
    keys: Tensor
    values: Tensor
    shares: bool = False

    @classmethod
    def over(cls, memory: Tensor, shape: EntryShape) -> KVBuffer:
        """memory: flat; what is too short for a vector, at its end, is left out."""
        width = shape.width
        vectors = memory[: len(memory) // width * width].view(-1, width)
        return cls(vectors, *shape.split(vectors), shares=shape.shared > 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What one layer needs: `elements` numbers, in vectors of `width`, with one of which their run begins."""

    width: int
    elements: int  # a multiple of the geometry's alignment

    @classmethod
    def of(cls, geometry: Geometry, elements: int, width: int = 1) -> Demand:
        """At least `elements`."""
        unit = geometry.alignment
        return cls(width=width, elements=-(-elements // unit) * unit)

    @classmethod
    def of_bytes(cls, geometry: Geometry, nbytes: int) -> Demand:
        return cls.of(geometry, -(-nbytes // geometry.itemsize))


class Spare(Protocol):
    """Memory of the pool that is in use only as long as no session needs it. Called under no lock of the pool."""

    @property
    def nbytes(self) -> int:
        """Bytes that are granted for it."""

    @property
    def runs(self) -> Collection[Run]: ...

    def give_back(self) -> bool:
        """Release some of it. False: there is none."""


class NoSpare:
    """Implements Spare."""

    nbytes = 0
    runs: Collection[Run] = ()

    def give_back(self) -> bool:
        return False


@dataclass(frozen=True, slots=True, eq=False)
class SpareRoom:
    """Runs of the pool that `Pool.reserve` returned. place: which of its holder's rooms it is."""

    demands: tuple[Demand, ...]
    starts: tuple[int, ...]
    nbytes: int
    place: int


class RoomHolder(Protocol):
    """Who uses rooms."""

    def keep_rooms(self, count: int) -> None:
        """Any thread, with a lock held that no holder needs: only rooms before the one of place `count` are left."""


class Rooms:
    """Memory beyond what any bound has: taken from what is free, given back when it is needed. Implements Spare.

    A holder has rooms in order, and loses the last one first; those of the holder that was used longest ago go before
    all others. Only where there are more addresses than memory: elsewhere what others take between rooms could leave no
    stretch that is long enough for a session.

    A room may be given back by any thread, at any time. The engine's thread, which alone writes entries, may go on
    using it within the call that it is in; others write there in later ones.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool: Pool = weakref.proxy(pool)  # a pool goes with its last holder, not at some collection
        self._is_possible = pool.has_addresses
        self._lock = threading.Lock()
        self._held: OrderedDict[RoomHolder, list[SpareRoom]] = OrderedDict()  # least recently used first
        self.nbytes = 0
        self._choices = 0

    @property
    def choices(self) -> int:
        """Of a session's restore cache: choices that it may have at first; 0: rooms are neither taken nor kept."""
        return self._choices

    @choices.setter
    def choices(self, count: int) -> None:
        self._choices = count if self._is_possible else 0

    @property
    def runs(self) -> list[Run]:
        with self._lock:
            rooms = [room for held in self._held.values() for room in held]
        return [run for room in rooms for run in self._pool.runs(room.demands, room.starts)]

    def bytes_of(self, holder: RoomHolder) -> int:
        with self._lock:
            return sum(room.nbytes for room in self._held.get(holder, ()))

    def add(
        self, holder: RoomHolder, demands: Sequence[Demand], use: Callable[[Sequence[int]], int], *, leave: int = 0
    ) -> bool:
        """Take a room from what is free, if `leave` bytes stay so. use: is called before it can be given back, with
        what `Pool.reserve` returned, and says its place.
        """
        nbytes = self._pool.bytes_of(demands)
        with self._lock:
            self.nbytes += nbytes  # first: the pool never counts too many bytes as reserved
            starts = self._pool.reserve_free(demands, leave=leave)
            if starts is None:
                self.nbytes -= nbytes
                return False
            room = SpareRoom(tuple(demands), starts, nbytes, use(starts))
            self._held.setdefault(holder, []).append(room)
        return True

    def lend(self, holder: RoomHolder, room: SpareRoom) -> None:
        """The first room of a holder is in no bound from now on."""
        with self._lock:
            self._held.setdefault(holder, []).insert(0, room)
            self._held.move_to_end(holder)
            self.nbytes += room.nbytes

    def claim(self, holder: RoomHolder) -> SpareRoom | None:
        """The first room of the holder, from now on in a bound again. None if it was given back."""
        with self._lock:
            held = self._held.get(holder)
            if not held:
                return None
            self._held.move_to_end(holder)
            room = held.pop(0)
            self.nbytes -= room.nbytes
            return room

    def release(self, holder: RoomHolder) -> None:
        """Give back all rooms of a holder."""
        with self._lock:
            for room in self._held.pop(holder, ()):
                self._release(room)

    def give_back(self) -> bool:
        """Release one room. False: there is none."""
        with self._lock:
            for holder, held in self._held.items():
                if held:
                    room = held.pop()
                    holder.keep_rooms(room.place)
                    self._release(room)
                    return True
        return False

    def _release(self, room: SpareRoom) -> None:
        self._pool.release(room.demands, room.starts)
        self.nbytes -= room.nbytes  # last, for the same reason


C = TypeVar("C")


class Mirror(Protocol):
    """Gets what is written to the pool between steps: the views of its memory that are written, and read.

    ranks: so many devices have a pool alike, this one among them.
    """

    @property
    def ranks(self) -> int: ...

    def wiped(self, view: Tensor) -> None: ...

    def copied(self, to: Tensor, of: Tensor) -> None: ...

    def turned(self, to: Tensor, of: Tensor, shift: int, rotary: str) -> None:
        """Keys [layers, Hkv, n, D] were written to `to`: those of `of`, rotated by `shift` positions."""

    def cleaned(self, first: int, count: int) -> None:
        """So many numbers from `first` on were zeroed, or discarded."""

    def collected(self, views: Sequence[Tensor]) -> list[list[Tensor]]:
        """What lies in the same views on each device, this one first."""

    def given(self, views: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> None:
        """Write what each device is to have in these views, but for this one."""

    def done(self, work: Callable[[C], Tensor | None], context: C) -> list[Tensor]:
        """Have each device do this, with the context of its own pool. Returns what each found, if all find something.

        work: can be pickled."""


class _Account:
    """Bytes granted of the capacity."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.granted_bytes = 0
        self._lock = threading.Lock()

    def grant(self, nbytes: int, *, leave: int = 0) -> bool:
        with self._lock:
            if self.granted_bytes + nbytes + leave > self.capacity_bytes:
                return False
            self.granted_bytes += nbytes
            return True

    def ungrant(self, nbytes: int) -> None:
        with self._lock:
            self.granted_bytes -= nbytes
            assert self.granted_bytes >= 0, "given back twice"


class Pool:
    """The memory of all K and V.

    `reserve`, `release`, `grant` and `ungrant` are safe from any thread; only the engine's thread uses the arrays.
    """

    def __init__(
        self,
        geometry: Geometry,
        capacity_bytes: int,
        allocate: Callable[[int], Tensor],
        *,
        address_bytes: int = 0,
        discard: Callable[[Tensor], None] | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        """`allocate(n)` gives n zeros on the device, in the dtype of K and V.

        mirror: of other devices that have the same pool.
        address_bytes: size of the address space, if that is more than the capacity. discard: zeroes a part of what
        `allocate` gave, at almost no cost where nothing was written; None: zeros are written.
        """
        self._lock = threading.Lock()
        self._takes_grants = True
        self.spare: Spare = NoSpare()
        self._discard = discard
        self.mirror = mirror
        self._itemsize = geometry.itemsize
        self._unit = geometry.alignment
        self.scratch = Scratch()  # for the steps over this pool
        unit_bytes = self._unit * geometry.itemsize
        self._account = _Account(capacity_bytes // unit_bytes * unit_bytes)
        units = max(capacity_bytes, address_bytes) // unit_bytes
        self._runs = RunAllocator(units)
        self.has_addresses = address_bytes > capacity_bytes  # for as many runs as are granted, wherever they lie
        self.rooms = Rooms(self)
        self._unclean: list[tuple[int, int]] = []  # released and not zeroed since: start and count, in units
        self.memory = allocate((units + TRASH_UNITS) * self._unit)
        shapes = [layer.entry for layer in geometry.layers]
        by_shape = {shape: KVBuffer.over(self.memory, shape) for shape in set(shapes)}
        self.buffers = tuple(by_shape[shape] for shape in shapes)  # by layer
        self.address = self.memory.data_ptr()

    @property
    def capacity_bytes(self) -> int:
        return self._account.capacity_bytes

    @property
    def ranks(self) -> int:
        """So many devices have a pool alike."""
        return 1 if self.mirror is None else self.mirror.ranks

    @property
    def reserved_bytes(self) -> int:
        """Bytes granted, but for those that are given back when they are needed."""
        return self._account.granted_bytes - self.rooms.nbytes - self.spare.nbytes

    def _give_back_spare(self) -> bool:
        """Rooms first: what they hold is made again in milliseconds."""
        return self.rooms.give_back() or self.spare.give_back()

    @property
    def takes_grants(self) -> bool:
        """Does `reserve` count its bytes as granted?"""
        return self._takes_grants

    def ungranted(self) -> Pool:
        """The same pool for callers that take runs here, and are granted bytes separately."""
        view = object.__new__(Pool)
        view.__dict__ = {**self.__dict__, "_takes_grants": False}
        return view

    def grant(self, nbytes: int) -> bool:
        """Count `nbytes` as granted. False, and nothing changed, if fewer are left."""
        while not self._account.grant(nbytes):
            if self.reserved_bytes + nbytes > self.capacity_bytes:
                return False
            if not self._give_back_spare():
                return self._account.grant(nbytes)  # another thread may have given back the last of it
        return True

    def ungrant(self, nbytes: int) -> None:
        self._account.ungrant(nbytes)

    def reserve(self, demands: Sequence[Demand], *, is_last: bool = False) -> tuple[int, ...] | None:
        """The first vector of each layer's run, or None (and nothing taken) if there is no room.

        Each layer takes any run that is long enough, so a fragmented pool can still serve. is_last: of these the last.
        """
        if not self._takes_grants:
            return self._take(demands, is_last=is_last)
        nbytes = self.bytes_of(demands)
        if not self.grant(nbytes):
            return None
        starts = self._take(demands, is_last=is_last)
        if starts is None:
            self._account.ungrant(nbytes)
        return starts

    def bytes_of(self, demands: Sequence[Demand]) -> int:
        """What `reserve` grants for them."""
        return self._bytes(sum(self._units(demand) for demand in demands))

    def reserve_free(self, demands: Sequence[Demand], *, leave: int = 0) -> tuple[int, ...] | None:
        """As `reserve`, of the last that is free now, if `leave` bytes stay free: nothing is given back for it."""
        nbytes = self.bytes_of(demands)
        if not self._account.grant(nbytes, leave=leave):
            return None
        starts = self._take_free(demands, is_last=True)
        if starts is None:
            self._account.ungrant(nbytes)
        return starts

    def _take(self, demands: Sequence[Demand], *, is_last: bool) -> tuple[int, ...] | None:
        while (starts := self._take_free(demands, is_last=is_last)) is None:
            if self.least_released([], demands) is None or not self._give_back_spare():
                return None
        return starts

    def _take_free(self, demands: Sequence[Demand], *, is_last: bool) -> tuple[int, ...] | None:
        with self._lock:
            take = self._runs.take_last if is_last else self._runs.take
            starts: list[int] = []
            for demand in demands:
                start = take(self._units(demand))
                if start is None:
                    self._give_back(demands, starts)
                    return None
                starts.append(start)
        return tuple(
            (start + TRASH_UNITS) * self._unit // demand.width for start, demand in zip(starts, demands, strict=True)
        )

    def runs(self, demands: Sequence[Demand], starts: Sequence[int]) -> list[Run]:
        """Where that lies which `reserve` returned. Neighbours are one run: mostly all layers of a session are."""
        joined: list[Run] = []
        for start, demand in zip(starts, demands, strict=True):
            first, count = start * demand.width // self._unit - TRASH_UNITS, self._units(demand)
            if joined and sum(joined[-1]) == first:
                joined[-1] = joined[-1][0], joined[-1][1] + count
            elif count:
                joined.append((first, count))
        return joined

    def run(self, demand: Demand, start: int) -> Tensor:
        """The memory of a run: [elements]."""
        first = start * demand.width
        return self.memory[first : first + demand.elements]

    def least_released(
        self, held: Sequence[Collection[Run]], demands: Sequence[Demand], *, least: int = 0
    ) -> int | None:
        """How many of `held`, from the first one on and `least` or more, have to be released so that runs are free for
        all of these demands, reserved in this order. None: all of them are too few. Nothing changes.
        """
        spare, counts = [*self.rooms.runs, *self.spare.runs], [self._units(demand) for demand in demands]
        with self._lock:
            return self._runs.least_given_back(held, counts, least=least, beside=spare)

    def release(self, demands: Sequence[Demand], starts: Sequence[int]) -> None:
        """Give back runs that `reserve` returned."""
        runs = self.runs(demands, starts)
        if self._takes_grants:
            self._account.ungrant(self._bytes(sum([count for _, count in runs])))
        with self._lock:
            for start, count in runs:
                self._runs.give_back(start, count)
            # By layer: `clean` discards whole ones.
            self._unclean += [run for one in zip(demands, starts, strict=True) for run in self.runs([one[0]], [one[1]])]

    def clean(self, most_bytes: int) -> bool:
        """Engine's thread: zero about `most_bytes` of released memory, or discard runs of it. Returns whether more is
        left.

        Memory that was taken again meanwhile is skipped: it may hold entries, and its session wipes what it opens.
        """
        room = max(1, most_bytes // self._bytes(1))
        free: list[tuple[int, int]] = []
        with self._lock:
            while self._unclean and room:
                start, count = self._unclean.pop()
                # Address space is discarded in whole runs: most of it was never written.
                now = min(count, room) if self._discard is None else count
                room -= now if self._discard is None else min(room, _DISCARD_UNITS)
                free.extend(self._runs.free_within(start, now))
                if now < count:
                    self._unclean.append((start + now, count - now))
            is_left = bool(self._unclean)
        # From here on it may be taken, but only this thread writes entries.
        for start, count in free:
            self.zero((start + TRASH_UNITS) * self._unit, count * self._unit)
        return is_left

    def zero(self, first: int, count: int) -> None:
        """Engine's thread: zero or discard so many numbers."""
        (self._discard or _zero)(self.memory[first : first + count])
        if self.mirror is not None:
            self.mirror.cleaned(first, count)

    def wipe(self, view: Tensor) -> None:
        """Engine's thread: zero a view of the memory."""
        view.zero_()
        if self.mirror is not None:
            self.mirror.wiped(view)

    def copy(self, to: Tensor, of: Tensor) -> None:
        """Engine's thread: copy between two views of the memory."""
        to.copy_(of)
        if self.mirror is not None:
            self.mirror.copied(to, of)

    def _give_back(self, demands: Sequence[Demand], starts: Sequence[int]) -> None:
        for demand, start in zip(demands, starts, strict=False):
            self._runs.give_back(start, self._units(demand))

    def _units(self, demand: Demand) -> int:
        assert demand.elements % self._unit == 0
        return demand.elements // self._unit

    def _bytes(self, units: int) -> int:
        return units * self._unit * self._itemsize


def _zero(states: Tensor) -> None:
    if states.device.type != "cpu":
        states.zero_()
        return
    flat = states.view(torch.uint8)
    whole = len(flat) // _PIECE_BYTES * _PIECE_BYTES
    pieces, rest = flat[:whole].view(-1, _PIECE_BYTES), flat[whole:]
    for index in pieces.any(dim=1).nonzero().flatten().tolist():
        pieces[index].zero_()
    if rest.any():
        rest.zero_()
