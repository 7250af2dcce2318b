"""What decoding needs of a device: a step's token ids in, sampled ids, logits and hidden states out.

One protocol above all backends. A backend loads weights, allocates the pool, runs the forward and samples, with arrays
of its own. It may substitute modules or lower the step, under one law: equal logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kernels.sampling import Draw, Sample
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.plan import StepPlan
from inference_engine.types import Mode, ModelFacts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: the packed rows' token ids [N] (padding included), their plan, the rows whose logits are computed.

    tap_layers: the layers after which the hidden states of all rows are wanted, ascending.
    draws: the tokens that are wanted, of rows among `logit_queries`.
    on_computed: called when the forward is on its way, or done, and nothing has waited for the device yet.
    """

    token_ids: NDArray[np.int64]
    plan: StepPlan
    logit_queries: Sequence[int]
    tap_layers: tuple[int, ...] = ()
    draws: Sequence[Draw] = ()
    on_computed: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Result:
    """What a step gave.

    logits: float32 [len(logit_queries), V], on the device. taps: [N, len(tap_layers), hidden] in the model's dtype, on
    the device; None if none are wanted. samples: of each draw, one for each of its rows, on the host.
    """

    logits: Tensor
    taps: Tensor | None = None
    samples: Sequence[Sequence[Sample]] = ()


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
        """Can buffers be larger than the memory that they take?"""

    def open(
        self, geometry: Geometry, capacity_bytes: int, *, address_bytes: int = 0, tap_layers: tuple[int, ...] = ()
    ) -> KVContext:
        """Allocate the buffers and get ready for steps; tap_layers: of those that will want hidden states.

        address_bytes: of address space for them, where there is any beyond the capacity.
        """

    def run(self, step: Step) -> Result:
        """One forward over all layers, and the samples that are wanted of it. One synchronisation if there are any."""

    @property
    def torch_model(self) -> PreTrainedModel | None:
        """The model, for a drafter that shares weights with it; None where it does not run on torch."""

    @property
    def records_graphs(self) -> bool:
        """Are steps of fixed shapes recorded and run again?"""
