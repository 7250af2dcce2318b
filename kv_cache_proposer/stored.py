"""What is made for one model, on disk: tensors in safetensors, and a manifest in JSON beside them.

The manifest has format and version, the target's digest, how it was made, and the SHA-256 of the tensors. It is
written last: a folder without it holds nothing. All is loaded whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from inference_engine.errors import ModelError
from inference_engine.models.checksums import sha256_of
from inference_engine.models.folder import read_json
from inference_engine.models.safetensors_header import check_safetensors


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredManifest:
    """What stored tensors say of themselves.

    target_digest: of the weights that they were made for, in the caller's own form. recipe, seeds, commit, metrics: how
    to make them again, and what was measured.
    """

    target_digest: str
    recipe: Mapping[str, Any] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    commit: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """Raises KeyError for what is missing."""
        return cls(**{name: content[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationManifest(StoredManifest):
    """Of what was calibrated on so many tokens."""

    calibration_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredKind:
    """What is stored. missing: said of a folder without it; made: how it was made for its target; remedy: what
    to do about damage. error, foreign: what is raised, the latter for what belongs to another model.
    """

    tensors: str
    manifest: str
    format: str
    version: int
    missing: str
    made: str
    remedy: str
    error: type[ModelError]
    foreign: type[ModelError]

    def save(self, folder: Path, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.manifest).unlink(missing_ok=True)
        save_file(dict(tensors), folder / self.tensors)
        known = {"format": self.format, "format_version": self.version}
        whole = {**known, **content, "tensors_sha256": sha256_of(folder / self.tensors)}
        draft = folder / f"{self.manifest}.partial"
        draft.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
        draft.replace(folder / self.manifest)

    def damage(self, place: Path, what: str) -> ModelError:
        return self.error(f"{place}: {what}; {self.remedy}")

    def read_manifest(self, folder: Path) -> dict[str, Any]:
        path = folder / self.manifest
        if not path.is_file():
            raise self.damage(folder, f"no {self.manifest}, so there {self.missing} here")
        content: dict[str, Any] = read_json(path)
        stated, known = (content.get("format"), content.get("format_version")), (self.format, self.version)
        if stated != known:
            raise self.damage(path, f"format {stated} cannot be read, only {known}")
        return content

    @contextmanager
    def parsing(self, folder: Path) -> Iterator[None]:
        """A field of the manifest that is missing, or of another type, is damage."""
        try:
            yield
        except (KeyError, TypeError, ValueError) as error:
            raise self.damage(folder / self.manifest, f"damaged: {type(error).__name__}: {error}") from error

    def check_target(self, folder: Path, stated: str, digest: str) -> None:
        if stated != digest:
            raise self.foreign(
                f"{folder}: {self.made} for the model with digest {stated}, this one has {digest}; make one for this "
                "model"
            )

    def check_tensors(self, folder: Path) -> Path:
        """Their file, by its header. Raises ModelError if it is missing or cut short."""
        path = folder / self.tensors
        if not path.is_file():
            raise self.damage(path, "missing")
        check_safetensors(path)
        return path

    def read_tensors(self, folder: Path, stated_sha256: str) -> dict[str, Tensor]:
        path = self.check_tensors(folder)
        if (sha256 := sha256_of(path)) != stated_sha256:
            raise self.damage(path, f"SHA-256 is {sha256}, {self.manifest} says {stated_sha256}")
        try:
            return load_file(path)
        except (SafetensorError, ValueError, KeyError) as error:
            raise self.damage(path, f"damaged: {error}") from error

    def check_all_taken(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        if tensors:
            raise self.damage(folder / self.tensors, f"unknown tensors: {', '.join(sorted(tensors))}")

    def take(
        self, tensors: dict[str, Tensor], folder: Path, name: str, dtypes: tuple[torch.dtype, ...], *shape: int
    ) -> Tensor:
        """Out of `tensors`: of that shape, one of those types, and finite."""
        path, tensor = folder / self.tensors, tensors.pop(name, None)
        if tensor is None:
            raise self.damage(path, f"{name} is missing")
        if tensor.shape != shape or tensor.dtype not in dtypes:
            expected = f"{' or '.join(map(str, dtypes))} {list(shape)}"
            raise self.damage(path, f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {expected}")
        if not bool(torch.isfinite(tensor).all()):
            raise self.damage(path, f"{name} holds NaN or infinity")
        return tensor
