"""CUDA graphs of steps that only decode: recorded once for each number of rows, then run again over other numbers.

A small model's decode step is hundreds of launches of microseconds each, and preparing them on the host takes longer
than running them. A step whose rows all attend to lanes is nothing but numbers of fixed shapes (`kv/lane_tables.py`):
they are copied over those that the graph was recorded with, in one transfer, and the whole forward is one launch.

    numbers   ids [N] | positions [N] | writes | lanes

N is rounded up to one of `SIZES`; the rows that pad it write to row 0 of the arena and attend to nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inference_engine.backends.base import Result, Step
from inference_engine.errors import BackendError
from inference_engine.kernels.lane_attention import LaneAttention
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.lane_tables import LaneTables, Numbers, StepNumbers
from inference_engine.kv.pool import Pool
from inference_engine.models.seam import Seam

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_WARM_UPS = 2  # forwards before recording: libraries allocate in their first


def wants_graphs(choice: str, device: torch.device, *, has_lanes: bool) -> bool:
    """Are decode steps to be recorded? Raises BackendError if they must be (`on`) and cannot."""
    can = device.type == "cuda" and has_lanes
    if choice == "on" and not can:
        raise BackendError(
            f"graphs=on needs a GPU, kernels=triton and a model without sinks in its heads; this is {device} "
            f"{'with' if has_lanes else 'without'} the kernel. Start with graphs=auto"
        )
    return can and choice != "off"


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    numbers: Tensor  # where the next step's numbers go
    logits: Tensor
    taps: Tensor | None


class StepGraphs:
    """The graphs recorded so far, by number of rows and by the layers whose hidden states are wanted."""

    def __init__(self, seam: Seam, geometry: Geometry, pool: Pool, attention: LaneAttention) -> None:
        """Records the smallest one, so that what cannot be recorded is known at the start."""
        self._seam = seam
        self._geometry = geometry
        self._pool = pool
        self._attention = attention
        self._device = next(iter(pool.arenas.values())).keys.device
        self._recorded: dict[tuple[int, tuple[int, ...]], _Recorded] = {}
        self._memory: Any = None  # graphs share their temporary memory: one runs at a time
        try:
            self._get(SIZES[0], ())
        except RuntimeError as error:
            raise BackendError(f"a decode step cannot be recorded ({error}); start with graphs=off") from error

    def can_run(self, step: Step) -> bool:
        """Rows past the trained positions are rotated by other operations than those recorded."""
        plan = step.plan
        if not plan.is_lanes_only or plan.row_count > SIZES[-1]:
            return False
        return bool(plan.positions.max() < self._seam.trained_positions)

    def run(self, step: Step) -> Result:
        """As `Forward.run`. What it gives is overwritten by no later step."""
        rows = step.plan.row_count
        size = SIZES[bisect_left(SIZES, rows)]
        recorded = self._get(size, step.tap_layers)
        numbers = np.concatenate(
            [_padded(step.token_ids, size), _padded(step.plan.positions, size), step.plan.numbers.padded(size).all]
        )
        recorded.numbers.copy_(torch.from_numpy(numbers))
        recorded.graph.replay()
        # A copy either way: the next step overwrites what the graph gives.
        if len(step.logit_rows) == rows:
            logits = recorded.logits[:rows].clone()
        else:
            logits = recorded.logits[torch.tensor(step.logit_rows, dtype=torch.long, device=self._device)]
        return Result(logits, None if recorded.taps is None else recorded.taps[:rows].clone())

    def _get(self, size: int, tap_layers: tuple[int, ...]) -> _Recorded:
        found = self._recorded.get((size, tap_layers))
        if found is None:
            found = self._recorded[size, tap_layers] = self._record(size, tap_layers)
        return found

    @torch.inference_mode()
    def _record(self, size: int, tap_layers: tuple[int, ...]) -> _Recorded:
        idle = np.concatenate(
            [np.zeros(2 * size, dtype=np.int64), StepNumbers(self._geometry, size, has_lanes=True).all]
        )
        numbers = torch.from_numpy(idle).to(self._device)
        tables = LaneTables.over(numbers[2 * size :], self._geometry, self._pool, self._attention, rows=size)
        ids, positions = numbers[:size], numbers[size : 2 * size]

        def forward() -> tuple[Tensor, Tensor | None]:
            with self._seam.tapped(tap_layers) as states:
                batch = self._seam.batch(tables, np.zeros(1, dtype=np.int64))
                out = self._seam.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, batch=batch)
                return out.logits[0].float(), torch.stack(states, dim=1) if states else None

        new_stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
        side = new_stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                forward()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may talk to the device meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits, taps = forward()
        self._memory = graph.pool()
        return _Recorded(graph, numbers, logits, taps)


def _padded(numbers: Numbers, size: int) -> Numbers:
    return np.pad(numbers, (0, size - len(numbers)))
