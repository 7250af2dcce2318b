"""The model spec that an executor serves from: kept with the verdict of an earlier start, or tried on a twin now."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from inference_engine.backends.model_spec import ModelSpec
from inference_engine.backends.verdicts import Verdicts
from inference_engine.config import ModelConfig
from inference_engine.kv.geometry import LayerTraits
from inference_engine.models import CheckedFolder

if TYPE_CHECKING:  # a later start does without
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)


def tried_spec(
    config: ModelConfig,
    checked: CheckedFolder,
    traits: tuple[LayerTraits, ...],
    *,
    executor: str,
    depends: str,
    try_list: Callable[[type[PreTrainedModel], PretrainedConfig], float],
) -> ModelSpec:
    """Kept from an earlier start of this executor, or found out and tried on a small twin now.

    depends: what else the verdict depends on. Raises as `read_model_spec` and `try_list` do.
    """
    verdicts, depends = Verdicts(checked, config.cache_path), f"{depends} {traits}"
    if (kept := verdicts.read(ModelSpec, executor, depends)) is not None:
        return kept
    from inference_engine.backends.read_model_spec import read_model_spec
    from inference_engine.backends.twin import text_generator
    from inference_engine.models import read_config

    full, kind = text_generator(read_config(checked))
    spec = read_model_spec(full, kind, traits)
    difference = try_list(kind, full)
    logger.debug("a twin's logits differ by %.3g from transformers'", difference)
    verdicts.keep(spec, executor, depends)
    return spec
