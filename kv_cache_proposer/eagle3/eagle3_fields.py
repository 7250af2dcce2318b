"""The configuration and the names of an EAGLE-3 drafter as it is published, in one of two formats.

                  of SafeAILab, SpecForge, AngelSlim         of speculators (RedHatAI)
    config.json   the layer's sizes, draft_vocab_size        the same, the layer's in transformer_layer_config
    taps          eagle_config: outputs of these layers      eagle_aux_hidden_state_layer_ids: inputs of these layers
    weights       midlayer.…, fc, norm, lm_head, d2t, t2d    layers.0.…, the same, and mostly embed_tokens

Without a list of layers, both read the inputs of the third layer, of the middle one and of the third last. A field
means what vLLM's `llama_eagle3.py` and `transformers_utils/configs/speculators/algos.py` and SGLang's `llama_eagle3.py`
and `set_eagle3_layers_to_capture` make of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kv_cache_proposer.drafter_errors import DrafterError
from kv_cache_proposer.eagle3.eagle3_network import Eagle3Config
from kv_cache_proposer.published_fields import MALFORMED, REMEDY, Only, check_fields, names_in, rope_base, section

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
# SafeAILab's own are called as any Llama is, and have a vocabulary of their own.
PLAIN_ARCHITECTURE = "LlamaForCausalLM"
ID_TENSORS = DRAFT_IDS, HAS_DRAFT_ID = "d2t", "t2d"
EMBEDDING = "embed_tokens.weight"
LONGEST = 5  # draft tokens, where the configuration says none: published measurements have 3 to 7
_ROPE_BASE = 10_000.0  # where it says none: Llama's

_ONLY: Only = {
    "architectures": tuple([name] for name in (*ARCHITECTURES, PLAIN_ARCHITECTURE)),
    "model_type": ("llama",),
    "speculators_model_type": ("eagle3",),
    "num_hidden_layers": (1,),
    "mlp_bias": (False, None),
    "bias": (False, None),
    "qkv_bias": (False, None),
    "fc_norm": (False, None),
    "logit_scale": (1.0, None),
    "tie_word_embeddings": (False,),
    "is_causal": (True, None),
    "use_sliding_window": (False, None),
    "layer_types": (None, ["full_attention"]),
    "use_aux_hidden_state": (True, None),
    "parallel_drafting": (False, None),
    "algorithm": ("eagle3",),
}
_HONOURED = (
    "transformer_layer_config speculators_config eagle_config proposal_methods hidden_size target_hidden_size "
    "num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size draft_vocab_size rope_theta "
    "rope_scaling rope_parameters rms_norm_eps norm_before_residual norm_before_fc norm_output "
    "eagle_aux_hidden_state_layer_ids"
)
_NO_EFFECT = (
    "default_proposal_method embed_requires_grad enable_sp_ulysses max_window_layers sliding_window "
    "speculators_version verifier"
)


def is_eagle3(content: Mapping[str, Any]) -> bool:
    """Is it such a drafter's, or in the second format, which others have, too?"""
    names = names_in(content)
    return (
        "speculators_model_type" in content
        or any(name in ARCHITECTURES for name in names)
        or (names == [PLAIN_ARCHITECTURE] and "draft_vocab_size" in content)
    )


def read_config(
    content: Mapping[str, Any], path: Path, *, context_window: int, target_layers: int | None, has_embedding: bool
) -> Eagle3Config:
    """target_layers: of the target; None: it is not known yet. Raises DrafterError for what cannot be run."""
    layer, made = section(content, "transformer_layer_config", path), section(content, "speculators_config", path)
    nested = section(content, "eagle_config", path)
    # In the second format these two are of the layer alone, and of a model that the layer is not in.
    kind, is_tied = layer.get("model_type", content.get("model_type")), content.get("tie_word_embeddings", False)
    own: Mapping[str, Any] = {**layer, **nested, **made, **content, "model_type": kind, "tie_word_embeddings": is_tied}
    check_fields(own, path, only=_ONLY, honoured=_HONOURED, no_effect=_NO_EFFECT)
    try:
        hidden, heads = own["hidden_size"], own["num_attention_heads"]
        methods = own.get("proposal_methods") or [{}]
        return Eagle3Config(
            hidden=hidden,
            target_hidden=own.get("target_hidden_size") or hidden,
            query_heads=heads,
            kv_heads=own.get("num_key_value_heads") or heads,
            head_dim=own.get("head_dim") or hidden // heads,
            intermediate=own["intermediate_size"],
            vocabulary=own["vocab_size"],
            draft_vocabulary=own.get("draft_vocab_size") or own["vocab_size"],
            tap_layers=_taps(content, nested, path, target_layers),
            longest=methods[0].get("speculative_tokens", LONGEST),
            context_window=context_window,
            rope_theta=rope_base(own, path, _ROPE_BASE),
            norm_eps=own["rms_norm_eps"],
            has_embedding=has_embedding,
            norms_taps=own.get("norm_before_fc") or False,
            norms_residual=own.get("norm_before_residual") or False,
            norms_output=own.get("norm_output") or False,
        )
    except MALFORMED as error:
        raise DrafterError(f"{path}: not an EAGLE-3 drafter's: {type(error).__name__}: {error}") from error


def _taps(
    content: Mapping[str, Any], nested: Mapping[str, Any], path: Path, target_layers: int | None
) -> tuple[int, ...]:
    """Layers whose outputs are read. Raises DrafterError for the embedding's output."""
    name = "eagle_aux_hidden_state_layer_ids"
    if outputs := nested.get(name):
        return tuple(outputs)
    if not (inputs := content.get(name)):
        if target_layers is None:
            return 0, 1, 2  # as many
        inputs = 2, target_layers // 2, target_layers - 3
        if sorted({0, *inputs}) != [0, *inputs]:
            raise DrafterError(f"{path}: no {name}, and a target of {target_layers} layers is too shallow for {inputs}")
    if 0 in inputs:
        raise DrafterError(f"{path}: {name} is {inputs!r}; what the first layer reads cannot be given; {REMEDY}")
    return tuple(layer - 1 for layer in inputs)


def own_names(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """By the names that the network has them under."""
    return {name.replace("midlayer.", "layers.0.", 1): found for name, found in tensors.items()}


def take_ids(tensors: dict[str, Tensor], config: Eagle3Config, folder: Path) -> Tensor:
    """Remove what says which ids `lm_head` scores, and return them [draft_vocabulary].

    Raises DrafterError for ids that are not ascending ids of the target, or that `t2d` contradicts.
    """
    distances, scored = tensors.pop(DRAFT_IDS, None), tensors.pop(HAS_DRAFT_ID, None)
    places = torch.arange(config.draft_vocabulary)
    if distances is None:
        if config.draft_vocabulary != config.vocabulary:
            raise DrafterError(f"{folder}: no {DRAFT_IDS}, and {config.draft_vocabulary} of {config.vocabulary} ids")
        return places
    if distances.shape != places.shape or distances.is_floating_point():
        raise DrafterError(f"{folder}: {DRAFT_IDS} is {distances.dtype} {list(distances.shape)}, not {len(places)} ids")
    ids = places + distances.long()
    if bool((ids.diff() <= 0).any()) or ids[0] < 0 or ids[-1] >= config.vocabulary:
        raise DrafterError(f"{folder}: {DRAFT_IDS} gives no ascending ids below {config.vocabulary}")
    if scored is not None and not torch.equal(scored.nonzero().flatten(), ids):
        raise DrafterError(f"{folder}: {HAS_DRAFT_ID} has other ids than {DRAFT_IDS}")
    return ids
