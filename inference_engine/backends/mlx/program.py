"""A model's list of operations (`models/operations.py`) over arrays of MLX, computed when they are asked for.

What each operation computes is said in `operation_kernels.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from inference_engine.backends.mlx.device import Limits
from inference_engine.backends.mlx.list_weights import ListWeights
from inference_engine.backends.mlx.operation_kernels import KERNELS, GraphStep, LayerAttention
from inference_engine.backends.mlx.step_states import StepStates
from inference_engine.backends.mlx.weights import CheckpointWeights
from inference_engine.backends.model_spec import ModelSpec
from inference_engine.backends.native.packed_weights import TensorSource
from inference_engine.kv.geometry import SHORT_ROTARY
from inference_engine.models.families import step_list
from inference_engine.models.operations import Embed, Product, Select


class MLXProgram(ListWeights):
    """The list of a model, with its weights."""

    def __init__(self, spec: ModelSpec, checkpoint: TensorSource, names: Sequence[str], dtype: mx.Dtype) -> None:
        """names: of the checkpoint's tensors, those of this model. dtype: of activations.

        Raises NoStepListError for a list that is not one of a model, ModelError for weights that do not fit it.
        """
        steps = step_list(spec.config, spec.layers, names, spec.reads)
        limits = Limits()  # before the weights: what they are made of is let go one by one
        super().__init__(steps, CheckpointWeights(checkpoint, dtype), dtype)
        self._trained = spec.trained_positions
        self._rotaries = {name: (table.frequencies, table.factor) for name, table in spec.rotaries.items()}
        self._short = self._rotaries.pop(SHORT_ROTARY, None)
        KERNELS.check(steps.operations)
        self._operations = [(one.writes, KERNELS[one](self, one, at)) for at, one in enumerate(steps.operations)]
        self._embedding = next(one.matrix for one in steps.operations if isinstance(one, Embed))
        self._before_head = next(index for index, one in enumerate(steps.operations) if isinstance(one, Select))
        self._head = next(one for one in steps.operations if isinstance(one, Product) and one.output is None)
        del self.weights
        # Computed here: an array belongs to the thread that first computes it.
        mx.eval(self._arrays)
        self._limits = limits  # set last, so that it goes last: the weights are freed within the limits

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)

    def embedding(self) -> mx.array:
        """[V, hidden] in the dtype of the activations, without a factor."""
        return self._unpacked((self._embedding,))

    def head(self) -> mx.array | None:
        """[V, hidden]; None if it has a bias."""
        return None if self._head.biases else self._unpacked(self._head.matrices)

    def run(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        attend: LayerAttention,
        states: StepStates | None = None,
        *,
        logit_queries: Sequence[int],
        tap_layers: Sequence[int] = (),
    ) -> tuple[mx.array, mx.array | None]:
        """The logits [asked, V], float32, and the hidden states [N, taps, hidden] after `tap_layers`.

        Nothing is computed yet.
        """
        _streams.begin()
        step = GraphStep(
            ids=mx.array(token_ids.astype(np.int32)),
            turns={name: self._turns(name, positions) for name in self._rotaries},
            attend=attend,
            states=states,
            logit_queries=mx.array(np.array(logit_queries, np.int32)),
            tap_layers=frozenset(tap_layers),
        )
        # Not every operation of MLX can be asked for no rows.
        for register, compute in self._operations if len(logit_queries) else self._operations[: self._before_head]:
            step.registers[register] = compute(step)
        logits = step.registers.get(None, mx.zeros((0, self.steps.vocabulary)))
        return logits, mx.stack([step.taps[layer] for layer in tap_layers], axis=1) if tap_layers else None

    def _turns(self, name: str, positions: NDArray[np.int64]) -> tuple[mx.array, mx.array]:
        """Cosines and sines [N, 1, turned / 2], as transformers has them: past the trained positions in float64."""
        angles, factor = self._rotaries[name]
        if self._short is not None:
            angles = np.where(positions[:, None] < 0, self._short[0], angles)
            positions = np.maximum(positions, ~positions)
        turns = positions.astype(np.float32)[:, None] * angles
        cos, sin = np.cos(turns), np.sin(turns)
        if (far := positions >= self._trained).any():
            exact = positions[far].astype(np.float64)[:, None] * np.broadcast_to(angles, turns.shape)[far]
            cos[far], sin[far] = np.cos(exact), np.sin(exact)
        scale = np.float32(factor)
        return tuple(mx.array(part * scale).astype(self.dtype)[:, None] for part in (cos, sin))  # type: ignore[return-value]

    def _unpacked(self, names: tuple[str, ...]) -> mx.array:
        (matrix,) = self._matrices[names]
        return matrix.rows(mx.arange(matrix.numbers.shape[-2])) if matrix.bits else matrix.numbers


class _Streams(threading.local):
    """MLX's streams of a thread end with it. Else a process whose threads ran compiled functions aborts at its end."""

    last: _End | None = None

    def begin(self) -> None:
        if self.last is None and threading.current_thread() is not threading.main_thread():
            self.last = _End()


class _End:
    def __del__(self) -> None:
        mx.clear_streams()


_streams = _Streams()
