"""Builds a server's parts from its settings: the model on its device, latent codecs, the drafter, the engine.

A trained codec or drafter belongs to a model if its manifest has the digest of the model's weights; nothing else about
a model is trusted. Drafters:

    trained  long copies first, else the model's trained drafter, from the cache or from the package
    ngram    prompt lookup
    auto     trained on torch, if the model has a trained drafter; else ngram
    none     no drafting
    FOLDER   the trained or published drafter there, alone; `org/name` of the hub likewise, once it is fetched

On the native backend a plain step costs less than a network's draft and the tokens it makes a step longer by, so `auto`
does not take memory for a network there (ADR 0024).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kv_cache_proposer
from inference_engine.config import EngineConfig, ModelConfig, hub_cache, in_full
from inference_engine.errors import BackendError, ConfigError, ModelError, NotNative, NotOnMlx
from inference_engine.models import FoundModel, check_model, hub_model, weights_digest
from inference_engine.models.hub import snapshot
from inference_engine.models.tokenizer_ids import read_token_bytes
from inference_engine.types import Durability, ReadTokenBytes
from kv_cache_proposer.drafter_errors import DrafterError
from kv_cache_proposer.hybrid import LONG_COPY, HybridDrafter
from kv_cache_proposer.ngram import NgramDrafter

if TYPE_CHECKING:
    from inference_engine.backends.base import Admitted, Forward
    from inference_engine.decode.draft import Drafter
    from inference_engine.engine import Engine
    from inference_engine.kernels.components import ModelComponents
    from inference_engine.kv.context import TapCodec, TokenCodec
    from inference_engine.tracing import Tracing
    from kv_cache_proposer.dflash.network import DFlashNetwork
    from kv_cache_proposer.f_theta.lazy_codec import LateCodec, LateTapCodec
    from kv_cache_proposer.published_drafters import DrafterNetwork

logger = logging.getLogger(__name__)

# Drafters that come with the package, one folder each.
SHIPPED = Path(kv_cache_proposer.__file__).parent / "checkpoints"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DLMRestoredVerifier:
    """What a server runs: a target that verifies, a drafter of blocks (a diffusion language model, or another), and
    what restores evicted entries, by the source that a session names.

        latent      latent, a code of the entries themselves
        drafter     f_theta, from a code of what the drafter reads; why_no_f_theta: and what to do about it
        recompute   forward, from the token ids

    With its settings it becomes an engine.
    """

    forward: Forward
    latent: TokenCodec | None
    drafter: Drafter | None
    # Digests of the weights and of the latent codec ("": there is none): what kept sessions belong to.
    digests: Callable[[], tuple[str, str]]
    f_theta: TapCodec | None = None
    why_no_f_theta: str = ""
    components: ModelComponents | None = None
    read_tokens: ReadTokenBytes | None = None  # their bytes, for constraints
    tensor_parallel: int = 1  # ranks that have a part of the model each
    end_ids: tuple[int, ...] = ()  # end a turn by the model's files: `server/http/turn_ends.py` finds them

    def engine(self, config: EngineConfig, *, tracing: Tracing | None = None) -> Engine:
        """Raises ConfigError or BackendError for what is not available, or a `journal` that cannot be used."""
        from inference_engine.engine import Engine
        from inference_engine.metrics import EngineMetrics
        from inference_engine.session.journals import open_journal

        if self.tensor_parallel > 1:
            from inference_engine.backends.ranks.loading import check_engine_config

            check_engine_config(config, self.tensor_parallel)
        # They are read from the files where sessions outlive the process, and else not needed.
        weights, codec = ("", "") if config.kept is Durability.NONE else self.digests()
        metrics = EngineMetrics()
        journal = open_journal(config, weights=weights, metrics=metrics, facts=self._deciding(config))
        try:
            return Engine(
                self.forward,
                config,
                journal=journal,
                metrics=metrics,
                latent=self.latent,
                codec_digest=codec,
                f_theta=self.f_theta,
                why_no_f_theta=self.why_no_f_theta,
                components=self.components,
                drafter=self.drafter,
                end_ids=self.end_ids,
                read_tokens=self.read_tokens,
                tracing=tracing,
            )
        except BaseException:
            journal.stop()
            raise

    def _deciding(self, config: EngineConfig) -> dict[str, str]:
        """What decides tokens, beside the weights and what is recorded of each session."""
        facts = self.forward.facts
        return {
            "device": self.forward.device.type,
            "backend": facts.backend,
            "dtype": facts.dtype,
            "numerics": facts.numerics,
            "determinism": facts.mode.value,
            "kv_dtype": facts.kv_dtype or facts.dtype,
            "segment_tokens": str(config.segment_tokens),
        }


def open_parts(model: ModelConfig, admitted: Admitted | None = None) -> DLMRestoredVerifier:
    """Everything that `model` asks for. Raises ConfigError, ModelError or BackendError, after the cheapest check first.

    admitted: the result of `admit` for this configuration, if available.
    """
    _check_is_there("latent", model.latent, ("auto", "none"), in_full)
    _check_is_there("drafter", model.drafter, ("auto", "none", "ngram", "trained"), _folder_named)
    latent = find_latent(model)
    components = find_components(model)
    forward = open_backend(model, admitted)
    drafter = find_drafter(model, forward)
    f_theta, why_no_f_theta = find_f_theta(model, forward, drafter)
    return DLMRestoredVerifier(
        forward=forward,
        latent=latent,
        drafter=drafter,
        f_theta=f_theta,
        why_no_f_theta=why_no_f_theta,
        digests=lambda: _digests(model),
        components=components,
        read_tokens=partial(read_token_bytes, model.model, model.cache_path),
        tensor_parallel=model.tensor_parallel,
    )


def _check_is_there(setting: str, given: str, names: tuple[str, ...], folder: Callable[[str], Path]) -> None:
    """What is no name is a folder: a name that was mistyped is none that is there."""
    if given not in names and not folder(given).exists():
        raise ConfigError(f"{setting} must be {', '.join(names)} or a folder that is there, got {given!r}")


def _folder_named(given: str) -> Path:
    """A folder, or that of `org/name` in the hub's cache. Raises ModelError for such a name that was not fetched."""
    folder = in_full(given)
    named = None if folder.exists() else hub_model(given)
    return folder if named is None else snapshot(named, hub_cache())


