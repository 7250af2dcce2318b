"""Drafters as they are published: a folder with config.json and safetensors, weights by the names DFlash gave them.

    config.json          block_size, sizes of the layers, and in dflash_config: target_layer_ids, mask_token_id
    model.safetensors    fc, hidden_norm, layers.N.…, norm; the embedding and the head are the target's

Only these two files are read, and no code of the folder runs. The weights must be exactly these, and every layer must
attend to the whole context and block: a drafter with random parts, or with layers trained with a narrower mask, would
run without an error and draft badly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from inference_engine.models.folder import CONFIG, read_json, weight_files
from inference_engine.models.safetensors_header import check_safetensors
from kv_cache_proposer.dflash.config import DFlashConfig
from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.errors import DrafterError

# Published drafters were trained with whole contexts; earlier positions improve a draft little.
CONTEXT_WINDOW = 2048


def load_published(
    folder: Path,
    *,
    embedding_scale: float,
    context_window: int = CONTEXT_WINDOW,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> DFlashNetwork:
    """embedding_scale: the target's, for a configuration that does not state one.

    Raises ModelError naming what is missing, unknown, of wrong shape, not finite, or not supported.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise DrafterError(f"{folder}: no {CONFIG}, so there is no published drafter here")
    config = _read_config(read_json(path), path, embedding_scale, context_window)
    tensors: dict[str, Tensor] = {}
    for name in weight_files(folder):
        check_safetensors(folder / name)
        try:
            tensors |= load_file(folder / name)
        except (SafetensorError, ValueError, KeyError) as error:
            raise DrafterError(f"{folder / name}: damaged: {error}; get it again") from error
    with torch.device("meta"):
        network = DFlashNetwork(config)
    expected = {name: tensor.shape for name, tensor in network.state_dict().items()}
    for kind, names in (("missing", set(expected) - set(tensors)), ("unknown", set(tensors) - set(expected))):
        if names:
            raise DrafterError(
                f"{folder}: {len(names)} weights are {kind}, first {min(names)}; is it a DFlash drafter?"
            )
    for name, shape in expected.items():
        found = tensors[name]
        if found.shape != shape or not found.is_floating_point():
            raise DrafterError(
                f"{folder}: {name} is {found.dtype} {list(found.shape)}, {CONFIG} makes it {list(shape)}"
            )
        if not bool(torch.isfinite(found).all()):
            raise DrafterError(f"{folder}: {name} holds NaN or infinity")
    network.load_state_dict(tensors, assign=True)
    return network.to(device=device, dtype=dtype).eval().requires_grad_(requires_grad=False)


def _check_layers(own: Mapping[str, Any], path: Path) -> None:
    """Raise DrafterError unless every layer attends to the whole context and block.

    DFlash makes a layer causal if it slides or if `is_causal` says so. Its configuration is Qwen3's, which without
    `layer_types` makes layers slide from `max_window_layers` on if `use_sliding_window` says so.
    """
    remedy = "only drafters whose layers attend to the whole context can be run; use another, or --drafter auto"
    kinds = own.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise DrafterError(f"{path}: layer_types is {kinds!r}, not a list of names")
    if others := sorted(set(kinds or ()) - {"full_attention"}):
        count = sum(kind != "full_attention" for kind in kinds or ())
        raise DrafterError(f"{path}: layer_types has {', '.join(others)} in {count} of {len(kinds or ())}; {remedy}")
    slides = bool(own.get("use_sliding_window")) and own.get("sliding_window", 4096) is not None
    first = own.get("max_window_layers", 28)
    if kinds is None and slides and first < own.get("num_hidden_layers", 0):
        raise DrafterError(f"{path}: use_sliding_window is set, so layers slide from number {first} on; {remedy}")
    if own.get("is_causal"):
        raise DrafterError(f"{path}: is_causal is {own['is_causal']!r}; {remedy}")


def _read_config(content: Mapping[str, Any], path: Path, embedding_scale: float, context_window: int) -> DFlashConfig:
    own: Mapping[str, Any] = {**content, **(content.get("dflash_config") or {})}
    rope: Mapping[str, Any] = content.get("rope_parameters") or content.get("rope_scaling") or {}
    refused = {
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
        "attention_bias": (content.get("attention_bias", False), False),
        "hidden_act": (content.get("hidden_act", "silu"), "silu"),
        # Scales and caps of the draft tokens' logits; 0 is none.
        "output_multiplier": (own.get("output_multiplier") or 1.0, 1.0),
        "final_logit_softcapping": (own.get("final_logit_softcapping") or None, None),
    }
    for name, (found, known) in refused.items():
        if found != known:
            raise DrafterError(f"{path}: {name} is {found!r}, only {known!r} can be run")
    _check_layers(own, path)
    try:
        return DFlashConfig(
            hidden=content["hidden_size"],
            layers=content["num_hidden_layers"],
            query_heads=content["num_attention_heads"],
            kv_heads=content["num_key_value_heads"],
            head_dim=content["head_dim"],
            intermediate=content["intermediate_size"],
            tap_layers=tuple(own["target_layer_ids"]),
            block_size=own["block_size"],
            mask_token_id=own["mask_token_id"],
            context_window=context_window,
            rope_theta=rope.get("rope_theta") or content["rope_theta"],
            norm_eps=content["rms_norm_eps"],
            embedding_scale=own.get("input_embedding_scale") or embedding_scale,
        )
    except (KeyError, TypeError) as error:
        raise DrafterError(f"{path}: not a DFlash drafter's: {type(error).__name__}: {error}") from error
