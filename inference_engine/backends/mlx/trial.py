"""Tests a model's list of operations on MLX: on a small twin, it must give the logits that transformers gives."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import torch
from transformers import PretrainedConfig, PreTrainedModel

from inference_engine.backends.mlx.forward import MlxForward
from inference_engine.backends.mlx.program import MLXProgram
from inference_engine.backends.native.trial import LoadedTensors, check_rotation
from inference_engine.backends.read_model_spec import spec_of_seam
from inference_engine.backends.twin import Twin, TwinSizes, checked
from inference_engine.kv.geometry import LayerTraits


def try_list(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    traits: Sequence[LayerTraits],
    *,
    seed: int = 0,
    sizes: TwinSizes | None = None,
) -> float:
    """As `native.trial.try_list`, in chunks beside another session and token by token alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        twin = Twin(kind, config, traits, sizes or TwinSizes())
    checkpoint = LoadedTensors.of_model(twin.tensors)
    spec = spec_of_seam(twin.seam)
    check_rotation(twin, spec)
    program = MLXProgram(spec, checkpoint, checkpoint.names(), mx.float32)
    twin.forward = MlxForward(spec, twin.forward.facts, program, dtype=torch.float32)
    twin.geometry = twin.forward.geometry(page_tokens=4, segment_tokens=16)
    return checked(max(twin.difference_of_chunks(), twin.difference_of_chunks(tokens=1, is_alone=True)), kind)