def _digests(model: ModelConfig) -> tuple[str, str]:
    weights = weights_digest(check_model(model.model, cache=model.cache_path))
    return weights, str(latent_identity(model).get("tensors_sha256", ""))


# -- the model --------------------------------------------------------------------------------------------------------


def admit(config: ModelConfig) -> Admitted:
    """Check by a model's configuration whether it can be served, and how. No weights are read or hashed.

    What an earlier start of the same configuration and code found is believed (`backends/verdicts.py`).

    Raises ModelError with the reason why it cannot.
    """
    from inference_engine.backends.base import Admitted, use_threads
    from inference_engine.backends.verdicts import Verdicts
    from inference_engine.models import find_model, read_config, sizes

    found = find_model(config.model, cache=config.cache_path)
    use_threads(config.threads)
    verdicts = Verdicts(found, config.cache_path)
    if (kept := verdicts.read(Admitted, "admitted")) is not None:
        return kept
    from inference_engine.backends.twin import admit_config
    from kv_cache_proposer.published_drafters import is_published_drafter

    if not found.only_gguf and is_published_drafter(found.folder):
        raise ModelError(f"{config.model} is a drafter, and no model: name its target, with --drafter {config.model}")
    read = read_config(found)
    admitted = admit_config(read)
    sizes(read, found.folder)
    verdicts.keep(admitted, "admitted")
    return admitted


def try_out(config: ModelConfig) -> None:
    """Find out now what the first start of this configuration would, and keep it for all starts.

    It takes transformers and 180 MB of memory, which a server then has no need of. Raises ModelError as `admit` does.
    """
    admitted = admit(config)
    if config.device == "cpu" and config.backend != "torch":
        from inference_engine.backends.native.loading import try_native

        with suppress(NotNative):
            try_native(config, admitted)


def forget_admission(config: ModelConfig) -> None:
    """What was kept about the model by `admit` and by its loading is tried again next time. Raises ModelError."""
    from inference_engine.backends.verdicts import Verdicts
    from inference_engine.models import find_model

    Verdicts(find_model(config.model, cache=config.cache_path), config.cache_path).forget()


