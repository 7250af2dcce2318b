"""The tokenizer of a GGUF file, made of its header and compared with it.

transformers' own reader trusts the spelling of tokens: one outside of the byte alphabet gets another text, and then an
id beyond the vocabulary. Here an id is the token's place in the file, whatever its text:

    type 3, 2   control, unknown   found in text as a whole, skipped when ids are decoded
    type 4      user defined       found in text as a whole, and decoded as text
    type 1, 6   normal, byte       reached by merges
    type 5      unused             no token: its id decodes to nothing, unless merges lead to it

What the reader of the reference does with each key: llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from inference_engine.errors import ModelError
from inference_engine.models.file_keys import REFUSED, TOKENIZER_KEYS
from inference_engine.models.gguf_header import GgufHeader

# Ways to split text of byte-level tokenizers, by llama.cpp's names, that transformers' reader does not tell apart.
# Those of the second kind take every digit alone, then split as the first do.
_AS_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais")
_DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_LLAMA3 = (
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
)
_ADDS_BOS = (*_LLAMA3, "tekken")
# A word that is a token is that token, whatever its merges give.
_WORDS_FIRST = (*_LLAMA3, "tekken")
# Qwen's models compose characters first. llama.cpp does not; tokenizer.json of these models does.
_COMPOSED = ("qwen2", "qwen35")
# One after the other: each splits what those before have left.
_SPLIT_IN_TURN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "deepseek-v3": (
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            (
                r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
                r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
        )
    }
)

_NONE = 2**32 - 1  # as some converters write an id that is not there
_NAMED = {
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
_SENTENCEPIECE_DEFAULTS = {"unk_token": 0, "bos_token": 1, "eos_token": 2}
_TEMPLATE = "tokenizer.chat_template"
_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

REMEDY = (
    "put the file into a folder of its own beside the model's tokenizer.json and tokenizer_config.json, and name the "
    "folder"
)


class _Type(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufVocabulary:
    """The tokens of a header, by id: texts and types. named: ids by the names that tokenizer_config.json has for them.

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
        chosen = (_Type.CONTROL, _Type.UNKNOWN)
        return {at: text for at, text in enumerate(self.texts) if self.types[at] in chosen or at in named}

    def wholes(self) -> dict[int, str]:
        """The texts that are found in text as a whole, the special ones among them."""
        user = {at: text for at, text in enumerate(self.texts) if self.types[at] == _Type.USER_DEFINED}
        return {**user, **self.specials()}


def vocabulary_of(header: GgufHeader) -> GgufVocabulary:
    """The tokens and their names. Raises ModelError for ids that are none, equal texts, and keys that are refused."""
    path = header.path
    _check_keys(header)
    kind = header.text("tokenizer.ggml.model")
    texts = header.strings("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama") or texts is None:
        what = f"is of the kind {kind!r}" if texts is not None or kind is None else "has no tokens"
        raise ModelError(f"{path}: its tokenizer {what}, which cannot be read; {REMEDY}")
    texts = [text or f"[EMPTY_{at}]" for at, text in enumerate(texts)]
    if len(seen := {text: at for at, text in enumerate(texts)}) < len(texts):
        at = next(at for at, text in enumerate(texts) if seen[text] != at)
        raise ModelError(
            f"{path}: its tokenizer cannot be read: the tokens {at} and {seen[texts[at]]} are both {texts[at]!r}; "
            f"{REMEDY}"
        )
    types = header.values.get("tokenizer.ggml.token_type", np.full(len(texts), _Type.NORMAL))
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
    return GgufVocabulary(
        path=path,
        texts=tuple(texts),
        types=tuple(types[: len(texts)].tolist()),
        named=_named(header, len(texts), kind == "llama"),
        rows=rows,
    )


def _check_keys(header: GgufHeader) -> None:
    for key in (*header.values, *header.string_arrays):
        treatment, why = TOKENIZER_KEYS.get(key, (REFUSED, "not a key that is known, so texts could mean other ids"))
        if key.startswith("tokenizer.ggml.") and treatment == REFUSED:
            raise ModelError(f"{header.path}: its tokenizer cannot be read: {key}: {why}; {REMEDY}")


