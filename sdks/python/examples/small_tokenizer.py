"""A tokenizer of one id for each printable character, so that these examples need no download."""

from __future__ import annotations

import string
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from kakeya.tokenization import ChatTokenizer

UNKNOWN = "<unk>"


def small_tokenizer(
    chat_template: str, special_tokens: Sequence[str], *, eos_token: str, merges: Sequence[tuple[str, str]] = ()
) -> ChatTokenizer:
    """Special tokens first, then characters, then the pairs that `merges` makes single ids."""
    characters = [*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n"]
    words = [UNKNOWN, *special_tokens, *characters, *(left + right for left, right in merges)]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=list(merges), unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    chat_tokenizer: ChatTokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        eos_token=eos_token,
        additional_special_tokens=[token for token in special_tokens if token != eos_token],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
    return chat_tokenizer
