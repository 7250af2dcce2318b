"""The plan of one forward: which packed row is whose, where its K and V go, and what it may see.

    packed rows   | session A: 3 rows | session B: 1 row | …            input_ids [1, N]

Everything a layer needs is worked out here once, as host integers and one transfer; `attend` then runs layer after
layer with no session object, no synchronisation and no decision. In fixed-shape mode each session's rows sit at their
position modulo the row quantum, padded on both sides, and keys are padded to the key quantum: a row then meets the
same arithmetic whatever else is in the forward.

Where the device has an operation for it, rows that read lanes are attended to all at once, whatever their sessions are
(`kernels/lane_attention.py`), but for the longest chunks of prefills: these see every row up to their own, and need no
mask. A step of nothing but lanes is a table of numbers (`LaneTables`), and may be run as a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.errors import RestorationFailed
from inference_engine.kernels.gather import always_read, distant_blocks
from inference_engine.kernels.lane_attention import LaneAttention
from inference_engine.kv.chunk_view import ChunkView, Portion
from inference_engine.kv.context import OnChoice
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.lane_rows import lane_numbers
from inference_engine.kv.lane_tables import LaneTables, StepNumbers, most_blocks
from inference_engine.kv.lanes import LaneGroup
from inference_engine.kv.layout import BlockSelector, Positions
from inference_engine.kv.pool import Pool
from inference_engine.kv.query_rings import QueryRings
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.tier_view import TierView
from inference_engine.kv.trunk_view import TrunkView
from inference_engine.kv.views import CausalView, DenseView, GatherView, Lane, MacView, Scoring, View

# Blocks of more rows are attended to session by session: each fills a device, and fused operations are at their best.
_MOST_LANE_ROWS = 1024
_MOST_SELECTING_ROWS = 32


@dataclass(frozen=True, slots=True)
class Span:
    """One session's rows in the packed forward: `rows` includes padding, `real` does not."""

    rows: slice
    real: slice
    views: dict[int, View]  # by layer; none where the rows are in the step's lane rows

    @property
    def count(self) -> int:
        return int(self.real.stop - self.real.start)


class SpanFailed(Exception):
    """Old rows of span `index` could not be had, or are not finite; the step's other sessions have no part in it."""

    def __init__(self, index: int, failure: RestorationFailed) -> None:
        super().__init__(str(failure))
        self.index = index
        self.failure = failure


