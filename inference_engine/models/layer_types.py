"""What a configuration says of a text model's layers, and whether a model of it can be served with any weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PretrainedConfig

from inference_engine.errors import ModelError
from inference_engine.kv.geometry import ONE_ROTARY
from inference_engine.models.latent_attention import INDEXED, check_latent

LONGROPE, DYNAMIC = "longrope", "dynamic"
_ATTENTION_TYPES = {"full_attention", "sliding_attention", INDEXED}
_STATE_TYPES = {"linear_attention", "conv"}
_BOTH_TYPES = {"hybrid"}  # attention and a recurrent state side by side
_PLAIN_TYPES = {"mlp", "moe"}  # feed-forward blocks that count as layers
_LAYER_TYPES = _ATTENTION_TYPES | _STATE_TYPES | _BOTH_TYPES | _PLAIN_TYPES
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
# Names in configurations: widths of convolutions over tokens, and heads with what they are multiples of.
_CONVOLUTIONS = ("linear_conv_kernel_dim", "conv_L_cache", "mamba_d_conv", "conv_kernel")
_WIDEST_CONVOLUTION = 256
_EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")  # 0 is one
_SCALES = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "logits_scaling")
_DIVIDED = (
    ("linear_num_value_heads", "linear_num_key_heads"),
    ("mamba_n_heads", "mamba_n_groups"),
    ("mamba_num_heads", "n_groups"),
)


def check_config(config: PretrainedConfig) -> None:
    """Raise ModelError for a configuration that cannot be served with any weights. config: of the text model."""
    name = config.model_type
    if _read(config, "is_encoder_decoder"):
        raise ModelError(f"{name!r} is an encoder with a decoder; models that are a decoder alone can be served")
    for attribute in ("num_hidden_layers", "num_attention_heads", "vocab_size"):
        if not isinstance(_read(config, attribute), int):
            raise ModelError(
                f"{name!r} says no {attribute} in its configuration; only models whose every layer is attention, with "
                "sizes under the usual names, can be served"
            )
    for attribute in (*_EPSILONS, *_SCALES):
        number = _read(config, attribute)
        is_one = isinstance(number, int | float) and 0 <= number < math.inf
        if number is not None and not (is_one and (number or attribute in _EPSILONS)):
            raise ModelError(f"{attribute} is {number!r}, expected a positive number; get the file again")
    if _read(config, "kv_lora_rank") is not None:
        check_latent(config)
    _check_experts(config)
    types = layer_types(config)
    # Of indexers those are known that latent attention has.
    known = _LAYER_TYPES if getattr(config, "kv_lora_rank", None) is not None else _LAYER_TYPES - {INDEXED}
    if unknown := set(types) - known:
        raise ModelError(
            f"{name!r}: layers of type {', '.join(sorted(map(str, unknown)))} cannot be served yet; "
            f"{', '.join(sorted(known))} can"
        )
    if len(types) != config.num_hidden_layers:
        raise ModelError(f"{name!r}: layer_types names {len(types)} layers, the model has {config.num_hidden_layers}")
    if not any(map(has_attention, types)):
        raise ModelError(f"{name!r} has no layer with attention; models with some can be served")
    if any(map(has_state, types)):
        _check_states(config)
    for index, own in enumerate(config.per_layer_config):
        heads, kv_heads = own.num_attention_heads, getattr(own, "num_key_value_heads", None) or own.num_attention_heads
        if heads % kv_heads:
            raise ModelError(f"{name!r}, layer {index}: {heads} query heads are no multiple of {kv_heads} KV heads")
    try:
        getattr(config, "kv_sharing_modes", None)
    except ValueError as error:
        raise ModelError(
            f"{name!r}: the last {_read(config, 'num_kv_shared_layers')} layers read the entries of earlier ones, and "
            "some of them have no earlier layer of their type"
        ) from error
    # Where it is that of pictures alone, text is read as by any other model.
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise ModelError("a model with bidirectional attention cannot be served")
    parameters = getattr(config, "rope_parameters", None) or {}
    for name, rope in parameters.items() if has_table_per_type(config) else [(ONE_ROTARY, parameters)]:
        kind = (rope or {}).get("rope_type", ONE_ROTARY)
        theta = (rope or {}).get("rope_theta", 1.0)
        if not isinstance(theta, int | float) or not 0 < theta < math.inf:
            raise ModelError(f"rope_theta is {theta!r}, expected a positive number; get the file again")
        for key in ("factor", "attention_factor"):
            number = (rope or {}).get(key)
            if number is not None and not (isinstance(number, int | float) and 0 < number < math.inf):
                raise ModelError(f"the rotation's {key} is {number!r}, expected a positive number; get the file again")
        if kind in (LONGROPE, DYNAMIC) and name != ONE_ROTARY:
            raise ModelError(
                f"rotary kind {kind!r} ({name}) changes with the length of a sequence; beside another table for other "
                "layers it cannot be served yet"
            )
        if kind == LONGROPE:
            _check_longrope(config, rope)


def _check_longrope(config: PretrainedConfig, rope: Mapping[str, Any]) -> None:
    name, short = config.model_type, rope.get("original_max_position_embeddings")
    if not isinstance(short, int) or not 0 < short <= config.max_position_embeddings:
        raise ModelError(
            f"{name!r}: longrope has original_max_position_embeddings {short!r}; it is a number of positions from 1 to "
            f"max_position_embeddings, {config.max_position_embeddings}"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    for key in ("short_factor", "long_factor"):
        factors = rope.get(key)
        if (
            not isinstance(factors, Sequence)
            or len(factors) != pairs
            or not all(isinstance(factor, int | float) and 0 < factor < math.inf for factor in factors)
        ):
            says = f"{len(factors)} numbers" if isinstance(factors, Sequence) else repr(factors)
            raise ModelError(
                f"{name!r}: longrope has a {key} of {says}; it is a positive number for each of the {pairs} pairs of "
                "numbers of a head that are rotated"
            )


def _check_experts(config: PretrainedConfig) -> None:
    """Raise ModelError for a router that chooses more than there is. Twins, of few experts, would not show it."""
    experts = next((found for name in _EXPERTS if (found := _read(config, name))), None)
    chosen, groups, kept = (_read(config, name) for name in ("num_experts_per_tok", "n_group", "topk_group"))
    if not isinstance(experts, int) or not isinstance(chosen, int):
        return
    in_groups = experts
    if isinstance(groups, int) and isinstance(kept, int) and groups > 1:
        if experts % groups or not 0 < kept <= groups:
            raise ModelError(f"{config.model_type!r}: {kept} of {groups} groups (n_group) of {experts} experts")
        in_groups = kept * experts // groups
    if not 0 < chosen <= in_groups:
        raise ModelError(f"{config.model_type!r}: num_experts_per_tok is {chosen}, of {in_groups} experts")


def has_attention(kind: str) -> bool:
    """kind: of a layer, as `layer_types` has it."""
    return kind in _ATTENTION_TYPES | _BOTH_TYPES


def has_state(kind: str) -> bool:
    return kind in _STATE_TYPES | _BOTH_TYPES


def _check_states(config: PretrainedConfig) -> None:
    """Raise ModelError for sizes of state layers that no module can have."""
    name = config.model_type
    for attribute in _CONVOLUTIONS:
        width = _read(config, attribute)
        if width is not None and not (isinstance(width, int) and 0 < width <= _WIDEST_CONVOLUTION):
            raise ModelError(
                f"{name!r}: {attribute} is {width!r}; convolutions over 1 to {_WIDEST_CONVOLUTION} tokens can be served"
            )
    for many, few in _DIVIDED:
        heads, groups = _read(config, many), _read(config, few)
        if isinstance(heads, int) and isinstance(groups, int) and (groups < 1 or heads % groups):
            raise ModelError(f"{name!r}: {many} ({heads}) is no multiple of {few} ({groups})")


def _read(config: PretrainedConfig, attribute: str) -> Any:
    try:
        return getattr(config, attribute, None)
    except Exception as error:  # the library raises its own for attributes that differ by layer
        raise ModelError(
            f"{config.model_type!r} has a {attribute} of its own in each layer, or none that can be read; that cannot "
            "be served yet"
        ) from error


def layer_types(config: PretrainedConfig) -> list[str]:
    """The type of each layer; "full_attention" where the family has only one."""
    return list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)


def has_table_per_type(config: PretrainedConfig) -> bool:
    parameters = getattr(config, "rope_parameters", None) or {}
    return any(name in parameters for name in _ATTENTION_TYPES)
