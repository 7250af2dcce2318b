"""A list of operations with its weights, while each of its operations is prepared."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import mlx.core as mx

from inference_engine.backends.mlx.weights import CheckpointWeights, Matrix
from inference_engine.backends.model_spec import state_layers
from inference_engine.errors import ModelError
from inference_engine.kernels.states import StateLayer
from inference_engine.kv.geometry import LayerGeometry
from inference_engine.models.operations import (
    Attend,
    AttendEarlier,
    Convolve,
    DeltaRule,
    NoStepListError,
    SelectiveScan,
    StepList,
)

_READS_HEADS = (Attend, AttendEarlier)


class ListWeights:
    """weights: of the checkpoint; let go when all is prepared."""

    def __init__(self, steps: StepList, weights: CheckpointWeights, dtype: mx.Dtype) -> None:
        self.steps = steps
        self.weights = weights
        self.dtype = dtype
        self.state_layers = state_layers(steps)
        self._matrices: dict[tuple[str, ...], list[Matrix]] = {}
        self._arrays: list[mx.array] = []

    def product(self, names: Sequence[str]) -> list[Matrix]:
        """The matrices, neighbours of one format as one. Each is kept once, whatever uses it."""
        if (found := self._matrices.get(tuple(names))) is not None:
            return found
        groups = groupby([self.weights.matrix(name) for name in names], key=lambda matrix: matrix.format)
        found = self.computed([Matrix.below_each_other(list(group)) for _, group in groups])
        self._matrices[tuple(names)] = found
        return found

    def computed(self, matrices: list[Matrix]) -> list[Matrix]:
        """At once, so that what they are made of is let go layer by layer."""
        arrays = [array for matrix in matrices for array in matrix.arrays]
        mx.eval(arrays)
        self._arrays += arrays
        return matrices

    def factor(self, factor: float) -> mx.array | None:
        return None if factor == 1.0 else mx.array(factor, dtype=self.dtype)

    def checked(self, name: str, vector: mx.array, width: int) -> mx.array:
        if vector.shape != (width,):
            raise ModelError(
                f"{name} has the shape {tuple(vector.shape)}, the configuration asks for {width} numbers; the weights "
                "do not fit config.json"
            )
        return self.constant(vector)

    def layer_of(self, register: str | None, index: int) -> LayerGeometry | None:
        """The layer whose attention reads the register next; None if none ever does."""
        if not any(isinstance(one, _READS_HEADS) and one.input == register for one in self.steps.operations):
            return None
        rest = self.steps.operations[index:]
        found = next((one for one in rest if isinstance(one, _READS_HEADS) and one.input == register), None)
        if found is None:
            raise NoStepListError(f"no attention reads {register}")
        return self.steps.layers[found.layer]

    def state_of(self, operation: Convolve | DeltaRule | SelectiveScan) -> StateLayer:
        return self.state_layers[operation.state]

    def constant(self, array: mx.array) -> mx.array:
        """To be computed with the weights."""
        self._arrays.append(array)
        return array

    def numbers(self, name: str, count: int) -> mx.array:
        """[count] of a tensor, float32."""
        return self.checked(name, self.weights.vector(name, dtype=mx.float32), count)
