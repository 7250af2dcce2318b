"""Admissions of configurations, each found out once a process: for tests to which only what comes of one matters."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedModel

from inference_engine.backends.base import Admitted
from inference_engine.backends.twin import admit_config

_FOUND: dict[tuple[type[PretrainedConfig], str, type[PreTrainedModel] | None], Admitted] = {}


def admitted_once(config: PretrainedConfig, kind: type[PreTrainedModel] | None = None) -> Admitted:
    """As `admit_config`, which takes up to a second, for it runs a small twin with every strategy."""
    key = type(config), config.to_json_string(), kind
    if key not in _FOUND:
        _FOUND[key] = admit_config(config, kind)
    return _FOUND[key]
