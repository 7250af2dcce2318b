"""From an admitted model to one on MLX, or the reason why it cannot be."""

from __future__ import annotations

import logging
from typing import Any

import torch

from inference_engine.backends.base import Admitted, use_threads
from inference_engine.backends.mlx.bridge import MLX_DTYPES
from inference_engine.backends.mlx.device import describe, kind, multiplies_in_full
from inference_engine.backends.mlx.forward import MlxForward
from inference_engine.backends.mlx.program import MLXProgram
from inference_engine.backends.tried_spec import tried_spec
from inference_engine.config import ModelConfig, multiply_float32_in_full
from inference_engine.errors import NotOnMlx
from inference_engine.models import check_model, log_remarks
from inference_engine.models.folder import grouping_of
from inference_engine.models.open_checkpoint import open_checkpoint
from inference_engine.models.operations import NoStepListError
from inference_engine.models.places import check_fits, text_names
from inference_engine.types import Mode, ModelFacts

logger = logging.getLogger(__name__)


def open_mlx(config: ModelConfig, admitted: Admitted) -> MlxForward:
    """Load the model that was admitted. Raises NotOnMlx, ModelError or BackendError."""
    _check_settings(config)
    multiply_float32_in_full()
    if not multiplies_in_full():
        raise NotOnMlx(
            "it multiplies float32 in TF32: this process multiplied with MLX before MLX_ENABLE_TF32 was 0, and MLX "
            "looks at it once; set MLX_ENABLE_TF32=0 before the process starts"
        )
    use_threads(config.threads)
    checked = check_model(config.model, cache=config.cache_path)
    dtype: torch.dtype = getattr(torch, config.dtype)

    def try_list(kind: Any, full: Any) -> float:
        from inference_engine.backends.mlx import trial  # with transformers: two seconds of each start

        return trial.try_list(kind, full, admitted.traits)

    try:
        spec = tried_spec(
            config,
            checked,
            admitted.traits,
            executor="mlx",
            depends=describe(),
            try_list=try_list,
        )
        # The safetensors where there are both: MLX has no use for a GGUF file's blocks.
        checkpoint = open_checkpoint(checked.stored if checked.only_gguf else checked.folder)
        check_fits(checkpoint, spec.parameters, spec.reads)
        names = text_names(checkpoint, spec.parameters)
        program = MLXProgram(spec, checkpoint, names, MLX_DTYPES[dtype])
    except NoStepListError as error:
        raise NotOnMlx(str(error)) from error
    checkpoint.warn_of_unpacking("mlx", config.dtype, dtype.itemsize)
    bits = "" if checked.only_gguf or grouping_of(checked.folder) is None else "grouped weights, "
    facts = ModelFacts(
        model_id=checked.model_id,
        vocab_size=program.steps.vocabulary,
        trained_positions=spec.trained_positions,
        layers=len(spec.reads),
        hidden_size=program.steps.hidden,
        device="mlx",
        dtype=config.dtype,
        backend="mlx",
        numerics=f"{bits}{kind()}",
        refused_strategies=admitted.refused,
    )
    log_remarks(checked)
    logger.debug("%s runs on %s: %d MiB of weights", checked.model_id, describe(), program.weight_bytes >> 20)
    return MlxForward(spec, facts, program, dtype=dtype)


def _check_settings(config: ModelConfig) -> None:
    """Raise NotOnMlx for settings that are about other backends."""
    if config.kv_dtype not in ("auto", config.dtype):
        raise NotOnMlx(f"it keeps K and V in the dtype of its activations, and kv_dtype is {config.kv_dtype}")
    if config.mode is Mode.FIXED_SHAPE:
        raise NotOnMlx(
            f"its products and its attention add in an order that depends on the shape, and determinism is "
            f"{config.determinism}; leave it off"
        )
    for name in ("weights", "numerics", "kernels", "linear", "graphs"):
        if (asked := getattr(config, name)) not in ("auto", "off"):
            raise NotOnMlx(f"{name}={asked} is about other backends")
