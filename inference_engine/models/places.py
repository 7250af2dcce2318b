"""Which tensors of a checkpoint are a model's, and whether they fit it: one answer for whatever runs the model.

A tensor that no layer reads is refused, for the file may be of another model. Known ones are not: frequencies of old
checkpoints, a tied head once more, keys and values of layers that read those of others, and what `configuration.py`
leaves out and tells.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inference_engine.errors import ModelError
from inference_engine.models.checkpoint import Checkpoint, text_name
from inference_engine.models.configuration import configuration_of
from inference_engine.models.families.list_writer import HEAD

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# How names of a text model's tensors begin.
TEXT = (
    *("model.layers.", "model.embed_tokens.", "model.norm.", "model.embedding_norm.", "lm_head."),
    *("model.final_layernorm.", "model.embeddings.", "model.norm_f."),
    *("model.embed_tokens_per_layer.", "model.per_layer_model_projection.", "model.per_layer_projection_norm."),
)
_WITHOUT_EFFECT = re.compile(r".*rotary_emb\.inv_freq")  # of old checkpoints
_EXPERTS = re.compile(r"(?P<layer>.*\.experts)\.(?P<kind>gate_up_proj|up_proj|down_proj)")


def generator_of(config: Any) -> tuple[Any, Any]:
    """The configuration and the class with which transformers loads a checkpoint: of some families with several parts
    those of text alone."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    part = config.sub_configs.get("text_config")
    return (config.get_text_config() if part is not None and kind.config_class == part else config), kind


def shapes_of(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Of all tensors that a checkpoint has: parameters, tied ones once, and the buffers that are saved."""
    from inference_engine.models.mixers import original_name

    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    tensors = {**dict(model.named_parameters()), **buffers}
    return {original_name(name): tuple(tensor.shape) for name, tensor in tensors.items()}


def reads_of(config: Any) -> list[int]:
    """As Geometry has them, of a text model's configuration that says which layers read the entries of an earlier one
    of their type; [] of others."""
    modes, kinds = getattr(config, "kv_sharing_modes", None) or (), getattr(config, "layer_types", ())
    stores = {kind: layer for layer, (mode, kind) in enumerate(zip(modes, kinds, strict=False)) if mode == "store"}
    return [stores[kinds[layer]] if mode == "reuse" else layer for layer, mode in enumerate(modes)]


def check_fits(
    checkpoint: Checkpoint,
    parameters: Mapping[str, tuple[int, ...]],
    reads: Sequence[int | None] = (),
    *,
    by_headers: bool = False,
) -> None:
    """Raise ModelError unless the checkpoint has the tensors of transformers' model of this configuration, no others.

    parameters: see `shapes_of`. reads: of the model, as Geometry has them. by_headers: no number is read. An executor
    takes what is there: a bias or a norm that the model has no place for would change it.
    """
    for name, shape in _wanted(checkpoint, parameters).items():
        if by_headers:
            checkpoint.check(name, shape)
        else:
            checkpoint.tensor(name, shape)
    check_places(checkpoint, parameters, reads)


def check_places(
    checkpoint: Checkpoint, parameters: Mapping[str, tuple[int, ...]], reads: Sequence[int | None] = ()
) -> None:
    """Raise ModelError for a tensor that the model has no place for; as `check_fits`."""
    wanted = _wanted(checkpoint, parameters)
    known = {*wanted, *_unread(reads), *({HEAD} - wanted.keys())}  # a tied head has the embedding's numbers
    # What sees, where transformers' class has it, too: its names in files are those of several versions.
    parts = {text_name(name).removeprefix("model.").split(".")[0] for name in parameters if not _is_text(name)}
    if found := unplaced(checkpoint, known, tuple(f"{root}{part}." for part in parts for root in ("", "model."))):
        raise no_place(checkpoint, found)


def unplaced(checkpoint: Checkpoint, known: Collection[str], parts: tuple[str, ...] = ()) -> list[str]:
    """The tensors that are not known, nor without effect, nor of parts that are left out, or begin like `parts`."""
    left_out = (*configuration_of(checkpoint.path).left_out, *parts)
    return [
        name
        for name in checkpoint.names()
        if name not in known and not name.startswith(left_out) and not _WITHOUT_EFFECT.fullmatch(name)
    ]


def no_place(checkpoint: Checkpoint, names: Sequence[str]) -> ModelError:
    count = f", the first of {len(names)}," if len(names) > 1 else ""
    return ModelError(
        f"{checkpoint.path}: {names[0]}{count} has no place in a model of this configuration; the weights do not fit it"
    )


def text_names(checkpoint: Checkpoint, parameters: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The tensors that are read of a checkpoint that fits: not the head, if it is the embedding once more."""
    is_tied = HEAD not in _wanted(checkpoint, parameters)
    return [name for name in checkpoint.names() if not (is_tied and name == HEAD)]


def _unread(reads: Sequence[int | None]) -> frozenset[str]:
    """What checkpoints may have of layers that read the entries of an earlier one, and no model asks for."""
    return frozenset(
        f"model.layers.{layer}.self_attn.{part}.weight"
        for layer, read in enumerate(reads)
        if read is not None and read in reads[:layer]
        for part in ("k_proj", "v_proj", "k_norm", "v_norm")
    )


def _is_text(name: str) -> bool:
    return text_name(name).startswith(TEXT)


def _wanted(checkpoint: Checkpoint, parameters: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of the text model's parameters, by the names of this checkpoint, which may have each expert, and the
    convolution of each of queries, keys and values, as a tensor of its own."""
    found: dict[str, tuple[int, ...]] = {}
    for own, shape in parameters.items():
        name = text_name(own)
        head, _, last = name.rpartition(".conv1d.weight")
        parts = [f"{head}.{one}_conv1d.weight" for one in "qkv"]
        if name in checkpoint or not _is_text(own):
            found |= {name: shape} if _is_text(own) else {}
        elif (match := _EXPERTS.fullmatch(name)) is not None:
            experts, outputs, inputs = shape
            kinds = ("gate_proj", "up_proj") if match["kind"] == "gate_up_proj" else (match["kind"],)
            for expert in range(experts):
                for kind in kinds:
                    found[f"{match['layer']}.{expert}.{kind}.weight"] = outputs // len(kinds), inputs
        elif head and not last and all(part in checkpoint for part in parts):
            found |= {part: (checkpoint.tensor(part).shape[0], *shape[1:]) for part in parts}
        else:
            found[name] = shape
    return found
