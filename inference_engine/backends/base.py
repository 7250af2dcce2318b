"""What the decode room needs of a device: rows in, logits out. One protocol above all backends.

A backend loads weights, allocates arenas and runs the forward. It may substitute modules or lower the step, under one
law: equal logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.plan import StepPlan
from inference_engine.types import Mode, ModelFacts


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: the packed rows' token ids [N] (padding included), their plan, the rows whose logits are wanted."""

    token_ids: NDArray[np.int64]
    plan: StepPlan
    logit_rows: Sequence[int]


class Forward(Protocol):
    """A model on a device. Every call happens on the engine's thread, after construction."""

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def compute_dtype(self) -> torch.dtype: ...

    def geometry(self, *, mode: Mode, page_tokens: int, segment_tokens: int) -> Geometry:
        """The model's layers with the padding `mode` needs here. Raises BackendError if it cannot be had."""

    def free_bytes(self) -> int:
        """Memory of the device that K/V could use now."""

    def open(self, geometry: Geometry, capacity_bytes: int) -> KVContext:
        """Allocate the arenas."""

    def run(self, step: Step) -> Tensor:
        """One forward over all layers. Returns float32 logits [len(logit_rows), V] on the device."""
