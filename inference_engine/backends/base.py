"""What the decode room needs of a device: rows in, logits and hidden states out. One protocol above all backends.

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
    """One forward: the packed rows' token ids [N] (padding included), their plan, the rows whose logits are wanted.

    tap_layers: the layers after which the hidden states of all rows are wanted, ascending.
    """

    token_ids: NDArray[np.int64]
    plan: StepPlan
    logit_rows: Sequence[int]
    tap_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """What a forward gave, on the device.

    logits: float32 [len(logit_rows), V]. taps: [N, len(tap_layers), hidden] in the model's dtype; None if none are
    wanted.
    """

    logits: Tensor
    taps: Tensor | None = None


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

    @property
    def has_address_space(self) -> bool:
        """Can arenas be larger than the memory that they take?"""

    def open(
        self, geometry: Geometry, capacity_bytes: int, *, address_bytes: int = 0, tap_layers: tuple[int, ...] = ()
    ) -> KVContext:
        """Allocate the arenas and get ready for steps; tap_layers: of those that will want hidden states.

        address_bytes: of address space for them, where there is any beyond the capacity.
        """

    def run(self, step: Step) -> Result:
        """One forward over all layers."""
