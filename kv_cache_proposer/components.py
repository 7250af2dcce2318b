"""Components of a model's keys on disk: tensors in safetensors, everything else in JSON beside them.

    components.safetensors   per layer: mean [Hkv, D], basis [Hkv, D, R], deviations [Hkv, R], float32
    components.json          format and version, the target's digest, layers, how they were made, SHA-256 of the tensors

They are loaded whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from inference_engine.errors import ModelError
from inference_engine.kernels.components import KeyComponents
from inference_engine.models.checksums import sha256_of
from inference_engine.models.folder import read_json
from inference_engine.models.safetensors_header import check_safetensors

TENSORS = "components.safetensors"
MANIFEST = "components.json"
FORMAT = "kakeya-components"
FORMAT_VERSION = 1

_REMEDY = "calibrate them again (`kakeya train components`)"
_PARTS = ("mean", "basis", "deviations")


class ComponentsError(ModelError):
    """Components of keys cannot be made, stored or read as asked."""


class ForeignComponents(ComponentsError):
    """Stored components were calibrated for another model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentsManifest:
    """What stored components say of themselves.

    target_digest: of the weights they were calibrated for. recipe, seeds, commit, metrics: how to make them again, and
    what was measured.
    """

    target_digest: str
    calibration_tokens: int
    recipe: Mapping[str, Any] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    commit: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


def save_components(components: Mapping[int, KeyComponents], folder: Path, manifest: ComponentsManifest) -> None:
    """Write both files, the manifest last: a folder without it holds nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    tensors = {
        f"layer.{layer}.{part}": getattr(found, part).cpu().contiguous()
        for layer, found in components.items()
        for part in _PARTS
    }
    save_file(tensors, folder / TENSORS)
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **asdict(manifest),
        "layers": list(components),
        "tensors_sha256": sha256_of(folder / TENSORS),
    }
    draft = folder / f"{MANIFEST}.partial"
    draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    draft.replace(folder / MANIFEST)


def load_components(folder: Path, *, target_digest: str) -> tuple[dict[int, KeyComponents], ComponentsManifest]:
    """By layer. Raises ForeignComponents for another model's, ComponentsError for what is missing or damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ComponentsError(f"{folder}: no {MANIFEST}, so there are no components here; {_REMEDY}")
    content = read_json(path)
    stated = (content.get("format"), content.get("format_version"))
    if stated != (FORMAT, FORMAT_VERSION):
        raise ComponentsError(f"{path}: format {stated} cannot be read, only {(FORMAT, FORMAT_VERSION)}; {_REMEDY}")
    try:
        manifest = ComponentsManifest(**{name: content[name] for name in ComponentsManifest.__dataclass_fields__})
        layers, stated_sha256 = [int(layer) for layer in content["layers"]], str(content["tensors_sha256"])
    except (KeyError, TypeError, ValueError) as error:
        raise ComponentsError(f"{path}: damaged: {type(error).__name__}: {error}; {_REMEDY}") from error
    if manifest.target_digest != target_digest:
        raise ForeignComponents(
            f"{folder}: calibrated for the model with digest {manifest.target_digest}, this one has {target_digest}; "
            "calibrate them for this model (`kakeya train components`)"
        )
    tensors = _read(folder / TENSORS, stated_sha256)
    found = {layer: _taken(tensors, layer, folder / TENSORS) for layer in layers}
    if tensors:
        raise ComponentsError(f"{folder / TENSORS}: unknown tensors: {', '.join(sorted(tensors))}; {_REMEDY}")
    return found, manifest


def _read(path: Path, stated_sha256: str) -> dict[str, Tensor]:
    if not path.is_file():
        raise ComponentsError(f"{path}: missing; {_REMEDY}")
    check_safetensors(path)
    if (sha256 := sha256_of(path)) != stated_sha256:
        raise ComponentsError(f"{path}: SHA-256 is {sha256}, {MANIFEST} says {stated_sha256}; {_REMEDY}")
    try:
        return load_file(path)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ComponentsError(f"{path}: damaged: {error}; {_REMEDY}") from error


def _taken(tensors: dict[str, Tensor], layer: int, path: Path) -> KeyComponents:
    mean, basis, deviations = (tensors.pop(f"layer.{layer}.{part}", None) for part in _PARTS)
    if mean is None or basis is None or deviations is None:
        raise ComponentsError(f"{path}: layer {layer} is not complete; {_REMEDY}")
    shapes_fit = basis.ndim == 3 and mean.shape == basis.shape[:2] and deviations.shape == (len(basis), basis.shape[-1])
    if not shapes_fit or any(part.dtype != torch.float32 for part in (mean, basis, deviations)):
        raise ComponentsError(f"{path}: the tensors of layer {layer} do not fit each other; {_REMEDY}")
    if not all(bool(torch.isfinite(part).all()) for part in (mean, basis, deviations)) or bool((deviations <= 0).any()):
        raise ComponentsError(f"{path}: layer {layer} holds NaN, infinity, or a spread of zero; {_REMEDY}")
    return KeyComponents(mean=mean, basis=basis, deviations=deviations)
