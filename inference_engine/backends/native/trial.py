"""Tests a model's list of operations: on a small twin, it must give the logits that transformers gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from inference_engine.backends.model_spec import ModelSpec
from inference_engine.backends.native.forward import NativeForward
from inference_engine.backends.native.program import Program
from inference_engine.backends.read_model_spec import spec_of_seam
from inference_engine.backends.twin import TOLERANCE, Twin, TwinSizes, checked
from inference_engine.kv.geometry import ONE_ROTARY, SHORT_ROTARY, LayerTraits
from inference_engine.models.checkpoint import text_name
from inference_engine.models.families import step_list
from inference_engine.models.operations import NoStepListError
from inference_engine.native.library import Library, ProductIdentity


def try_list(
    library: Library,
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    traits: Sequence[LayerTraits],
    *,
    seed: int = 0,
    sizes: TwinSizes | None = None,
) -> float:
    """The largest difference of a logit between the twin's list and transformers, as a share of the largest logit.

    Raises NoStepListError if there is no list, or if it gives other logits.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        twin = Twin(kind, config, traits, sizes or TwinSizes())
    checkpoint = LoadedTensors.of_model(twin.tensors)
    spec = spec_of_seam(twin.seam)
    steps = step_list(spec.config, spec.layers, checkpoint.names(), spec.reads)
    check_rotation(twin, spec)
    program = Program(
        library,
        steps,
        checkpoint,
        spec.rotaries,
        trained_positions=twin.seam.trained_positions,
        identity=ProductIdentity.EXACT,
        threads=1,
    )
    try:
        twin.forward = NativeForward(spec, twin.forward.facts, program)
        twin.geometry = twin.forward.geometry(page_tokens=4, segment_tokens=16)
        difference = twin.difference_of_chunks()
    finally:
        program.close()
    return checked(difference, kind)


def check_rotation(twin: Twin, spec: ModelSpec) -> None:
    """Raise NoStepListError unless keys are moved as the model itself moves them."""
    shifts = torch.tensor([0, 1, 7, -1, -5, spec.trained_positions + 3])
    for name in spec.rotaries:
        declared = ONE_ROTARY if name == SHORT_ROTARY else name
        head_dim = next(layer.head_dim for layer in spec.layers if layer.rotary == declared)
        keys = torch.from_numpy(np.random.default_rng(0).standard_normal((2, len(shifts), head_dim), np.float32))
        for some in (shifts[shifts >= 0], shifts[shifts <= 0]):
            own, expected = (rotate(keys[:, : len(some)], some, name) for rotate in (spec.rotate, twin.seam.rotate))
            if own.shape != expected.shape or not bool((own - expected).abs().max() <= TOLERANCE):
                raise NoStepListError(f"{name} moves keys otherwise than the model's RoPE")


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Implements StoredTensor."""

    states: Tensor
    encoding: str = "F32"
    row_order: None = None
    column_order: None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.states.shape)

    @property
    def data(self) -> NDArray[np.uint8]:
        return self.as_float32().view(np.uint8).reshape(-1)

    def as_float32(self) -> NDArray[np.float32]:
        numbers: NDArray[np.float32] = np.ascontiguousarray(self.states.float().numpy())
        return numbers


class LoadedTensors:
    """Implements Checkpoint over tensors in memory, under the names that checkpoints have.

    transformers keeps the experts of a layer in one tensor, checkpoints keep each by itself.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors: dict[str, Tensor] = {}
        for name, states in tensors.items():
            head, _, last = name.rpartition(".experts.")
            if last == "gate_up_proj":
                for expert, both in enumerate(states):
                    gate, up = both.chunk(2)
                    self._tensors[f"{head}.experts.{expert}.gate_proj.weight"] = gate
                    self._tensors[f"{head}.experts.{expert}.up_proj.weight"] = up
            elif head and last in ("up_proj", "down_proj"):
                for expert, own in enumerate(states):
                    self._tensors[f"{head}.experts.{expert}.{last}.weight"] = own
            else:
                self._tensors[name] = states

    @classmethod
    def of_model(cls, tensors: Mapping[str, Tensor]) -> LoadedTensors:
        return cls({text_name(own): states for own, states in tensors.items()})

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> _Loaded:
        return _Loaded(self._tensors[name])
