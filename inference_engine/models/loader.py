"""From a name or a folder to a model in memory: checked first, mapped rather than copied, ready for inference.

Only safetensors are read, only built-in architectures are built, nothing is downloaded and no code of the folder runs.
No tokenizer is loaded: the runtime never sees text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference_engine.config import forbid_model_hub
from inference_engine.errors import BackendError, ModelError
from inference_engine.models.checksums import sha256_of
from inference_engine.models.fetch import check_fetched, model_folder
from inference_engine.models.folder import check_content, check_names, weight_files
from inference_engine.models.manifest import Manifest, check_manifest, has_manifest
from inference_engine.models.registry import is_known, known_model, known_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = ("float32", "bfloat16")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedModel:
    """A transformers model in evaluation mode, and what callers need to know of it.

    trained_positions: tokens of history the model was made for. weights_sha256: of the weights in the folder, if a
    manifest vouches for them (for shards, of the list of their digests).
    """

    model: PreTrainedModel
    model_id: str
    folder: Path
    trained_positions: int
    vocab_size: int
    dtype: str
    device: str
    weights_sha256: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedFolder:
    """A folder that passed every check. manifest: None for one that came without."""

    model_id: str
    folder: Path
    manifest: Manifest | None


def check_model(name_or_path: str, *, cache: Path, thorough: bool = False) -> CheckedFolder:
    """Find a model and check its folder, without building anything. A known name comes before a folder of that name.

    thorough: hash the weights even if they look as they did when they were last hashed. Raises ModelError.
    """
    try:
        return _check_model(name_or_path, cache, thorough)
    except OSError as error:
        raise ModelError(f"{name_or_path}: cannot be read: {error}") from error


def load_model(
    name_or_path: str, *, cache: Path, device: str = "cpu", dtype: str = "float32", attention: str = "eager"
) -> LoadedModel:
    """Check a model's folder and load it.

    attention: the name of an attention function that transformers knows. On the CPU, in the dtype of the files, the
    weights are pages of the file, read when first touched; in another dtype or on another device they are copied.

    Raises ModelError if the folder is missing, unsafe, damaged or does not fit its configuration, BackendError if the
    device is not there.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    checked = check_model(name_or_path, cache=cache)

    forbid_model_hub()
    import torch
    from transformers.utils import logging

    _check_device(device)
    logging.disable_progress_bar()
    model = _from_pretrained(checked.folder, getattr(torch, dtype), attention)
    model.requires_grad_(requires_grad=False)
    if device != "cpu":
        model.to(device)
    text = model.config.get_text_config()
    return LoadedModel(
        model=model.eval(),
        model_id=checked.model_id,
        folder=checked.folder,
        trained_positions=_positive(text, "max_position_embeddings", checked.folder),
        vocab_size=_positive(text, "vocab_size", checked.folder),
        dtype=dtype,
        device=device,
        weights_sha256=weights_digest(checked) if checked.manifest else None,
    )


def tokenizer_folder(name_or_path: str, cache: Path) -> Path:
    """A checked folder to load the model's tokenizer from, for clients that have text. Raises ModelError."""
    folder = check_model(name_or_path, cache=cache).folder
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"{folder}: holds no tokenizer ({', '.join(TOKENIZER_FILES)})")
    return folder


def _check_model(name_or_path: str, cache: Path, thorough: bool) -> CheckedFolder:
    manifest: Manifest | None = None
    if is_known(name_or_path):
        folder = model_folder(name_or_path, cache)
        manifest = check_fetched(known_model(name_or_path), cache, thorough=thorough)
        check_names(folder)
    else:
        folder = Path(name_or_path).expanduser()
        if not folder.exists():
            raise ModelError(f"{name_or_path}: neither a known model ({', '.join(known_names())}) nor a folder")
        check_names(folder)
        if has_manifest(folder):
            manifest = check_manifest(folder, cache=cache, thorough=thorough)
    check_content(folder)
    folder = folder.resolve()
    return CheckedFolder(model_id=manifest.model if manifest else folder.name, folder=folder, manifest=manifest)


def _from_pretrained(folder: Path, dtype: Any, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        # Whatever a folder from somewhere else makes the library raise, it is the folder's fault.
        raise ModelError(f"{folder}: transformers cannot load it: {type(error).__name__}: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if keys := sorted(map(str, info[kind])):
            raise ModelError(
                f"{folder}: the weights do not fit config.json: {len(keys)} {kind.replace('_', ' ')}, "
                f"first {keys[0]}; the files are of different models or versions"
            )
    return model


def _positive(config: Any, name: str, folder: Path) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{folder}: config.json: {name} is {value!r}; a model that does not say cannot be served")
    return value


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BackendError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from error


def weights_digest(checked: CheckedFolder) -> str:
    """SHA-256 of the weights (for shards, of the list of their digests): the manifest's, or worked out now."""
    digests = [
        checked.manifest.files[name].sha256 if checked.manifest else sha256_of(checked.folder / name)
        for name in weight_files(checked.folder)
    ]
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()
