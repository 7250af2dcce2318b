"""Where a model's latent codec is kept, and how a server finds it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from inference_engine.config import ModelConfig
from inference_engine.models import check_model, weights_digest

if TYPE_CHECKING:
    from kv_cache_proposer.f_theta.codec import LatentCodec


def latent_folder(model_id: str, cache: Path) -> Path:
    return cache / "latents" / model_id


def find_latent(model: ModelConfig) -> LatentCodec | None:
    """The codec that `model.latent` asks for, on the model's device.

    `auto`: the one in the cache, if there is one. `none`: none. Else a folder. Raises ModelError for one that is not
    there, damaged, or made for other weights.
    """
    if model.latent == "none":
        return None
    checked = check_model(model.model, cache=model.cache_path)
    folder = Path(model.latent).expanduser()
    if model.latent == "auto":
        folder = latent_folder(checked.model_id, model.cache_path)
        if not folder.is_dir():
            return None

    from kv_cache_proposer.f_theta.store import load_codec

    codec, _ = load_codec(folder, target_digest=weights_digest(checked), device=model.device)
    return codec
