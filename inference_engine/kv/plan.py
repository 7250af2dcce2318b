"""The plan of one forward: which packed row is whose, where its K and V go, and what it may see.

    packed rows   | session A: 3 rows | session B: 1 row | …            input_ids [1, N]

Everything a layer needs is worked out here once, as host integers and one transfer; `attend` then runs layer after
layer with no session object, no synchronisation and no decision. In fixed-shape mode each session's rows sit at their
position modulo the row quantum, padded on both sides, and keys are padded to the key quantum: a row then meets the
same arithmetic whatever else is in the forward.

Where the device has an operation for it, rows that read regions are attended to all at once, whatever their sessions
are (`kernels/ragged_attention.py`), but for the longest chunks of prefills: these see every row up to their own, and
need no mask. A step of nothing but regions is a table of numbers (`StepTables`), and may be run as a graph.
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
from inference_engine.kernels.ops import REFERENCE, DeviceOps
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.memory.pool import Pool
from inference_engine.kv.numbers import StepNumbers, StepTables
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.views import OnChoice, Scoring, StagedQueries, StepReads, View

# Blocks of more rows are attended to session by session: each fills a device, and fused operations are at their best.
_MOST_RAGGED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Span:
    """One session's rows in the packed forward: `packed` includes padding, `real` does not."""

    packed: slice
    real: slice
    views: dict[int, View]  # by layer; none where the rows are in the step's region rows

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
        ops: DeviceOps = REFERENCE,
        on_choice: OnChoice | None = None,
    ) -> None:
        self._geometry = geometry
        self.pool = pool
        device = next(iter(pool.buffers.values())).keys.device
        quantum = geometry.token_quantum
        self._attend_ragged = ops.attend_ragged
        attends_together = ops.attends_together and quantum == 1
        staged: list[StagedQueries] = []
        total = 0
        for session in sessions:
            staged.append(_staged(session, quantum, total))
            total = staged[-1].packed.stop
        self.query_count = total
        self.positions: NDArray[np.int64] = np.concatenate([queries.positions for queries in staged])
        has_regions = attends_together and any(kv.staged <= _MOST_RAGGED_TOKENS for kv in sessions)
        self.numbers = StepNumbers(geometry, total, has_regions=has_regions, scratch=pool.scratch)
        reads = StepReads(
            geometry=geometry,
            device=device,
            mask_dtype=mask_dtype,
            attends_together=attends_together,
            most_queries=_MOST_RAGGED_TOKENS,
            numbers=self.numbers,
            on_choice=on_choice,
        )
        for session, queries in zip(sessions, staged, strict=True):
            for part in session.parts:
                part.read(queries, reads)
        self._device = device
        self.selects = reads.selects  # does a row of the regions choose blocks?
        self.spans = tuple(Span(queries.packed, queries.real, queries.views) for queries in staged)
        # Is this step nothing but its numbers?
        self.is_numbers_only = not any(span.views for span in self.spans)

    @cached_property
    def _tables(self) -> StepTables:
        numbers = torch.from_numpy(self.numbers.all).to(self._device)
        return StepTables.over(
            numbers, self._geometry, self.pool, self._attend_ragged, tokens=self.query_count, selects=self.selects
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
        if self.is_numbers_only:
            return tables.attend(layer, queries, keys, values, scaling=scaling, softcap=softcap, head_sinks=head_sinks)
        tables.write(layer, keys, values)
        buffer = tables.buffer(layer)
        views = [span.views.get(layer) for span in self.spans]
        regions = queries  # whatever it is, if no row has one
        if None in views:
            regions = tables.read(layer, queries, scaling=scaling, softcap=softcap, head_sinks=head_sinks)
        scoring = Scoring(scaling=scaling, softcap=softcap, head_sinks=head_sinks)
        outs = []
        for index, (span, view) in enumerate(zip(self.spans, views, strict=True)):
            try:
                outs.append(
                    regions[span.packed]
                    if view is None
                    else view.read(layer, queries[0, :, span.packed].transpose(0, 1), buffer, scoring)
                )
            except RestorationFailed as failure:
                raise SpanFailed(index, failure) from failure
        return (outs[0] if len(outs) == 1 else torch.cat(outs))[None]


def _staged(session: SessionKV, quantum: int, packed: int) -> StagedQueries:
    """What a session has staged, its packed rows beginning with row number `packed`."""
    first, end = session.next_position, session.next_position + session.staged
    begin, stop = first - first % quantum, -(-end // quantum) * quantum
    has_generated = bool(session.staged_generated.any())
    return StagedQueries(
        positions=np.arange(begin, stop, dtype=np.int64),
        packed=slice(packed, packed + stop - begin),
        real=slice(packed + first - begin, packed + end - begin),
        first=first,
        end=end,
        generated=session.staged_generated,
        has_generated=has_generated,
        has_appended=not (has_generated and session.staged_generated.all()),
    )
