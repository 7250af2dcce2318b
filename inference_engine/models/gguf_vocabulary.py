"""What the header of a GGUF file says of its tokens: texts, types, ids by name, chat templates.

An id is a token's place in the file, whatever its text:

    type 3, 2   control, unknown   found in text as a whole, skipped when ids are decoded
    type 4      user defined       found in text as a whole, and decoded as text
    type 1, 6   normal, byte       reached by merges
    type 5      unused             no token: its id decodes to nothing, unless merges lead to it

What a key means, and an absent one, is what llama.cpp makes of it: src/llama-vocab.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType

import numpy as np

from inference_engine.errors import ModelError
from inference_engine.models.file_keys import REFUSED, TOKENIZER_KEYS
from inference_engine.models.gguf_header import GgufHeader

_NONE = 2**32 - 1  # as some converters write an id that is not there
NAMED = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "eot_token": "tokenizer.ggml.eot_token_id",
    "eom_token": "tokenizer.ggml.eom_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",
    "cls_token": "tokenizer.ggml.cls_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}
_ENDS = ("eos_token", "eot_token", "eom_token")
_MORE_ENDS = "tokenizer.ggml.eos_token_ids"
# Behind a text that was filled in, and before another file: llama.cpp ends there, too.
_FILLED_ENDS = tuple(f"tokenizer.ggml.fim_{name}_token_id" for name in ("pad", "rep", "sep"))
# Texts of tokens that llama.cpp takes for control tokens that end what is generated, whatever their types, and the ids
# by name. `_end_texts` has the exceptions.
_ENDS_BY_TEXT = """
    <|eot_id|> <|eom_id|> <|im_end|> <|end|> <end_of_turn> <end_of_utterance> <|endoftext|> <|end_of_text|> <EOT> _<EOT>
    <|return|> <|call|> <|calls|> <|flush|> <eos> <turn|> </s> [EOT] [EOS] <｜end▁of▁sentence｜>
    <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
