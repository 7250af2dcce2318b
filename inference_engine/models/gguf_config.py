"""The configuration of a GGUF file, as transformers' config.json would say it.

transformers' own reader of these keys takes rotation as plain where the file has factors for long texts, a window of
every Gemma as its default, and reads with gguf.GGUFReader (see gguf_header.py). Here a file that says something the
configuration cannot say is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from inference_engine.errors import ModelError
from inference_engine.models.file_keys import in_a_line, unlisted_in_gguf
from inference_engine.models.gguf_architectures import ARCHITECTURES, Keys
from inference_engine.models.gguf_header import GgufHeader

# Of YaRN, with the values that the rotation has without them.
_NOT_READ: Mapping[str, float] = MappingProxyType(
    {
        "rope.scaling.yarn_ext_factor": 1.0,
        "rope.scaling.yarn_attn_factor": 1.0,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
    }
)
_BY_POSITION = ("attention.temperature_scale", "attention.temperature_length")


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """What config.json would hold. Raises ModelError for an architecture that is not read, and for missing values."""
    architecture = header.text("general.architecture") or ""
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{header.path}: general.architecture is {architecture!r}, which cannot be served from GGUF; "
            f"{', '.join(ARCHITECTURES)} can, others from a folder of safetensors"
        )
    if (kind := header.text("general.type")) not in (None, "model"):
        raise ModelError(f"{header.path}: general.type is {kind!r}, and not 'model'; name the file of a whole model")
    if (causal := header.values.get(f"{architecture}.attention.causal", True)) is not True:
        raise ModelError(
            f"{header.path}: {architecture}.attention.causal is {causal!r}, and not True; tokens that attend to later "
            "ones are not served"
        )
    for name in _BY_POSITION:
        if header.real(key := f"{architecture}.{name}"):
            raise ModelError(f"{header.path}: {key}: attention scaled by position cannot be served from GGUF")
    config = ARCHITECTURES[architecture].config(Keys(header, architecture))
    # What the file does not say is the class's default, but for what is named here: none is one of their values.
    return {
        name: value
        for name, value in config.items()
        if value is not None or name.endswith("_softcapping") or name in _MAY_BE_NONE
    }


_MAY_BE_NONE = ("q_lora_rank", "position_embedding_type", "num_global_key_value_heads")


def gguf_notes(header: GgufHeader) -> tuple[str, ...]:
    """What a file says that llama.cpp would read otherwise, or that its tensors contradict; for the log."""
    architecture, notes = header.text("general.architecture") or "", []
    if architecture in ("llama", "phi3") and (
        window := Keys(header, architecture).optional("attention.sliding_window")
    ):
        notes.append(
            f"{architecture}.attention.sliding_window is {window}: each token sees that many, as in a "
            f"{'Mistral' if architecture == 'llama' else 'Phi-3'} model of safetensors; llama.cpp ignores the key"
        )
    if architecture == "gpt-oss" and header.text("gpt-oss.rope.scaling.type") == "yarn":
        notes.append("YaRN's bounds are not rounded, as in every model of this architecture; llama.cpp rounds them")
    if count := len(later_tensors(header, architecture)):
        notes.append(f"layers that predict later tokens, with {count} tensors, are not loaded")
    for name, default in _NOT_READ.items():
        value = header.values.get(f"{architecture}.{name}", default)
        if np.any(value != default):
            notes.append(f"{architecture}.{name} is {value}, and is not read, as by llama.cpp")
    rows, said = header.tensors["token_embd.weight"].shape[0], header.values.get(f"{architecture}.vocab_size")
    if said is not None and np.any(said != rows):
        notes.append(f"token_embd.weight has {rows} rows, which is the vocabulary; {architecture}.vocab_size is {said}")
    listed = header.strings("tokenizer.chat_templates") or ()
    if absent := [name for name in listed if f"tokenizer.chat_template.{name}" not in header.values]:
        notes.append(f"tokenizer.chat_templates names templates that are not there: {in_a_line(absent)}")
    if unknown := unlisted_in_gguf([*header.values], architecture):
        notes.append(f"keys that are not known, and are not read: {in_a_line(unknown)}")
    return tuple(notes)


_IN_LAYER = re.compile(r"blk\.(\d{1,4})\.", re.ASCII)


def later_tensors(header: GgufHeader, architecture: str) -> frozenset[str]:
    """The tensors of layers that predict later tokens, which lie behind the model's own."""
    keys = Keys(header, architecture)
    if not keys.optional("nextn_predict_layers"):
        return frozenset()
    found = ((name, _IN_LAYER.match(name)) for name in header.tensors)
    return frozenset(name for name, place in found if place is not None and int(place[1]) >= keys.layers)
