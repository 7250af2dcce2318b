"""From an admitted model to a native one, or the reason why it cannot be."""

from __future__ import annotations

import logging

from inference_engine.backends.base import Admitted
from inference_engine.backends.native.forward import NativeForward, rotary_tables, seam_without_weights
from inference_engine.backends.native.program import Program
from inference_engine.backends.native.trial import try_list
from inference_engine.backends.twin import text_generator
from inference_engine.config import ModelConfig
from inference_engine.errors import NotNative
from inference_engine.models import check_model, read_config, sizes
from inference_engine.models.checkpoint import open_checkpoint
from inference_engine.models.folder import describe_ignored
from inference_engine.models.step_list import NoStepListError, step_list
from inference_engine.native import library as native_library
from inference_engine.native.library import Identity, KVType, Library
from inference_engine.types import ModelFacts

logger = logging.getLogger(__name__)

_IDENTITIES = {"exact": Identity.EXACT, "int8": Identity.QUANTISED, "auto": Identity.EXACT}
_KV_TYPES = {
    "auto": KVType.FLOAT16,
    "float32": KVType.FLOAT32,
    "float16": KVType.FLOAT16,
    "bfloat16": KVType.BFLOAT16,
}
_NAMES = {Identity.EXACT: "exact", Identity.QUANTISED: "int8"}


def open_native(config: ModelConfig, admitted: Admitted) -> NativeForward:
    """Load the model that was admitted. Raises NotNative, ModelError or BackendError."""
    library = _library(config)
    checked = check_model(config.model, cache=config.cache_path)
    full, kind = text_generator(read_config(checked))
    trained, vocabulary = sizes(full, checked.folder)
    text = full.get_text_config()
    seam = seam_without_weights(full, kind, admitted.traits)
    checkpoint = open_checkpoint(checked.stored)
    try:
        steps = step_list(text, seam.layers, checkpoint.names())
        difference = try_list(library, kind, full, admitted.traits)
    except NoStepListError as error:
        raise NotNative(str(error)) from error
    logger.debug("a twin's logits differ by %.3g from transformers'", difference)
    program = Program(
        library,
        steps,
        checkpoint,
        rotary_tables(seam),
        trained_positions=trained,
        identity=_IDENTITIES[config.numerics],
        weights=config.weights,
        kv_type=_KV_TYPES[config.kv_dtype],
        threads=config.threads,
    )
    facts = ModelFacts(
        model_id=checked.model_id,
        vocab_size=vocabulary,
        trained_positions=trained,
        device="cpu",
        dtype="float32",
        backend="native",
        numerics=_numerics(config, program),
        refused_strategies=admitted.refused,
    )
    if reported := describe_ignored(checked.ignored):
        logger.info("%s: %s", checked.model_id, reported)
    logger.debug(
        "%s runs natively: %s, %s, weights %s",
        checked.model_id,
        program.kernels.level,
        facts.numerics,
        ", ".join(f"{name} {count >> 20} MiB" for name, count in program.formats().items()),
    )
    return NativeForward(seam, facts, program)


def _library(config: ModelConfig) -> Library:
    """Raises NotNative if there is none, or if the settings ask for torch."""
    if reason := _asks_for_torch(config):
        raise NotNative(reason, level=logging.DEBUG)
    library = native_library.load()
    if library is None:
        raise NotNative(str(native_library.why_missing()), level=logging.WARNING)
    if library.levels() == ("plain",):
        raise NotNative("this processor has none of the instructions that its kernels are made for")
    return library


def _asks_for_torch(config: ModelConfig) -> str:
    """Why these settings are for torch; "" if they are not."""
    if config.device != "cpu":
        return f"it computes on the CPU, and device is {config.device}"
    if config.dtype != "float32":
        return f"its activations are float32, and dtype is {config.dtype}"
    for name, asked in (("kernels", config.kernels), ("linear", config.linear)):
        if asked != "auto":
            return f"{name}={asked} is about torch"
    if config.drafter not in ("auto", "ngram", "none"):
        return f"the trained drafter {config.drafter} shares the weights of a model on torch"
    return ""


def _numerics(config: ModelConfig, program: Program) -> str:
    """The numeric identity: products of floating-point weights are exact in any case."""
    is_quantised = any(name.startswith("int") for name in program.formats())
    products = _NAMES[_IDENTITIES[config.numerics]] if is_quantised else "exact"
    return f"{products}, {program.kv_type.name.lower()} K/V"