def open_backend(config: ModelConfig, admitted: Admitted | None = None) -> Forward:
    """Load the model. Raises ModelError or BackendError.

    admitted: what `admit` gave for this configuration, if it was asked already. The architecture is admitted by test
    (`backends/twin.py`) before weights are read. With `device=mlx` MLX runs the model, or it is refused. Elsewhere
    `backend=auto` is native where that runs the model, else torch.
    """
    if config.device == "mlx":
        return _open_on_mlx(config, admitted)
    admitted = admitted or admit(config)
    if config.backend == "torch" or config.tensor_parallel > 1:
        return BACKENDS["torch"](config, admitted)
    try:
        return BACKENDS["native"](config, admitted)
    except NotNative as reason:
        if config.backend == "native":
            raise BackendError(f"backend=native does not run {config.model}: {reason}") from reason
        logger.log(reason.level, "torch runs the model, not the native backend: %s", reason)
    return BACKENDS["torch"](config, admitted)


def executor(config: ModelConfig) -> tuple[str, str]:
    """What would run the model with these settings, and why: by its configuration, and by the names, shapes and types
    of its tensors.

    Nothing is loaded or tried; that may still find a reason for torch.

    "" and the reason if nothing would. Raises ModelError for a model that is not there or cannot be read.
    """
    from inference_engine.models import find_model, read_config
    from inference_engine.models.families import check_family
    from inference_engine.models.folder import grouping_of, layout_of
    from inference_engine.models.operations import NoStepListError

    found = find_model(config.model, cache=config.cache_path)
    listed, reason = "its family has a list of operations", ""
    try:
        check_family(read_config(found).get_text_config())
    except NoStepListError as error:
        reason = str(error)
    if config.device == "mlx":
        from inference_engine.backends.mlx import why_missing

        if reason := why_missing() or reason:
            return "", f"device is mlx, and {reason}; --device cpu may run it"
        if reason := _unfit(found, found.stored if found.only_gguf else found.folder):
            return "", reason
        return "mlx", f"device is mlx, and {listed}"
    if not found.only_gguf and grouping_of(found.folder) is not None:
        return "", "its matrices are quantised in MLX's layout, which --device mlx alone runs"
    if not found.only_gguf and (layout := layout_of(found.folder)) is not None:
        how = (
            "is read as it is where its family has a list" if config.device != "cpu" else "is unpacked at each product"
        )
        reason = f"its matrices are stored in {layout}, which {how}"
    elif config.tensor_parallel > 1:
        reason = f"tensor_parallel is {config.tensor_parallel}"
    elif config.backend != "torch":
        from inference_engine.backends.native.loading import check_stored, open_library

        try:
            open_library(config)
            check_stored(found.stored)
        except NotNative as error:
            reason = reason or str(error)
    else:
        reason = "backend is torch"
    if not reason and not (reason := _unfit(found, found.stored)):
        return "native", listed
    if config.backend == "native":
        return "", f"backend is native, which does not run it: {reason}"
    return ("", unfit) if (unfit := _unfit(found, None)) else ("torch", reason)


def _unfit(found: FoundModel, stored: Path | None) -> str:
    """Why the tensors are not those of the configuration; "" if they are. Reads headers alone.

    stored: what an executor of lists of operations reads; None: what torch reads is asked for.
    """
    from inference_engine.backends.read_model_spec import parameter_shapes
    from inference_engine.models import read_config, sizes
    from inference_engine.models.folder import layout_of
    from inference_engine.models.layer_types import check_config
    from inference_engine.models.loader import check_tensors
    from inference_engine.models.open_checkpoint import open_checkpoint
    from inference_engine.models.places import check_fits, reads_of

    try:
        config = read_config(found)
        check_config(config.get_text_config())
        sizes(config, found.folder)
        if stored is not None or found.only_gguf:
            checkpoint, shapes = open_checkpoint(stored or found.stored), parameter_shapes(config)
            check_fits(checkpoint, shapes, reads_of(config.get_text_config()), by_headers=True)
        elif (layout := layout_of(found.folder)) is not None:
            from inference_engine.models.quantised_model import check_quantised

            check_quantised(found.folder, layout, config)
        else:
            check_tensors(found.folder, config)
    except ModelError as error:
        return str(error)
    return ""


