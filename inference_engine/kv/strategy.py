"""The strategy interface: a frozen spec of the KV entries that each layer keeps, and of the longest history.

A strategy is data. The planner (`kv/plan.py`) turns its rules into one attention call for all sessions of a step; no
code asks which strategy it has. A new one is a file in `strategies/` and its line in the registry there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from inference_engine.errors import InvalidArgument, NoCapacity
from inference_engine.kv.archives.restorer import KeptLayers, NoRestorer, Restorer
from inference_engine.kv.geometry import IMMOVABLE, Geometry
from inference_engine.kv.layout import LayerRule, LayerSet, Layout, alike
from inference_engine.kv.memory.allocation import allocation_bytes
from inference_engine.kv.memory.pool import Demand
from inference_engine.kv.part import Need
from inference_engine.kv.parts.layer_entries import LayerEntries
from inference_engine.kv.parts.recurrent import RecurrentStates
from inference_engine.types import Bound

if TYPE_CHECKING:
    from inference_engine.kv.context import KVContext

LATENT, COMPONENTS = "the latent codec", "the components of keys"
LATENT_AND_COMPONENTS = f"{LATENT} and {COMPONENTS}"
F_THETA = "f_theta"  # the codec of a drafter's taps
F_THETA_AND_COMPONENTS = f"{F_THETA} and {COMPONENTS}"

Option = int | float | str | tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchivedLayout:
    """A layer whose old entries are archived.

    exact: layout of its exact entries, which are always resident. active: layout of every readable entry, for an active
    session; unused if old entries stay in the archive.
    """

    exact: Layout
    active: Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where the entries of a session lie, by sets of alike layers."""

    resident: tuple[tuple[LayerSet, Layout], ...]
    archived: tuple[tuple[LayerSet, ArchivedLayout], ...]
    kept: tuple[KeptLayers, ...]  # one for each of `archived`; none for a restorer that replays
    restorer: Restorer

    def step(self, segment: int) -> int | None:
        """Tokens on both sides of a multiple of it do not share a step; None: any may.

        A segment, where entries are evicted or archived.
        """
        if self.kept:
            return segment
        return min((layout.step for layout in self._layouts if layout.step is not None), default=None)

    @property
    def is_selective(self) -> bool:
        """Do generated tokens read less than all? Then they do not share a step with tokens of other segments.

        What is distant must be committed. A matched query has a rotation matrix of its own, so the number of them in a
        step is limited. Appended tokens read everything: a prefill needs no such limit.
        """
        return any(layout.is_selective for layout in self._layouts)

    @property
    def ends_alone(self) -> bool:
        """Is the last token of a segment a step of its own?"""
        return any(mechanism.ends_alone for layout in self._layouts for mechanism in layout.mechanisms)

    @property
    def by_view(self) -> bool:
        """Do queries read by views, as far as no device has an operation for them?"""
        return any(mechanism.by_view for layout in self._layouts for mechanism in layout.mechanisms) or (
            bool(self.archived) and self.restorer.entries.by_view
        )

    @property
    def keeps_every_entry(self) -> bool:
        """Does each entry stay in its place, unchanged? Then forks may read it there."""
        return not self.archived and all(layout.keeps_every_entry for layout in self._layouts)

    def behind(self, base: int, geometry: Geometry, limit_tokens: int) -> Placement:
        """The same for a session whose first `base` entries lie in a shared prefix. Only if `keeps_every_entry`."""
        return replace(
            self,
            resident=tuple((layers, layout.behind(base, geometry, limit_tokens)) for layers, layout in self.resident),
        )

    def bound(self, geometry: Geometry) -> Bound:
        """Bytes of K/V that such a session may hold; see `KVStrategy.bound`."""
        sustained, active = self.need(geometry), Need()
        if self.archived:
            active = self.restorer.entries.active_need(geometry, self)
        return Bound(
            sustained_bytes=sustained.elements * geometry.itemsize,
            peak_bytes=(sustained.elements + active.elements) * geometry.itemsize,
            tier_bytes=sustained.tier_bytes,
        )

    def need(self, geometry: Geometry) -> Need:
        """What such a session takes while it is idle, in the order in which it takes it."""
        taken = needed(geometry, self.resident)
        if self.archived:
            taken += needed(geometry, [(layers, pair.exact) for layers, pair in self.archived])
            taken += self.restorer.need(geometry, self.kept)
        return taken

    @property
    def _layouts(self) -> list[Layout]:
        return [layout for _, layout in self.resident] + [pair.active for _, pair in self.archived]


