"""Components of a model's keys on disk: tensors in safetensors, everything else in JSON beside them.

    components.safetensors   per layer: mean [Hkv, D], basis [Hkv, D, R], deviations [Hkv, R], float32
    components.json          format and version, the target's digest, layers, how they were made, SHA-256 of the tensors

They are loaded whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from inference_engine.errors import ModelError
from inference_engine.kernels.components import KeyComponents
from kv_cache_proposer.stored import CalibrationManifest, StoredKind

TENSORS, MANIFEST = "components.safetensors", "components.json"
_PARTS = ("mean", "basis", "deviations")


class ComponentsError(ModelError):
    """Components of keys cannot be made, stored or read as asked."""


class ForeignComponents(ComponentsError):
    """Stored components were calibrated for another model."""


_STORED = StoredKind(
    tensors=TENSORS,
    manifest=MANIFEST,
    format="kakeya-components",
    version=1,
    made="calibrated",
    foreign=ForeignComponents,
    missing="are no components",
    remedy="calibrate them again (`kakeya train components`)",
    error=ComponentsError,
)


def save_components(components: Mapping[int, KeyComponents], folder: Path, manifest: CalibrationManifest) -> None:
    """Write both files, the manifest last: a folder without it holds nothing."""
    tensors = {
        f"layer.{layer}.{part}": getattr(found, part).cpu().contiguous()
        for layer, found in components.items()
        for part in _PARTS
    }
    _STORED.save(folder, tensors, {**asdict(manifest), "layers": list(components)})


def load_components(folder: Path, *, target_digest: str) -> tuple[dict[int, KeyComponents], CalibrationManifest]:
    """By layer. Raises ForeignComponents for another model's, ComponentsError for what is missing or damaged."""
    content = _STORED.read_manifest(folder)
    with _STORED.parsing(folder):
        manifest = CalibrationManifest.of(content)
        layers, stated_sha256 = [int(layer) for layer in content["layers"]], str(content["tensors_sha256"])
    _STORED.check_target(folder, manifest.target_digest, target_digest)
    tensors = _STORED.read_tensors(folder, stated_sha256)
    found = {layer: _taken(tensors, layer, folder / TENSORS) for layer in layers}
    _STORED.check_all_taken(tensors, folder)
    return found, manifest


def _taken(tensors: dict[str, Tensor], layer: int, path: Path) -> KeyComponents:
    mean, basis, deviations = (tensors.pop(f"layer.{layer}.{part}", None) for part in _PARTS)
    if mean is None or basis is None or deviations is None:
        raise _STORED.damage(path, f"layer {layer} is not complete")
    shapes_fit = basis.ndim == 3 and mean.shape == basis.shape[:2] and deviations.shape == (len(basis), basis.shape[-1])
    if not shapes_fit or any(part.dtype != torch.float32 for part in (mean, basis, deviations)):
        raise _STORED.damage(path, f"the tensors of layer {layer} do not fit each other")
    if not all(bool(torch.isfinite(part).all()) for part in (mean, basis, deviations)) or bool((deviations <= 0).any()):
        raise _STORED.damage(path, f"layer {layer} holds NaN, infinity, or a spread of zero")
    return KeyComponents(mean=mean, basis=basis, deviations=deviations)
