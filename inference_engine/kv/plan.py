"""The plan of a continuous batch: the session of each packed token, where its K and V go, what its query may see.

    packed tokens | session A: 3 tokens | session B: 1 token | …        input_ids [1, N]

Everything a layer needs is worked out here once, as host integers and one transfer. `attend` then runs layer after
layer with no session object, no synchronisation and no decision. In fixed-shape mode each session's tokens lie at
their position modulo the token quantum, padded on both sides, and keys are padded to the key quantum: a token then
meets the same arithmetic whatever else is in the forward.

Where the device has an operation for it, queries that read regions are computed together, whatever their sessions are
(`kernels/ragged_attention.py`). The longest prefill chunks are not, but where sums have one order: they see every entry
up to their own, and need no mask. A step whose queries all read regions is a table of numbers (`StepTables`), and may
be run as a graph; one in which some have causal views, as graphs between which they read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.errors import RestorationFailed
from inference_engine.kernels.expanded_attention import OwnQueries
from inference_engine.kernels.flash3 import CHUNK_FIELDS
from inference_engine.kernels.ops import REFERENCE, DeviceOps
from inference_engine.kernels.reads import COUNT, ReadRecord
from inference_engine.kernels.states import enter_span
from inference_engine.kernels.transfer import on_device
from inference_engine.kv.geometry import SHORT_ROTARY, Geometry
from inference_engine.kv.memory.pool import KVBuffer, Pool
from inference_engine.kv.numbers import StepNumbers, StepTables
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.views import CausalView, Mixer, Scoring, StagedQueries, StatesOfStep, StepReads, View

# Longer blocks are computed session by session: each fills a device, and fused operations are fastest then.
MOST_RAGGED_TOKENS = 1024


class SpanFailed(Exception):
    """Old entries of span `index` could not be restored, or are not finite.

    The step's other sessions are not affected.
    """

    def __init__(self, index: int, failure: RestorationFailed) -> None:
        super().__init__(str(failure))
        self.index = index
        self.failure = failure


class StepUnwanted(Exception):
    """The step ended between two layers, because all whose tokens are in it have stopped."""


class StepPlan:
    """Built from sessions that have staged their tokens; valid until one of them commits."""

    def __init__(
        self,
        sessions: Sequence[SessionKV],
        geometry: Geometry,
        pool: Pool,
        *,
        mask_dtype: torch.dtype,
        ops: DeviceOps = REFERENCE,
    ) -> None:
        self._sessions = sessions
        self._geometry = geometry
        self.pool = pool
        # Asked between layers, where a device does not compute ahead; None: the step runs to its end.
        self.is_wanted: Callable[[], bool] | None = None
        device = pool.memory.device
        self._attend_ragged = ops.attend_ragged
        is_padded = geometry.token_quantum > 1
        # Sessions whose bits do not depend on what is in the step: they need no padding.
        unpadded: set[int] = set()
        if is_padded:
            unpadded.update(index for index, kv in enumerate(sessions) if _has_one_order(kv, ops))
        attends_together = ops.attends_together and not is_padded
        # Of each session. In a plan that follows another, where its tokens lie among those of the step is right, and
        # their positions, which are in `positions`, may be those of an earlier one.
        self.spans: list[StagedQueries] = []
        total = 0
        for index, session in enumerate(sessions):
            self.spans.append(_staged(session, 1 if index in unpadded else geometry.token_quantum, total))
            total = self.spans[-1].packed.stop
        self.query_count = total
        self.positions: NDArray[np.int64] = np.concatenate([span.positions for span in self.spans])
        # Which tokens are rotated by the table for short histories; None: none, or the model has no such table.
        self._in_short = None if geometry.short_positions is None else _in_short(sessions, self.spans)
        self.rotary_positions = self.positions if self._in_short is None else self._turned(self.positions)
        # Views add up in another order: where the operation has one, chunks of any length are its own.
        most_queries = sys.maxsize if ops.attends_in_one_order else MOST_RAGGED_TOKENS
        is_causal_only = ops.has_causal_views_only
        has_regions = attends_together and any(
            kv.staged <= most_queries or (is_causal_only and not kv.reads_causally) for kv in sessions
        )
        self.numbers = StepNumbers(geometry, total, has_regions=has_regions or bool(unpadded), scratch=pool.scratch)
        self._reads = StepReads(
            geometry=geometry,
            device=device,
            mask_dtype=mask_dtype,
            attends_together=attends_together,
            most_queries=most_queries,
            attends_in_one_order=ops.attends_in_one_order,
            long_reads=ops.long_reads,
            has_causal_views_only=is_causal_only,
            numbers=self.numbers,
            attention=ops.attend_ragged,
            largest=ops.largest,
            attend_causal=ops.attend_causal,
            attend_piece=ops.attend_piece,
            attend_causal_state=ops.attend_causal_state,
            merging=ops.merging,
            attend_generated=ops.attend_generated,
        )
        by_numbers = replace(self._reads, attends_together=True) if unpadded else self._reads
        # Of each session, until which position its numbers grow evenly (`Part.read`).
        self._untils: list[int] = []
        for index, (session, span) in enumerate(zip(sessions, self.spans, strict=True)):
            reads = by_numbers if index in unpadded else self._reads
            self._untils.append(min([part.read(span, reads) for part in session.parts]))
            if self._geometry.numbers_states:
                self._enter_states(index)
        self._device = device
        self._growth: _Growth | None = None
        # Do all queries read by numbers? Do some of a session, and others of it by a view?
        self.is_numbers_only, self._has_halves = True, False
        for span in self.spans:
            self.is_numbers_only &= not span.views
            self._has_halves |= span.has_halves

    @property
    def records(self) -> tuple[ReadRecord, ...]:
        """How queries read by numbers that do not read all they see, always in the same order."""
        return self._reads.records.records

    @property
    def reads_upto(self) -> int:
        """The queries of `records` are among the first so many of the step."""
        return self._reads.records.upto

    def _turned(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """[N], as rotations take them: the position, or ~position of a token that SHORT_ROTARY rotates."""
        assert self._in_short is not None
        return np.where(self._in_short, ~positions, positions)

    @property
    def is_causal(self) -> bool:
        """Are all views, if there are any, of entries in the slots of their positions?"""
        return all(isinstance(view, CausalView) for span in self.spans for view in span.views.values())

    @property
    def has_numbers(self) -> bool:
        """Does any query read by numbers?"""
        return bool(self.numbers.regions[..., COUNT].any())

    @property
    def grows_evenly(self) -> bool:
        """Are these single tokens whose reads change with their positions alone, whatever happens between two steps?"""
        geometry = self._geometry
        return (
            self.is_numbers_only
            and self.query_count == len(self._sessions)
            and geometry.token_quantum == geometry.key_quantum == 1
            and not any(kv.takes_room for kv in self._sessions)
            and all(kv.reads_regions_alone for kv in self._sessions)
        )

    def following(self) -> StepPlan:
        """The plan of the next step of the same sessions, each of which has committed its token and staged another.

        Of a plan of generated tokens, one of each session, which all read by numbers. No session is looked at while
        its numbers grow by what they grew before.
        """
        assert self.is_numbers_only and self.query_count == len(self._sessions)
        plan = object.__new__(type(self))
        vars(plan).update(vars(self))
        vars(plan).pop("tables", None)
        plan.positions = plan.rotary_positions = self.positions + 1
        if self._in_short is not None:
            plan.rotary_positions = self._turned(plan.positions)
        plan._growth = growth = self._growth or _Growth(self._geometry, self._untils)
        plan.numbers = self.numbers.grown(growth.numbers, self.pool.scratch)
        if self._geometry.numbers_states:
            for session in self._sessions:
                assert session.states is not None
                session.states.of_step()
        others = np.flatnonzero(plan.positions >= growth.ends).tolist()
        if others:
            plan.spans, plan._reads = list(self.spans), replace(self._reads, numbers=plan.numbers)
            for index in others:
                plan._read_anew(index, growth, self.numbers)
        return plan

    def _read_anew(self, index: int, growth: _Growth, before: StepNumbers) -> None:
        """Plan the token of one session, which is token `index` of the step. before: the numbers of the step before."""
        session, span = self._sessions[index], _staged(self._sessions[index], 1, index)
        self.spans[index] = span
        self.numbers.clear(index)
        until = min([part.read(span, self._reads) for part in session.parts])
        if self._geometry.numbers_states:
            self._enter_states(index)
        growth.follow(index, span.first, until, self.numbers, before)
        self.is_numbers_only &= not span.views

    def _enter_states(self, index: int) -> None:
        """Where kernels find the states of a session, and where they write."""
        session, span = self._sessions[index], self.spans[index]
        if session.states is not None and (states := session.states.of_step()) is not None:
            before, after = states.before.data_ptr(), 0 if states.after is None else states.after.data_ptr()
            table = self.numbers.states
            enter_span(table, index, len(self._sessions), span.real, session.next_position, before, after)

    @cached_property
    def tables(self) -> StepTables:
        """The numbers on the device."""
        numbers = on_device(self.numbers.all, self._device)
        return StepTables.over(
            numbers,
            self._geometry,
            self.pool,
            self._attend_ragged,
            tokens=self.query_count,
            reads=self._reads.records.staged(self._longest) if self.records else (),
            has_chunks=self.has_chunks,
        )

    def require_wanted(self) -> None:
        """Raises StepUnwanted if all in the step have stopped."""
        if self.is_wanted is not None and not self.is_wanted():
            raise StepUnwanted

    @property
    def has_chunks(self) -> bool:
        """Have sessions several tokens in the step?"""
        return self.query_count > len(self._sessions)

    @property
    def _longest(self) -> int:
        """No history is longer; one of few numbers, since an operation may be compiled for each."""
        tokens, longest = self._geometry.trained_positions, int(self.positions.max()) + 1
        while tokens < longest:
            tokens *= 2
        return tokens

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
        *,
        scaling: float,
        softcap: float | None = None,
        head_sinks: Tensor | None = None,
        own: OwnQueries | None = None,
    ) -> Tensor:
        """Write the step's K and V of the stored `layer` and attend. None: they are where `tables` says already.

        All [1, H, N, D], queries and keys rotated; returns [1, N, Hq, D]. own: of a layer whose entries stand for keys
        and values of all heads, in the place of `queries`. Raises SpanFailed, and StepUnwanted.
        """
        if self.is_wanted is not None:
            self.require_wanted()
        tables = self.tables
        if keys is not None and values is not None:
            tables.write(layer, keys, values)
        if self.is_numbers_only and own is None:
            return tables.read(layer, queries, scaling=scaling, softcap=softcap, head_sinks=head_sinks)[None]
        buffer = tables.buffer(layer)
        views = [span.views.get(layer) for span in self.spans]
        regions = queries  # unused if no query reads by numbers
        if None in views or self._has_halves:
            regions = tables.attend(
                layer, queries, None, None, scaling=scaling, softcap=softcap, head_sinks=head_sinks, own=own
            )[0]
        scoring = Scoring(scaling=scaling, softcap=softcap, head_sinks=head_sinks)
        outs = []
        for index, (span, view) in enumerate(zip(self.spans, views, strict=True)):
            try:
                if view is None:
                    outs.append(regions[span.packed])
                elif own is None:
                    some = span.packed
                    if self._has_halves and isinstance(view, CausalView):
                        some = slice(some.start + view.first, some.stop)
                        outs.append(regions[span.packed.start : some.start])
                    outs.append(view.read(layer, queries[0, :, some].transpose(0, 1), buffer, scoring))
                else:
                    outs.append(self._read_own(own, view, layer, span.packed, buffer, scoring))
            except RestorationFailed as failure:
                raise SpanFailed(index, failure) from failure
        return (outs[0] if len(outs) == 1 else torch.cat(outs))[None]

    def read_views(self, layer: int, queries: Tensor, out: Tensor, scoring: Scoring) -> None:
        """Fill `out` for the queries that read by views. Both [N, Hq, D], with padding behind the step's tokens."""
        buffer = self.pool.buffers[layer]
        for span in self.spans:
            if isinstance(view := span.views.get(layer), CausalView):
                some = slice(span.packed.start + view.first, span.packed.stop)
                out[some] = view.read(layer, queries[some], buffer, scoring)

    @property
    def views(self) -> int:
        """How many sessions have views."""
        return sum(bool(span.views) for span in self.spans)

    def chunks(self, most: int) -> NDArray[np.int64]:
        """Where the queries with views, all of which are causal, and their entries lie, [L, most, CHUNK_FIELDS]."""
        layers = len(self._geometry.layers)
        table = np.zeros((layers, most, CHUNK_FIELDS), dtype=np.int64)
        table[..., :2] = self.query_count
        counts = [0] * layers
        for span in self.spans:
            for layer, view in span.views.items():
                assert isinstance(view, CausalView)
                first, region = span.packed.start + view.first, view.region
                table[layer, counts[layer]] = first, span.packed.stop, region.starts[layer], region.region, view.count
                counts[layer] += 1
        return table

    def _read_own(
        self, own: OwnQueries, view: View, layer: int, some: slice, buffer: KVBuffer, scoring: Scoring
    ) -> Tensor:
        """[T, Hq, D]. Which sums tokens get follows from how many their session has in the step, and from what these
        read; padded, they always get the same."""
        is_whole = own.chooses or self._geometry.token_quantum == 1
        entries = view.whole(layer, buffer) if is_whole else None
        is_seen = entries is not None and not entries.is_causal  # an indexer chooses by a mask
        assert is_seen or not own.chooses, "a strategy that hides entries from an indexer has to be refused"
        is_plain = scoring.softcap is None and scoring.head_sinks is None
        out = own.expanded(some, entries, scaling=scoring.scaling) if entries is not None and is_plain else None
        return own.output(view.read(layer, own.absorbed(some), buffer, scoring)) if out is None else out

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """The outputs of the state layer `layer` of the model: each session's tokens with its own state.

        hidden, and what is returned: [1, N, H]; zeros for padding.
        """
        out = torch.zeros_like(hidden)
        for session, span in zip(self._sessions, self.spans, strict=True):
            assert session.states is not None
            out[:, span.real] = session.states.mix(layer, mixer, hidden[:, span.real])
        return out

    @property
    def states(self) -> list[tuple[slice, int, StatesOfStep]]:
        """Of each session whose layers keep states for kernels: its tokens in the step, the position of the first one,
        and the states. To be asked for when the step is computed."""
        return [
            (span.real, session.next_position, states)
            for session, span in zip(self._sessions, self.spans, strict=True)
            if session.states is not None and (states := session.states.of_step()) is not None
        ]


