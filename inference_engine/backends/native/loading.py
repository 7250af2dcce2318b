"""From an admitted model to a native one, or the reason why it cannot be."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from inference_engine.backends.base import Admitted
from inference_engine.backends.model_spec import ModelSpec
from inference_engine.backends.native.forward import NativeForward
from inference_engine.backends.native.packed_weights import packed_format
from inference_engine.backends.native.program import Program
from inference_engine.backends.tried_spec import tried_spec
from inference_engine.config import ModelConfig
from inference_engine.errors import ModelError, NotNative
from inference_engine.models import CheckedFolder, check_model, log_remarks
from inference_engine.models.families import step_list
from inference_engine.models.folder import layout_of
from inference_engine.models.open_checkpoint import open_checkpoint
from inference_engine.models.operations import NoStepListError
from inference_engine.models.places import TEXT, check_fits, text_names
from inference_engine.native import library as native_library
from inference_engine.native.library import KVType, Library, ProductIdentity
from inference_engine.types import ModelFacts

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

# Within each of them a session's bits depend on nothing else in a step.
_IDENTITIES = {"auto": ProductIdentity.EXACT, "int8": ProductIdentity.QUANTISED}
_KV_TYPES = {
    "auto": KVType.FLOAT16,
    "float32": KVType.FLOAT32,
    "float16": KVType.FLOAT16,
    "bfloat16": KVType.BFLOAT16,
}
_NAMES = {ProductIdentity.EXACT: "exact", ProductIdentity.QUANTISED: "int8"}


def open_native(config: ModelConfig, admitted: Admitted) -> NativeForward:
    """Load the model that was admitted. Raises NotNative, ModelError or BackendError.

    Weights that do not fit the configuration are left to torch, which refuses them: NotNative has the reason, too.
    """
    library = open_library(config)
    checked = _checked(config)
    try:
        spec = _tried(config, checked, admitted, library)
        checkpoint = open_checkpoint(checked.stored)
        check_fits(checkpoint, spec.parameters, spec.reads)
        steps = step_list(spec.config, spec.layers, text_names(checkpoint, spec.parameters), spec.reads)
        program = Program(
            library,
            steps,
            checkpoint,
            spec.rotaries,
            trained_positions=spec.trained_positions,
            identity=_IDENTITIES[config.numerics],
            weights=config.weights,
            kv_type=_KV_TYPES[config.kv_dtype],
            threads=config.threads,
        )
    except (NoStepListError, ModelError, OSError) as error:
        raise NotNative(str(error)) from error
    except MemoryError as error:
        raise NotNative(f"no memory is left for its packed weights ({error})", level=logging.WARNING) from error
    formats = program.formats()
    facts = ModelFacts(
        model_id=checked.model_id,
        vocab_size=steps.vocabulary,
        trained_positions=spec.trained_positions,
        layers=len(spec.reads),
        hidden_size=steps.hidden,
        kv_dtype=program.kv_type.name.lower(),
        device="cpu",
        dtype="float32",
        backend="native",
        numerics=_numerics(config, program),
        mode=config.mode,
        weights=tuple(form.name.lower() for form in sorted(formats, key=formats.__getitem__, reverse=True)),
        refused_strategies=admitted.refused,
    )
    checkpoint.warn_of_unpacking("native")
    log_remarks(checked)
    logger.debug(
        "%s runs natively: %s, %s, weights %s",
        checked.model_id,
        program.kernels.level,
        facts.numerics,
        ", ".join(f"{form.name.lower()} {count >> 20} MiB" for form, count in formats.items()),
    )
    return NativeForward(spec, facts, program)


def try_native(config: ModelConfig, admitted: Admitted) -> None:
    """All of `open_native` that a later start need not do again. Raises NotNative or ModelError."""
    library = open_library(config)
    try:
        _tried(config, _checked(config), admitted, library)
    except NoStepListError as error:
        raise NotNative(str(error)) from error


def _checked(config: ModelConfig) -> CheckedFolder:
    checked = check_model(config.model, cache=config.cache_path)
    if not checked.only_gguf and (layout := layout_of(checked.folder)) is not None:
        raise NotNative(f"its matrices are stored in {layout}, which torch reads")
    return checked


def _tried(config: ModelConfig, checked: CheckedFolder, admitted: Admitted, library: Library) -> ModelSpec:
    """As `tried_spec`."""

    def try_list(kind: type[PreTrainedModel], full: PretrainedConfig) -> float:
        from inference_engine.backends.native import trial

        return trial.try_list(library, kind, full, admitted.traits)

    level = library.kernels().level
    return tried_spec(config, checked, admitted.traits, executor="native", depends=level, try_list=try_list)


def check_stored(stored: Path) -> None:
    """Raise NotNative unless the kernels can hold what each matrix is stored as. Reads headers alone.

    stored: the GGUF file, or the folder of safetensors. Raises ModelError if nothing can read it.
    """
    checkpoint = open_checkpoint(stored)
    try:
        for name in checkpoint.names():
            if name.startswith(TEXT) and len((tensor := checkpoint.tensor(name)).shape) == 2:
                packed_format(name, tensor, "auto")
    except ModelError as error:
        raise NotNative(str(error)) from error


def open_library(config: ModelConfig) -> Library:
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
    if config.weights == "fp8":
        return "weights=fp8 is for CUDA; on a CPU, int8 and int4 are made"
    for name, asked in (("kernels", config.kernels), ("linear", config.linear)):
        if asked != "auto":
            return f"{name}={asked} is about torch"
    if config.graphs == "on":
        return "graphs=on is about a GPU"
    return ""


def _numerics(config: ModelConfig, program: Program) -> str:
    """The numeric identity: products of floating-point weights are exact; weights are as stored if none are named."""
    is_quantised = any(form.is_quantised for form in program.formats())
    products = _NAMES[_IDENTITIES[config.numerics]] if is_quantised else "exact"
    weights = "" if config.weights == "auto" else f", {config.weights} weights"
    return f"{products}{weights}, {program.kv_type.name.lower()} K/V"
