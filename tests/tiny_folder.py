"""TinyModel as a folder, as a server process loads it, with a tokenizer of single characters that can chat."""

from __future__ import annotations

import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.tiny import VOCABULARY, tiny_model

CHARACTERS = sorted({*string.printable} - {*"\r\x0b\x0c"})
START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tiny_model(folder: Path) -> Path:
    """Write the model, without a tokenizer."""
    tiny_model().save_pretrained(folder)
    return folder


def save_tiny_chat_model(folder: Path) -> Path:
    """Write the model and its tokenizer."""
    save_tiny_model(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {character: index for index, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([START, END])
    assert tokenizer.get_vocab_size() <= VOCABULARY
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.chat_template = TEMPLATE
    return fast
