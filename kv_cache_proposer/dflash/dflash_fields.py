"""The configuration of a DFlash drafter as it is published.

    config.json          block_size, sizes of the layers, and in dflash_config: target_layer_ids, mask_token_id
    model.safetensors    fc, hidden_norm, layers.N.…, norm; the embedding and the head are the target's

What a field means is what the code published with the drafters makes of it (`dflash/model.py` of z-lab/dflash).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inference_engine.models.folder import MAX_LAYERS
from kv_cache_proposer.dflash.drafter_config import DFlashConfig
from kv_cache_proposer.drafter_errors import DrafterError
from kv_cache_proposer.published_fields import MALFORMED, REMEDY, Only, check_fields, rope_base, section

ARCHITECTURE = "DFlashDraftModel"
# From `conv_kernel_size` on they are those of DFlash 2 and of other descendants, whose weights or masks differ.
_ONLY: Only = {
    "architectures": ([ARCHITECTURE],),
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
_HONOURED = (
    "dflash_config hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size "
    "target_layer_ids num_target_layers block_size mask_token_id rope_theta rope_scaling rope_parameters rms_norm_eps "
    "input_embedding_scale layer_types use_sliding_window sliding_window max_window_layers is_causal causal"
)
_NO_EFFECT = "tie_word_embeddings vocab_size"  # the target's embedding and head are what they are
_KINDS = ("full_attention", "sliding_attention")


def _reaches(own: Mapping[str, Any], path: Path) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """The window of each layer, 0 for none, and whether it is causal. Raises DrafterError for other kinds of layers.

    The configuration is Qwen3's: `sliding_window` counts only with `use_sliding_window`, and without `layer_types`
    layers slide from `max_window_layers` on. A layer is causal if `is_causal` says so, and where nothing does, if its
    type is sliding; `causal` is what other trainers call it.
    """
    count = own["num_hidden_layers"]
    if not isinstance(count, int) or not 0 < count <= MAX_LAYERS:
        raise DrafterError(f"{path}: num_hidden_layers is {count!r}, not a number of layers up to {MAX_LAYERS}")
    window = own.get("sliding_window", 4096) if own.get("use_sliding_window") else None
    kinds = own.get("layer_types")
    if kinds is None:
        first = own.get("max_window_layers", 28)
        kinds = [_KINDS[window is not None and layer >= first] for layer in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise DrafterError(f"{path}: layer_types is {kinds!r}, not a list of {count} names")
    if others := sorted({str(kind) for kind in kinds} - set(_KINDS)):
        raise DrafterError(f"{path}: layer_types has {', '.join(others)}, only {', '.join(_KINDS)}; {REMEDY}")
    stated: object = None
    for name in ("is_causal", "causal"):
        stated = own.get(name) if stated is None else stated
        if stated is not None and not isinstance(stated, bool):
            raise DrafterError(f"{path}: {name} is {stated!r}, neither true nor false")
    slides = [kind == _KINDS[1] for kind in kinds]
    windows = tuple((window or 0) if one else 0 for one in slides)
    causal = tuple(one if stated is None else bool(stated) for one in slides)
    return windows if any(windows) else (), causal if any(causal) else ()


def read_config(
    content: Mapping[str, Any], path: Path, *, context_window: int, target_layers: int | None
) -> DFlashConfig:
    """target_layers: of the target; None: it is not known yet. Raises DrafterError for what cannot be run."""
    own: Mapping[str, Any] = {**content, **section(content, "dflash_config", path)}
    check_fields(own, path, only=_ONLY, honoured=_HONOURED, no_effect=_NO_EFFECT)
    scale, made_for = own.get("input_embedding_scale"), own.get("num_target_layers")
    if made_for is not None and target_layers is not None and made_for != target_layers:
        raise DrafterError(f"{path}: num_target_layers is {made_for!r}, this model has {target_layers}; {REMEDY}")
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
            rope_theta=rope_base(content, path),
            norm_eps=content["rms_norm_eps"],
            # A drafter reads the rows of the target's embedding as they are, whatever the target makes of them.
            embedding_scale=1.0 if scale is None else scale,
            windows=windows,
            causal=causal,
        )
    except MALFORMED as error:
        raise DrafterError(f"{path}: not a DFlash drafter's: {type(error).__name__}: {error}") from error
