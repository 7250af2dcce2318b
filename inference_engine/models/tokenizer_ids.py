"""The ids that a model's files name, read without transformers: those of its tokenizer, the ends of a turn, and the
bytes that ids stand for.

Ends are a union, because files of one model disagree by omission: config.json has one id, generation_config.json a
list, the tokenizer the end of a text, a GGUF header those of a turn and of a message. What the chat template writes
after an answer is known only by rendering it (`server/http/chat_text.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_engine.errors import ModelError
from inference_engine.models.folder import CONFIG, read_json
from inference_engine.models.gguf_header import read_gguf
from inference_engine.models.gguf_tokenizer import check_made_tokenizer
from inference_engine.models.gguf_vocabulary import end_ids, vocabulary_of
from inference_engine.models.loader import FoundModel, check_model, own_tokenizer
from inference_engine.models.token_bytes import bytes_of
from inference_engine.types import TokenBytes

logger = logging.getLogger(__name__)

_ENDS = ("eos_token", "eot_token", "eom_token")
# The names of tokenizer_config.json, which are variables of chat templates, too.
SPECIAL_TOKENS = ("bos_token", *_ENDS, "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerIds:
    """highest: the largest id of all tokens. named: ids by the names that they have in chat templates. ends: of a turn,
    wherever a file names them. lacking: texts named as ends that are no tokens."""

    highest: int
    named: Mapping[str, int]
    ends: tuple[int, ...]
    lacking: tuple[str, ...]


def read_tokenizer_ids(folder: Path) -> TokenizerIds | None:
    """None where there is no tokenizer.json. Raises ModelError for one that cannot be read."""
    if not (folder / "tokenizer.json").is_file():
        return None
    specification = read_json(folder / "tokenizer.json")
    places = [folder / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
    config, others = (read_json(path) if path.is_file() else {} for path in places)
    # As transformers has it: without tokens of its own a configuration is an old one, and the map's names count.
    called = config if "added_tokens_decoder" in config else {**config, **others}
    try:
        vocabulary = specification["model"]["vocab"]
        by_text = (
            dict(vocabulary) if isinstance(vocabulary, dict) else {text: at for at, (text, *_) in enumerate(vocabulary)}
        )
        by_text |= {token["content"]: token["id"] for token in specification.get("added_tokens") or ()}
        texts = {name: text_of(called.get(name)) for name in SPECIAL_TOKENS}
        named = {name: int(by_text[text]) for name, text in texts.items() if text in by_text}
        said = [text_of(one.get(name)) for one in (called, config, others) for name in _ENDS]
        ends = [text for text in dict.fromkeys(said) if text]
        return TokenizerIds(
            highest=max(map(int, by_text.values()), default=0),
            named=named,
            ends=tuple(dict.fromkeys(int(by_text[text]) for text in ends if text in by_text)),
            lacking=tuple(text for text in ends if text not in by_text),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{folder / 'tokenizer.json'}: not what the tokenizers library writes: {type(error).__name__}: {error}"
        ) from error


def check_tokenizer_ids(found: FoundModel, tokenizer: Path, rows: int) -> str:
    """Compare the tokenizer in the folder `tokenizer` with the model. Returns what a user should know, or "".

    rows: of its vocabulary. One that was made of a GGUF file is compared with the header, token by token. Raises
    ModelError if an end of a turn, or another token that tokenizer_config.json names, is no row of the model.
    """
    if found.only_gguf and tokenizer != found.folder:
        check_made_tokenizer(read_gguf(found.stored), tokenizer)
    ids = read_tokenizer_ids(tokenizer)
    ends = [("an end of a turn", at) for at in file_end_ids(found, tokenizer)]
    beyond = [(name, at) for name, at in [*(ids.named.items() if ids else ()), *ends] if at >= rows]
    if beyond:
        name, at = beyond[0]
        raise ModelError(
            f"{tokenizer}: {name} is {at}, and the model has {rows} rows, so no chat is possible; the files are of "
            "different models: get them again"
        )
    if ids is not None and ids.lacking:
        return f"what it names as an end of a turn is no token of it: {', '.join(map(repr, ids.lacking))}"
    if ids is not None and ids.highest >= rows:
        return f"its ids reach {ids.highest}, and the model has {rows} rows: texts with the tokens beyond are refused"
    return ""


def file_end_ids(found: FoundModel, tokenizer: Path | None) -> tuple[int, ...]:
    """The ids that end a turn by the model's configurations, by its GGUF header, and by the tokenizer in a folder."""
    ids: list[Any] = []
    for folder in dict.fromkeys(([] if tokenizer is None else [tokenizer]) + [found.folder]):
        if folder == tokenizer and (read := read_tokenizer_ids(folder)) is not None:
            ids += read.ends
        # What lies beside a GGUF file is about it only if it has its tokenizer.
        if folder == tokenizer or not found.only_gguf:
            for name in ("generation_config.json", CONFIG):
                if (folder / name).is_file():
                    ids += _ids_in(folder / name)
    if found.only_gguf:
        ids += end_ids(read_gguf(found.stored))
    return tuple(dict.fromkeys(ids))


def _ids_in(path: Path) -> Iterable[int]:
    config = read_json(path)
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        found = part.get("eos_token_id")
        for at in found if isinstance(found, list) else [] if found is None else [found]:
            if not isinstance(at, int) or isinstance(at, bool):
                raise ModelError(
                    f"{path}: eos_token_id is {found!r}, neither an id nor a list of them; get the file again"
                )
            if at >= 0:
                yield at


def read_token_bytes(name_or_path: str, cache: Path) -> TokenBytes:
    """Of a model by its name. Raises ModelError where its files do not say."""
    found = check_model(name_or_path, cache=cache)
    folder = own_tokenizer(found, name_or_path, cache)
    if folder is not None and (folder / "tokenizer.json").is_file():
        return TokenBytes(specification=(folder / "tokenizer.json").read_text(encoding="utf-8"))
    if found.only_gguf:
        header = read_gguf(found.stored)
        return bytes_of(vocabulary_of(header), is_byte_level=header.text("tokenizer.ggml.model") == "gpt2")
    raise ModelError(f"{found.folder}: it has no tokenizer.json, and no GGUF file says the bytes of its tokens")


def text_of(token: Any) -> str | None:
    """The text of a token in tokenizer_config.json, which is that text or describes it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