def _open_on_mlx(config: ModelConfig, admitted: Admitted | None) -> Forward:
    from inference_engine.backends.mlx import why_missing
    from inference_engine.models import find_model
    from inference_engine.models.folder import layout_of

    try:
        if config.tensor_parallel > 1:
            raise NotOnMlx(f"tensor_parallel={config.tensor_parallel} is for GPUs of CUDA")
        if config.backend != "auto":
            raise NotOnMlx(f"backend={config.backend} is about other devices")
        if reason := why_missing():
            raise NotOnMlx(reason)
        found = find_model(config.model, cache=config.cache_path)
        if not found.only_gguf and (layout := layout_of(found.folder)) is not None:
            raise NotOnMlx(f"its matrices are stored in {layout}")
        return BACKENDS["mlx"](config, admitted or admit(config))
    except NotOnMlx as reason:
        raise BackendError(f"device=mlx does not run {config.model}: {reason}; or start with --device cpu") from reason


def _open_mlx(config: ModelConfig, admitted: Admitted) -> Forward:
    from inference_engine.backends.mlx.loading import open_mlx

    return open_mlx(config, admitted)


def _open_torch(config: ModelConfig, admitted: Admitted) -> Forward:
    if config.tensor_parallel > 1:
        from inference_engine.backends.ranks.loading import open_ranks

        return open_ranks(config, admitted)
    from inference_engine.backends.torch_loading import open_torch

    return open_torch(config, admitted)


def _open_native(config: ModelConfig, admitted: Admitted) -> Forward:
    from inference_engine.backends.native.loading import open_native

    return open_native(config, admitted)


# Functions that load a model, by name of the backend.
BACKENDS: Mapping[str, Callable[[ModelConfig, Admitted], Forward]] = {
    "torch": _open_torch,
    "native": _open_native,
    "mlx": _open_mlx,
}


# -- the latent -------------------------------------------------------------------------------------------------------


def latent_folder(model_id: str, cache: Path) -> Path:
    return cache / "latents" / model_id


def find_latent(model: ModelConfig) -> LateCodec | None:
    """The codec that `model.latent` selects, for the model's device. Its tensors are read when they are used first.

    `auto`: the one in the cache, if there is one. `none`: none. Else a folder. Raises ModelError for one that is not
    there, cut short, or made for other weights.
    """
    folder = _latent_of(model)
    if folder is None:
        return None

    from kv_cache_proposer.f_theta.lazy_codec import open_codec

    checked = check_model(model.model, cache=model.cache_path)
    return open_codec(folder, target_digest=weights_digest(checked), device=model.torch_device, kernels=model.kernels)


def latent_identity(model: ModelConfig) -> Mapping[str, Any]:
    """Identifies the codec of `find_latent`: its tensors' digest, its bytes, its recipe.

    Empty without a codec. Raises ModelError for a manifest that cannot be read.
    """
    folder = _latent_of(model)
    if folder is None:
        return {}

    from inference_engine.models.folder import read_json
    from kv_cache_proposer.f_theta.codec_files import MANIFEST

    stored = read_json(folder / MANIFEST)
    short = {name: value for name, value in stored["recipe"].items() if isinstance(value, bool | int | float | str)}
    reported = ("tensors_sha256", "bytes_per_token", "calibration_tokens", "seeds")
    return {**{name: stored[name] for name in reported}, "recipe": short}


def _latent_of(model: ModelConfig) -> Path | None:
    """The folder of the codec that `model.latent` selects; None for none."""
    if model.latent == "none":
        return None
    if model.latent != "auto":
        return in_full(model.latent)
    folder = latent_folder(check_model(model.model, cache=model.cache_path).model_id, model.cache_path)
    return folder if folder.is_dir() else None


# -- f_theta ----------------------------------------------------------------------------------------------------------


def f_theta_folder(model_id: str, cache: Path) -> Path:
    return cache / "f_theta" / model_id