def _named(header: GgufHeader, tokens: int, is_sentencepiece: bool) -> Mapping[str, int]:
    found = {name: header.number(key) for name, key in _NAMED.items()}
    if is_sentencepiece:
        found = {name: _SENTENCEPIECE_DEFAULTS.get(name) if at is None else at for name, at in found.items()}
    named = {name: at for name, at in found.items() if at is not None and at != _NONE}
    for name, at in named.items():
        if not 0 <= at < tokens:
            raise ModelError(
                f"{header.path}: its tokenizer cannot be used: {_NAMED[name]} is {at}, and there are {tokens} tokens; "
                f"{REMEDY}"
            )
    return MappingProxyType(named)


def named_id(header: GgufHeader, name: str) -> int | None:
    """The id of a token by its name in tokenizer_config.json, such as `pad_token`; None for one that is no row."""
    matrix = header.tensors.get("token_embd.weight")
    rows = _NONE if matrix is None else matrix.shape[0]
    defaults = _SENTENCEPIECE_DEFAULTS if header.text("tokenizer.ggml.model") == "llama" else {}
    at = header.number(_NAMED[name])
    at = defaults.get(name) if at is None else at
    return at if at is not None and 0 <= at < rows else None


def end_ids(header: GgufHeader) -> list[int]:
    """The ids that end a turn, by the header: of eos, eot and eom."""
    ids = [named_id(header, name) for name in _ENDS]
    return list(dict.fromkeys(at for at in ids if at is not None))


# -- made -------------------------------------------------------------------------------------------------------------


