"""Drafters as they are published: a folder with config.json and safetensors, weights by the names DFlash gave them.

    config.json          block_size, sizes of the layers, and in dflash_config: target_layer_ids, mask_token_id
    model.safetensors    fc, hidden_norm, layers.N.…, norm; the embedding and the head are the target's

Only these two files are read, and no code of the folder runs. The weights must be exactly these: a drafter with random
parts, or one that is run otherwise than it was trained, would run without an error and draft badly. What a field of the
configuration means is what the code published with the drafters makes of it (`dflash/model.py` of z-lab/dflash); a
field that asks for what is not here is refused with its value.
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
from kv_cache_proposer.dflash.drafter_config import DFlashConfig
from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.drafter_errors import DrafterError

# Published drafters were trained with whole contexts; earlier positions improve a draft little.
CONTEXT_WINDOW = 2048


def load_published(
    folder: Path,
    *,
    context_window: int = CONTEXT_WINDOW,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> DFlashNetwork:
    """Raises ModelError naming what is missing, unknown, of wrong shape, not finite, or not supported."""
    path = folder / CONFIG
    if not path.is_file():
        raise DrafterError(f"{folder}: no {CONFIG}, so there is no published drafter here")
    config = _read_config(read_json(path), path, context_window)
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


# Fields with the values that can be run, the first of them for a configuration without the field. From
# `conv_kernel_size` on they are those of DFlash 2 and of other descendants, whose weights or masks differ.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "hidden_act": ("silu",),
    "output_multiplier": (1.0, None),
    "final_logit_softcapping": (None, 0),
    "conv_kernel_size": (None,),
    "conv_group_size": (None,),
    "selector_rank": (None,),
    "selector_top_k": (None,),
    "attention_sink_bias": (False, None),
    "fc_layernorm": (False, None),
    "markov_rank": (None, 0),
    "enable_confidence_head": (False, None),
    "use_swa": (False, None),
    "sliding_window_non_causal": (False, None),
}
_KINDS = ("full_attention", "sliding_attention")
_REMEDY = "use another drafter, or --drafter auto"


def _check_supported(own: Mapping[str, Any], rope: Mapping[str, Any], path: Path) -> None:
    """Raise DrafterError for the first field that asks for what is not here."""
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise DrafterError(f"{path}: rope_type is {kind!r}, only 'default' can be run; {_REMEDY}")
    for name, known in _ONLY.items():
        if (found := own.get(name, known[0])) not in known:
            raise DrafterError(f"{path}: {name} is {found!r}, only {known[0]!r} can be run; {_REMEDY}")
    architectures = own.get("architectures") or ["DFlashDraftModel"]
    if architectures != ["DFlashDraftModel"]:
        raise DrafterError(f"{path}: architectures is {architectures!r}, only DFlashDraftModel can be run; {_REMEDY}")


def _reaches(own: Mapping[str, Any], path: Path) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """The window of each layer, 0 for none, and whether it is causal. Raises DrafterError for other kinds of layers.

    The configuration is Qwen3's: `sliding_window` counts only with `use_sliding_window`, and without `layer_types`
    layers slide from `max_window_layers` on. A layer is causal if `is_causal` says so, and where nothing does, if its
    type is sliding; `causal` is what other trainers call it.
    """
    count = own["num_hidden_layers"]
    window = own.get("sliding_window", 4096) if own.get("use_sliding_window") else None
    kinds = own.get("layer_types")
    if kinds is None:
        first = own.get("max_window_layers", 28)
        kinds = [_KINDS[window is not None and layer >= first] for layer in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise DrafterError(f"{path}: layer_types is {kinds!r}, not a list of {count} names")
    if others := sorted({str(kind) for kind in kinds} - set(_KINDS)):
        raise DrafterError(f"{path}: layer_types has {', '.join(others)}, only {', '.join(_KINDS)}; {_REMEDY}")
    stated: object = None
    for name in ("is_causal", "causal"):
        stated = own.get(name) if stated is None else stated
        if stated is not None and not isinstance(stated, bool):
            raise DrafterError(f"{path}: {name} is {stated!r}, neither true nor false")
    slides = [kind == _KINDS[1] for kind in kinds]
    windows = tuple((window or 0) if one else 0 for one in slides)
    causal = tuple(one if stated is None else bool(stated) for one in slides)
    return windows if any(windows) else (), causal if any(causal) else ()


def _read_config(content: Mapping[str, Any], path: Path, context_window: int) -> DFlashConfig:
    own: Mapping[str, Any] = {**content, **(content.get("dflash_config") or {})}
    rope: Mapping[str, Any] = content.get("rope_parameters") or content.get("rope_scaling") or {}
    _check_supported(own, rope, path)
    scale = own.get("input_embedding_scale")
    try:
        windows, causal = _reaches(own, path)
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
            # A drafter reads the rows of the target's embedding as they are, whatever the target makes of them.
            embedding_scale=1.0 if scale is None else scale,
            windows=windows,
            causal=causal,
        )
    except (KeyError, TypeError) as error:
        raise DrafterError(f"{path}: not a DFlash drafter's: {type(error).__name__}: {error}") from error
