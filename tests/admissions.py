"""Admissions of configurations, each found out once a process: for tests to which only what comes of one matters."""

from __future__ import annotations

from unittest.mock import patch

from transformers import PretrainedConfig, PreTrainedModel

from inference_engine.backends import twin
from inference_engine.backends.base import Admitted
from inference_engine.backends.twin import admit_config
from inference_engine.kv.geometry import LayerTraits

_FOUND: dict[tuple[type[PretrainedConfig], str, type[PreTrainedModel] | None], Admitted] = {}


def admitted_once(config: PretrainedConfig, kind: type[PreTrainedModel] | None = None) -> Admitted:
    """As `admit_config`, which takes up to a second, for it runs a small twin with every strategy."""
    key = type(config), config.to_json_string(), kind
    if key not in _FOUND:
        _FOUND[key] = admit_config(config, kind)
    return _FOUND[key]


def admitted_untried(config: PretrainedConfig, kind: type[PreTrainedModel] | None = None) -> Admitted:
    """As `admit_config`, for tests to which only `full` matters: trying other strategies takes most of its time."""
    with patch.object(twin, "strategy_kinds", dict):
        return admit_config(config, kind)


def traits_of(config: PretrainedConfig, kind: type[PreTrainedModel] | None = None) -> tuple[LayerTraits, ...]:
    """What the layers of a model are like, which no strategy changes."""
    key = type(config), config.to_json_string(), kind
    return (_FOUND[key] if key in _FOUND else admitted_untried(config, kind)).traits
