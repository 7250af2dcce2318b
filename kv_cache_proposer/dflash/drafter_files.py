"""A trained drafter on disk: 4-bit weights in safetensors, everything else in JSON beside them.

    drafter.safetensors   each matrix as numbers of levels, two in a byte, with scales of its groups of up to 64 inputs
                          and of its columns; vectors in float32
    drafter.json          format and version, the target's digest, the network's shape, how it was made, what was
                          measured, SHA-256 of the tensors

It is loaded whole or not at all, and only beside the weights it was trained for.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kv_cache_proposer.dflash.drafter_config import DFlashConfig
from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.drafter_errors import DrafterError, ForeignDrafter
from kv_cache_proposer.stored import StoredKind, StoredManifest

TENSORS, MANIFEST = "drafter.safetensors", "drafter.json"
_STORED = StoredKind(
    tensors=TENSORS,
    manifest=MANIFEST,
    format="kakeya-drafter",
    version=2,
    made="trained",
    foreign=ForeignDrafter,
    missing="is no drafter",
    remedy="train it again",
    error=DrafterError,
)

_GROUP_SCALES, _COLUMN_SCALES = ".groups", ".columns"
_GROUP = 64  # inputs that share a scale, at most
# Those of ggml's IQ4_NL: nearer to one another where weights are many. The first is the furthest from 0.
_LEVELS = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]) / 127
_SHRINKS = (1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of a group's largest number, by which its scale is tried


def save_drafter(network: DFlashNetwork, folder: Path, manifest: StoredManifest) -> None:
    """Write both files, the manifest last: a folder without it holds no drafter."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        tensors |= _rounded(name, tensor.detach().float().cpu())
    _STORED.save(folder, tensors, {**asdict(manifest), "network": asdict(network.config)})


def load_drafter(
    folder: Path,
    *,
    target_digest: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[DFlashNetwork, StoredManifest]:
    """Raises ForeignDrafter for another model's, ModelError naming what is missing, damaged or of wrong shape."""
    content = _STORED.read_manifest(folder)
    with _STORED.parsing(folder):
        manifest = StoredManifest.of(content)
        config, stated_sha256 = DFlashConfig.from_json(content["network"]), str(content["tensors_sha256"])
    _STORED.check_target(folder, manifest.target_digest, target_digest)
    tensors = _STORED.read_tensors(folder, stated_sha256)
    with torch.device("meta"):
        network = DFlashNetwork(config)
    found = {name: _take(tensors, name, tensor.shape, folder) for name, tensor in network.state_dict().items()}
    _STORED.check_all_taken(tensors, folder)
    network.load_state_dict(found, assign=True)
    return network.to(device=device, dtype=dtype).eval().requires_grad_(False), manifest


def stored_target(folder: Path) -> str:
    """The digest of the weights that the drafter in `folder` belongs to. Raises DrafterError if there is none."""
    return str(_STORED.read_manifest(folder).get("target_digest"))


def stored_shape(folder: Path) -> DFlashConfig:
    """The shape of the drafter in `folder`. Raises DrafterError if there is none."""
    return DFlashConfig.from_json(_STORED.read_manifest(folder).get("network"))


def stored_digest(folder: Path) -> str:
    """SHA-256 of the tensors of the drafter in `folder`, as it says. Raises DrafterError if there is none."""
    return str(_STORED.read_manifest(folder).get("tensors_sha256"))


def _rounded(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if tensor.ndim != 2:
        return {name: tensor.contiguous()}
    # Columns that read taps differ in size as the taps do, so a group's scale alone would keep the largest only.
    columns = tensor.square().mean(dim=0).sqrt().clamp(min=1e-12)
    groups = (tensor / columns).view(len(tensor), -1, _group_of(tensor.shape))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    between = (_LEVELS[1:] + _LEVELS[:-1]) / 2
    scales, codes = torch.zeros_like(largest), torch.zeros_like(groups, dtype=torch.uint8)
    least = torch.full_like(largest, math.inf)
    for shrink in _SHRINKS:
        tried = (largest * shrink / _LEVELS[0]).half().float()
        found = torch.bucketize(groups / torch.where(tried == 0, 1.0, tried), between)
        error = (_LEVELS[found] * tried - groups).square().sum(-1, keepdim=True)
        is_better = error < least
        scales, least = torch.where(is_better, tried, scales), torch.where(is_better, error, least)
        codes = torch.where(is_better, found.to(torch.uint8), codes)
    flat = F.pad(codes.flatten(), (0, codes.numel() % 2))
    return {
        name: flat[::2] | flat[1::2] << 4,
        name + _GROUP_SCALES: scales[..., 0].half(),
        name + _COLUMN_SCALES: columns,
    }


def _group_of(shape: torch.Size) -> int:
    return math.gcd(shape[1], _GROUP)


def _take(tensors: dict[str, Tensor], name: str, shape: torch.Size, folder: Path) -> Tensor:
    """The tensor in float32."""

    def take(suffix: str, dtype: torch.dtype, *stored: int) -> Tensor:
        return _STORED.take(tensors, folder, name + suffix, (dtype,), *stored)

    if len(shape) != 2:
        return take("", torch.float32, *shape)
    count, group = shape.numel(), _group_of(shape)
    packed = take("", torch.uint8, (count + 1) // 2)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten()[:count]
    groups = shape[0], shape[1] // group
    scales = take(_GROUP_SCALES, torch.float16, *groups).float()
    columns = take(_COLUMN_SCALES, torch.float32, shape[1])
    return (_LEVELS[codes.long()].view(*groups, group) * scales[..., None]).view(shape) * columns
