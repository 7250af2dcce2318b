"""Describes a model for the native backend: asks transformers, by building the model without weights."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence

import torch
from transformers import PretrainedConfig, PreTrainedModel

from inference_engine.backends.native.described import Described, Frequencies
from inference_engine.backends.twin import text_generator
from inference_engine.errors import ModelError, NotNative
from inference_engine.kv.geometry import IMMOVABLE, UNROTATED, LayerTraits
from inference_engine.models.families import ListConfig
from inference_engine.models.seam import ATTENTION, Seam

logger = logging.getLogger(__name__)


def describe(config: PretrainedConfig, kind: type[PreTrainedModel], traits: Sequence[LayerTraits]) -> Described:
    """Raises NoStepListError, NotNative or ModelError for a model that the native backend cannot run."""
    ListConfig.of(config.get_text_config())  # a family without a list needs no model
    try:
        return describe_seam(_without_weights(config, kind, traits))
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
            return {name: tuple(parameter.shape) for name, parameter in kind(copy.deepcopy(own)).named_parameters()}
    except Exception as error:
        # Any exception of the library means that the configuration is invalid.
        logger.debug("%s cannot be built without weights", kind.__name__, exc_info=True)
        raise ModelError(f"{kind.__name__} cannot be built of its configuration ({error})") from error


def describe_seam(seam: Seam) -> Described:
    """The model that `seam` took over."""
    names = dict.fromkeys(layer.rotary for layer in seam.layers if layer.rotary not in (UNROTATED, IMMOVABLE))
    tables = {name: seam.rotary_frequencies(name) for name in names}
    return Described(
        config=ListConfig.of(seam.model.config.get_text_config()),
        layers=seam.layers,
        trained_positions=seam.trained_positions,
        rotaries={
            name: Frequencies(angles=tuple(angles.tolist()), factor=factor) for name, (angles, factor) in tables.items()
        },
        parameters={name: tuple(parameter.shape) for name, parameter in seam.model.named_parameters()},
    )


def _without_weights(config: PretrainedConfig, kind: type[PreTrainedModel], traits: Sequence[LayerTraits]) -> Seam:
    """The layers and the rotation of a model of this configuration; no memory is taken for its weights."""
    own = copy.deepcopy(config)
    own._attn_implementation = ATTENTION
    with torch.device("meta"):
        model = kind(own).eval()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name == "rotary_emb":
                setattr(parent, name, type(child)(getattr(child, "config", own.get_text_config())))
    return Seam(model, traits)
