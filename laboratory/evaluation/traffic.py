"""The traffic model: what a decode step costs, predicted from the bytes it moves.

    t(n, B) = (W + B · A(n)) / β + c0           + c1 where a step has to find what it reads          the source's form
    t(n, B) = (W + B · A(n)) / β + c0 + B · c2  + B · c1                                             with sessions

W weight bytes, read once a step; A(n) bytes of K/V that one session's token reads at length n; B sessions. β (effective
bandwidth), c0 (fixed cost of a step) and c2 (what a session costs however little it reads: its arithmetic, its own
attention calls) are fitted on rows of full alone, by relative least squares, so that a short context counts as much as
a long one. The other strategies are then predicted without any freedom, but for c1, the price of finding, which is
fitted on one row of each strategy that has one. The source's engine attends for all sessions in one kernel and has no
c2. β is that of K/V: where weights are read faster than that, c0 comes out below 0, and says so.

Source: "Attention Pays Its Bill", BRL-2026-07, sections 2 and 9.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from inference_engine.backends.base import EmbeddingAndHead
from inference_engine.backends.native.program import Program
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import Layout
from inference_engine.kv.parts.block_index import BlockSelector
from inference_engine.kv.parts.component_index import TokenSelector
from inference_engine.kv.strategy import KVStrategy
from inference_engine.models import check_model
from inference_engine.models.folder import weight_files
from inference_engine.models.open_checkpoint import open_checkpoint
from inference_engine.models.safetensors_header import check_safetensors
from inference_engine.models.seam import Seam
from laboratory.evaluation.models import Target


def bytes_read(strategy: KVStrategy, geometry: Geometry, length: int) -> int:
    """Bytes that a generated token, the last of `length`, reads of K and V in all layers, its own entry included.

    Where blocks are selected these are the selected blocks and the bounds of every whole block. Where a token may take
    over what another saw, they are what it reads when it finds none. Compressed entries count as the exact entries they
    are when they are read.
    """
    layouts = _layouts(strategy, geometry, length)
    read = {layout: _entries_read(layout, length) for layout in set(layouts)}
    return sum(
        read[layout] * layer.entry_bytes(geometry.itemsize) + layer.kv_heads * _index_bytes(layout, length)
        for layout, layer in zip(layouts, geometry.layers, strict=True)
    )


def finds(strategy: KVStrategy, geometry: Geometry, length: int) -> bool:
    """Whether a generated token has to find out what it reads."""
    return any(layout.is_selective for layout in _layouts(strategy, geometry, length))


def weight_bytes(target: Target) -> int:
    """Bytes of the weights that a step reads: all of them, but for a table of embeddings that is only looked up.

    Raises ModelError if the model's files cannot be read.
    """
    return target.forward.lend(_WeightBytes(target))


class _WeightBytes:
    """Implements Borrower. The native backend counts what it packed; elsewhere all numbers have one dtype."""

    def __init__(self, target: Target) -> None:
        self._model, self._itemsize = target.model, target.forward.compute_dtype.itemsize

    def of_program(self, program: Program) -> int:
        return program.weight_bytes

    def of_modules(self, seam: Seam) -> int:
        return self._of_files()

    def of_matrices(self, words: EmbeddingAndHead) -> int:
        return self._of_files()

    def _of_files(self) -> int:
        checked = check_model(self._model.model, cache=self._model.cache_path)
        if checked.only_gguf:
            checkpoint = open_checkpoint(checked.stored)
            shapes = {name: checkpoint.tensor(name).shape for name in checkpoint.names()}
        else:
            files = [check_safetensors(checked.folder / file) for file in weight_files(checked.folder)]
            shapes = {name: tensor["shape"] for tensors in files for name, tensor in tensors.items()}
        if any(name.endswith("lm_head.weight") for name in shapes):
            shapes = {name: shape for name, shape in shapes.items() if not name.endswith("embed_tokens.weight")}
        return self._itemsize * sum(math.prod(shape) for shape in shapes.values())


def _layouts(strategy: KVStrategy, geometry: Geometry, length: int) -> list[Layout]:
    return [
        Layout.of(strategy.rule(index, geometry), geometry, layer.native_window, length)
        for index, layer in enumerate(geometry.layers)
    ]


def _index_bytes(layout: Layout, length: int) -> int:
    """Bytes of a KV head's index that the query of the last token reads."""
    query = np.array([length - 1])
    choosers = [each for each in layout.mechanisms if isinstance(each, TokenSelector)]
    return sum(int(each.local_starts(query)[0]) // each.shape.tile * each.shape.tile_bytes for each in choosers)


def _entries_read(layout: Layout, length: int) -> int:
    query, held = np.array([length - 1]), np.arange(length)
    visible = layout.visible(query, held)[0]
    for each in layout.mechanisms:
        if isinstance(each, TokenSelector):
            first = int(each.local_starts(query)[0])
            local = np.count_nonzero(visible[(held < each.sink) | (held >= first)])
            return int(local) + min(each.count, max(0, first - each.sink))
        if isinstance(each, BlockSelector):
            first = int(each.local_starts(query)[0])
            distant = max(0, first - each.sink_tokens)
            local = np.count_nonzero(visible[(held < each.sink_tokens) | (held >= first)])
            # What is known of a block, two vectors per KV head, is as large as a KV entry.
            return int(local) + min(each.count * each.block, distant) + length // each.block
    return int(np.count_nonzero(visible))


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A measured decode step. bytes_read: by each session's token. finds: whether it had to choose what to read."""

    strategy: str
    length: int
    batch: int
    bytes_read: float
    seconds: float
    finds: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """The model with its terms. session_seconds: c2; None for the source's form, where finding is paid once a step.

    finding_seconds: c1 by strategy; one that is not in it does not search.
    """

    weight_bytes: int
    bytes_per_second: float
    step_seconds: float
    session_seconds: float | None = None
    finding_seconds: Mapping[str, float] = field(default_factory=dict)

    def predict(self, step: Step) -> float:
        moved = (self.weight_bytes + step.batch * step.bytes_read) / self.bytes_per_second
        finding = self.finding_seconds.get(step.strategy, 0.0)
        if self.session_seconds is None:
            return moved + self.step_seconds + finding
        return moved + self.step_seconds + step.batch * (self.session_seconds + finding)


def fit(dense: Sequence[Step], weight_bytes: int, *, with_sessions: bool = False) -> Bill:
    """β, c0 and perhaps c2 from dense steps. Raises ValueError if they cannot separate the terms."""
    bill = _fit(dense, weight_bytes, with_sessions)
    if bill is None:
        needed = "two lengths and two batches" if with_sessions else "two lengths or batches"
        raise ValueError(f"the traffic model needs dense steps of at least {needed}")
    if bill.bytes_per_second <= 0:
        raise ValueError("dense steps do not get slower with what they read: measure longer contexts")
    return bill


def _fit(dense: Sequence[Step], weight_bytes: int, with_sessions: bool) -> Bill | None:
    """As `fit`, but β may be negative, and None stands for too few steps."""
    seconds = np.array([step.seconds for step in dense], dtype=np.float64)
    reads = np.array([step.batch * step.bytes_read for step in dense], dtype=np.float64)
    columns = [np.ones_like(reads), reads]
    if with_sessions:
        columns.append(np.array([step.batch for step in dense], dtype=np.float64))
    # To a common scale, or the rank could not be separated from rounding.
    scales = np.array([np.abs(column).max(initial=1.0) for column in columns])
    terms = np.stack(columns, axis=1) / scales / seconds[:, None]
    if np.linalg.matrix_rank(terms, rtol=1e-9) < len(columns):
        return None
    found = np.linalg.lstsq(terms, np.ones_like(seconds), rcond=None)[0] / scales
    fixed, per_byte = float(found[0]), float(found[1])
    return Bill(
        weight_bytes=weight_bytes,
        bytes_per_second=1 / per_byte if per_byte else math.inf,
        step_seconds=fixed - weight_bytes * per_byte,
        session_seconds=float(found[2]) if with_sessions else None,
    )


def fit_finding(bill: Bill, others: Sequence[Step]) -> tuple[Bill, list[Step]]:
    """Add c1 for each strategy that finds, from its row of fewest bytes. Also returns the rows that fitted no term."""
    finding: dict[str, float] = {}
    fitted: list[Step] = []
    for name in dict.fromkeys(step.strategy for step in others if step.finds):
        one = min((step for step in others if step.strategy == name), key=lambda step: step.batch * step.bytes_read)
        missing = one.seconds - bill.predict(one)
        finding[name] = missing if bill.session_seconds is None else missing / one.batch
        fitted.append(one)
    return replace(bill, finding_seconds=finding), [step for step in others if step not in fitted]


# -- how good it is --------------------------------------------------------------------------------------------------


def r_squared(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """The share of the measured values' variance that the predictions explain; below 0, worse than their mean."""
    mean = statistics.fmean(measured)
    left = sum((one - other) ** 2 for one, other in zip(measured, predicted, strict=True))
    return 1.0 - left / sum((one - mean) ** 2 for one in measured)


def relative_errors(bill: Bill, steps: Sequence[Step]) -> list[float]:
    """|predicted − measured| ÷ measured, of each step."""
    return [abs(bill.predict(step) - step.seconds) / step.seconds for step in steps]


def leave_one_out(dense: Sequence[Step], weight_bytes: int, *, with_sessions: bool = False) -> list[float]:
    """The relative error at each dense step of a fit on all others; empty where any of those fits is not to be had."""
    errors = []
    for index, step in enumerate(dense):
        bill = _fit([*dense[:index], *dense[index + 1 :]], weight_bytes, with_sessions)
        if bill is None:
            return []
        errors += relative_errors(bill, [step])
    return errors


def speedups(bill: Bill, dense: Sequence[Step], others: Sequence[Step]) -> list[tuple[Step, float, float]]:
    """Each other step with its speed ÷ full's at the same length and batch: as measured, as predicted."""
    by_place = {(step.length, step.batch): step for step in dense}
    return [
        (step, full.seconds / step.seconds, bill.predict(full) / bill.predict(step))
        for step in others
        if (full := by_place.get((step.length, step.batch))) is not None
    ]
