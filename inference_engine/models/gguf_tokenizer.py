"""The tokenizer of a GGUF file, made of its header and compared with it.

transformers' own reader trusts the spelling of tokens: one outside of the byte alphabet gets another text, and then an
id beyond the vocabulary. Here every token has the text and the id that the header gives it (gguf_vocabulary.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from inference_engine.errors import ModelError
from inference_engine.models.gguf_header import GgufHeader
from inference_engine.models.gguf_vocabulary import (
    GEMMA4,
    NAMED,
    REMEDY,
    SENTENCEPIECE,
    GgufVocabulary,
    TokenType,
    chat_templates,
    end_ids,
    named_id,
    vocabulary_of,
)

# Ways to split text of byte-level tokenizers, by llama.cpp's names, that transformers' reader does not tell apart.
# Those of the second kind take every digit alone, then split as the first do.
_AS_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "granite-docling")
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
# They split as Llama 3 does.
_GLM = ("glm4", "glm5", "chatglm-bpe")
_ADDS_BOS = (*_LLAMA3, "tekken")
# A word that is a token is that token, whatever its merges give.
_WORDS_FIRST = (*_LLAMA3, "tekken", "glm4", "glm5")
# Qwen's models compose characters first. llama.cpp does not; tokenizer.json of these models does.
_COMPOSED = ("qwen2", "qwen35")
# Of Phi-3, whose other tokens of the kind take spaces and line breaks behind them.
_TAKE_NONE = ("<unk>", "<s>", "<|endoftext|>")
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

# -- made -------------------------------------------------------------------------------------------------------------


def write_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Write the tokenizer into `folder`, as transformers saves one, with the ends of a turn in generation_config.json.

    Raises ModelError, also if what was written does not agree with the header.
    """
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    vocabulary = vocabulary_of(header)
    kind = header.text("tokenizer.ggml.model")
    is_sentencepiece = kind in (SENTENCEPIECE, GEMMA4)
    backend = _sentencepiece(header, vocabulary) if is_sentencepiece else _byte_level(header, vocabulary)
    _add_wholes(backend, vocabulary, takes_spaces=_is_phi3(header))
    named = {name: vocabulary.texts[at] for name, at in vocabulary.named.items()}
    pre = header.text("tokenizer.ggml.pre")
    adds_bos = _flag(header, "tokenizer.ggml.add_bos_token", is_sentencepiece or pre in _ADDS_BOS)
    if adds_bos and "bos_token" not in named and named_id(header, "bos_token") is not None:
        raise ModelError(
            f"{header.path}: its tokenizer cannot be used: it adds a bos_token that is ordinary text; {REMEDY}"
        )
    tokenizer: Any = TokenizersBackend(
        tokenizer_object=backend,
        extra_special_tokens={name: named.pop(name) for name in ("eot_token", "eom_token") if name in named},
        add_bos_token=(adds_bos or kind == GEMMA4) and "bos_token" in named,
        add_eos_token=_flag(header, "tokenizer.ggml.add_eos_token", False) and "eos_token" in named,
        chat_template=chat_templates(header),
        clean_up_tokenization_spaces=False,
        **named,
    )
    tokenizer.save_pretrained(folder)
    if ends := end_ids(header):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
    check_made_tokenizer(header, folder)


def _merged(merges: Sequence[tuple[str, str]]) -> set[str]:
    """What merges take and make: a vocabulary has it, whatever its type says."""
    return {text for first, second in merges for text in (first, second, first + second)}


def _byte_level(header: GgufHeader, vocabulary: GgufVocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    pre = header.text("tokenizer.ggml.pre")
    splits, alike = _SPLIT_IN_TURN.get(pre or ""), "llama3" if pre in _GLM else pre
    if splits is None and alike in GGUF_PRE_TOKENIZER_SPLITS:
        splits = (GGUF_PRE_TOKENIZER_SPLITS[alike],)
    if splits is None and pre not in (*_AS_GPT2, *_DIGITS_ALONE):
        raise ModelError(f"{header.path}: its tokenizer splits text as {pre!r}, which is not known; {REMEDY}")
    merges = _merges(header)
    if merges is None:
        raise ModelError(f"{header.path}: its tokenizer cannot be read: no tokenizer.ggml.merges; {REMEDY}")
    spelling = bytes_to_unicode()
    alphabet = {*spelling.values()}
    wholes, merged = vocabulary.wholes(), _merged(merges)
    types = vocabulary.types
    vocab = {
        text: at
        for at, text in enumerate(vocabulary.texts)
        if at in wholes or ({*text} <= alphabet and (types[at] != TokenType.UNUSED or text in merged))
    }
    for at, text in enumerate(vocabulary.texts):
        if at not in wholes and types[at] != TokenType.UNUSED and not {*text} <= alphabet:
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

    wholes, types = vocabulary.wholes(), vocabulary.types
    vocab = {text: at for at, text in enumerate(vocabulary.texts)}
    is_gemma = (header.text("general.architecture") or "").startswith("gemma")
    is_gemma4 = header.text("tokenizer.ggml.model") == GEMMA4
    merges = _merges(header)
    if merges is None and is_gemma4:
        raise ModelError(f"{header.path}: its tokenizer cannot be read: no tokenizer.ggml.merges; {REMEDY}")
    if merges is None:
        scores = header.values.get("tokenizer.ggml.scores", np.zeros(len(vocabulary.texts) if is_gemma else 0))
        if not isinstance(scores, np.ndarray) or scores.dtype.kind not in "iuf" or len(scores) < len(vocabulary.texts):
            raise ModelError(
                f"{header.path}: its tokenizer cannot be read: tokenizer.ggml.scores is not {len(vocabulary.texts)} "
                f"numbers, one for each token; {REMEDY}"
            )
        order = [-float(at) for at in vocab.values()] if is_gemma else [float(scores[at]) for at in vocab.values()]
        # Bytes and tokens that are found as a whole are no result of a merge, and none's part.
        apart = {text for text, at in vocab.items() if at in wholes or types[at] == TokenType.BYTE}
        merges = generate_merges(vocab, dict(zip(vocab, order, strict=True)), apart)
    merged = _merged(merges)
    vocab = {text: at for text, at in vocab.items() if types[at] != TokenType.UNUSED or at in wholes or text in merged}
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
    has_prefix = _flag(header, "tokenizer.ggml.add_space_prefix", not is_gemma4)
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


def _is_phi3(header: GgufHeader) -> bool:
    """No key says it. Phi-4, of the same architecture, has byte-level tokens. llama.cpp looks at the name alone."""
    name = (header.text("general.name") or "").lower()
    is_of_its_kind = header.text("general.architecture") == "phi3"
    return (
        "phi-3" in name or "phi3" in name or (is_of_its_kind and header.text("tokenizer.ggml.model") == SENTENCEPIECE)
    )


def _add_wholes(tokenizer: Any, vocabulary: GgufVocabulary, *, takes_spaces: bool) -> None:
    """takes_spaces: all but a few take what is blank behind them."""
    from tokenizers import AddedToken

    specials = vocabulary.specials()
    tokenizer.add_tokens(
        [
            AddedToken(text, normalized=False, special=at in specials, rstrip=takes_spaces and text not in _TAKE_NONE)
            for at, text in vocabulary.wholes().items()
        ]
    )


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
            raise refusal(f"{NAMED[name]} is {at}, {vocabulary.texts[at]!r}, and it has {content!r} as {name}")


def _some(ids: Sequence[int]) -> str:
    return f"{list(ids)[:8]}" + ("…" if len(ids) > 8 else "")
