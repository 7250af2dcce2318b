"""Finds out a model's spec (`model_spec.py`): asks transformers, by building the model without weights."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence

import torch
from transformers import PretrainedConfig, PreTrainedModel

from inference_engine.backends.model_spec import ModelSpec, RotaryTable
from inference_engine.backends.twin import text_generator
from inference_engine.errors import ModelError, NotNative
from inference_engine.kv.geometry import IMMOVABLE, ONE_ROTARY, SHORT_ROTARY, UNROTATED, LayerTraits
from inference_engine.models.families import ListConfig
from inference_engine.models.places import shapes_of
from inference_engine.models.seam import ATTENTION, ROTARY_MODULES, Seam

logger = logging.getLogger(__name__)


def read_model_spec(config: PretrainedConfig, kind: type[PreTrainedModel], traits: Sequence[LayerTraits]) -> ModelSpec:
    """Raises NoStepListError, NotNative or ModelError for a model that the native backend cannot run."""
    ListConfig.of(config.get_text_config())  # a family without a list needs no model
    try:
        return spec_of_seam(_without_weights(config, kind, traits))
    except ModelError:
        raise
    except Exception as error:
        # Any exception of the library means that the configuration is invalid.
        logger.debug("%s cannot be built without weights", kind.__name__, exc_info=True)
        raise NotNative(f"{kind.__name__} cannot be built without weights ({error})") from error


def parameter_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters, by transformers' names. Raises ModelError."""
    own, kind = text_generator(config)
    try:
        with torch.device("meta"):
            return shapes_of(kind(copy.deepcopy(own)))
    except Exception as error:
        # Any exception of the library means that the configuration is invalid.
        logger.debug("%s cannot be built without weights", kind.__name__, exc_info=True)
        raise ModelError(f"{kind.__name__} cannot be built of its configuration ({error})") from error


def spec_of_seam(seam: Seam) -> ModelSpec:
    """The model that `seam` took over."""
    names = dict.fromkeys(layer.rotary for layer in seam.layers if layer.rotary not in (UNROTATED, IMMOVABLE))
    if seam.short_positions is not None:
        names[SHORT_ROTARY] = None
    tables = {name: seam.rotary_frequencies(name) for name in names}
    return ModelSpec(
        config=ListConfig.of(seam.model.config.get_text_config()),
        layers=seam.layers,
        reads=seam.reads,
        trained_positions=seam.trained_positions,
        rotaries={
            name: RotaryTable(
                angles=tuple(angles.tolist()),
                factor=factor,
                still=(still := seam.still_numbers(name)),
                is_adjacent=seam.can_rotate and _turns_neighbours(seam, name, still),
            )
            for name, (angles, factor) in tables.items()
        },
        parameters=shapes_of(seam.model),
        short_positions=seam.short_positions,
        is_endless=seam.is_endless,
    )


def _turns_neighbours(seam: Seam, name: str, first: int) -> bool:
    """Does a key whose only number is the first that is rotated have a part in the second, once it is moved?"""
    declared = ONE_ROTARY if name == SHORT_ROTARY else name
    key = torch.zeros(1, 1, next(layer.head_dim for layer in seam.layers if layer.rotary == declared))
    key[..., first] = 1.0
    return bool(seam.rotate(key, torch.ones(1, dtype=torch.long), name)[0, 0, first + 1])


def _without_weights(config: PretrainedConfig, kind: type[PreTrainedModel], traits: Sequence[LayerTraits]) -> Seam:
    """The layers and the rotation of a model of this configuration; no memory is taken for its weights."""
    own = copy.deepcopy(config)
    own._attn_implementation = ATTENTION
    with torch.device("meta"):
        model = kind(own).eval()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in ROTARY_MODULES:
                setattr(parent, name, type(child)(getattr(child, "config", own.get_text_config())))
    return Seam(model, traits)