class _Growth:
    """By how much the numbers of steps grow from one to the next: known from the first two of an even run.

    ends: by session, the position whose numbers have to be worked out. untils: of each as it was last worked out, until
    where its run goes.
    """

    def __init__(self, geometry: Geometry, untils: Sequence[int]) -> None:
        self.numbers = StepNumbers(geometry, len(untils), has_regions=True)
        self.ends = np.zeros(len(untils), dtype=np.int64)
        self._untils = list(untils)

    def follow(self, index: int, position: int, until: int, numbers: StepNumbers, before: StepNumbers) -> None:
        """`numbers` of the token at `position` were worked out, and are even `until` then. before: a step earlier."""
        is_run = position < self._untils[index]
        if is_run:
            self.numbers.take_difference(index, numbers, before)
        self.ends[index] = self._untils[index] if is_run else 0
        self._untils[index] = until


def _in_short(sessions: Sequence[SessionKV], spans: Sequence[StagedQueries]) -> NDArray[np.bool_] | None:
    are_short = [any(layer.rotary == SHORT_ROTARY for layer in kv.context.geometry.layers) for kv in sessions]
    if not any(are_short):
        return None
    return np.concatenate([np.full(len(span.positions), own) for own, span in zip(are_short, spans, strict=True)])


def _has_one_order(session: SessionKV, ops: DeviceOps) -> bool:
    """Is what the session's queries read added up in one order, whatever else is in the step?"""
    return ops.attends_in_one_order and session.reads_regions_alone


def _staged(session: SessionKV, quantum: int, packed: int) -> StagedQueries:
    """What a session has staged. Its packed tokens begin at index `packed`."""
    first, count, generated = session.next_position, session.staged, session.staged_generated
    end = first + count
    if count == quantum == 1:  # a decode step: numpy takes its time for short arrays
        positions, own, is_generated = np.array([first]), slice(packed, packed + 1), bool(generated[0])
        return StagedQueries(
            positions=positions,
            staged=positions,
            packed=own,
            real=own,
            quantum=quantum,
            first=first,
            end=end,
            generated=generated,
            has_generated=is_generated,
            has_appended=not is_generated,
        )
    begin, stop = first - first % quantum, -(-end // quantum) * quantum
    positions = np.arange(begin, stop, dtype=np.int64)
    return StagedQueries(
        positions=positions,
        staged=positions[first - begin : end - begin],
        packed=slice(packed, packed + stop - begin),
        real=slice(packed + first - begin, packed + end - begin),
        quantum=quantum,
        first=first,
        end=end,
        generated=generated,
        has_generated=True in generated,
        has_appended=False in generated,
    )