def write_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Write the tokenizer into `folder`, as transformers saves one, with the ends of a turn in generation_config.json.

    Raises ModelError, also if what was written does not agree with the header.
    """
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    vocabulary = vocabulary_of(header)
    is_sentencepiece = header.text("tokenizer.ggml.model") == "llama"
    backend = _sentencepiece(header, vocabulary) if is_sentencepiece else _byte_level(header, vocabulary)
    _add_wholes(backend, vocabulary)
    named = {name: vocabulary.texts[at] for name, at in vocabulary.named.items()}
    pre = header.text("tokenizer.ggml.pre")
    adds_bos = _flag(header, "tokenizer.ggml.add_bos_token", is_sentencepiece or pre in _ADDS_BOS)
    tokenizer: Any = TokenizersBackend(
        tokenizer_object=backend,
        extra_special_tokens={name: named.pop(name) for name in ("eot_token", "eom_token") if name in named},
        add_bos_token=adds_bos and "bos_token" in named,
        add_eos_token=_flag(header, "tokenizer.ggml.add_eos_token", False) and "eos_token" in named,
        chat_template=chat_templates(header),
        clean_up_tokenization_spaces=False,
        **named,
    )
    tokenizer.save_pretrained(folder)
    if ends := end_ids(header):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
    check_made_tokenizer(header, folder)


def _byte_level(header: GgufHeader, vocabulary: GgufVocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    pre = header.text("tokenizer.ggml.pre")
    splits = _SPLIT_IN_TURN.get(pre or "")
    if splits is None and pre in GGUF_PRE_TOKENIZER_SPLITS:
        splits = (GGUF_PRE_TOKENIZER_SPLITS[pre],)
    if splits is None and pre not in (*_AS_GPT2, *_DIGITS_ALONE):
        raise ModelError(f"{header.path}: its tokenizer splits text as {pre!r}, which is not known; {REMEDY}")
    merges = _merges(header)
    if merges is None:
        raise ModelError(f"{header.path}: its tokenizer cannot be read: no tokenizer.ggml.merges; {REMEDY}")
    spelling = bytes_to_unicode()
    alphabet = {*spelling.values()}
    wholes, merged = vocabulary.wholes(), {first + second for first, second in merges}
    types = vocabulary.types
    vocab = {
        text: at
        for at, text in enumerate(vocabulary.texts)
        if at in wholes or ({*text} <= alphabet and (types[at] != _Type.UNUSED or text in merged))
    }
    for at, text in enumerate(vocabulary.texts):
        if at not in wholes and types[at] != _Type.UNUSED and not {*text} <= alphabet:
            vocab.setdefault("".join(spelling[byte] for byte in text.encode()), at)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WORDS_FIRST))
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    if splits is not None:
        before: list[Any] = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        before = [pre_tokenizers.Digits(individual_digits=True)] if pre in _DIGITS_ALONE else []
        last = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, last]) if before else last
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(header: GgufHeader, vocabulary: GgufVocabulary) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers.tokenization_utils_base import generate_merges

    wholes = vocabulary.wholes()
    vocab = {
        text: at for at, text in enumerate(vocabulary.texts) if vocabulary.types[at] != _Type.UNUSED or at in wholes
    }
    is_gemma = (header.text("general.architecture") or "").startswith("gemma")
    merges = _merges(header)
    if merges is None:
        scores = header.values.get("tokenizer.ggml.scores", np.zeros(len(vocabulary.texts)))
        if not isinstance(scores, np.ndarray) or scores.dtype.kind not in "iuf" or len(scores) < len(vocabulary.texts):
            raise ModelError(
                f"{header.path}: its tokenizer cannot be read: tokenizer.ggml.scores is not {len(vocabulary.texts)} "
                f"numbers, one for each token; {REMEDY}"
            )
        order = [-float(at) for at in vocab.values()] if is_gemma else [float(scores[at]) for at in vocab.values()]
        # Bytes and tokens that are found as a whole are no result of a merge, and none's part.
        apart = {text for text, at in vocab.items() if at in wholes or vocabulary.types[at] == _Type.BYTE}
        merges = generate_merges(vocab, dict(zip(vocab, order, strict=True)), apart)
    unknown = vocabulary.named.get("unk_token")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            fuse_unk=True,
            byte_fallback=True,
            unk_token=None if unknown is None else vocabulary.texts[unknown],
        )
    )
    has_prefix = _flag(header, "tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if has_prefix else spaces
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if has_prefix else decoding)
    if is_gemma:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return tokenizer


def _merges(header: GgufHeader) -> list[tuple[str, str]] | None:
    found = header.strings("tokenizer.ggml.merges")
    if found is None:
        return None
    # A piece can begin with a space, and is never empty.
    cuts = [(merge, merge.find(" ", 1)) for merge in found]
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts if cut > 0]


def _add_wholes(tokenizer: Any, vocabulary: GgufVocabulary) -> None:
    from tokenizers import AddedToken

    specials = vocabulary.specials()
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False, special=at in specials) for at, text in vocabulary.wholes().items()]
    )


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


def _flag(header: GgufHeader, key: str, default: bool) -> bool:
    value = header.values.get(key, default)
    if isinstance(value, bool | int) and value in (0, 1):
        return bool(value)
    raise ModelError(f"{header.path}: its tokenizer cannot be read: {key} is {value!r}, not true or false; {REMEDY}")


# -- checked ----------------------------------------------------------------------------------------------------------


def check_made_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Compare the tokenizer in `folder` with the header it was made of. Raises ModelError for what differs.

    Every control and user-defined token has its id and is found as a whole, what the header names has the header's id,
    and no id is beyond the rows of the model.
    """
    from tokenizers import Tokenizer

    vocabulary = vocabulary_of(header)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def refusal(what: str) -> ModelError:
        return ModelError(f"{header.path}: its tokenizer cannot be used: {what}; {REMEDY}")

    if (highest := max(tokenizer.get_vocab().values(), default=0)) >= vocabulary.rows:
        raise refusal(f"the id {highest} is beyond the model's {vocabulary.rows} rows")
    for at, text in vocabulary.wholes().items():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if tokenizer.token_to_id(text) != at or ids != [at]:
            raise refusal(f"its token {at}, {text!r}, is encoded as {_some(ids)}")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    for name, at in vocabulary.named.items():
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if content != vocabulary.texts[at]:
            raise refusal(f"{_NAMED[name]} is {at}, {vocabulary.texts[at]!r}, and it has {content!r} as {name}")


def _some(ids: Sequence[int]) -> str:
    return f"{list(ids)[:8]}" + ("…" if len(ids) > 8 else "")
