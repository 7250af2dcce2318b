"""The traffic model: what a decode step costs, told by the bytes it moves.

    t(n, B) = (W + B · A(n)) / β + c0            + c1 where a step has to find what it reads

W weight bytes, read once a step; A(n) bytes of K/V that one session's token reads at length n; B sessions. β (effective
bandwidth) and c0 (fixed cost of a step) are fitted on dense rows alone, by relative least squares, so that a short
context counts as much as a long one. The other strategies are then predicted without any freedom, but for c1, the price
of finding, which is fitted on one row of each strategy that has one.

Source: "Attention Pays Its Bill", BRL-2026-07, sections 2 and 9.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from inference_engine.config import ModelConfig
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import Layout
from inference_engine.kv.strategy import KVStrategy
from inference_engine.models import check_model
from inference_engine.models.folder import weight_files
from inference_engine.models.safetensors_header import check_safetensors


def bytes_read(strategy: KVStrategy, geometry: Geometry, length: int) -> int:
    """Bytes that a generated token, the last of `length`, reads of K and V in all layers, its own row included.

    Where blocks are selected these are the keep-set and the bounds of every whole block. Where a token may take over
    what another saw, they are what it reads when it finds none. Rows kept coded count as what they are when they are
    read: rows.
    """
    layouts = _layouts(strategy, geometry, length)
    read = {layout: _rows_read(layout, length) for layout in set(layouts)}
    return sum(
        read[layout] * layer.row_bytes(geometry.itemsize)
        for layout, layer in zip(layouts, geometry.layers, strict=True)
    )


def finds(strategy: KVStrategy, geometry: Geometry, length: int) -> bool:
    """Whether a generated token has to find out what it reads."""
    return any((layout.selector, layout.matcher) != (None, None) for layout in _layouts(strategy, geometry, length))


def weight_bytes(model: ModelConfig, itemsize: int) -> int:
    """Bytes of the weights that a step reads: all of them, but for a table of embeddings that only lends rows.

    Raises ModelError if the model's folder cannot be read.
    """
    folder = check_model(model.model, cache=model.cache_path).folder
    tensors = {
        name: tensor for file in weight_files(folder) for name, tensor in check_safetensors(folder / file).items()
    }
    if any(name.endswith("lm_head.weight") for name in tensors):
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("embed_tokens.weight")}
    numbers: int = sum(math.prod(tensor["shape"]) for tensor in tensors.values())
    return itemsize * numbers


def _layouts(strategy: KVStrategy, geometry: Geometry, length: int) -> list[Layout]:
    return [
        Layout.of(strategy.rule(index, geometry), geometry, layer.native_window, length)
        for index, layer in enumerate(geometry.layers)
    ]


def _rows_read(layout: Layout, length: int) -> int:
    query, held = np.array([length - 1]), np.arange(length)
    visible = layout.visible(query, held)[0]
    selector = layout.selector
    if selector is None:
        return int(np.count_nonzero(visible))
    first_local = int(selector.local_starts(query)[0])
    distant = max(0, first_local - selector.sink_rows)
    local = np.count_nonzero(visible[(held < selector.sink_rows) | (held >= first_local)])
    # What is known of a block, two vectors per KV head, is as large as a row.
    return int(local) + min(selector.count * selector.block, distant) + length // selector.block


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
    """The model with its terms. finding_seconds: c1 by strategy; one that is not in it does not search."""

    weight_bytes: int
    bytes_per_second: float
    step_seconds: float
    finding_seconds: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, strategy: str, batch: int, bytes_read: float) -> float:
        moved = (self.weight_bytes + batch * bytes_read) / self.bytes_per_second
        return moved + self.step_seconds + self.finding_seconds.get(strategy, 0.0)

    def predict(self, step: Step) -> float:
        return self.seconds(step.strategy, step.batch, step.bytes_read)


def fit(dense: Sequence[Step], weight_bytes: int) -> Bill:
    """β and c0 from dense steps. Raises ValueError if they cannot tell the two apart."""
    reads = np.array([step.batch * step.bytes_read for step in dense], dtype=np.float64)
    seconds = np.array([step.seconds for step in dense], dtype=np.float64)
    if len(set(reads.tolist())) < 2:
        raise ValueError("the traffic model needs dense steps of at least two lengths or batches")
    terms = np.stack([np.ones_like(reads), reads], axis=1) / seconds[:, None]
    (fixed, per_byte), *_ = np.linalg.lstsq(terms, np.ones_like(seconds), rcond=None)
    if per_byte <= 0:
        raise ValueError(
            f"dense steps do not get slower with what they read (slope {per_byte:.3g} s/byte): measure longer contexts"
        )
    return Bill(
        weight_bytes=weight_bytes,
        bytes_per_second=float(1 / per_byte),
        step_seconds=float(fixed - weight_bytes * per_byte),
    )


def fit_finding(bill: Bill, others: Sequence[Step]) -> tuple[Bill, list[Step]]:
    """Add c1 for each strategy that finds, from its row of fewest bytes. Also returns the rows that fitted no term."""
    finding: dict[str, float] = {}
    fitted: list[Step] = []
    for name in dict.fromkeys(step.strategy for step in others if step.finds):
        one = min((step for step in others if step.strategy == name), key=lambda step: step.batch * step.bytes_read)
        finding[name] = one.seconds - bill.predict(one)
        fitted.append(one)
    with_finding = Bill(
        weight_bytes=bill.weight_bytes,
        bytes_per_second=bill.bytes_per_second,
        step_seconds=bill.step_seconds,
        finding_seconds=finding,
    )
    return with_finding, [step for step in others if step not in fitted]


# -- how good it is --------------------------------------------------------------------------------------------------


def r_squared(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """The share of the measured values' variance that the predictions explain; below 0, worse than their mean."""
    mean = statistics.fmean(measured)
    left = sum((one - other) ** 2 for one, other in zip(measured, predicted, strict=True))
    return 1.0 - left / sum((one - mean) ** 2 for one in measured)


def relative_errors(bill: Bill, steps: Sequence[Step]) -> list[float]:
    """|predicted − measured| ÷ measured, of each step."""
    return [abs(bill.predict(step) - step.seconds) / step.seconds for step in steps]


def leave_one_out(dense: Sequence[Step], weight_bytes: int) -> list[float]:
    """The relative error at each dense step of a fit on all others; empty where fewer than three are left to fit."""
    if len(dense) < 4:
        return []
    return [
        relative_errors(fit([*dense[:index], *dense[index + 1 :]], weight_bytes), [step])[0]
        for index, step in enumerate(dense)
    ]


def speedups(bill: Bill, dense: Sequence[Step], others: Sequence[Step]) -> list[tuple[Step, float, float]]:
    """Each other step with its speed ÷ full's at the same length and batch: as measured, as predicted."""
    by_place = {(step.length, step.batch): step for step in dense}
    return [
        (step, full.seconds / step.seconds, bill.predict(full) / bill.predict(step))
        for step in others
        if (full := by_place.get((step.length, step.batch))) is not None
    ]
