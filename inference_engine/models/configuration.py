"""The configuration of a model: what its files say it is, where its tensors do not say otherwise.

Everything that builds or describes a model takes it from here, so that every executor runs the same one. What the
tensors decide, against what is written beside them:

    the head        `lm_head` is the embedding only if the file has no other numbers for it, whatever
                    tie_word_embeddings says. transformers decides so, too, since version 5
    quantisation    what is not stored in the layout that quantization_config names is read as it is stored
    other parts     what sees or hears is left out where the class does without it, and never run in Gemma 3, whose
                    class has it: then it need not be whole. Left out are layers that predict later tokens, too, in
                    every family: `mtp.*`, and num_nextn_predict_layers behind the last
    shards          a tensor is in the shard that has it, whatever the index says; one file of weights is read if an
                    index beside it lacks shards

Each is logged. Other contradictions are refused where the weights are read: a tensor of another shape than the
configuration gives it, one too few, one too many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from inference_engine.errors import ModelError
from inference_engine.models.checkpoint import SafetensorsCheckpoint, StoredTensor
from inference_engine.models.families import FAMILIES
from inference_engine.models.families.list_writer import EMBEDDING, HEAD
from inference_engine.models.file_keys import (
    CONFIG_KEYS,
    QUANTIZATION_KEYS,
    ROPE_KEYS,
    Keys,
    in_a_line,
    unlisted,
)
from inference_engine.models.folder import (
    CONFIG,
    INDEX,
    MAX_LAYERS,
    WEIGHTS,
    grouping_in,
    read_json,
    shards_listed,
    weights_read,
)
from inference_engine.models.gguf_config import gguf_config, gguf_notes
from inference_engine.models.gguf_header import read_gguf
from inference_engine.models.mapped import let_go
from inference_engine.models.quantised_layout import KEY as QUANTIZATION
from inference_engine.models.quantised_layout import layout_in
from inference_engine.models.verified import look_of

_LATER_TOKENS = "mtp."
_TIED = "tie_word_embeddings"
_STEP_BYTES = 2**24
_FLOATS = ("F32", "F16", "BF16")
_FP8 = "F8_E4M3"
# Types of models that do without these parts, by their keys, and how the names of the parts' tensors begin.
_LEAVES_OUT = ("gemma4", "gemma4_unified", "qwen3_5", "qwen3_5_moe")
# Classes of these types always have the part. No text reaches it, so it need not be whole, either.
_NEVER_RUNS = ("gemma3",)
_PROJECTORS = ("model.multi_modal_projector.", "vision_tower.", "multi_modal_projector.")
_PARTS = {
    "vision_config": ("model.vision_tower.", "model.embed_vision.", "model.visual.", *_PROJECTORS),
    "audio_config": ("model.audio_tower.", "model.embed_audio."),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """content: as config.json has it. notes: what in the files was decided against what else in them, for the log.

    left_out: how the names of tensors begin that are of parts left out.
    """

    content: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def configuration_of(stored: Path) -> Configuration:
    """Of a GGUF file, or of a folder that passed the checks of its configuration. Raises ModelError or OSError.

    Weights that are not there yet, or are damaged, say nothing here; who reads them refuses them.
    """
    if not stored.is_dir():
        header = read_gguf(stored)
        return Configuration(content=gguf_config(header), notes=gguf_notes(header))
    try:
        files = (CONFIG, *weights_read(stored))
    except ModelError:
        return Configuration(content=_of_text(read_json(stored / CONFIG))[0])
    return _of_folder(stored, tuple((name, *look_of(stored / name).values()) for name in files))


@lru_cache(maxsize=8)
def _of_folder(folder: Path, looks: tuple[tuple[str | int, ...], ...]) -> Configuration:
    """looks: name and status of each file that is read. Comparing a head with an embedding reads both."""
    content, left_out = _of_text(read_json(folder / CONFIG))
    begin = tuple(name for names in left_out.values() for name in names)
    try:
        tensors = SafetensorsCheckpoint(folder)
    except (ModelError, OSError):
        return Configuration(content=content)
    notes = []
    if left_out:
        count = sum(name.startswith(begin) for name in tensors.names())
        becomes = "not run" if content.get("model_type") in _NEVER_RUNS else "not loaded"
        notes.append(f"served as a model of text: {in_a_line([*left_out])}, with {count} tensors, are {becomes}")
    later = _later_layers(content)
    if found := [name for name in tensors.names() if name.startswith(later)]:
        first = next(one for one in later if found[0].startswith(one))
        notes.append(f"layers that predict later tokens, with {len(found)} tensors ({first}*), are not loaded")
    if _has_own_head(tensors):
        text = content.get("text_config")
        is_tied = any(one.get(_TIED) for one in (content, text) if isinstance(one, dict))
        content = {**content, _TIED: False}
        if isinstance(text, dict):
            content["text_config"] = {**text, _TIED: False}
        if is_tied:
            notes.append(
                f"{HEAD} is another matrix than {EMBEDDING}: the head of the file is used, though {CONFIG} says {_TIED}"
            )
    for place, given, keys in _tables(content):
        if unknown := unlisted(given, keys):
            notes.append(f"{place}: keys that are not known: {in_a_line(unknown)}")
    layout = layout_in(content) if grouping_in(content) is None else None
    if layout is not None and not any(
        name.endswith(".qweight") or tensors.stored(name).encoding == _FP8 for name in tensors.names()
    ):
        notes.append(f"no tensor is stored in {layout}, which {CONFIG} names: all are read as they are stored")
    if WEIGHTS in [name for name, *_ in looks]:
        if (folder / INDEX).is_file() and shards_listed(folder / INDEX) != (WEIGHTS,):
            notes.append(f"{INDEX} is not read: {WEIGHTS} is there, and not all shards of the index are")
    else:
        notes += _misplaced(folder, tensors)
    return Configuration(content=content, notes=tuple(notes), left_out=(*begin, *later))


def _of_text(content: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, tuple[str, ...]]]:
    """The configuration without the parts left out, and these by their keys, with those that are never run."""
    kind = content.get("model_type")
    if kind not in (*_LEAVES_OUT, *_NEVER_RUNS):
        return content, {}
    found = {key: names for key, names in _PARTS.items() if content.get(key) is not None}
    return {**content, **(dict.fromkeys(found) if kind in _LEAVES_OUT else {})}, found


def _later_layers(content: Mapping[str, Any]) -> tuple[str, ...]:
    """How names of the tensors begin that predict later tokens."""
    text = found if isinstance(found := content.get("text_config"), dict) else content
    layers, later = (text.get(name) for name in ("num_hidden_layers", "num_nextn_predict_layers"))
    if not isinstance(layers, int) or not isinstance(later, int):
        return (_LATER_TOKENS,)
    return _LATER_TOKENS, *(f"model.layers.{layer}." for layer in range(layers, layers + min(later, MAX_LAYERS)))


def _tables(content: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Keys]]:
    """What is in a configuration, where, with the table of its keys. Of other families than those with a list of
    operations transformers' class knows the keys (`loader.remarks`)."""
    if content.get("model_type") in FAMILIES:
        yield CONFIG, content, CONFIG_KEYS
    if isinstance(found := content.get(QUANTIZATION), dict) and grouping_in(content) is None:
        yield f"{CONFIG}: {QUANTIZATION}", found, QUANTIZATION_KEYS
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := content.get(name), dict):
            yield f"{CONFIG}: {name}", rope, ROPE_KEYS
            for part in rope.values():
                if isinstance(part, dict):
                    yield f"{CONFIG}: {name}", part, ROPE_KEYS


