"""The restorer interface: how entries that left the exact window are archived and restored.

A `Restorer` is the spec; an `Archive` holds the data of one session, in the pool.
Entries are passed in blocks, one per set of layers that share their slots: keys unrotated, values, both float32.

    keep     archive entries that leave the exact window, at a segment boundary
    restore  what later queries read in their place: all when the session becomes active, or chunk by chunk
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from inference_engine.kv.context import ArchivedCodes, HeldEntries, KVContext
from inference_engine.kv.geometry import EntryShape, Geometry
from inference_engine.kv.layout import LayerSet, Layout, Positions
from inference_engine.kv.memory.pool import Demand, Run
from inference_engine.kv.part import Need, Part
from inference_engine.kv.slots import LayerSlots

Pair = tuple[Tensor, Tensor]  # keys and values


@dataclass(frozen=True, slots=True)
class EntryBlock:
    """Entries of one set of layers: keys and values [layers, n, Hkv, D], float32.

    Keys are unrotated; those in which the value lies are as they are, rotated.
    """

    positions: Positions
    keys: Tensor
    values: Tensor

    @staticmethod
    def of(slots: LayerSlots, positions: Positions) -> EntryBlock:
        """Entries in regions."""
        return EntryBlock.read(slots, positions, slots.read_entries(positions))

    @staticmethod
    def read(slots: LayerSlots, positions: Positions, entries: Pair) -> EntryBlock:
        """Of entries as `slots` has them."""
        keys, values = entries
        keys = keys.float() if slots.layer_set.entry.value_in_key else slots.moved(keys.float(), -positions)
        return EntryBlock(positions, keys, values.float())


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptLayers:
    """Layers whose old entries are archived.

    Codes of positions from `sink` on use `capacity` slots as a ring buffer.
    """

    layers: LayerSet
    sink: int
    capacity: int

    @staticmethod
    def of(layers: LayerSet, geometry: Geometry, exact: Layout, window: int | None, limit: int | None) -> KeptLayers:
        """Room for all entries between the exact window and `window` (None: all) in sessions of up to `limit` tokens.

        limit None: endless; then there is a window.
        """
        if window is None:
            assert limit is not None, "a layer that keeps every entry needs a length limit"
            entries = exact.horizon(limit) - exact.sink
        else:
            assert exact.window is not None and window > exact.window
            entries = window - exact.window + geometry.segment_tokens
            entries = entries if limit is None else min(entries, exact.horizon(limit) - exact.sink)
        return KeptLayers(layers=layers, sink=exact.sink, capacity=max(0, entries))

    def slots(self, positions: Positions) -> Positions:
        return (positions - self.sink) % max(1, self.capacity)


def _chunk_demand(geometry: Geometry, kept: Sequence[KeptLayers]) -> Demand:
    """Room for a chunk of entries of one layer, the largest of them."""
    entries = geometry.segments_in_a_chunk * geometry.segment_tokens
    widest = max(group.layers.kv_heads * (group.layers.entry.key + group.layers.entry.value) for group in kept)
    return Demand.of(geometry, widest * min(entries, max(group.capacity for group in kept)))


def restore_cache_slots(group: KeptLayers, held: int) -> int:
    """Restored entries of each KV head that a restore cache has room for: `held`, or all that can be archived."""
    return min(held, group.capacity)


def restore_cache_demands(geometry: Geometry, kept: Sequence[KeptLayers], held: int) -> tuple[Demand, ...]:
    """Room for `held` restored entries of each KV head, layer by layer."""
    demands: list[Demand] = []
    for group in kept:
        layers, width = group.layers, group.layers.entry.width
        demand = Demand.of(geometry, layers.kv_heads * restore_cache_slots(group, held) * width, width)
        demands += [demand] * len(layers.layers)
    return tuple(demands)


class Archive(ABC):
    """The archived entries of one session. Engine's thread only, except `release`."""

    @abstractmethod
    def begin(self, blocks: Sequence[EntryBlock]) -> None:
        """Called before the first entries of a set of layers are archived, with all its entries after the sink so far.

        The block of a set that does not begin now is empty.
        """

    def begin_from(self, regions: Sequence[LayerSlots], positions: Sequence[Positions]) -> None:
        """`begin` of entries in regions."""
        self.begin([EntryBlock.of(slots, asked) for slots, asked in zip(regions, positions, strict=True)])

    @abstractmethod
    def keep(self, blocks: Sequence[EntryBlock]) -> None:
        """Archive entries that leave the exact window. Per set of layers they follow those archived before."""

    def keep_from(self, regions: Sequence[LayerSlots], positions: Sequence[Positions]) -> None:
        """`keep` of entries in regions."""
        self.keep([EntryBlock.of(slots, asked) for slots, asked in zip(regions, positions, strict=True)])

    @abstractmethod
    def restore(self, positions: Sequence[Positions]) -> Sequence[EntryBlock]:
        """Archived entries, per set of layers; always equal for equal positions."""

    @property
    def gives_back(self) -> bool:
        """Can it `take_back`? Not what the second tier was given."""
        return False

    def take_back(self, positions: Sequence[Positions]) -> None:
        """Forget the entries that were archived last, per set of layers: they have not left the exact window."""
        raise AssertionError("this archive keeps what it has")

    def keep_taps(self, first: int, taps: Tensor) -> None:
        """Only of a restorer that `reads_taps`: those of tokens from position `first` on, which are kept."""
        raise AssertionError("this archive reads no taps")

    def settle(self) -> None:
        """The session becomes idle: what waits to be archived with later tokens is archived now."""

    def restore_into(self, regions: Sequence[LayerSlots], positions: Sequence[Positions]) -> None:
        """Write archived entries into their slots, per set of layers, keys rotated to their positions."""
        for slots, block in zip(regions, self.restore(positions), strict=True):
            slots.write_unrotated(block.positions, block.keys, block.values)

    def restores_directly(self, layer: int, rotary: str) -> bool:
        """Does the device restore entries of a layer where attention reads them, in one operation?"""
        return False

    def restores_all_directly(self, regions: Sequence[LayerSlots]) -> bool:
        """Of all layers of these."""
        layers = ((layer, slots.layer_set.rotary) for slots in regions for layer in slots.layer_set.layers)
        return all(self.restores_directly(layer, rotary) for layer, rotary in layers)

    def restore_to(
        self, layers: Sequence[int], rotary: str, places: Sequence[Pair], first: int, held: HeldEntries | None = None
    ) -> None:
        """Only if so: write the entries of consecutive positions, from `first` on, to the keys and values of `places`,
        [Hkv, n, D] each, one for each of `layers`. held: of the one layer.
        """
        raise AssertionError("the device has no operation")

    def restore_layer(self, layer: int, positions: Positions) -> tuple[Tensor, Tensor]:
        """Entries of one layer, if the restorer streams: keys, unrotated, and values, float32 [n, Hkv, D]."""
        raise AssertionError("this restorer does not stream")

    def restore_some(self, layer: int, positions: Positions) -> tuple[Tensor, Tensor]:
        """As `restore_layer`, of any positions, if the restorer holds some."""
        raise AssertionError("this restorer holds no entries of choice")

    def decoded_by(self, layer: int) -> ArchivedCodes | None:
        """What a device's own operation needs to decode entries of one layer; None if it cannot."""
        return None

    def ask_finite(self) -> int:
        """Start a check on the device that entries archived or restored so far are finite. Nothing waits for it.

        Returns how many checks were ever started.
        """
        return 0

    def require_finite(self, upto: int | None = None) -> None:
        """Raise NonFiniteEntries if a check of `ask_finite` failed; upto: one of the first so many.

        Call it before any result that was computed from them is returned. Once raised, it is raised by every call.
        """

    def dismiss(self) -> None:
        """The entries restored so far are not read: drop their checks."""

    @abstractmethod
    def save(self, positions: Sequence[Positions], length: int) -> Iterator[tuple[Tensor, ...]]:
        """The archive of `positions`, per set of layers all that a history of `length` archives: tensors for `load`."""

    @abstractmethod
    def load(self, positions: Sequence[Positions], saved: Iterable[tuple[Tensor, ...]]) -> None:
        """Restore, to the bit, what an archive of the same rule saved of `positions`.

        Only while this archive is empty. Raises OSError if the second tier cannot store its part.
        """

    @abstractmethod
    def held_bytes(self, counts: Sequence[int]) -> int:
        """Bytes in use when `counts` entries have been archived per set of layers, page rounding included."""

    def tier_bytes(self, counts: Sequence[int]) -> int:
        """As `held_bytes`, for the second tier."""
        return 0

    def rewind(self, length: int) -> None:
        """The history ends at `length`, to which the exact entries can rewind: drop what is of tokens behind it."""

    @abstractmethod
    def forget(self) -> None:
        """Drop all archived entries."""

    @property
    @abstractmethod
    def runs(self) -> Sequence[Run]:
        """Those of the pool that it holds."""

    @abstractmethod
    def release(self) -> None:
        """Give the memory back."""


