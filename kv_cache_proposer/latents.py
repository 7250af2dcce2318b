"""Where a model's latent codec is kept, and how a server finds it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference_engine.config import ModelConfig
from inference_engine.models import check_model, weights_digest
from inference_engine.models.folder import read_json

if TYPE_CHECKING:
    from kv_cache_proposer.f_theta.codec import LatentCodec


def latent_folder(model_id: str, cache: Path) -> Path:
    return cache / "latents" / model_id


def find_latent(model: ModelConfig) -> LatentCodec | None:
    """The codec that `model.latent` asks for, on the model's device.

    `auto`: the one in the cache, if there is one. `none`: none. Else a folder. Raises ModelError for one that is not
    there, damaged, or made for other weights.
    """
    folder = _folder(model)
    if folder is None:
        return None

    from kv_cache_proposer.f_theta.store import load_codec

    checked = check_model(model.model, cache=model.cache_path)
    codec, _ = load_codec(folder, target_digest=weights_digest(checked), device=model.device, kernels=model.kernels)
    return codec


def latent_identity(model: ModelConfig) -> Mapping[str, Any]:
    """What tells the codec that `find_latent` gives from others: its tensors' digest, its bytes, how it was made.

    Nothing where there is none. Raises ModelError for a manifest that cannot be read.
    """
    folder = _folder(model)
    if folder is None:
        return {}

    from kv_cache_proposer.f_theta.store import MANIFEST

    stored = read_json(folder / MANIFEST)
    short = {name: value for name, value in stored["recipe"].items() if isinstance(value, bool | int | float | str)}
    told = ("tensors_sha256", "bytes_per_token", "calibration_tokens", "seeds")
    return {**{name: stored[name] for name in told}, "recipe": short}


def _folder(model: ModelConfig) -> Path | None:
    """Where the codec lies that `model.latent` asks for; None for none."""
    if model.latent == "none":
        return None
    if model.latent != "auto":
        return Path(model.latent).expanduser()
    folder = latent_folder(check_model(model.model, cache=model.cache_path).model_id, model.cache_path)
    return folder if folder.is_dir() else None
