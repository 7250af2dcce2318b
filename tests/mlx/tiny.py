"""TinyModel on MLX."""

from __future__ import annotations

from functools import lru_cache

import torch

from inference_engine.backends.mlx.bridge import MLX_DTYPES
from inference_engine.backends.mlx.forward import MlxForward
from inference_engine.backends.mlx.program import MLXProgram
from inference_engine.backends.native.trial import LoadedTensors
from inference_engine.backends.read_model_spec import spec_of_seam
from inference_engine.config import multiply_float32_in_full
from inference_engine.models.seam import ATTENTION, Seam
from inference_engine.types import ModelFacts
from tests.tiny import TRAINED_POSITIONS, VOCABULARY, tiny_model

multiply_float32_in_full()  # laws on MLX do not call `open_mlx`


@lru_cache(maxsize=8)
def tiny_mlx(
    *,
    seed: int = 0,
    windowed: bool = True,
    dtype: torch.dtype = torch.float32,
    hybrid: str = "",
) -> MlxForward:
    model = tiny_model(seed=seed, windowed=windowed, hybrid=hybrid, attention=ATTENTION)
    checkpoint = LoadedTensors.of_model(model.state_dict())
    spec = spec_of_seam(Seam(model))
    program = MLXProgram(spec, checkpoint, checkpoint.names(), MLX_DTYPES[dtype])
    facts = ModelFacts(
        model_id="tiny",
        vocab_size=VOCABULARY,
        trained_positions=TRAINED_POSITIONS,
        device="mlx",
        dtype=str(dtype).removeprefix("torch."),
        backend="mlx",
        numerics="tiny",
    )
    return MlxForward(spec, facts, program, dtype=dtype)