def find_f_theta(model: ModelConfig, forward: Forward, drafter: Drafter | None) -> tuple[LateTapCodec | None, str]:
    """The f_theta of the server's drafter in the cache, or None and why there is none, with the way out.

    Its tensors are read when they are used first. Raises ModelError for one that is cut short, or made for other
    weights.
    """
    if model.device != "cpu" or model.tensor_parallel > 1:
        where = "several ranks" if model.tensor_parallel > 1 else model.device
        return None, f"source drafter is served on a CPU alone, and this server runs on {where}"
    if drafter is None or not drafter.tap_layers:
        return None, (
            "source drafter needs a drafter that reads the model's hidden states, and this server has "
            f"{'none' if drafter is None else drafter.name}; start it with --drafter trained"
        )
    checked = check_model(model.model, cache=model.cache_path)
    folder = f_theta_folder(checked.model_id, model.cache_path)
    if not folder.is_dir():
        return None, "this server has no f_theta; make one with `kakeya train f-theta` and start it again"

    from kv_cache_proposer.f_theta.lazy_codec import open_tap_codec

    codec = open_tap_codec(folder, target_digest=weights_digest(checked), device=forward.device, kernels=model.kernels)
    if (own := drafter_digest(model, forward)) != codec.drafter_digest:
        return None, (
            f"f_theta in {folder} is of the drafter with digest {codec.drafter_digest}, this server's has {own}; make "
            "one for it with `kakeya train f-theta` and start the server again"
        )
    return codec, ""


def find_f_theta_alone(model: ModelConfig, forward: Forward) -> tuple[LateTapCodec | None, str]:
    """As `find_f_theta`, where no drafter runs: of the one that the settings name, or the model's trained one."""
    checked = check_model(model.model, cache=model.cache_path)
    if not f_theta_folder(checked.model_id, model.cache_path).is_dir():
        return None, ""
    named = replace(model, drafter="trained") if model.drafter == "auto" else model
    return find_f_theta(named, forward, find_drafter(named, forward))


# -- components of keys ------------------------------------------------------------------------------------------------


def components_folder(model_id: str, cache: Path) -> Path:
    return cache / "components" / model_id


def find_components(model: ModelConfig) -> ModelComponents | None:
    """The components of the model's keys that are in the cache; None if there are none.

    Raises ModelError for ones that are damaged, or made for other weights.
    """
    checked = check_model(model.model, cache=model.cache_path)
    folder = components_folder(checked.model_id, model.cache_path)
    if not folder.is_dir():
        return None

    from kv_cache_proposer.components import load_components

    components, _ = load_components(folder, target_digest=weights_digest(checked))
    return components


def components_identity(model: ModelConfig) -> Mapping[str, Any]:
    """Identifies the components of `find_components`: their tensors' digest, their recipe. Empty without any."""
    folder = components_folder(check_model(model.model, cache=model.cache_path).model_id, model.cache_path)
    if not folder.is_dir():
        return {}

    from inference_engine.models.folder import read_json
    from kv_cache_proposer.components import MANIFEST

    stored = read_json(folder / MANIFEST)
    return {name: stored[name] for name in ("tensors_sha256", "calibration_tokens", "recipe", "seeds")}


# -- the drafter ------------------------------------------------------------------------------------------------------


def drafter_folder(model_id: str, cache: Path) -> Path:
    return cache / "drafters" / model_id


def find_drafter(model: ModelConfig, forward: Forward) -> Drafter | None:
    """The drafter that `model.drafter` selects, run by what runs the model: `forward`.

    Raises ModelError for one that is not there, damaged, or made for other weights.
    """
    if model.drafter == "none":
        return None
    if model.drafter == "ngram":
        return NgramDrafter()
    if model.drafter == "auto" and not forward.drafts_with_networks:
        return NgramDrafter()
    is_named = model.drafter in ("auto", "trained")
    if not is_named:
        network = _in_folder(_folder_named(model.drafter), model, forward)
    elif (folder := _trained_folder(model, forward)) is not None:
        network = _load_trained(folder, _digest_of_target(folder), forward)
    elif model.drafter == "auto":
        return NgramDrafter()
    else:
        raise DrafterError(f"{model.model} has no trained drafter; make one with `kakeya train drafter`, or use ngram")
    try:
        drafter = _drafter(network, model, forward)
    except NotNative as reason:
        raise DrafterError(f"drafter={model.drafter}: {reason}; start with --backend torch, or use ngram") from reason
    return HybridDrafter(drafter) if is_named else drafter


