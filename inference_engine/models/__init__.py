"""Model loading: models known by name, fetched and converted once; names of the hub; any local folder. All are checked
first."""

from inference_engine.models.fetch import check_fetched, convert_for_torch, fetch, model_folder
from inference_engine.models.hub import HubModel, hub_model
from inference_engine.models.hub_fetch import fetch_from_hub
from inference_engine.models.loader import (
    CheckedFolder,
    FoundModel,
    LoadedModel,
    check_model,
    find_model,
    load_model,
    log_remarks,
    own_tokenizer,
    read_config,
    remarks,
    sizes,
    tokenizer_folder,
    weights_digest,
)
from inference_engine.models.manifest import MANIFEST, Manifest, check_manifest, read_manifest, write_manifest
from inference_engine.models.registry import KnownModel, is_known, known_model, known_names

__all__ = [
    "MANIFEST",
    "CheckedFolder",
    "FoundModel",
    "HubModel",
    "KnownModel",
    "LoadedModel",
    "Manifest",
    "check_fetched",
    "check_manifest",
    "check_model",
    "convert_for_torch",
    "fetch",
    "fetch_from_hub",
    "find_model",
    "hub_model",
    "is_known",
    "known_model",
    "known_names",
    "load_model",
    "log_remarks",
    "model_folder",
    "own_tokenizer",
    "read_config",
    "read_manifest",
    "remarks",
    "sizes",
    "tokenizer_folder",
    "weights_digest",
    "write_manifest",
]
