"""Steps as CUDA graphs: captured for a set of sizes when the engine starts, then replayed with new inputs.

A step of a small model is hundreds of kernels of microseconds each, and launching them from the host takes longer than
running them, for decode and for a segment of prefill. A step whose queries all attend to regions is described by whole
numbers in fixed shapes (`kv/numbers.py`), so it can be captured.

    numbers   ids [N] | positions [N] | tokens whose logits are computed [at most MOST_LOGITS] | writes | regions

N is rounded up to one of `SIZES`; the padding tokens write to vector 0 of the buffer and attend to nothing.

Long chunks read by causal views, whose lengths are those of a history. Where an operation takes them from the device
(`kernels/flash3.py`), they are numbers, too. Otherwise such a step is a graph up to a layer's attention, the views' own
operation, the next graph: each is launched while the device is busy with those before.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left
from enum import Enum
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inference_engine.backends.base import Result, Step
from inference_engine.backends.op_list_executor import OpListExecutor
from inference_engine.backends.ranks.group import gather_peaks
from inference_engine.backends.ranks.leader import ALONE, Followers
from inference_engine.backends.recording import GraphMemory, Numbers, Recording, Recordings, padded
from inference_engine.errors import BackendError
from inference_engine.kernels.flash3 import CHUNK_FIELDS, CHUNKS, FlashChunks
from inference_engine.kernels.graph_io import PLAIN_ENDS, Peaks, StepEnds
from inference_engine.kernels.reads import AttentionCall, RaggedAttention, ReadRecord, StagedRead
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.memory.pool import Pool
from inference_engine.kv.numbers import Besides, StepNumbers, StepTables
from inference_engine.kv.views import LEAST_LONG, Scoring
from inference_engine.models.seam import Seam

logger = logging.getLogger(__name__)

# A turn's round number of tokens has the last one of the answer before it beside it.
SIZES = (
    *(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 136, 160, 192, 256, 264, 288, 384, 512, 520, 544, 768, 1024),
)
# The tokens of a step that do not read all they see are among its first ones, so many. The last: at most.
SELECTING = (1, 8, 64)
_ALONE = 64  # tokens of a step, up to which one of single tokens is another kind than one with chunks
MOST_KINDS = 256  # of steps recorded while serving, at a time: clients choose what their sessions read
# A recording that was not looked for among so many looks may be replaced; a step takes several.
STALE_LOOKS = 128 * MOST_KINDS
MOST_LOGITS = 64  # logits of one token are as long as the vocabulary: those of a whole prompt would take gigabytes

Recorded = Recording[tuple[Tensor, Tensor | None, Peaks]]


class Views(Enum):
    NONE = "none"
    BESIDE = "beside queries that read by numbers"
    ALONE = "alone"


class RecordedKind(NamedTuple):
    """What is alike in steps that are recorded once.

    tokens: with padding. records: of queries that do not read all they see, which are among the first `reads_upto`.
    has_chunks: may a session have several tokens? views: do queries have causal ones? chunks: how many sessions' views
    are attended to within the step.
    """

    tokens: int
    tap_layers: tuple[int, ...]
    has_chunks: bool
    records: tuple[ReadRecord, ...] = ()
    reads_upto: int = 0
    views: Views = Views.NONE
    chunks: int = 0


def should_record_graphs(choice: str, device: torch.device, *, has_regions: bool, has_states: bool = False) -> bool:
    """Are steps to be recorded? Raises BackendError if they must be (`on`) and cannot."""
    if choice == "on" and has_states:
        raise BackendError(
            "graphs=on: torch's modules run layers with recurrent states for one session at a time, which cannot be "
            "recorded. Start with graphs=auto"
        )
    can = device.type == "cuda" and has_regions and not has_states
    if choice == "on" and not can:
        raise BackendError(
            "graphs=on needs a GPU, kernels=triton and a model without sinks in its heads and recurrent states; this "
            f"is {device} {'with' if has_regions else 'without'} a kernel for all of its layers. Start with graphs=auto"
        )
    return can and choice != "off"


class StepGraphs:
    """Recorded steps over one pool, by number of tokens and by tap layers.

    The pool may be freed before they are; they must not run after that.
    """

    def __init__(
        self,
        seam: Seam,
        geometry: Geometry,
        pool: Pool,
        attention: RaggedAttention,
        *,
        tap_layers: tuple[int, ...] = (),
        memory: GraphMemory,
        listed: OpListExecutor | None = None,
        ends: StepEnds = PLAIN_ENDS,
        followers: Followers = ALONE,
        has_long_reads: bool = False,
        attend_chunks: type[FlashChunks] | None = None,
    ) -> None:
        """Records all steps whose queries read all they see, so that no request waits for a recording later.

        tap_layers: of the steps that return hidden states. listed: runs the steps in place of torch's modules. ends:
        finds the largest logits. followers: run what is run here. has_long_reads: may chunks read by views?
        attend_chunks: attends to them; None: they do so between graphs.
        Raises BackendError for a model that cannot be recorded.
        """
        self._seam, self._geometry, self._attention, self._listed = seam, geometry, attention, listed
        self._device = pool.memory.device
        # Its views of a pool are the same for all layers.
        is_even = len({len(buffer.keys) for buffer in pool.buffers}) == 1
        self._attend_chunks = attend_chunks if is_even else None
        self._memory, self._ends, self._followers = memory, ends, followers
        self._taps = {(), tap_layers}
        # Of kinds met while serving; None: it cannot be recorded.
        self._tried: Recordings[Recorded | None] = Recordings(MOST_KINDS, STALE_LOOKS)
        self._is_full = False
        kinds = [
            kind
            for size in reversed(SIZES)
            for kind in itertools.starmap(
                RecordedKind, itertools.product([size], self._taps, {size > 1, size > _ALONE})
            )
        ]
        self._has_views = has_long_reads
        if has_long_reads:
            kinds += [
                RecordedKind(
                    size, (), has_chunks=True, views=Views.ALONE, chunks=CHUNKS[0] if self._attend_chunks else 0
                )
                for size in reversed(SIZES)
                if size >= LEAST_LONG
            ]
        # The largest first: the others reuse its temporary memory.
        self._at_start: dict[RecordedKind, Recorded] = {kind: self._record(pool, kind) for kind in kinds}

    def _record(self, pool: Pool, kind: RecordedKind) -> Recorded:
        seam, geometry, attention = self._seam, self._geometry, self._attention
        listed = self._listed
        size, taps = kind.tokens, kind.tap_layers
        memory = self._memory

        def beside(layer: int, call: AttentionCall, attention: RaggedAttention) -> Tensor:
            queries = memory.room("queries", call.queries.shape, call.queries.dtype, self._device)
            out = memory.room("attended", (*queries.shape[:2], call.values.shape[1]), queries.dtype, self._device)
            queries.copy_(call.queries)
            if kind.views is Views.BESIDE:
                out.copy_(attention(call))
            scoring = Scoring(scaling=call.scaling, softcap=call.softcap, head_sinks=None)
            memory.cut(lambda plan: plan.read_views(layer, queries, out, scoring))
            return out

        def within(chunks: FlashChunks, layer: int, call: AttentionCall, attention: RaggedAttention) -> Tensor:
            out = chunks.attend(layer, call.queries, call.keys, call.values, call.scaling)
            if kind.views is Views.BESIDE:
                out += attention(call)  # each has zeros where the other has not
            return out

        attend_chunks = self._attend_chunks if kind.chunks else None
        reads = [StagedRead(each, upto=kind.reads_upto, tokens=geometry.trained_positions) for each in kind.records]

        def compute(numbers: Tensor) -> tuple[Tensor, Tensor | None, Peaks]:
            head, rest = numbers[: 2 * size + _logits(size)], numbers[2 * size + _logits(size) :]
            besides: Besides | None = None if kind.views is Views.NONE else beside
            if attend_chunks is not None:
                rest, table = rest[: -idle_chunks.size], rest[-idle_chunks.size :].view(idle_chunks.shape)
                heads = tuple(layer.kv_heads for layer in geometry.layers)
                vectors, longest = len(pool.buffers[0].keys), geometry.trained_positions
                besides = partial(within, attend_chunks(table, size, heads, vectors, longest))
            tables = StepTables.over(
                rest,
                geometry,
                pool,
                attention,
                tokens=size,
                reads=reads,
                has_chunks=kind.has_chunks,
                besides=besides,
            )
            logits, states = _forward(seam, listed, head[:size], head[size : 2 * size], head[2 * size :], tables, taps)
            return logits, states, gather_peaks(self._followers.group, self._ends.peaks(logits), logits.shape[1])

        nothing = StepNumbers(geometry, size, has_regions=True, scratch=pool.scratch)
        idle_chunks = np.zeros((len(geometry.layers), kind.chunks, CHUNK_FIELDS), dtype=np.int64)
        parts = [np.zeros(2 * size + _logits(size), dtype=np.int64), nothing.all]
        idle = np.concatenate(parts if attend_chunks is None else [*parts, idle_chunks.reshape(-1)])
        try:
            return Recording(idle, self._device, compute, self._memory)
        except RuntimeError as error:
            raise BackendError(f"steps cannot be recorded ({error}); start with graphs=off") from error

    def can_run(self, step: Step) -> bool:
        """Is the step recorded? Tokens past the trained positions are rotated by operations that are not.

        The first step of its size with other records is recorded now. If that fails, or MOST_KINDS are in
        use, such steps run unrecorded, and the requests of this step are not affected.
        """
        plan = step.plan
        if not plan.is_numbers_only and not (self._has_views and plan.is_causal):
            return False
        if plan.records and self._followers.ranks > 1:
            return False  # ranks record at the start, and know no other kinds
        if self._attend_chunks is not None and plan.views > CHUNKS[-1]:
            return False
        if step.tap_layers not in self._taps or len(step.logit_queries) > MOST_LOGITS:
            return False
        if plan.query_count > SIZES[-1] or plan.reads_upto > SELECTING[-1]:
            return False
        return bool(plan.positions.max() < self._seam.trained_positions) and self._recorded(step) is not None

    def _recorded(self, step: Step) -> Recorded | None:
        kind = self._kind(step)
        if kind in self._at_start:
            return self._at_start[kind]
        found = self._tried.find(kind)
        if found is not None or kind in self._tried:
            return found
        was_full, self._is_full = self._is_full, not self._tried.has_place()
        if self._is_full:
            if not was_full:
                logger.warning("%d kinds of steps are recorded and in use: others run unrecorded", MOST_KINDS)
            return None
        found = self._try_to_record(step.plan.pool, kind)
        self._tried.keep(kind, found)
        return found

    def _try_to_record(self, pool: Pool, kind: RecordedKind) -> Recorded | None:
        try:
            return self._record(pool, kind)
        except BackendError:
            logger.exception("steps of %d tokens, some of which select what they read, run unrecorded", kind.tokens)
            return None

    def _kind(self, step: Step) -> RecordedKind:
        plan = step.plan
        size = _size(step)
        has_chunks = plan.has_chunks or size > _ALONE
        upto = SELECTING[bisect_left(SELECTING, plan.reads_upto)] if plan.records else 0
        views, chunks = Views.NONE, 0
        if not plan.is_numbers_only:
            views = Views.BESIDE if plan.has_numbers else Views.ALONE
            chunks = CHUNKS[bisect_left(CHUNKS, plan.views)] if self._attend_chunks is not None else 0
        return RecordedKind(size, step.tap_layers, has_chunks, plan.records, upto, views, chunks)

    def run(self, step: Step, fed: Tensor | None = None) -> Result:
        """As `Forward.run`, for a step that `can_run`; fed: as in `Launcher`. Does not wait for the device."""
        logits, taps, _ = self._run(step, fed, collects=True)
        # Copies: the next step overwrites the graph's outputs.
        return Result(self._followers.group.gather(logits)[: len(step.logit_queries)].clone(), _copy(taps, step))

    def run_in_place(self, step: Step, fed: Tensor | None = None) -> tuple[Tensor, Peaks, Tensor | None]:
        """As `run`, with logits, of this rank alone, and their peaks, of the first rows, which the next step
        overwrites; and the taps."""
        logits, taps, peaks = self._run(step, fed, collects=False)
        return logits, peaks, _copy(taps, step)

    def _run(self, step: Step, fed: Tensor | None, *, collects: bool) -> tuple[Tensor, Tensor | None, Peaks]:
        plan = step.plan
        size, recorded = _size(step), self._recorded(step)
        assert recorded is not None, "can_run was not asked"
        kept = padded(np.array(step.logit_queries, dtype=np.int64), _logits(size))
        numbers = plan.numbers.padded(size, plan.pool.scratch)
        shared, kind = [padded(plan.rotary_positions, size), kept, numbers.all], self._kind(step)
        if kind.chunks:
            shared.append(plan.chunks(kind.chunks))
        self._followers.replay(kind, shared, collects=collects)
        return recorded.run(padded(step.token_ids, size), *shared, fed=fed, given=plan)

    def replay(self, kind: RecordedKind, numbers: Numbers, *, collects: bool) -> None:
        """Run a step that was recorded at the start, beside the first rank, which alone knows its ids.

        collects: are its logits wanted there?
        """
        logits, _, _ = self._at_start[kind].run(np.zeros(kind.tokens, dtype=np.int64), numbers)
        if collects:
            self._followers.group.gather(logits)


def _copy(taps: Tensor | None, step: Step) -> Tensor | None:
    return None if taps is None else taps[: step.plan.query_count].clone()


def _size(step: Step) -> int:
    return SIZES[bisect_left(SIZES, step.plan.query_count)]


def _logits(size: int) -> int:
    """For how many tokens of a step of this size logits are computed."""
    return min(size, MOST_LOGITS)


def _forward(
    seam: Seam,
    listed: OpListExecutor | None,
    ids: Tensor,
    positions: Tensor,
    kept: Tensor,
    tables: StepTables,
    tap_layers: tuple[int, ...],
) -> tuple[Tensor, Tensor | None]:
    """Logits [n, V] float32 of the tokens `kept` [n], and hidden states [N, layers, hidden] if there are tap layers."""
    with seam.attending(tables, np.zeros(1, dtype=np.int64)):
        if listed is not None:
            return listed.run(ids, positions, kept, tables, tap_layers)
        with seam.tapped(tap_layers) as states:
            out = seam.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=kept)
        return out.logits[0].float(), torch.stack(states, dim=2)[0] if states else None
