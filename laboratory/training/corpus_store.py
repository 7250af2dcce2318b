"""A corpus on disk: token ids in files that are small enough to be carried around, and a manifest.

    corpus-000.safetensors   token_ids [tokens] uint16 or uint32, texts one after another; per text: lengths, kinds
    corpus-001.safetensors   (index into the manifest's), held_out; answers: a bit for each id that the model answered
    …
    corpus.json              format, the target's digest, kinds, seed, recipe, batches done, each file's texts, tokens

Files are written before the manifest, and it says how many of a file's texts count: a call that is stopped anywhere
leaves a corpus that can be read and continued.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from inference_engine.models.folder import read_json
from inference_engine.models.safetensors_header import check_safetensors
from kv_cache_proposer.drafter_errors import DrafterError, ForeignDrafter

MANIFEST = "corpus.json"
FORMAT = "kakeya-corpus"
FORMAT_VERSION = 2  # in 1, what a text began with was held out by its place in a list
MAX_FILE_BYTES = 16 * 2**20

_HEADER_BYTES = 2**12
_REMEDY = "make the corpus again, in an empty folder"


@dataclass(frozen=True, slots=True)
class Text:
    """One text of the model's. answers: which of its ids a session would have had it say."""

    token_ids: NDArray[np.uint32]
    answers: NDArray[np.bool_]
    kind: str
    is_held_out: bool

    @property
    def stored_bytes(self) -> int:
        return self.token_ids.nbytes + -(-len(self.answers) // 8) + 6


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusManifest:
    """What a corpus says of itself. files: (texts, tokens) of each. recipe: whatever it takes to make it again."""

    target_digest: str
    kinds: tuple[str, ...]
    seed: int
    vocab_size: int
    recipe: Mapping[str, Any] = field(default_factory=dict)
    batches: int = 0
    files: tuple[tuple[int, int], ...] = ()

    @property
    def texts(self) -> int:
        return sum(texts for texts, _ in self.files)

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.files)


def open_corpus(folder: Path, made: CorpusManifest) -> CorpusManifest:
    """The manifest of the corpus in `folder`, to be continued; `made` if there is none yet.

    Raises ForeignDrafter for another model's, DrafterError for one that was begun with other settings.
    """
    if not (folder / MANIFEST).is_file():
        return made
    found = read_manifest(folder, target_digest=made.target_digest)
    if replace(found, batches=0, files=()) != made:
        raise DrafterError(f"{folder}: holds a corpus begun with other settings ({found.recipe}); {_REMEDY}")
    return found


def read_manifest(folder: Path, *, target_digest: str) -> CorpusManifest:
    """Raises ForeignDrafter for another model's corpus, ModelError for none or a damaged one."""
    path = folder / MANIFEST
    if not path.is_file():
        raise DrafterError(f"{folder}: no {MANIFEST}, so there is no corpus here; make one with `kakeya train corpus`")
    content = read_json(path)
    if (stated := (content.get("format"), content.get("format_version"))) != (FORMAT, FORMAT_VERSION):
        raise DrafterError(f"{path}: format {stated} cannot be read, only {(FORMAT, FORMAT_VERSION)}; {_REMEDY}")
    try:
        manifest = CorpusManifest(**{name: content[name] for name in CorpusManifest.__dataclass_fields__})
        files = tuple((int(texts), int(tokens)) for texts, tokens in manifest.files)
        manifest = replace(manifest, kinds=tuple(manifest.kinds), files=files)
    except (KeyError, TypeError, ValueError) as error:
        raise DrafterError(f"{path}: damaged: {type(error).__name__}: {error}; {_REMEDY}") from error
    if manifest.target_digest != target_digest:
        raise ForeignDrafter(
            f"{folder}: written by the model with digest {manifest.target_digest}, this one has {target_digest}; "
            "make a corpus with this model"
        )
    return manifest


def add_texts(folder: Path, manifest: CorpusManifest, texts: Sequence[Text]) -> CorpusManifest:
    """Write one more batch of texts behind the others; returns the manifest that counts them, which is written too."""
    folder.mkdir(parents=True, exist_ok=True)
    files = list(manifest.files)
    pending = list(_read_file(folder, len(files) - 1, manifest)) if files else []
    index = max(0, len(files) - 1)
    size = sum(text.stored_bytes for text in pending)
    for text in texts:
        if size + text.stored_bytes > MAX_FILE_BYTES - _HEADER_BYTES:
            files[index:] = [_write_file(folder, index, manifest, pending)]
            index, pending, size = index + 1, [], 0
        pending.append(text)
        size += text.stored_bytes
    files[index:] = [_write_file(folder, index, manifest, pending)]
    grown = replace(manifest, batches=manifest.batches + 1, files=tuple(files))
    draft = folder / f"{MANIFEST}.partial"
    stated = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(grown)}
    draft.write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
    draft.replace(folder / MANIFEST)
    return grown


def read_texts(folder: Path, manifest: CorpusManifest) -> Iterator[Text]:
    """All texts, in the order they were written. Raises ModelError for a damaged file."""
    for index in range(len(manifest.files)):
        yield from _read_file(folder, index, manifest)


def _path(folder: Path, index: int) -> Path:
    return folder / f"corpus-{index:03d}.safetensors"


def _write_file(folder: Path, index: int, manifest: CorpusManifest, texts: Sequence[Text]) -> tuple[int, int]:
    dtype = id_dtype(manifest.vocab_size)
    tensors = {
        "token_ids": _joined((text.token_ids for text in texts), dtype),
        "answers": np.packbits(_joined((text.answers for text in texts), np.dtype(np.bool_))),
        "lengths": np.array([len(text.token_ids) for text in texts], dtype=np.uint32),
        "kinds": np.array([manifest.kinds.index(text.kind) for text in texts], dtype=np.uint8),
        "held_out": np.array([text.is_held_out for text in texts], dtype=np.uint8),
    }
    path = _path(folder, index)
    draft = path.with_suffix(".partial")
    save_file(tensors, draft)
    draft.replace(path)
    return len(texts), len(tensors["token_ids"])


def _read_file(folder: Path, index: int, manifest: CorpusManifest) -> Iterator[Text]:
    path = _path(folder, index)
    if not path.is_file():
        raise DrafterError(f"{path}: missing; {_REMEDY}")
    check_safetensors(path)
    try:
        tensors = load_file(path)
        ids, lengths = tensors["token_ids"], tensors["lengths"].astype(np.int64)
        answers = np.unpackbits(tensors["answers"], count=len(ids)).astype(np.bool_)
        kinds, held_out = tensors["kinds"], tensors["held_out"]
    except (SafetensorError, ValueError, KeyError) as error:
        raise DrafterError(f"{path}: damaged: {error}; {_REMEDY}") from error
    count, tokens = manifest.files[index]
    ends = np.cumsum(lengths)
    if len(lengths) < count or int(lengths[:count].sum()) != tokens or int(lengths.sum()) != len(ids):
        raise DrafterError(f"{path}: holds {len(lengths)} texts, {MANIFEST} says {count}; {_REMEDY}")
    for place in range(count):
        own = slice(int(ends[place] - lengths[place]), int(ends[place]))
        kind = manifest.kinds[int(kinds[place])]
        yield Text(ids[own].astype(np.uint32), answers[own], kind, bool(held_out[place]))


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype(np.uint16) if vocab_size <= 2**16 else np.dtype(np.uint32)


def _joined(parts: Iterable[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    found = list(parts)
    return np.concatenate(found).astype(dtype) if found else np.empty(0, dtype)