class StepPlan:
    """Built from sessions that have staged their rows; valid until one of them commits."""

    def __init__(
        self,
        sessions: Sequence[SessionKV],
        geometry: Geometry,
        pool: Pool,
        *,
        mask_dtype: torch.dtype,
        lane_attention: LaneAttention | None = None,
        on_choice: OnChoice | None = None,
    ) -> None:
        self._geometry = geometry
        self.pool = pool
        self._lane_attention = lane_attention if geometry.row_quantum == 1 else None
        self._on_choice = on_choice
        self._device = next(iter(pool.arenas.values())).keys.device
        self._mask_dtype = mask_dtype
        quantum = geometry.row_quantum
        placed: list[tuple[SessionKV, Positions, int]] = []  # session, positions with padding, first packed row
        total = 0
        for session in sessions:
            first = session.next_position - session.next_position % quantum
            last = -(-(session.next_position + session.staged) // quantum) * quantum
            placed.append((session, np.arange(first, last, dtype=np.int64), total))
            total += last - first
        self.row_count = total
        self.positions: NDArray[np.int64] = np.concatenate([positions for _, positions, _ in placed])
        has_lanes = self._lane_attention is not None and any(kv.staged <= _MOST_LANE_ROWS for kv in sessions)
        self.numbers = StepNumbers(geometry, total, has_lanes=has_lanes, scratch=pool.scratch)
        self.selects = False  # does a row of the lanes read a keep-set?
        self._plan_writes(placed)
        self.spans = tuple(self._plan_span(*entry) for entry in placed)
        # Is this step nothing but its numbers?
        self.is_lanes_only = not any(span.views for span in self.spans)

    @cached_property
    def _tables(self) -> LaneTables:
        numbers = torch.from_numpy(self.numbers.all).to(self._device)
        return LaneTables.over(
            numbers, self._geometry, self.pool, self._lane_attention, rows=self.row_count, selects=self.selects
        )

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
        head_sinks: Tensor | None = None,
    ) -> Tensor:
        """Write the step's rows of `layer` and attend.

        All [1, H, N, D], queries and keys rotated; returns [1, N, Hq, D]. Raises SpanFailed.
        """
        tables = self._tables
        if self.is_lanes_only:
            return tables.attend(layer, queries, keys, values, scaling=scaling, softcap=softcap, head_sinks=head_sinks)
        tables.write(layer, keys, values)
        arena = tables.arena(layer)
        views = [span.views.get(layer) for span in self.spans]
        lanes = queries  # whatever it is, if no row has one
        if None in views:
            lanes = tables.read(layer, queries, scaling=scaling, softcap=softcap, head_sinks=head_sinks)
        scoring = Scoring(scaling=scaling, softcap=softcap, head_sinks=head_sinks)
        outs = []
        for index, (span, view) in enumerate(zip(self.spans, views, strict=True)):
            try:
                outs.append(
                    lanes[span.rows]
                    if view is None
                    else view.read(layer, queries[0, :, span.rows].transpose(0, 1), arena, scoring)
                )
            except RestorationFailed as failure:
                raise SpanFailed(index, failure) from failure
        return (outs[0] if len(outs) == 1 else torch.cat(outs))[None]

    def _plan_writes(self, placed: Sequence[tuple[SessionKV, Positions, int]]) -> None:
        """Arena rows that each layer's K and V go to; padding goes to row 0."""
        for session, _, base in placed:
            real = self._real(session, base)
            for group in session.groups:
                rows = group.lane_rows(group.layout.slots(_staged(session)))
                self.numbers.write(group.kv_heads, group.place_index, real, group.starts, rows)

    def _plan_span(self, session: SessionKV, positions: Positions, base: int) -> Span:
        views: dict[int, View] = {}
        real = self._real(session, base)
        for group in session.groups:
            count = self._slot_count(group, session.next_position + session.staged)
            if self._reads_lanes(group, session):
                self._plan_lanes(group, session, positions, real, count)
                continue
            lane = Lane(
                starts=dict(zip(group.layers.tolist(), group.starts.tolist(), strict=True)),
                heads=group.kv_heads,
                lane=group.layout.lane,
            )
            view: View
            if group.layout.selector is not None and session.staged_generated.any():
                view = self._gather_view(group, group.layout.selector, lane, session, positions, count)
            elif group.rings is not None and session.staged_generated.any():
                view = self._mac_view(group, group.rings, lane, session, positions, count)
            else:
                view = self._dense_view(group, lane, session, positions, count)
            views.update(dict.fromkeys(group.layers.tolist(), view))
        return Span(slice(base, base + len(positions)), real, views)

    def _reads_lanes(self, group: LaneGroup, session: SessionKV) -> bool:
        """May the step's one operation over lanes do what a view of the group would?"""
        if self._lane_attention is None or session.staged > _MOST_LANE_ROWS:
            return False
        if group.source is not None and not group.has_one_trunk:
            return False
        if not session.staged_generated.any():
            return True
        if group.layout.selector is None:
            return group.rings is None
        # Rows that choose blocks are served one by one, and not beside others of their session that do not.
        fits = session.staged <= _MOST_SELECTING_ROWS and group.layout.blocks <= most_blocks(self._geometry)
        return fits and group.layout.selector.scorer == "bounds" and bool(session.staged_generated.all())

    def _plan_lanes(self, group: LaneGroup, session: SessionKV, positions: Positions, real: slice, count: int) -> None:
        selector = group.layout.selector if session.staged_generated.any() else None
        self.selects |= selector is not None
        count += group.layout.base
        numbers = lane_numbers(group.layout, positions, last=int(positions[-1]), count=count, selector=selector)
        self.numbers.attend(group.layer_index, real, group.starts, group.layout.lane, numbers)
        if group.trunk is not None:
            held = group.trunk.pieces[0].lane
            starts = np.array([held.starts[layer] for layer in group.layers.tolist()])
            self.numbers.attend_trunk(group.layer_index, real, starts, held.lane)

    def _gather_view(
        self,
        group: LaneGroup,
        selector: BlockSelector,
        lane: Lane,
        session: SessionKV,
        positions: Positions,
        count: int,
    ) -> GatherView:
        rows = self._generated(session)
        queries = positions[rows]
        is_fixed = self._geometry.key_quantum > 1
        always = always_read(
            queries,
            selector.local_starts(queries),
            sink=selector.sink_rows,
            device=self._device,
            width=selector.sink_rows + selector.window + selector.block if is_fixed else None,
        )
        has_appended = not session.staged_generated.all()
        layout = group.layout
        view = GatherView(
            lane=lane,
            selector=selector,
            capacity=layout.capacity,
            summaries_from=layout.summaries_from,
            generated=torch.from_numpy(rows).to(self._device),
            always=always,
            candidates=distant_blocks(always, block=selector.block, count=layout.blocks),
            row_by_row=is_fixed,
            dense=self._dense_view(group, lane, session, positions, count) if has_appended else None,
            on_choice=self._on_choice,
        )
        if group.tier is None:
            return view
        return TierView.of(view, group.tier, queries)

    def _dense_view(self, group: LaneGroup, lane: Lane, session: SessionKV, positions: Positions, count: int) -> View:
        """For rows that read everything: lanes, and what is elsewhere chunk by chunk, or with them."""
        if group.trunk is not None:
            return TrunkView(lane=lane, count=count, mask=self._mask(group, positions, count), trunk=group.trunk)
        if group.source is not None and (chunks := group.chunks(session.next_position)):
            portions = self._portions(group, positions)
            return ChunkView(lane=lane, portions=portions, source=group.source, chunks=chunks)
        if self._is_causal(group, positions, count):
            return CausalView(lane=lane, count=count)
        return DenseView(lane=lane, count=count, mask=self._mask(group, positions, count))

    def _is_causal(self, group: LaneGroup, positions: Positions, count: int) -> bool:
        """Are the first `count` slots the positions up to the last of these rows, and do rows see all up to their own?

        Only where the device's operations are used: others give other bits than under a mask.
        """
        if self._lane_attention is None or len(positions) == 1:
            return False
        layout = group.layout
        keeps_all = layout.window is None and layout.native_window is None and not layout.base
        return keeps_all and count == int(positions[-1]) + 1

    def _mac_view(
        self, group: LaneGroup, rings: QueryRings, lane: Lane, session: SessionKV, positions: Positions, count: int
    ) -> MacView:
        rows = self._generated(session)
        has_appended = not session.staged_generated.all()
        return MacView(
            lane=lane,
            rings=rings,
            generated=torch.from_numpy(rows).to(self._device),
            positions=positions[rows].tolist(),
            unrotations=_unrotations(group, positions[rows]),
            dense=DenseView(lane=lane, count=count, mask=self._mask(group, positions, count)) if has_appended else None,
        )

    def _portions(self, group: LaneGroup, positions: Positions) -> list[Portion]:
        """All rows together; in fixed-shape mode quantum by quantum, each with as many slots as its last row needs."""
        quantum = self._geometry.row_quantum
        size = quantum if quantum > 1 else len(positions)
        portions = []
        for first in range(0, len(positions), size):
            rows = slice(first, first + size)
            count = self._slot_count(group, int(positions[rows][-1]) + 1)
            portions.append(Portion(rows=rows, count=count, mask=self._mask(group, positions[rows], count)))
        return portions

    def _slot_count(self, group: LaneGroup, length: int) -> int:
        """Slots to read for a history of `length`, padded as keys are."""
        quantum = self._geometry.key_quantum
        return min(group.layout.capacity, -(-group.open_slots(length) // quantum) * quantum)

    def _generated(self, session: SessionKV) -> NDArray[np.int64]:
        """Which of a session's rows, counted from its padding on, the model generated."""
        return session.next_position % self._geometry.row_quantum + np.flatnonzero(session.staged_generated)

    def _mask(self, group: LaneGroup, positions: Positions, count: int) -> Tensor | None:
        """[T, count] additive. None when every query sees every key, which a lone decode row often does."""
        held = group.held[:count]
        if len(positions) == 1:
            seen = group.layout.visible(positions, held)
            if seen.all():
                return None
            visible = torch.from_numpy(seen).to(self._device)
        else:
            visible = group.layout.visible(
                torch.from_numpy(positions).to(self._device), torch.from_numpy(held).to(self._device)
            )
        mask = torch.zeros(visible.shape, dtype=self._mask_dtype, device=self._device)
        return mask.masked_fill_(~visible, float("-inf"))

    def _real(self, session: SessionKV, base: int) -> slice:
        first = base + session.next_position % self._geometry.row_quantum
        return slice(first, first + session.staged)


def _unrotations(group: LaneGroup, positions: Positions) -> Tensor:
    """[n, D, D], the matrices that undo the rotations of `positions`, so that no layer has to ask for one."""
    context = group.context
    units = torch.eye(group.head_dim, device=context.device)[:, None]  # [D, 1, D], as if each were a head
    shifts = torch.from_numpy(-positions)
    if context.geometry.row_quantum == 1:
        return context.rotate(units.expand(-1, len(shifts), -1), shifts, group.rotary).transpose(0, 1)
    # One at a time: an angle's cosine may depend, in its last digit, on those that come with it.
    return torch.stack([context.rotate(units, shift, group.rotary)[:, 0] for shift in shifts[:, None]])


def _staged(session: SessionKV) -> Positions:
    return np.arange(session.next_position, session.next_position + session.staged, dtype=np.int64)
