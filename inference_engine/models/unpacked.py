"""A model on torch from weights that transformers does not read: blocks of GGUF, groups of MLX, made to numbers.

A number takes the bytes of its dtype, however few it has in the file.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from inference_engine.errors import ModelError
from inference_engine.models.checkpoint import Checkpoint, text_name
from inference_engine.models.families.list_writer import HEAD
from inference_engine.models.folder import UNFIT, refused_as
from inference_engine.models.places import check_places, reads_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel


_EXPERTS = ".experts."


def load_unpacked(checkpoint: Checkpoint, config: PretrainedConfig, dtype: Any, attention: str) -> PreTrainedModel:
    """The model on torch, every number in `dtype`. Raises ModelError if they do not fit `config`, or are not read."""
    import torch
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    path = checkpoint.path
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{path}: {config.model_type} is no model of text alone, and is not unpacked for torch")
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with refused_as(f"{path}: {UNFIT}"):
        with torch.device("meta"):
            made = kind(copy.deepcopy(config))
        wanted = {name: tuple(part.shape) for name, part in made.state_dict().items()}
        if config.tie_word_embeddings:
            wanted.pop(HEAD, None)
        check_places(checkpoint, wanted, reads_of(config))
        checkpoint.warn_of_unpacking("torch", str(dtype).removeprefix("torch."), dtype.itemsize)
        narrow = _narrow(made)
        numbers = {}
        for name, shape in wanted.items():
            found = _parameter(checkpoint, text_name(name), shape)
            numbers[name] = found.to(dtype) if name in narrow else found
        model: PreTrainedModel = kind.from_pretrained(
            None, config=config, state_dict=numbers, dtype=dtype, attn_implementation=attention
        )
    return model


def _narrow(model: PreTrainedModel) -> set[str]:
    """The parameters that have the model's dtype. Of others transformers says it, such as biases of routers, which stay
    in float32: it must be given all their bits."""
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    return {name for name, _ in model.named_parameters() if kept.isdisjoint(name.split("."))}


def _parameter(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Tensor:
    import torch

    if name in checkpoint or _EXPERTS not in name:
        return torch.from_numpy(checkpoint.numbers(name, shape))
    experts, outputs, inputs = shape
    layer, _, kind = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    found = [
        torch.from_numpy(checkpoint.numbers(f"{layer}.{expert}.{part}.weight", (outputs // len(parts), inputs)))
        for expert in range(experts)
        for part in parts
    ]
    return torch.cat(found).reshape(shape)