def _has_own_head(tensors: SafetensorsCheckpoint) -> bool:
    """Does the file have numbers for the head that are not those of the embedding?"""
    stem, other = HEAD.removesuffix("weight"), EMBEDDING.removesuffix("weight")
    parts = [name for name in tensors.names() if name.startswith(stem) and not name.endswith(".bias")]
    return EMBEDDING in tensors and any(
        (counterpart := other + name.removeprefix(stem)) not in tensors
        or not _are_equal(tensors.stored(name), tensors.stored(counterpart))
        for name in parts
    )


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """The same numbers: of one type by their bytes, else as float32. Stops at the first that differ."""
    if one.shape != other.shape:
        return False
    try:
        return _compare(one, other)
    finally:
        let_go(one.data)
        let_go(other.data)


def _compare(one: StoredTensor, other: StoredTensor) -> bool:
    if one.encoding == other.encoding:
        return all(
            np.array_equal(one.data[start : start + _STEP_BYTES], other.data[start : start + _STEP_BYTES])
            for start in range(0, one.data.nbytes, _STEP_BYTES)
        )
    if one.encoding not in _FLOATS or other.encoding not in _FLOATS or len(one.shape) != 2:
        return False
    rows = max(1, _STEP_BYTES // (4 * max(1, one.shape[1])))
    return all(
        np.array_equal(one.rows(start, start + rows), other.rows(start, start + rows))
        for start in range(0, one.shape[0], rows)
    )


def _misplaced(folder: Path, tensors: SafetensorsCheckpoint) -> list[str]:
    """What an index of shards says of them that is not so."""
    index = read_json(folder / INDEX)
    places: Mapping[str, str] = index["weight_map"]
    elsewhere = [name for name, file in tensors.files.items() if places.get(name, file) != file]
    unlisted = [name for name in tensors.files if name not in places]
    notes = []
    if elsewhere:
        notes.append(f"{len(elsewhere)} tensors are in another shard than {INDEX} says, first {elsewhere[0]}")
    if unlisted:
        notes.append(f"{len(unlisted)} tensors of the shards are not in {INDEX}, and are read, first {unlisted[0]}")
    metadata = index.get("metadata")
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    if said is not None and said != tensors.total_bytes:
        notes.append(f"the shards hold {tensors.total_bytes} bytes of tensors, {INDEX} says {said}")
    return notes
