"""Where weights come from: models known by name, fetched and converted once; any local folder; all checked first."""

from inference_engine.models.fetch import check_fetched, fetch, model_folder
from inference_engine.models.loader import (
    CheckedFolder,
    LoadedModel,
    check_model,
    load_model,
    tokenizer_folder,
    weights_digest,
)
from inference_engine.models.manifest import MANIFEST, Manifest, check_manifest, read_manifest, write_manifest
from inference_engine.models.registry import KnownModel, is_known, known_model, known_names

__all__ = [
    "MANIFEST",
    "CheckedFolder",
    "KnownModel",
    "LoadedModel",
    "Manifest",
    "check_fetched",
    "check_manifest",
    "check_model",
    "fetch",
    "is_known",
    "known_model",
    "known_names",
    "load_model",
    "model_folder",
    "read_manifest",
    "tokenizer_folder",
    "weights_digest",
    "write_manifest",
]