class ArchivedPart(Part):
    """The part of a session that holds its archived layers. `kv/parts/archived.py` has what its kinds have in common.

    strategy, placement: as in `kv/strategy.py`. by_view: do queries read archived entries by a view, where no device
    has an operation for them?
    """

    by_view: ClassVar[bool]

    @classmethod
    @abstractmethod
    def reserve(cls, context: KVContext, strategy: Any, placement: Any, *, sustained: KVContext) -> ArchivedPart | None:
        """Reserve the sustained memory; None, and nothing taken, if the pool has no room.

        sustained: the context whose pool it comes from. What waking takes comes from the pool of `context`.
        """

    @classmethod
    @abstractmethod
    def active_need(cls, geometry: Geometry, placement: Any) -> Need:
        """What waking takes."""

    @abstractmethod
    def wake(self, tokens: int, length: int) -> bool:
        """Take what only an active session needs, for histories of up to `tokens`, after one of `length`.

        False, and nothing taken, if the pool has no room now. Raises RestorationFailed, with nothing taken.
        """

    @abstractmethod
    def idle(self, length: int | None) -> None:
        """Give back what `wake` took. None: entries are still being recomputed, none are new."""


class Restorer(ABC):
    """How a strategy archives entries that left the exact window."""

    # True: nothing is archived; entries are recomputed from the token ids.
    replays: ClassVar[bool] = False
    # Does it need a codec that was calibrated for the model?
    is_calibrated: ClassVar[bool] = False
    # Does it archive what a drafter reads of tokens, when they are computed?
    reads_taps: ClassVar[bool] = False

    entries: type[ArchivedPart]  # the part of a session that holds its archived layers: how old entries are read

    @property
    def reads_chunks(self) -> bool:
        """Are there tokens that read every entry, chunk by chunk, where entries stay in the archive? Not where all of
        them choose.
        """
        return True

    def chunk_demands(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> tuple[Demand, ...]:
        """The memory of a decoded chunk."""
        return (_chunk_demand(geometry, kept),) if self.reads_chunks else ()

    def held(self, geometry: Geometry) -> int:
        """Where tokens choose entries: how many of these, of each KV head, stay restored between steps."""
        return 0

    @property
    def choice(self) -> int:
        """As many of each KV head a token chooses."""
        return 0

    def restore_room(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> tuple[Demand, ...]:
        """The memory of one choice more, layer by layer."""
        return restore_cache_demands(geometry, kept, self.choice)

    def restore_caches(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> tuple[Demand, ...]:
        """The memory of those that stay restored, layer by layer; none on a device that holds none."""
        return restore_cache_demands(geometry, kept, self.held(geometry)) if geometry.holds_restored else ()

    def takes(self, entry: EntryShape) -> bool:
        """Can entries of this shape be archived?"""
        return entry.is_even

    @abstractmethod
    def check(self, geometry: Geometry, layers: Sequence[int]) -> None:
        """Raise InvalidArgument if entries of these layers cannot be archived by this method."""

    def waits(self, context: KVContext) -> bool:
        """Would `ready` take longer than a step?"""
        return False

    def ready(self, context: KVContext) -> None:
        """Raise InvalidArgument if the engine lacks what this restorer needs. What is read at first use is read now."""

    @abstractmethod
    def demands(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> tuple[Demand, ...]:
        """The memory of a session's archive in the pool."""

    def tier_bytes(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> int:
        """Its bytes in the second tier."""
        return 0

    def need(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> Need:
        """Both together."""
        return Need(demands=self.demands(geometry, kept), tier_bytes=self.tier_bytes(geometry, kept))

    @abstractmethod
    def open(self, context: KVContext, kept: Sequence[KeptLayers]) -> Archive | None:
        """Reserve an archive; None, and nothing taken, if the pool has no room.

        Raises Overloaded, with nothing taken, if the second tier has no room after all.
        """


@dataclass(frozen=True, slots=True)
class Recompute(Restorer):
    """Archives nothing: old entries are recomputed from the token ids. Exact, and as expensive as a prefill."""

    replays: ClassVar[bool] = True

    entries: type[ArchivedPart]

    def takes(self, entry: EntryShape) -> bool:
        return True

    def check(self, geometry: Geometry, layers: Sequence[int]) -> None:
        pass

    def demands(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> tuple[Demand, ...]:
        return ()

    def open(self, context: KVContext, kept: Sequence[KeptLayers]) -> Archive | None:
        return _EmptyArchive()


class NoRestorer(Restorer):
    """For a strategy that archives nothing: no session of it has an archive."""

    def check(self, geometry: Geometry, layers: Sequence[int]) -> None:
        pass

    def demands(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> tuple[Demand, ...]:
        return ()

    def open(self, context: KVContext, kept: Sequence[KeptLayers]) -> Archive | None:
        raise AssertionError("no layer is archived")


class _EmptyArchive(Archive):
    def begin(self, blocks: Sequence[EntryBlock]) -> None:
        pass

    def keep(self, blocks: Sequence[EntryBlock]) -> None:
        pass

    def restore(self, positions: Sequence[Positions]) -> Sequence[EntryBlock]:
        raise AssertionError("a restorer that replays is not asked for entries")

    def save(self, positions: Sequence[Positions], length: int) -> Iterator[tuple[Tensor, ...]]:
        return iter(())

    def load(self, positions: Sequence[Positions], saved: Iterable[tuple[Tensor, ...]]) -> None:
        pass

    def held_bytes(self, counts: Sequence[int]) -> int:
        return 0

    def forget(self) -> None:
        pass

    @property
    def runs(self) -> Sequence[Run]:
        return ()

    def release(self) -> None:
        pass
