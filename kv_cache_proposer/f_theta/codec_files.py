"""A codec on disk: tensors in safetensors, everything else in JSON beside them.

    latent.safetensors   per group: mean, components (int8: and scales), deviations, bits; per layer: weights, inverses
    latent.json          format and version, the target's digest, layers, rate, how it was made, what was measured,
                         SHA-256 of the tensors

What was saved is what is loaded, bit for bit, and it is loaded whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kv_cache_proposer.f_theta.basis import Basis
from kv_cache_proposer.f_theta.codec import LatentCodec, coded
from kv_cache_proposer.f_theta.codec_errors import ForeignLatent, LatentError
from kv_cache_proposer.f_theta.components import PRECISIONS, Components
from kv_cache_proposer.f_theta.group_layout import Group, LayerShape
from kv_cache_proposer.f_theta.levels import MAX_BITS
from kv_cache_proposer.stored import CalibrationManifest, StoredKind

TENSORS, MANIFEST = "latent.safetensors", "latent.json"
_STORED = StoredKind(
    tensors=TENSORS,
    manifest=MANIFEST,
    format="kakeya-latent",
    version=3,
    made="calibrated",
    foreign=ForeignLatent,
    missing="is no latent codec",
    remedy="calibrate it again (`kakeya train latent`)",
    error=LatentError,
)

# What manifests said while codecs were made in other ways, too.
_MADE_BY = {"bits": "variance", "quantiser": "trellis"}


def save_codec(codec: LatentCodec, folder: Path, manifest: CalibrationManifest) -> None:
    """Write both files, the manifest last: a folder without it holds no codec."""
    _STORED.save(folder, tensors_of(codec), {**asdict(manifest), **content_of(codec)})


def content_of(codec: LatentCodec) -> dict[str, Any]:
    """What a manifest says of it: `parse_stated` reads it."""
    return {
        "bytes_per_token": codec.bytes_per_token,
        "shared_bytes": codec.shared_bytes,
        "groups": [[asdict(shape) for shape in part.basis.group.shapes] for part in codec.coders],
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedCodec:
    """A stored codec as its manifest has it: all but its tensors, which are checked against it when they are read.

    tensors_sha256: of the file of tensors.
    """

    folder: Path
    manifest: CalibrationManifest
    groups: tuple[Group, ...]
    bytes_per_token: int
    tensors_sha256: str
    kind: StoredKind = _STORED

    @property
    def path(self) -> Path:
        """The file of tensors."""
        return self.folder / self.kind.tensors


def read_stated(folder: Path, *, target_digest: str) -> StatedCodec:
    """Read the manifest, and the header of the tensors' file, which is compared with the file's size.

    Raises ForeignLatent for another model's codec, ModelError naming what is missing, damaged or cut short.
    """
    path = folder / MANIFEST
    content = _STORED.read_manifest(folder)
    with _STORED.parsing(folder):
        codec = parse_stated(_STORED, folder, content)
    for name, known in _MADE_BY.items():
        if (made_by := content.get(name, known)) != known:
            raise _STORED.damage(path, f"{name} is {made_by!r}, known is {known!r}")
    _STORED.check_target(folder, codec.manifest.target_digest, target_digest)
    _STORED.check_tensors(folder)
    return codec


def parse_stated(kind: StoredKind, folder: Path, content: Mapping[str, Any]) -> StatedCodec:
    """Raises KeyError, TypeError or ValueError for what is missing, or of another type."""
    return StatedCodec(
        folder=folder,
        manifest=CalibrationManifest.of(content),
        groups=tuple(Group(tuple(LayerShape(**shape) for shape in shapes)) for shapes in content["groups"]),
        bytes_per_token=int(content["bytes_per_token"]),
        tensors_sha256=str(content["tensors_sha256"]),
        kind=kind,
    )


def load_stated(stated: StatedCodec, *, device: torch.device | str = "cpu", kernels: str = "auto") -> LatentCodec:
    """The codec, its tensors checked.

    Raises LatentError for what is missing, damaged or of wrong shape, or of another codec now, and BackendError for
    kernels that the device cannot have.
    """
    tensors = stated.kind.read_tensors(stated.folder, stated.tensors_sha256)
    codec = take_codec(stated, tensors)
    stated.kind.check_all_taken(tensors, stated.folder)
    return codec.to(device, kernels)


def take_codec(stated: StatedCodec, tensors: dict[str, Tensor]) -> LatentCodec:
    """Out of `tensors`, on the CPU. Raises LatentError for what is missing, or does not fit."""
    found = [_take_group(tensors, index, group, stated) for index, group in enumerate(stated.groups)]
    codec = coded([basis for basis, _ in found], [widths for _, widths in found])
    if codec.bytes_per_token != stated.bytes_per_token:
        raise stated.kind.damage(
            stated.folder,
            f"its bits take {codec.bytes_per_token} bytes per token, {stated.kind.manifest} says "
            f"{stated.bytes_per_token}",
        )
    return codec


def tensors_of(codec: LatentCodec) -> dict[str, Tensor]:
    """By name, as `take_codec` takes them."""
    found: dict[str, Tensor] = {}
    for index, part in enumerate(codec.coders):
        basis = part.basis
        found |= {
            f"group.{index}.mean": basis.mean,
            f"group.{index}.deviations": basis.deviations,
            f"group.{index}.bits": torch.tensor(part.packing.widths, dtype=torch.uint8),
        }
        found[f"group.{index}.components"] = basis.components.entries
        if basis.components.scales is not None:
            found[f"group.{index}.scales"] = basis.components.scales
        for shape, weights, inverses in zip(basis.group.shapes, basis.weights, basis.inverses, strict=True):
            found[f"layer.{shape.layer}.weights"] = weights
            found[f"layer.{shape.layer}.inverses"] = inverses
    return {name: tensor.cpu().contiguous() for name, tensor in found.items()}


def _take_group(
    tensors: dict[str, Tensor], index: int, group: Group, stated: StatedCodec
) -> tuple[Basis, tuple[int, ...]]:
    take = partial(stated.kind.take, tensors, stated.folder)
    prefix = f"group.{index}"
    single = (torch.float32,)
    deviations = tensors.get(f"{prefix}.deviations")
    count = len(deviations) if deviations is not None and deviations.ndim else 0

    entries = take(f"{prefix}.components", tuple(PRECISIONS.values()), group.width, count)
    is_int8 = entries.dtype == torch.int8
    scales = take(f"{prefix}.scales", single, len(group.head_sizes), count) if is_int8 else None
    blocks = [(2, shape.kv_heads, shape.head_dim, shape.head_dim) for shape in group.shapes]
    basis = Basis(
        group=group,
        mean=take(f"{prefix}.mean", single, group.width),
        weights=tuple(
            take(f"layer.{shape.layer}.weights", single, *block)
            for shape, block in zip(group.shapes, blocks, strict=True)
        ),
        inverses=tuple(
            take(f"layer.{shape.layer}.inverses", single, *block)
            for shape, block in zip(group.shapes, blocks, strict=True)
        ),
        components=Components(entries=entries, head_sizes=group.head_sizes, scales=scales),
        deviations=take(f"{prefix}.deviations", single, count),
    )
    bits = tuple(take(f"{prefix}.bits", (torch.uint8,), count).tolist())
    if not bits or not all(MAX_BITS >= a >= b >= 1 for a, b in zip(bits, (*bits[1:], 1), strict=True)):
        raise stated.kind.damage(stated.path, f"{prefix}.bits must fall from at most {MAX_BITS} to at least 1")
    return basis, bits