@dataclass(frozen=True, kw_only=True, slots=True)
class KVStrategy(ABC):
    """A spec. Its fields are its options, on the wire and on the command line."""

    name: ClassVar[str]

    @abstractmethod
    def rule(self, layer: int, geometry: Geometry) -> LayerRule:
        """What layer number `layer` keeps."""

    def restorer(self) -> Restorer:
        """How entries older than a rule's `exact` are archived."""
        return NoRestorer()

    @property
    def calibrated(self) -> str:
        """What was calibrated for the model and decides what a session's tokens are: LATENT, F_THETA, COMPONENTS, one
        of them with the last, or nothing."""
        return LATENT if self.restorer().is_calibrated else ""

    def check(self, geometry: Geometry) -> None:
        """Raise InvalidArgument, naming the option, if the strategy cannot serve a model of this geometry."""

    def resolved(self, geometry: Geometry, *, has_components: bool = False) -> KVStrategy:
        """This spec with the defaults that depend on the model filled in.

        has_components: are there components of the model's keys (`kernels/components.py`)?
        """
        return self

    def waits(self, context: KVContext) -> bool:
        """Would `ready` take longer than a step, because something that was calibrated has still to be read?"""
        return self.restorer().waits(context)

    def ready(self, context: KVContext) -> None:
        """Raise InvalidArgument, naming the option, if something that was calibrated is missing or does not fit.

        What is read at first use is read now. Called before anything is locked.
        """
        self.restorer().ready(context)

    @classmethod
    def trials(cls, geometry: Geometry) -> tuple[KVStrategy, ...]:
        """Small variants to test a model with: 80 positions in segments of 16 are enough to use every mechanism.

        Codes are exact and budgets hold every entry, so the logits are those of plain attention under each layer's
        rule.
        """
        return ()

    def geometry(self, geometry: Geometry) -> Geometry:
        """The sizes that sessions of this strategy have on a device of this geometry. Its own is its own."""
        return geometry

    def length_limit(self, geometry: Geometry) -> int | None:
        """The longest history in tokens, or None if it is unlimited."""
        return geometry.trained_positions

    def options(self) -> dict[str, Option]:
        return asdict(self)

    def option_texts(self) -> dict[str, str]:
        """The options as text. Those that are None or empty are left out."""
        return {
            option: "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
            for option, value in self.options().items()
            if value is not None and value != ()
        }

    def placement(self, geometry: Geometry, limit_tokens: int | None) -> Placement:
        """Where the entries of a session of at most `limit_tokens` lie."""
        geometry = self.geometry(geometry)
        restorer = self.restorer()
        rules = {index: self.rule(index, geometry) for index in range(len(geometry.layers))}
        archived = [index for index, rule in rules.items() if _is_archived(restorer, rule, geometry, index)]
        keys = {index: (rule, geometry.layers[index].native_window) for index, rule in rules.items()}
        archived_sets = alike(geometry, {index: keys[index] for index in archived})
        exact = [
            Layout.of(
                LayerRule(sink=rule.sink, window=rule.exact, mechanisms=rule.mechanisms),
                geometry,
                native,
                limit_tokens,
                moves_sink=False,
                entry=layers.entry,
            )
            for layers, (rule, native) in archived_sets
        ]
        resident = tuple(
            (layers, Layout.of(rule, geometry, native, limit_tokens, entry=layers.entry))
            for layers, (rule, native) in alike(
                geometry, {index: key for index, key in keys.items() if index not in archived}
            )
        )
        # Each step reads all weights, those of all experts above all; the room for long ones is no more than a window.
        windows = [layout.window for _, layout in resident if layout.window is not None]
        at_once = min((geometry.segments_at_once, *(window // geometry.segment_tokens for window in windows)))
        if at_once > 1 and not archived and all(layout.is_as_the_model_sees for _, layout in resident):
            resident = tuple(
                (layers, layout.in_long_steps(at_once, geometry, limit_tokens)) for layers, layout in resident
            )
        return Placement(
            resident=resident,
            archived=tuple(
                (
                    layers,
                    ArchivedLayout(
                        exact=layout, active=Layout.of(rule, geometry, native, limit_tokens, entry=layers.entry)
                    ),
                )
                for (layers, (rule, native)), layout in zip(archived_sets, exact, strict=True)
            ),
            kept=tuple(
                KeptLayers.of(layers, geometry, layout, rule.window, limit_tokens)
                for (layers, (rule, _)), layout in zip(archived_sets, exact, strict=True)
                if not restorer.replays
            ),
            restorer=restorer,
        )

    def bound(self, geometry: Geometry, limit_tokens: int | None) -> Bound:
        """Bytes of K/V that such a session may hold, with page rounding, ring buffers and the sink's second copy.

        Entries of a running step are staged in the regions themselves. If old entries are archived, the peak exceeds
        the sustained bytes by the regions of the active session, or by the room for one decoded chunk.
        """
        return self.placement(geometry, limit_tokens).bound(self.geometry(geometry))

    def evicted(self, geometry: Geometry, length: int) -> int:
        """Positions among the first `length` that no layer can read any more because of the strategy.

        Native sliding windows of the model do not count: full attention would not read those positions either.
        """
        geometry, lost = self.geometry(geometry), length
        for index in range(len(geometry.layers)):
            rule = self.rule(index, geometry)
            if rule.window is None:
                return 0
            start = length - length % geometry.segment_tokens
            lost = min(lost, max(0, start - rule.window - rule.sink))
        return lost

    def restored(self, geometry: Geometry, query: int) -> int:
        """Positions that the query at `query` reads in restored form, in at least one layer."""
        geometry, restorer = self.geometry(geometry), self.restorer()
        most = 0
        for index in range(len(geometry.layers)):
            rule = self.rule(index, geometry)
            if rule.exact is None or not _is_archived(restorer, rule, geometry, index):
                continue
            start = query - query % geometry.segment_tokens
            first = rule.sink if rule.window is None else max(rule.sink, start - rule.window)
            restored = start - rule.exact - first
            for mechanism in rule.mechanisms:
                restored = mechanism.restored(restored)
            most = max(most, restored)
        return most

    def __str__(self) -> str:
        options = ",".join(f"{option}={text}" for option, text in self.option_texts().items())
        return f"{self.name}:{options}" if options else self.name


def check_strategy(strategy: KVStrategy, geometry: Geometry) -> None:
    """Raise InvalidArgument, naming the option, if the strategy cannot serve a model of this geometry."""
    strategy.check(geometry)
    if not geometry.is_endless and strategy.length_limit(geometry) is None:
        raise InvalidArgument(
            "strategy",
            f"{strategy} serves histories of any length; the rotation of this model is another one beyond "
            f"{geometry.trained_positions} positions. full and sink_window can be used",
            trained_positions=geometry.trained_positions,
        )
    fixed = {index for index, layer in enumerate(geometry.layers) if layer.rotary == IMMOVABLE}
    uneven = {index for index, layer in enumerate(geometry.layers) if not layer.entry.has_one_size}
    if not fixed and not uneven:
        return
    plan = strategy.placement(geometry, strategy.length_limit(geometry))
    indexed = [index for index, layer in enumerate(geometry.layers) if layer.is_indexed]
    if indexed and (plan.archived or not plan.keeps_every_entry):
        raise InvalidArgument(
            "strategy",
            f"{strategy} keeps or reads less than every entry as it is. In {len(indexed)} of {len(geometry.layers)} "
            f"layers (layer {indexed[0]} is the first) this model chooses among all of them, by an indexer of its own, "
            "what a token reads. full without a codec can be used",
            layer=indexed[0],
        )
    special = {layer for layers, layout in plan.resident if layout.mechanisms for layer in layers.layers}
    archived = {layer for layers, _ in plan.archived for layer in layers.layers}
    special |= {layer for layer in archived if not plan.restorer.takes(geometry.layers[layer].entry)}
    special |= {layer for layers, pair in plan.archived if pair.active.mechanisms for layer in layers.layers}
    if hit := sorted(special & uneven):
        entry = geometry.layers[hit[0]].entry
        coded = "a codec or without" if entry.value_in_key else "no codec"
        raise InvalidArgument(
            "strategy",
            f"{strategy} codes or chooses entries in a way for which keys and values have to be of one size. "
            f"Layer {hit[0]} has a key of {entry.key} numbers and a value of {entry.value}"
            f"{' inside it' if entry.value_in_key else ''}. full and sink_window with {coded} can be used, and "
            "restored with source recompute",
            layer=hit[0],
        )
    moved = {layer for layers, layout in plan.resident if layout.moves_keys for layer in layers.layers}
    if plan.kept:
        moved |= {layer for layer in archived if not geometry.layers[layer].entry.value_in_key}
        moved |= {layer for layers, pair in plan.archived if pair.active.moves_keys for layer in layers.layers}
    if hit := [number for number, read in enumerate(geometry.reads) if read in moved & fixed]:
        raise InvalidArgument(
            "strategy",
            f"{strategy} needs keys at other positions, or before rotation. In {len(hit)} of {len(geometry.reads)} "
            f"layers (layer {hit[0]} is the first) this model changes its keys after they are rotated, so that this "
            "cannot be computed. Strategies that leave keys where they are can be used: full without a codec, gather "
            "with scorer bounds, restored with source recompute, sink_window with sink 0",
            layer=hit[0],
        )


def _is_archived(restorer: Restorer, rule: LayerRule, geometry: Geometry, layer: int) -> bool:
    """Does this layer have regions only while the session is active?

    A replay runs through every layer, so all layers need regions then. Otherwise layers with a native window keep their
    entries: the model never reads older ones.
    """
    if restorer.replays:
        return True
    return rule.exact is not None and geometry.layers[layer].native_window is None


def needed(geometry: Geometry, placed: Sequence[tuple[LayerSet, Layout]]) -> Need:
    """The memory of layers that are laid out so."""
    return sum((LayerEntries.need(geometry, layers, layout) for layers, layout in placed), start=Need())


def require(condition: bool, field: str, message: str, **limits: int) -> None:
    """Raise InvalidArgument for `field` unless `condition` holds."""
    if not condition:
        raise InvalidArgument(field, message, **limits)


# -- what a session needs of memory, before it is there ---------------------------------------------------------------


def grows_with_history(strategy: KVStrategy, context: KVContext, limit_tokens: int | None) -> bool:
    """Can memory be granted as the history grows? Without a limit, windows bound it from the start."""
    return limit_tokens is not None and strategy.length_limit(context.geometry) is not None


def whole_segments(tokens: int, geometry: Geometry, limit_tokens: int) -> int:
    """`tokens` rounded up to segments, and to slots that are opened together; at most `limit_tokens`."""
    unit = math.lcm(geometry.segment_tokens, geometry.opening_tokens)
    return min(limit_tokens, -(-tokens // unit) * unit)


def no_capacity(context: KVContext, needed: Bound) -> NoCapacity:
    """The error for memory that is not free now, or, without a time to retry, that there is not in all."""
    capacity = context.pool.capacity_bytes
    if needed.peak_bytes > capacity:
        return NoCapacity(
            f"the session needs {needed.peak_bytes} bytes of K/V and the server has {capacity} in all; a "
            "session with a smaller limit_tokens or another strategy needs less",
            needed_bytes=needed.peak_bytes,
            capacity_bytes=capacity,
        )
    return NoCapacity(
        f"the session needs {needed.peak_bytes} bytes of K/V; the server has {capacity}, too few of them free now. "
        "Close sessions, or ask for a smaller limit_tokens or another strategy",
        retry_after_seconds=1.0,
        needed_bytes=needed.peak_bytes,
        capacity_bytes=capacity,
    )


def no_address_space(nbytes: int) -> NoCapacity:
    """The error where enough bytes are free, and no runs that are long enough. nbytes: of the longest history."""
    return NoCapacity(
        f"memory is free, but no address space is left for a session of up to {nbytes} bytes of K/V: "
        "each of its layers needs one stretch of it. Close sessions, or ask for a smaller limit_tokens",
        retry_after_seconds=1.0,
        needed_bytes=nbytes,
    )


def bound_of(strategy: KVStrategy, context: KVContext, limit_tokens: int | None, *, base: int = 0) -> Bound:
    """Bytes that a session may hold: its entries by its strategy, recurrent states, and the drafter's memory of it.

    base: positions at its start that lie in a shared prefix.
    """
    plan = placed(strategy, context, limit_tokens, base)
    entries, apart = plan.bound(strategy.geometry(context.geometry)), bytes_apart(context, plan)
    return replace(entries, sustained_bytes=entries.sustained_bytes + apart, peak_bytes=entries.peak_bytes + apart)


def demands_of(
    strategy: KVStrategy, context: KVContext, limit_tokens: int | None, *, base: int = 0
) -> tuple[Demand, ...]:
    """The runs of the pool that a session takes, in this order. Also one that grows takes all of them at once."""
    context = context.of(strategy.geometry(context.geometry))
    return placement_demands(context, placed(strategy, context, limit_tokens, base))


def placement_demands(context: KVContext, plan: Placement) -> tuple[Demand, ...]:
    return plan.need(context.geometry).demands + _demands_apart(context, plan)


def _demands_apart(context: KVContext, plan: Placement) -> tuple[Demand, ...]:
    """Whatever the strategy keeps, and however long the history is: recurrent states, and the drafter's memory."""
    states = RecurrentStates.demands(context.geometry, replays=plan.restorer.replays)
    return states + context.draft_memories.demands(context.geometry)


def bytes_apart(context: KVContext, plan: Placement) -> int:
    return allocation_bytes(_demands_apart(context, plan), itemsize=context.geometry.itemsize)


def placed(strategy: KVStrategy, context: KVContext, limit_tokens: int | None, base: int) -> Placement:
    plan = strategy.placement(context.geometry, limit_tokens)
    if not base:
        return plan
    assert limit_tokens is not None, "a strategy that keeps every entry has a limit"
    return plan.behind(base, context.geometry, limit_tokens)
