"""f_theta on disk: as the latent codec is (`codec_files.py`), and what makes its codes of a drafter's taps.

f_theta.safetensors   those of a latent; analysis.mean [X]; group.N.analysis [X, C] float16
f_theta.json          those of a latent; drafter_digest: of the drafter's tensors; tap_layers
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

from kv_cache_proposer.f_theta.codec_errors import ForeignLatent, LatentError
from kv_cache_proposer.f_theta.codec_files import StatedCodec, content_of, parse_stated, take_codec, tensors_of
from kv_cache_proposer.f_theta.tap_codec import DrafterLatent, TapAnalysis
from kv_cache_proposer.stored import CalibrationManifest, StoredKind

TENSORS, MANIFEST = "f_theta.safetensors", "f_theta.json"
_STORED = StoredKind(
    tensors=TENSORS,
    manifest=MANIFEST,
    format="kakeya-f-theta",
    version=1,
    made="fitted",
    foreign=ForeignLatent,
    missing="is no f_theta",
    remedy="make it again (`kakeya train f-theta`)",
    error=LatentError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedTapCodec(StatedCodec):
    """A stored f_theta as its manifest has it. drafter_digest: SHA-256 of the tensors of the drafter it belongs to."""

    drafter_digest: str
    tap_layers: tuple[int, ...]


def save_tap_codec(codec: DrafterLatent, folder: Path, manifest: CalibrationManifest, *, drafter_digest: str) -> None:
    """Write both files, the manifest last."""
    analysis = codec.analysis
    tensors = {f"group.{index}.analysis": matrix.half() for index, matrix in enumerate(analysis.matrices)}
    tensors["analysis.mean"] = analysis.mean
    content = {
        **asdict(manifest),
        **content_of(codec.latent),
        "shared_bytes": codec.shared_bytes,
        "drafter_digest": drafter_digest,
        "tap_layers": list(analysis.tap_layers),
    }
    own = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    _STORED.save(folder, {**tensors_of(codec.latent), **own}, content)


def read_stated_tap_codec(folder: Path, *, target_digest: str) -> StatedTapCodec:
    """Raises as `read_stated` does."""
    content = _STORED.read_manifest(folder)
    with _STORED.parsing(folder):
        stated = parse_stated(_STORED, folder, content)
        found = StatedTapCodec(
            **{one.name: getattr(stated, one.name) for one in fields(stated)},
            drafter_digest=str(content["drafter_digest"]),
            tap_layers=tuple(int(layer) for layer in content["tap_layers"]),
        )
    _STORED.check_target(folder, found.manifest.target_digest, target_digest)
    _STORED.check_tensors(folder)
    return found


def load_tap_codec(
    stated: StatedTapCodec, *, device: torch.device | str = "cpu", kernels: str = "auto"
) -> DrafterLatent:
    """The codec, its tensors checked. Raises as `load_stated` does."""
    tensors = _STORED.read_tensors(stated.folder, stated.tensors_sha256)
    latent = take_codec(stated, tensors)
    mean = tensors.get("analysis.mean")
    size = len(mean) if mean is not None and mean.ndim else 0
    analysis = TapAnalysis(
        tap_layers=stated.tap_layers,
        mean=_STORED.take(tensors, stated.folder, "analysis.mean", (torch.float32,), size),
        matrices=tuple(
            _STORED.take(
                tensors,
                stated.folder,
                f"group.{index}.analysis",
                (torch.float16,),
                size,
                part.basis.components.count,
            ).float()
            for index, part in enumerate(latent.coders)
        ),
    )
    _STORED.check_all_taken(tensors, stated.folder)
    return replace(DrafterLatent(analysis=analysis, latent=latent), digest=stated.tensors_sha256).to(device, kernels)