def drafter_identity(model: ModelConfig, forward: Forward) -> Mapping[str, Any]:
    """Identifies the drafter of `find_drafter`: a trained or published one's digest, how copies are looked up.

    Empty without a drafter. Raises ModelError as `find_drafter` does.
    """
    if model.drafter == "none":
        return {}
    is_named = model.drafter in ("auto", "trained")
    folder = None if is_named or model.drafter == "ngram" else _folder_named(model.drafter)
    if model.drafter == "trained" or (is_named and forward.drafts_with_networks):
        folder = _trained_folder(model, forward)
    if folder is None:
        return asdict(NgramDrafter())

    from inference_engine.models.checksums import sha256_of
    from inference_engine.models.folder import read_json, weight_files
    from kv_cache_proposer.dflash.drafter_files import MANIFEST

    if _is_trained(folder):
        stored = read_json(folder / MANIFEST)
        made = {name: stored[name] for name in ("tensors_sha256", "recipe", "seeds", "commit")}
        return {**made, "copies": asdict(LONG_COPY)} if is_named else made
    digests = "\n".join(sha256_of(folder / name) for name in sorted(weight_files(folder)))
    return {"tensors_sha256": hashlib.sha256(digests.encode()).hexdigest()}


def drafter_digest(model: ModelConfig, forward: Forward) -> str:
    """SHA-256 of the network's tensors; "" for a drafter without one. Raises ModelError as `find_drafter` does."""
    return str(drafter_identity(model, forward).get("tensors_sha256", ""))


def _drafter(network: DrafterNetwork, model: ModelConfig, forward: Forward) -> Drafter:
    layers, is_packed = forward.facts.layers, model.linear != "plain"
    if (last_tap := network.config.tap_layers[-1]) >= layers:
        raise DrafterError(f"the drafter reads layer {last_tap} of its target, this model has {layers}")
    from kv_cache_proposer.dflash.beside_target import BesideTarget
    from kv_cache_proposer.eagle3.eagle3_drafter import Eagle3BesideTarget
    from kv_cache_proposer.eagle3.eagle3_network import Eagle3Network

    if isinstance(network, Eagle3Network):
        return forward.lend(
            Eagle3BesideTarget(network=network, is_packed=is_packed, target_hidden=forward.facts.hidden_size)
        )
    return forward.lend(BesideTarget(network=network, is_packed=is_packed, records_graphs=forward.records_graphs))


def _load_trained(folder: Path, digest: str, forward: Forward) -> DFlashNetwork:
    from kv_cache_proposer.dflash.drafter_files import load_drafter

    return load_drafter(folder, target_digest=digest, device=forward.device, dtype=forward.compute_dtype)[0]


def _trained_folder(model: ModelConfig, forward: Forward) -> Path | None:
    """The first folder whose manifest has the digest of the model's weights."""
    from kv_cache_proposer.dflash.drafter_files import stored_shape, stored_target

    checked = check_model(model.model, cache=model.cache_path)
    # The shape is compared first: hashing large weights without a manifest takes long.
    folders = [
        folder
        for folder in (drafter_folder(checked.model_id, model.cache_path), *sorted(SHIPPED.glob("*")))
        if _is_trained(folder) and stored_shape(folder).hidden == forward.facts.hidden_size
    ]
    if not folders:
        return None
    digest = weights_digest(checked)
    return next((folder for folder in folders if stored_target(folder) == digest), None)


def _in_folder(folder: Path, model: ModelConfig, forward: Forward) -> DrafterNetwork:
    from kv_cache_proposer.published_drafters import load_published

    if _is_trained(folder) or not (folder / "config.json").is_file():
        return _load_trained(folder, weights_digest(check_model(model.model, cache=model.cache_path)), forward)
    return load_published(
        folder, target_layers=forward.facts.layers, device=forward.device, dtype=forward.compute_dtype
    )


def _digest_of_target(folder: Path) -> str:
    from kv_cache_proposer.dflash.drafter_files import stored_target

    return stored_target(folder)


def _is_trained(folder: Path) -> bool:
    from kv_cache_proposer.dflash.drafter_files import MANIFEST

    return (folder / MANIFEST).is_file()
