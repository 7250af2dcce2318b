"""The page of model files: every key of a header or a configuration, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator

from inference_engine.models import file_keys
from inference_engine.models.families import FAMILIES
from inference_engine.models.file_keys import Keys
from inference_engine.models.folder import CONFIGURATION_FILES, TOKENIZER_FILES
from scripts.reference.markdown import code, page, table

INTRODUCTION = f"""
    What a model's files say is honoured, refused by name, or without effect. A key that is absent has the default of
    the format's reference reader: llama.cpp for GGUF, transformers for folders. A key that is not on this page is named
    in the log of a start, by `kakeya doctor` and by `kakeya models show`. Where what is written contradicts the
    tensors, the tensors decide and the same three places say so, or the file is refused
    ([ADR 0038](../adr/0038-a-file-is-what-its-tensors-say.md)). `*` stands for any other key that begins so.

    Read of a folder: {", ".join(map(code, CONFIGURATION_FILES))}, `model.safetensors` or the shards of
    `model.safetensors.index.json`; by clients with text {", ".join(map(code, TOKENIZER_FILES))}. What becomes of
    each type of tensor: [types of tensors](tensor_types.md).
"""

SECTIONS: tuple[tuple[str, str, Keys], ...] = (
    ("GGUF: general", "", file_keys.GGUF_KEYS),
    (
        "GGUF: the architecture",
        "Below the name of the architecture: `llama.context_length`.",
        file_keys.ARCHITECTURE_KEYS,
    ),
    ("GGUF: the tokenizer", "", file_keys.TOKENIZER_KEYS),
    (
        "config.json",
        f"Of the types {', '.join(map(code, FAMILIES))}. Of others, fields do what transformers' class does with them.",
        file_keys.CONFIG_KEYS,
    ),
    ("config.json: rope_parameters, rope_scaling", "", file_keys.ROPE_KEYS),
    ("config.json: quantization_config", "", file_keys.QUANTIZATION_KEYS),
    ("model.safetensors.index.json", "", file_keys.INDEX_KEYS),
    ("generation_config.json", "", file_keys.GENERATION_KEYS),
    ("tokenizer_config.json", "", file_keys.TOKENIZER_CONFIG_KEYS),
)


def render() -> str:
    parts = (part for title, says, keys in SECTIONS for part in (f"## {title}", says, _table(keys)))
    return page("Model files", "inference_engine/models/file_keys.py", INTRODUCTION, *parts)


def _table(keys: Keys) -> str:
    return table(("key", "is", "how"), _rows(keys))


def _rows(keys: Keys) -> Iterator[tuple[str, str, str]]:
    for name, (effect, how) in keys.items():
        yield code(name), effect, how
