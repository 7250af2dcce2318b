"""The restorer interface: what is kept of rows that left the exact window, and how they come back.

A `Restorer` is the spec; an `Archive` is one session's share of it, in the pool like everything else a session holds.
Rows travel in blocks, one per set of layers that share their slots: keys unrotated, values as they are, float32.

    keep     rows that leave the exact window, at a segment boundary
    restore  what every later query reads in their place: at once, when the session wakes, or chunk by chunk
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import SEGMENTS_IN_A_CHUNK, LayerSet, Layout, Positions
from inference_engine.kv.memory.pool import Demand
from inference_engine.kv.memory.transfers import TransferTotals
from inference_engine.kv.part import Need


@dataclass(frozen=True, slots=True)
class EntryBlock:
    """Rows of one set of layers: keys and values [layers, n, Hkv, D], float32, keys unrotated."""

    positions: Positions
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptLayers:
    """Layers whose old rows are kept otherwise, and where: codes of positions from `sink` go round `capacity` slots."""

    layers: LayerSet
    sink: int
    capacity: int

    @staticmethod
    def of(layers: LayerSet, geometry: Geometry, exact: Layout, window: int | None, limit: int | None) -> KeptLayers:
        """Room for all rows between the exact window and `window` (None: all) that sessions of `limit` can have.

        limit None: endless, then there is a window.
        """
        if window is None:
            assert limit is not None, "a layer that keeps every row needs a length limit"
            rows = exact.horizon(limit) - exact.sink
        else:
            assert exact.window is not None and window > exact.window
            rows = window - exact.window + geometry.segment_tokens
            rows = rows if limit is None else min(rows, exact.horizon(limit) - exact.sink)
        return KeptLayers(layers=layers, sink=exact.sink, capacity=max(0, rows))

    def slots(self, positions: Positions) -> Positions:
        return (positions - self.sink) % max(1, self.capacity)


def chunk_demand(geometry: Geometry, kept: Sequence[KeptLayers]) -> Demand:
    """Room for a chunk of rows of one layer, whichever of them takes most."""
    rows = SEGMENTS_IN_A_CHUNK * geometry.segment_tokens
    widest = max(kept, key=lambda group: group.layers.kv_heads * group.layers.head_dim)
    elements = widest.layers.kv_heads * widest.layers.head_dim * min(rows, max(group.capacity for group in kept))
    unit = geometry.alignment
    return Demand(head_dim=widest.layers.head_dim, elements=-(-elements // unit) * unit)


class Archive(ABC):
    """One session's evicted rows, as the restorer keeps them. Engine's thread only, but for `release`."""

    @abstractmethod
    def begin(self, blocks: Sequence[EntryBlock]) -> None:
        """Called before the first rows of a set of layers are kept, with all its rows after the sink so far.

        The block of a set that does not begin now is empty.
        """

    @abstractmethod
    def keep(self, blocks: Sequence[EntryBlock]) -> None:
        """Store rows that leave the exact window. Per set of layers they follow those kept before."""

    @abstractmethod
    def restore(self, positions: Sequence[Positions]) -> Sequence[EntryBlock]:
        """Rows that were kept, per set of layers; always equal for equal positions."""

    def restore_layer(self, layer: int, positions: Positions) -> tuple[Tensor, Tensor]:
        """Rows of one layer, where the restorer streams: keys, unrotated, and values, float32 [n, Hkv, D]."""
        raise AssertionError("this restorer does not stream")

    def ask_finite(self) -> None:
        """Let the device tell whether the rows that were kept or restored so far are finite. Nobody waits for it."""

    def require_finite(self) -> None:
        """Raise NonFiniteRows if some of those asked for by `ask_finite` are not.

        To be called before anything that was computed from them is told to anybody; raised once, it is raised again.
        """

    def dismiss(self) -> None:
        """Nobody reads the rows that were restored so far: whether they are finite matters no more."""

    @abstractmethod
    def save(self, positions: Sequence[Positions]) -> Iterator[tuple[Tensor, ...]]:
        """What is kept of `positions`, per set of layers all that were kept: tensors that `load` reads again."""

    @abstractmethod
    def load(self, positions: Sequence[Positions], saved: Iterable[tuple[Tensor, ...]]) -> None:
        """Keep, to the bit, what an archive of the same rule saved of `positions`.

        Only into an archive that keeps nothing yet. Raises OSError if the second tier cannot take its part.
        """

    @abstractmethod
    def held_bytes(self, counts: Sequence[int]) -> int:
        """Bytes in use when `counts` rows have been kept per set of layers, page rounding included."""

    def commit(self, length: int) -> None:
        """A step has ended with a history of `length`. One that moves nothing between the tiers need not know."""

    def tier_bytes(self, counts: Sequence[int]) -> int:
        """As `held_bytes`, of what lies in the second tier."""
        return 0

    def transfers(self) -> TransferTotals:
        """What was moved between the tiers."""
        return TransferTotals()

    @abstractmethod
    def forget(self) -> None:
        """Nothing is kept any more."""

    @abstractmethod
    def release(self) -> None:
        """Give the memory back."""


class Restorer(ABC):
    """How a strategy keeps rows that left the exact window."""

    # True: nothing is kept; rows come back by running the model over the token ids again.
    replays: ClassVar[bool] = False

    @property
    def streams(self) -> bool:
        """Are rows restored in attention, chunk by chunk, instead of into regions when the session wakes?"""
        return False

    @abstractmethod
    def check(self, geometry: Geometry, layers: Sequence[int]) -> None:
        """Raise InvalidArgument if rows of these layers cannot be kept this way."""

    def ready(self, context: KVContext) -> None:
        """Raise InvalidArgument if the engine lacks what this restorer needs."""

    @abstractmethod
    def demands(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> tuple[Demand, ...]:
        """What a session's archive takes of the pool."""

    def tier_bytes(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> int:
        """What it takes of the second tier."""
        return 0

    def need(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> Need:
        """Both together."""
        return Need(demands=self.demands(geometry, kept), tier_bytes=self.tier_bytes(geometry, kept))

    @abstractmethod
    def open(self, context: KVContext, kept: Sequence[KeptLayers]) -> Archive | None:
        """Reserve an archive; None, and nothing taken, if the pool has no room.

        Raises Overloaded, nothing taken, if the second tier cannot be had after all.
        """


class Recompute(Restorer):
    """Keeps nothing: evicted rows are computed again from the token ids. Exact, and as dear as a prefill."""

    replays = True

    def check(self, geometry: Geometry, layers: Sequence[int]) -> None:
        pass

    def demands(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> tuple[Demand, ...]:
        return ()

    def open(self, context: KVContext, kept: Sequence[KeptLayers]) -> Archive | None:
        return _EmptyArchive()


class _EmptyArchive(Archive):
    def begin(self, blocks: Sequence[EntryBlock]) -> None:
        pass

    def keep(self, blocks: Sequence[EntryBlock]) -> None:
        pass

    def restore(self, positions: Sequence[Positions]) -> Sequence[EntryBlock]:
        raise AssertionError("a restorer that replays is not asked for rows")

    def save(self, positions: Sequence[Positions]) -> Iterator[tuple[Tensor, ...]]:
        return iter(())

    def load(self, positions: Sequence[Positions], saved: Iterable[tuple[Tensor, ...]]) -> None:
        pass

    def held_bytes(self, counts: Sequence[int]) -> int:
        return 0

    def forget(self) -> None:
        pass

    def release(self) -> None:
        pass
