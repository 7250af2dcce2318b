"""What the readers of published drafters' configurations share. Every field is one of these:

honoured     the reader makes something of it
refused      it has another value than those that can be run, which the reader names
no effect    it is listed: on training, on the file, on what the target decides
unknown      it is named in the log
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inference_engine.models.file_keys import in_a_line
from kv_cache_proposer.drafter_errors import DrafterError

logger = logging.getLogger(__name__)

Only = Mapping[str, tuple[Any, ...]]  # values that can be run, the first for a configuration without the field

# What goes wrong in reading a configuration that is none.
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
REMEDY = "use another drafter, or --drafter auto"
# Of all formats.
_ONLY: Only = {
    "attention_bias": (False, None),
    "hidden_act": ("silu",),
    "quantization_config": (None,),
    "compression_config": (None,),
}
_NO_EFFECT = (
    "_name_or_path attention_dropout auto_map base_model_ep_plan bos_token_id decoder_start_token_id dtype "
    "eos_token_id has_no_defaults_at_init initializer_range max_position_embeddings model_type pad_token_id "
    "pretraining_tp torch_dtype transformers_version unk_token_id use_cache"
)


def check_fields(own: Mapping[str, Any], path: Path, *, only: Only, honoured: str, no_effect: str) -> None:
    """Raise DrafterError for the first field whose value cannot be run; name unknown ones in the log.

    honoured, no_effect: names, separated by blanks.
    """
    limited = {**_ONLY, **only}
    for name, known in limited.items():
        if (found := own.get(name, known[0])) not in known:
            raise DrafterError(f"{path}: {name} is {found!r}, only {known[0]!r} can be run; {REMEDY}")
    listed = {*limited, *f"{honoured} {no_effect} {_NO_EFFECT}".split()}
    if unknown := sorted(set(own) - listed):
        logger.warning("%s: fields that are not known: %s", path, in_a_line(unknown))


def names_in(content: Mapping[str, Any]) -> list[Any]:
    """Its architectures; [] if it says none."""
    names = content.get("architectures")
    return names if isinstance(names, list) else []


def section(content: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    """A part of it; empty if it is absent. Raises DrafterError for what is no part."""
    found = content.get(name)
    if not isinstance(found, dict | None):
        raise DrafterError(f"{path}: {name} is {found!r}, not an object")
    return found or {}


def rope_base(own: Mapping[str, Any], path: Path, default: float | None = None) -> float:
    """Raises DrafterError for a scaled rotation, KeyError without a base and a default."""
    rope = section(own, "rope_parameters", path) or section(own, "rope_scaling", path)
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise DrafterError(f"{path}: rope_type is {kind!r}, only 'default' can be run; {REMEDY}")
    found = rope.get("rope_theta") or own.get("rope_theta") or default
    if found is None:
        raise KeyError("rope_theta")
    return float(found)
