"""Where the latents of one session lie: in the pool and, beyond its limit there, in the second tier.

    place    0 1 2 … | … n        counted from the first archived position
             tier    | pool       the last `resident` places, a ring buffer

    pool     [resident, first half of the bytes], then [resident, the rest]
    tier     chunk [1, the two halves, 1, segment, half of the bytes]

A latent is moved unchanged, so it decodes to the same in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.memory.pool import Demand, Run
from inference_engine.kv.memory.tier import ChunkShape, Store


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentPlaces:
    """Room for `count` latents of `width` bytes, at most `resident_bytes` of it in the pool (None: all)."""

    count: int
    width: int
    resident_bytes: int | None
    segment: int

    @property
    def half(self) -> int:
        return -(-self.width // 2)

    def resident(self, geometry: Geometry) -> int:
        """Places in the pool. Their bytes, rounding included, are within `resident_bytes`."""
        if self.resident_bytes is None:
            return self.count
        unit = geometry.alignment * geometry.itemsize
        return min(self.count, self.resident_bytes // unit * unit // (2 * self.half))

    def demand(self, geometry: Geometry) -> Demand:
        return Demand.of_bytes(geometry, 2 * self.resident(geometry) * self.half)

    def chunks(self, geometry: Geometry) -> ChunkShape:
        """The chunks needed in the second tier, for all places that the pool has no room for."""
        pushed_out = self.count - self.resident(geometry)
        return ChunkShape(
            chunks=-(-pushed_out // self.segment),
            layers=1,
            kv_heads=1,
            chunk_tokens=self.segment,
            head_dim=self.half,
            dtype=torch.uint8,
        )


class LatentCodes:
    """The stored latents. Engine's thread only, except `release`."""

    def __init__(self, context: KVContext, places: LatentPlaces, start: int, store: Store) -> None:
        self._context = context
        self._places = places
        self._demand = places.demand(context.geometry)
        self._start = start
        self._store = store
        self.has_tier = places.chunks(context.geometry).chunks > 0
        self._resident = places.resident(context.geometry)
        whole = context.pool.run(self._demand, start).view(torch.uint8)[: 2 * self._resident * places.half]
        self._halves = whole.view(2, self._resident, places.half).unbind()
        self._end = 0  # places that have been stored

    @staticmethod
    def reserve(context: KVContext, places: LatentPlaces) -> LatentCodes | None:
        """None, and nothing taken, if the pool has no room. The session has reserved its bytes of the tier before.

        Raises Overloaded, with nothing taken, if the tier does not give them after all.
        """
        demand, shape = places.demand(context.geometry), places.chunks(context.geometry)
        starts = context.pool.reserve([demand])
        if starts is None:
            return None
        try:
            store = context.tier.open(shape)
        except BaseException:
            context.pool.release([demand], starts)
            raise
        return LatentCodes(context, places, starts[0], store)

    def put(self, first: int, codes: Tensor) -> None:
        """Store codes [n, width] for the places from `first` on, which follow those stored. Raises OSError."""
        end = first + len(codes)
        staying = max(0, end - self._resident)  # the first place in the pool from now on
        if staying:
            oldest = max(0, first - self._resident)
            self._push_out(oldest, self._in_pool(oldest, max(oldest, min(first, staying))))
            self._push_out(first, codes[: max(0, staying - first)])
        half, rest = self._places.half, self._places.width - self._places.half
        place = max(first, staying)
        for begin, behind in self._slots(place, end):
            fresh = codes[place - first :][: behind - begin]
            self._halves[0][begin:behind] = fresh[:, :half]
            self._halves[1][begin:behind, :rest] = fresh[:, half:]
            place += behind - begin
        self._end = end

    def take_back(self, first: int) -> None:
        """Wipe the codes of the places from `first` on, if any are stored. All of them lie in the pool."""
        assert not self.has_tier, "what the second tier has been given stays there"
        for begin, behind in self._slots(first, self._end):
            for half in self._halves:
                half[begin:behind].zero_()
        self._end = min(self._end, first)

    def get(self, first: int, last: int) -> Tensor:
        """The codes of the places [first, last), uint8 [n, width], on the device: a copy."""
        pushed_out = max(0, self._end - self._resident)
        begin = min(max(first, pushed_out), last)
        parts = [part.to(self._context.device) for part in self._in_tier(first, begin)]
        return torch.cat([*parts, self._in_pool(begin, last)]) if parts else self._in_pool(begin, last)

    def pick(self, places: Tensor) -> Tensor:
        """The codes of any places, uint8 [n, width]; all of them lie in the pool."""
        assert self._end <= self._resident, "some lie in the second tier"
        rest = self._places.width - self._places.half
        return torch.cat([self._halves[0][places], self._halves[1][places, :rest]], dim=1)

    @property
    def halves(self) -> tuple[Tensor, Tensor] | None:
        """[places, half of the bytes] each; None if some places are not in the pool."""
        return None if self._resident < self._places.count else (self._halves[0], self._halves[1])

    def save(self, end: int | None = None) -> Iterator[tuple[Tensor]]:
        """All stored latents, [n, width], a segment at a time; end: those of the places before it."""
        end = self._end if end is None else min(end, self._end)
        for first in range(0, end, self._places.segment):
            yield (self.get(first, min(first + self._places.segment, end)),)

    def load(self, saved: Iterable[tuple[Tensor, ...]]) -> None:
        """Store all saved latents."""
        for (codes,) in saved:
            self.put(self._end, codes)

    def clear(self) -> None:
        self._end = 0
        self._store.clear()

    @property
    def runs(self) -> Sequence[Run]:
        return self._context.pool.runs([self._demand], [self._start])

    def release(self) -> None:
        self._context.pool.release([self._demand], [self._start])
        self._store.close()

    # -- facts ------------------------------------------------------------------------------------------------------

    @property
    def stored(self) -> int:
        """Places that have been stored."""
        return self._end

    def held_bytes(self, count: int) -> int:
        """Bytes in the pool, in whole pages, when `count` places have been stored."""
        page = self._context.geometry.page_tokens
        return min(self._resident, -(-count // page) * page) * 2 * self._places.half

    def tier_bytes(self, count: int) -> int:
        """As `held_bytes`, in the second tier."""
        return self._store.held_bytes(max(0, count - self._resident))

    # -- pool and tier ----------------------------------------------------------------------------------------------

    def _slots(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The runs of slots in the ring buffer that hold the places [first, last), which are in the pool."""
        while first < last:
            begin = first % self._resident
            behind = min(begin + last - first, self._resident)
            yield begin, behind
            first += behind - begin

    def _in_pool(self, first: int, last: int) -> Tensor:
        rest = self._places.width - self._places.half
        runs = [
            torch.cat([self._halves[0][begin:behind], self._halves[1][begin:behind, :rest]], dim=1)
            for begin, behind in self._slots(first, last)
        ]
        if len(runs) == 1:
            return runs[0]
        return torch.cat(runs) if runs else self._halves[0].new_empty((0, self._places.width))

    def _in_tier(self, first: int, last: int) -> Sequence[Tensor]:
        parts = []
        for chunk, begin, end in self._chunks(first, last):
            states = self._store.read(chunk)[0, :, 0, begin:end]  # [2, n, half]
            parts.append(torch.cat(tuple(states), dim=1)[:, : self._places.width])
            self._context.tier.count("streamed", parts[-1].numel())
        return parts

    def _push_out(self, first: int, codes: Tensor) -> None:
        half = self._places.half
        for chunk, begin, end in self._chunks(first, first + len(codes)):
            at = chunk * self._places.segment - first
            some = codes[at + begin : at + end]
            padded = torch.nn.functional.pad(some, (0, 2 * half - self._places.width))
            self._store.write(chunk, begin, padded.view(-1, 2, half).transpose(0, 1)[None, :, None])
            self._context.tier.count("kept", some.numel())

    def _chunks(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """The chunks of the places [first, last), with their begin and end in each."""
        size = self._places.segment
        return [
            (chunk, max(first - chunk * size, 0), min(last - chunk * size, size))
            for chunk in range(first // size, -(-last // size) if last > first else first // size)
        ]
