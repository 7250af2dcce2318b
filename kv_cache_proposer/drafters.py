"""Which drafter a server drafts with, and where a model's own is kept.

    auto     long copies first, else a trained one of this model's, in the cache or else among those that come with the
             package; without a trained one, ngram
    ngram    prompt lookup
    none     no drafting
    FOLDER   the trained or published one there, by itself

A trained one is this model's if it names the digest of the model's weights; nothing else about a model is trusted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference_engine.config import ModelConfig
from inference_engine.models import check_model, weights_digest
from kv_cache_proposer.errors import DrafterError
from kv_cache_proposer.hybrid import LONG_COPY, HybridDrafter
from kv_cache_proposer.ngram import NgramDrafter

if TYPE_CHECKING:
    from inference_engine.backends.base import Forward
    from inference_engine.backends.torch_forward import TorchForward
    from inference_engine.decode.draft import Drafter
    from kv_cache_proposer.dflash.network import DFlashNetwork

# Drafters that come with the package, one folder each.
SHIPPED = Path(__file__).parent / "checkpoints"


def drafter_folder(model_id: str, cache: Path) -> Path:
    return cache / "drafters" / model_id


def find_drafter(model: ModelConfig, forward: Forward) -> Drafter | None:
    """The drafter that `model.drafter` asks for, on the device and in the dtype of `forward`, which runs the model.

    Raises ModelError for one that is not there, damaged, or made for other weights.
    """
    if model.drafter == "none":
        return None
    if model.drafter == "ngram":
        return NgramDrafter()

    from inference_engine.backends.torch_forward import TorchForward

    if not isinstance(forward, TorchForward):
        if model.drafter == "auto":
            return NgramDrafter()
        raise DrafterError("a trained drafter needs a model that runs on torch; start with --drafter ngram or none")
    if model.drafter == "auto":
        network = _trained_for(model, forward)
        return NgramDrafter() if network is None else HybridDrafter(_drafter(network, model, forward))
    return _drafter(_in_folder(Path(model.drafter).expanduser(), model, forward), model, forward)


def drafter_identity(model: ModelConfig, forward: Forward) -> Mapping[str, Any]:
    """What tells the drafter that `find_drafter` gives from others: a trained or published one's digest, how copies are
    looked up.

    Nothing where there is none. Raises ModelError as `find_drafter` does.
    """
    if model.drafter == "none":
        return {}
    folder = None if model.drafter in ("auto", "ngram") else Path(model.drafter).expanduser()

    from inference_engine.backends.torch_forward import TorchForward

    if model.drafter == "auto" and isinstance(forward, TorchForward):
        folder = _trained_folder(model, forward)
    if folder is None:
        return asdict(NgramDrafter())

    from inference_engine.models.checksums import sha256_of
    from inference_engine.models.folder import read_json, weight_files
    from kv_cache_proposer.dflash.store import MANIFEST

    if _is_trained(folder):
        stored = read_json(folder / MANIFEST)
        made = {name: stored[name] for name in ("tensors_sha256", "recipe", "seeds", "commit")}
        return {**made, "copies": asdict(LONG_COPY)} if model.drafter == "auto" else made
    digests = "\n".join(sha256_of(folder / name) for name in sorted(weight_files(folder)))
    return {"tensors_sha256": hashlib.sha256(digests.encode()).hexdigest()}


def _drafter(network: DFlashNetwork, model: ModelConfig, forward: TorchForward) -> Drafter:
    from inference_engine.backends.packed_linear import can_pack, pack_linears
    from kv_cache_proposer.dflash.drafter import DFlashDrafter
    from kv_cache_proposer.dflash.shortlist import Shortlist, can_shortlist
    from kv_cache_proposer.dflash.target import words_of

    layers, last_tap = len(forward.seam.layers), network.config.tap_layers[-1]
    if last_tap >= layers:
        raise DrafterError(f"the drafter reads layer {last_tap} of its target, this model has {layers}")
    words = words_of(forward.seam.model)
    if model.linear != "plain" and can_shortlist(words):
        assert words.head_rows is not None
        words = replace(words, shortlist=Shortlist(words.head_rows))
    drafter = DFlashDrafter(network, words, records_graphs=forward.records_graphs)
    if model.linear != "plain" and can_pack(network):
        pack_linears(network)
    return drafter


def _trained_for(model: ModelConfig, forward: TorchForward) -> DFlashNetwork | None:
    from kv_cache_proposer.dflash.store import load_drafter, stored_target

    folder = _trained_folder(model, forward)
    if folder is None:
        return None
    digest = stored_target(folder)
    return load_drafter(folder, target_digest=digest, device=forward.device, dtype=forward.compute_dtype)[0]


def _trained_folder(model: ModelConfig, forward: TorchForward) -> Path | None:
    """The first that names the digest of the model's weights."""
    from kv_cache_proposer.dflash.store import stored_shape, stored_target

    checked = check_model(model.model, cache=model.cache_path)
    hidden = forward.seam.model.config.get_text_config().hidden_size
    # What cannot fit is told by its shape: the digest of large weights without a manifest takes a while.
    folders = [
        folder
        for folder in (drafter_folder(checked.model_id, model.cache_path), *sorted(SHIPPED.glob("*")))
        if _is_trained(folder) and stored_shape(folder).hidden == hidden
    ]
    if not folders:
        return None
    digest = weights_digest(checked)
    return next((folder for folder in folders if stored_target(folder) == digest), None)


def _in_folder(folder: Path, model: ModelConfig, forward: TorchForward) -> DFlashNetwork:
    from kv_cache_proposer.dflash.published import load_published
    from kv_cache_proposer.dflash.store import load_drafter
    from kv_cache_proposer.dflash.target import embedding_scale_of

    device, dtype = forward.device, forward.compute_dtype
    if _is_trained(folder) or not (folder / "config.json").is_file():
        digest = weights_digest(check_model(model.model, cache=model.cache_path))
        return load_drafter(folder, target_digest=digest, device=device, dtype=dtype)[0]
    scale = embedding_scale_of(forward.seam.model)
    return load_published(folder, embedding_scale=scale, device=device, dtype=dtype)


def _is_trained(folder: Path) -> bool:
    from kv_cache_proposer.dflash.store import MANIFEST

    return (folder / MANIFEST).is_file()
