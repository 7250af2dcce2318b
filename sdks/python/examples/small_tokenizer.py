"""A tokenizer of one id for each printable character, so that these examples need no download."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from kakeya.tokenization import ChatTokenizer, load_tokenizer

UNKNOWN = "<unk>"


def save_tokenizer(
    folder: str | Path,
    chat_template: str,
    special_tokens: Sequence[str],
    *,
    eos_token: str,
    merges: Sequence[tuple[str, str]] = (),
) -> None:
    """Special tokens first, then characters, then the pairs that `merges` makes single ids."""
    characters = [*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n"]
    words = [UNKNOWN, *special_tokens, *characters, *(left + right for left, right in merges)]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=list(merges), unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([UNKNOWN, *special_tokens])
    named = {"unk_token": UNKNOWN, "eos_token": eos_token}
    tokenizer.save(str(Path(folder, "tokenizer.json")))
    Path(folder, "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    Path(folder, "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")


def small_tokenizer(
    chat_template: str, special_tokens: Sequence[str], *, eos_token: str, merges: Sequence[tuple[str, str]] = ()
) -> ChatTokenizer:
    with TemporaryDirectory() as folder:
        save_tokenizer(folder, chat_template, special_tokens, eos_token=eos_token, merges=merges)
        return load_tokenizer(folder)
