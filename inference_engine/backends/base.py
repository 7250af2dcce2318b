"""The interface of a backend: token ids of a step in; sampled ids, logits and hidden states out.

A backend loads weights, allocates the pool, runs the forward and samples, with arrays of its own. It may replace
modules or compile the step, as long as the logits stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kernels.sampling import Draw, Sample
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry, LayerTraits
from inference_engine.kv.plan import StepPlan
from inference_engine.native.cores import usable_cores
from inference_engine.types import ModelFacts

if TYPE_CHECKING:
    from inference_engine.backends.native.program import Program
    from inference_engine.models.seam import Seam

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: the packed token ids [N] (padding included), their plan, and the queries whose logits are computed.

    tap_layers: the layers after which the hidden states of all tokens are returned, ascending.
    draws: the samples to draw, each from logits of `logit_queries`.
    on_computed: called when the forward is launched, or done, before anything waits for the device.
    needs_logits: False if only the samples are used; then the result may have no logits.
    """

    token_ids: NDArray[np.int64]
    plan: StepPlan
    logit_queries: Sequence[int]
    tap_layers: tuple[int, ...] = ()
    draws: Sequence[Draw] = ()
    on_computed: Callable[[], None] = lambda: None
    needs_logits: bool = True


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a step.

    logits: float32 [len(logit_queries), V], on the device, unless the step needs none. taps: [N, len(tap_layers),
    hidden] in the model's dtype, on the device; None without tap_layers. samples: for each draw, one for each of its
    logits, on the host.
    """

    logits: Tensor
    taps: Tensor | None = None
    samples: Sequence[Sequence[Sample]] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EmbeddingAndHead:
    """A model's embedding and LM head, [V, hidden] each, in the dtype of its activations.

    head: None if it is no matrix alone.
    """

    embedding: Tensor
    head: Tensor | None


class Borrower(Protocol[T_co]):
    """What uses a model beyond its steps. It is handed the model as its executor has it (`Forward.lend`)."""

    def of_modules(self, seam: Seam) -> T_co:
        """Of transformers' modules, on torch: for what shares their weights or replaces their attention."""

    def of_program(self, program: Program) -> T_co:
        """Of packed weights with the native kernels, which run other lists of operations, too."""

    def of_matrices(self, words: EmbeddingAndHead) -> T_co:
        """Of an executor that gives out nothing else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """What a model was admitted with. refused: names of strategies that cannot be served with this model, and why.

    traits: of each layer. differences: by strategy variant, the largest difference of a logit between the model's twin
    and plain attention, as a share of the largest logit.
    """

    traits: tuple[LayerTraits, ...]
    refused: tuple[tuple[str, str], ...]
    differences: tuple[tuple[str, float], ...]


class Launched(Protocol):
    """A step that the device may still be computing.

    ids: int64, on the device: the samples of its draws, one after another. Once they are drawn.
    """

    @property
    def ids(self) -> Tensor: ...

    def draw(self) -> None:
        """Start its draws, if they wait for masks: those are known now."""

    def result(self) -> Result:
        """As `Forward.run` returns it, once it is drawn. Waits for the device. Raises what the step failed with."""


class Launcher(Protocol):
    """Starts steps without waiting for them."""

    def can_launch(self, step: Step) -> bool:
        """Can the step be on its way before the tokens of the one before it have reached the host?"""

    def launch(self, step: Step, fed: Tensor | None = None) -> Launched:
        """Start a step that `can_launch` and has a draw. fed: int64 [N], on the device, in place of its token ids.

        Where a draw has masks, none is begun before `Launched.draw`.
        """


class Forward(Protocol):
    """A model on a device. Every call happens on the engine's thread, after construction."""

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def compute_dtype(self) -> torch.dtype: ...

    def geometry(self, *, page_tokens: int, segment_tokens: int) -> Geometry:
        """The model's layers, with the padding that `facts.mode` needs here. Raises BackendError if none works."""

    def free_bytes(self) -> int:
        """Memory of the device that K/V could use now."""

    @property
    def indexes_keys(self) -> bool:
        """Does `gather` choose tokens by an index of keys, where its scorer is not given? Not where that is slower."""

    @property
    def has_address_space(self) -> bool:
        """Can buffers reserve more address space than the memory they use?"""

    def open(
        self, geometry: Geometry, capacity_bytes: int, *, address_bytes: int = 0, tap_layers: tuple[int, ...] = ()
    ) -> KVContext:
        """Allocate the buffers and prepare for steps. tap_layers: those of steps that return hidden states.

        address_bytes: the address space of the buffers, if `has_address_space`.
        """

    def run(self, step: Step) -> Result:
        """One forward over all layers, and its samples. One synchronisation if there are any."""

    @property
    def launcher(self) -> Launcher | None:
        """What starts steps without waiting for them; None where a step is done when it returns."""

    def lend(self, borrower: Borrower[T]) -> T:
        """Hand the model out. Raises what `borrower` raises."""

    @property
    def drafts_with_networks(self) -> bool:
        """Does `drafter=auto` choose a trained network? Not where its draft takes as long as a step."""

    def inference_mode(self) -> AbstractContextManager[object]:
        """Steps are planned and run within it; made anew for each."""

    def failure(self) -> str:
        """Why it can run no more steps; "": it can. Asked from any thread."""

    @property
    def records_graphs(self) -> bool:
        """Are steps of fixed shapes recorded as graphs and replayed?"""


class NeverFails:
    """Of a Forward in one process."""

    def failure(self) -> str:
        return ""


def use_threads(count: int) -> None:
    """Let torch compute with `count` threads; 0 means one for each core this process may use."""
    torch.set_num_threads(count or usable_cores())
