"""The families that have a list of operations, one file each; what a model's list is made of, and the list itself.

Whether a list is right is tested, not believed: a small twin of the model runs it beside transformers
(`backends/native/trial.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from inference_engine.kv.geometry import LayerGeometry
from inference_engine.models.families import (
    deepseek,
    delta_rule,
    gemma,
    llama,
    mixtures,
    short_convolution,
    state_space,
)
from inference_engine.models.families.family import Family, Scalar
from inference_engine.models.families.list_writer import LANES, ListWriter
from inference_engine.models.operations import NoStepListError, StepList

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES: Mapping[str, Family[Any]] = MappingProxyType(
    {
        kind: each
        for module in (llama, gemma, mixtures, deepseek, delta_rule, short_convolution, state_space)
        for each in module.FAMILIES
        for kind in each.model_types
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ListConfig:
    """What a list is made of, of a text model's configuration. fields: those of its family."""

    model_type: str
    fields: Mapping[str, Scalar]

    @classmethod
    def of(cls, config: Any) -> ListConfig:
        """config: transformers'. Raises NoStepListError if there is no list for models of its kind."""
        return cls(model_type=str(config.model_type), fields=check_family(config).read(config))


def check_family(config: Any) -> Family[Any]:
    """The family of a text model's configuration. Raises NoStepListError if there is no list for models of its kind."""
    if (family := FAMILIES.get(config.model_type)) is None:
        raise NoStepListError(f"no list of operations for the model type {config.model_type!r} yet")
    if getattr(config, "kv_lora_rank", None) or "head_dim" in (getattr(config, "per_layer_attributes", None) or ()):
        return family  # the list checks each layer's
    heads = getattr(config, "num_attention_heads", None)
    dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    if dim % LANES:
        raise NoStepListError(f"head size {dim} must be a multiple of {LANES}")
    return family


def step_list(
    config: PretrainedConfig | ListConfig,
    layers: Sequence[LayerGeometry],
    names: Collection[str],
    reads: Sequence[int | None] = (),
) -> StepList:
    """The list of a model. config: of its text model; names: of the tensors in its checkpoint; layers, reads: as
    Geometry has them.

    Raises NoStepListError if there is none.
    """
    own = config if isinstance(config, ListConfig) else ListConfig.of(config)
    family = FAMILIES[own.model_type]
    made = family.made(own.fields)
    writer = ListWriter(
        hidden=made.hidden_size,
        vocabulary=made.vocab_size,
        epsilon=made.rms_norm_eps,
        geometries=layers,
        reads=reads or range(len(layers)),
        names=frozenset(names),
    )
    family.write(writer, made)
    return writer.list()
