"""Decode steps as CUDA graphs: recorded for each number of rows when the engine starts, then run over other numbers.

A small model's decode step is hundreds of launches of microseconds each, and preparing them on the host takes longer
than running them. A step whose rows all attend to lanes is nothing but numbers of fixed shapes (`kv/lane_tables.py`),
and can be recorded.

    numbers   ids [N] | positions [N] | writes | lanes

N is rounded up to one of `SIZES`; the rows that pad it write to row 0 of the arena and attend to nothing.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import torch
from torch import Tensor

from inference_engine.backends.base import Result, Step
from inference_engine.backends.recording import GraphMemory, Recording, padded
from inference_engine.errors import BackendError
from inference_engine.kernels.lane_attention import LaneAttention
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.lane_tables import LaneTables, StepNumbers
from inference_engine.kv.pool import Pool
from inference_engine.models.seam import Seam

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def wants_graphs(choice: str, device: torch.device, *, has_lanes: bool) -> bool:
    """Are decode steps to be recorded? Raises BackendError if they must be (`on`) and cannot."""
    can = device.type == "cuda" and has_lanes
    if choice == "on" and not can:
        raise BackendError(
            f"graphs=on needs a GPU, kernels=triton and a model without sinks in its heads; this is {device} "
            f"{'with' if has_lanes else 'without'} the kernel. Start with graphs=auto"
        )
    return can and choice != "off"


class StepGraphs:
    """Recorded steps over one pool, by number of rows and by the layers after which hidden states are wanted.

    The pool may go before they do; they must not be run after it.
    """

    def __init__(
        self,
        seam: Seam,
        geometry: Geometry,
        pool: Pool,
        attention: LaneAttention,
        *,
        tap_layers: tuple[int, ...] = (),
        memory: GraphMemory,
    ) -> None:
        """Records all of them, so that none has to wait later. tap_layers: of the steps that want hidden states.

        Raises BackendError for a model that cannot be recorded.
        """
        self._seam = seam
        self._device = next(iter(pool.arenas.values())).keys.device

        def record(size: int, taps: tuple[int, ...]) -> Recording[tuple[Tensor, Tensor | None]]:
            def compute(numbers: Tensor) -> tuple[Tensor, Tensor | None]:
                ids, positions, rest = numbers[:size], numbers[size : 2 * size], numbers[2 * size :]
                tables = LaneTables.over(rest, geometry, pool, attention, rows=size)
                return _forward(seam, ids, positions, tables, taps)

            nothing = StepNumbers(geometry, size, has_lanes=True).all
            idle = np.concatenate([np.zeros(2 * size, dtype=np.int64), nothing])
            return Recording(idle, self._device, compute, memory)

        wanted = {(), tap_layers}
        try:
            # The largest first: the others find room in its temporary memory.
            self._recorded = {(size, taps): record(size, taps) for size in reversed(SIZES) for taps in wanted}
        except RuntimeError as error:
            raise BackendError(f"decode steps cannot be recorded ({error}); start with graphs=off") from error

    def can_run(self, step: Step) -> bool:
        """Rows past the trained positions are rotated by other operations than those recorded."""
        plan = step.plan
        if not plan.is_lanes_only or plan.row_count > SIZES[-1] or (SIZES[0], step.tap_layers) not in self._recorded:
            return False
        return bool(plan.positions.max() < self._seam.trained_positions)

    def run(self, step: Step) -> Result:
        """As `Forward.run`."""
        plan, rows = step.plan, step.plan.row_count
        size = SIZES[bisect_left(SIZES, rows)]
        parts = (padded(step.token_ids, size), padded(plan.positions, size), plan.numbers.padded(size).all)
        logits, taps = self._recorded[size, step.tap_layers].run(np.concatenate(parts))
        # Copies: the next step overwrites what the graph gives.
        if len(step.logit_rows) == rows:
            logits = logits[:rows].clone()
        else:
            logits = logits[torch.tensor(step.logit_rows, dtype=torch.long, device=self._device)]
        return Result(logits, None if taps is None else taps[:rows].clone())


def _forward(
    seam: Seam, ids: Tensor, positions: Tensor, tables: LaneTables, tap_layers: tuple[int, ...]
) -> tuple[Tensor, Tensor | None]:
    """Logits [N, V] float32 of every row, and hidden states [N, layers, hidden] if any are wanted."""
    with seam.tapped(tap_layers) as states:
        batch = seam.batch(tables, np.zeros(1, dtype=np.int64))
        out = seam.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, batch=batch)
        return out.logits[0].float(), torch.stack(states, dim=1) if states else None