"""
_END_TEXTS = frozenset(_ENDS_BY_TEXT.split())
# Behind it the result of a tool is filled in: it ends a turn, and is text.
_TOOL_RESULT = "<|tool_response>"
# Kinds of tokenizers that spell spaces ▁, and bytes that are no token <0x00>.
SENTENCEPIECE, GEMMA4 = "llama", "gemma4"
_SENTENCEPIECE_DEFAULTS = {"unk_token": 0, "bos_token": 1, "eos_token": 2}
_TEMPLATE = "tokenizer.chat_template"
_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

REMEDY = (
    "put the file into a folder of its own beside the model's tokenizer.json and tokenizer_config.json, and name the "
    "folder"
)


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufVocabulary:
    """The tokens of a header, by id: texts and types. named: ids by the names that tokenizer_config.json has for them,
    but for those of ordinary text, such as a `!` that pads.

    rows: of the model's matrix of embeddings; there can be fewer tokens, never more.
    """

    path: Path
    texts: tuple[str, ...]
    types: tuple[int, ...]
    named: Mapping[str, int]
    rows: int

    def specials(self) -> dict[int, str]:
        """The texts that are skipped when ids are decoded."""
        named = {*self.named.values()}
        chosen = (TokenType.CONTROL, TokenType.UNKNOWN)
        return {at: text for at, text in enumerate(self.texts) if self.types[at] in chosen or at in named}

    def wholes(self) -> dict[int, str]:
        """The texts that are found in text as a whole, the special ones among them."""
        user = {at: text for at, text in enumerate(self.texts) if self.types[at] == TokenType.USER_DEFINED}
        return {**user, **self.specials()}


def vocabulary_of(header: GgufHeader) -> GgufVocabulary:
    """The tokens and their names. Raises ModelError for ids that are none, equal texts, and keys that are refused."""
    path = header.path
    _check_keys(header)
    kind = header.text("tokenizer.ggml.model")
    texts = header.strings("tokenizer.ggml.tokens")
    if kind not in ("gpt2", SENTENCEPIECE, GEMMA4) or texts is None:
        what = f"is of the kind {kind!r}" if texts is not None or kind is None else "has no tokens"
        raise ModelError(f"{path}: its tokenizer {what}, which cannot be read; {REMEDY}")
    texts = [text or f"[EMPTY_{at}]" for at, text in enumerate(texts)]
    if len(seen := {text: at for at, text in enumerate(texts)}) < len(texts):
        at = next(at for at, text in enumerate(texts) if seen[text] != at)
        raise ModelError(
            f"{path}: its tokenizer cannot be read: the tokens {at} and {seen[texts[at]]} are both {texts[at]!r}; "
            f"{REMEDY}"
        )
    types = header.values.get("tokenizer.ggml.token_type", np.full(len(texts), TokenType.NORMAL))
    if not isinstance(types, np.ndarray) or types.dtype.kind not in "iu" or len(types) < len(texts):
        raise ModelError(
            f"{path}: its tokenizer cannot be read: tokenizer.ggml.token_type is not {len(texts)} whole numbers, one "
            f"for each token; {REMEDY}"
        )
    matrix = header.tensors.get("token_embd.weight")
    rows = len(texts) if matrix is None else matrix.shape[0]
    if len(texts) > rows:
        raise ModelError(
            f"{path}: its tokenizer cannot be used: {len(texts)} tokens for a matrix token_embd.weight of {rows} rows, "
            f"so ids would reach beyond the model; {REMEDY}"
        )
    ends = _end_texts(texts)
    own = [int(TokenType.CONTROL) if text in ends else of for text, of in zip(texts, types.tolist(), strict=False)]
    named = _named(header, len(texts), kind == SENTENCEPIECE)
    normal = {at for at in named.values() if own[at] == TokenType.NORMAL}
    merges = (header.strings("tokenizer.ggml.merges") if normal else None) or ()
    merged = {text for merge in merges for text in (*merge.split(" "), merge.replace(" ", ""))}
    return GgufVocabulary(
        path=path,
        texts=tuple(texts),
        types=tuple(own),
        # One that merges make, or make others of, stays that: found as a whole, it would split words.
        named={name: at for name, at in named.items() if at not in normal or texts[at] not in merged},
        rows=rows,
    )


def _end_texts(texts: Sequence[str]) -> frozenset[str]:
    """Of `_END_TEXTS`, those that end a turn of a model with these tokens."""
    there, none = {*texts}, set()
    # Of gpt-oss and Solar Open, where it is behind every message, and others behind a turn.
    if there & {"<|call|>", "<|calls|>"} and there & {"<|return|>", "<|flush|>"}:
        none.add("<|end|>")
    if _TOOL_RESULT in there:
        none.add("</s>")  # Gemma 4 has a tag of HTML of this text
    return _END_TEXTS - none


def _check_keys(header: GgufHeader) -> None:
    for key in header.values:
        treatment, why = TOKENIZER_KEYS.get(key, (REFUSED, "not a key that is known, so texts could mean other ids"))
        if key.startswith("tokenizer.ggml.") and treatment == REFUSED:
            raise ModelError(f"{header.path}: its tokenizer cannot be read: {key}: {why}; {REMEDY}")


def _named(header: GgufHeader, tokens: int, is_sentencepiece: bool) -> Mapping[str, int]:
    found = {name: header.number(key) for name, key in NAMED.items()}
    for name, default in _SENTENCEPIECE_DEFAULTS.items():
        if is_sentencepiece and found[name] in (None, _NONE) and default < tokens:
            found[name] = default
    named = {name: at for name, at in found.items() if at is not None and at != _NONE}
    for key, at in [
        *((NAMED[name], at) for name, at in named.items()),
        *((_MORE_ENDS, at) for at in _more_ends(header)),
        *_filled_ends(header),
    ]:
        if not 0 <= at < tokens:
            raise ModelError(
                f"{header.path}: its tokenizer cannot be used: {key} is {at}, and there are {tokens} tokens; {REMEDY}"
            )
    return MappingProxyType(named)


def _more_ends(header: GgufHeader) -> list[int]:
    found = header.values.get(_MORE_ENDS, np.zeros(0, np.int64))
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu":
        raise ModelError(f"{header.path}: {_MORE_ENDS}: expected an array of whole numbers; get the file again")
    return [int(at) for at in found if at != _NONE]


def _filled_ends(header: GgufHeader) -> list[tuple[str, int]]:
    found = ((key, header.number(key)) for key in _FILLED_ENDS)
    return [(key, at) for key, at in found if at is not None and at != _NONE]


def named_id(header: GgufHeader, name: str) -> int | None:
    """The id of a token by its name in tokenizer_config.json, such as `pad_token`; None for one that is no row."""
    defaults = _SENTENCEPIECE_DEFAULTS if header.text("tokenizer.ggml.model") == SENTENCEPIECE else {}
    at = header.number(NAMED[name])
    at = defaults.get(name) if at in (None, _NONE) else at
    return at if at is not None and 0 <= at < _rows(header) else None


def named_end_ids(header: GgufHeader) -> list[int]:
    """The ids that the header names as ends of a turn: of eos, eot and eom, more of eos, and what is filled in."""
    ids = [named_id(header, name) for name in _ENDS]
    more = (*_more_ends(header), *(at for _, at in _filled_ends(header)))
    ids += [at for at in more if 0 <= at < _rows(header)]
    return list(dict.fromkeys(at for at in ids if at is not None))


def end_ids(header: GgufHeader) -> list[int]:
    """The ids that end a turn, by the header: those that it names, and those of texts that end a turn in any model."""
    texts = header.strings("tokenizer.ggml.tokens") or []
    ends = {*_end_texts(texts), _TOOL_RESULT}
    by_text = [at for at, text in enumerate(texts) if text in ends and at < _rows(header)]
    return list(dict.fromkeys([*named_end_ids(header), *by_text]))


def _rows(header: GgufHeader) -> int:
    matrix = header.tensors.get("token_embd.weight")
    return _NONE if matrix is None else matrix.shape[0]


def chat_templates(header: GgufHeader) -> str | dict[str, str] | None:
    """The chat template, or all of them by name. Raises ModelError for a name that is no name of a file."""
    named = {}
    for key in header.values:
        if key.startswith(f"{_TEMPLATE}."):
            name = key.removeprefix(f"{_TEMPLATE}.")
            if _TEMPLATE_NAME.fullmatch(name) is None:  # it becomes the name of a file
                raise ModelError(f"{header.path}: {key[:80]!r}: not a name of a chat template; {REMEDY}")
            named[name] = header.text(key) or ""
    default = header.text(_TEMPLATE)
    return {**({} if default is None else {"default": default}), **named} if named else default
