"""Ids shown as text while they come: what is shown in pieces is what decoding all of them would show."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from inference_engine.cli.text import TextStream, shown_on


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that most characters beyond ASCII are spread over several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def pieces_of(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(token_id) for token_id in ids), stream.end()]


@given(text=st.text(st.characters(exclude_categories=("Cc", "Cs")) | st.sampled_from("\n\t")))
def test_text_is_shown_whole_and_never_with_a_broken_character(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    pieces = pieces_of(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, 255)))
def test_any_ids_are_shown_as_decoding_them_together_shows_them(
    tokenizer: PreTrainedTokenizerFast, ids: list[int]
) -> None:
    visible = "".join(pieces_of(tokenizer, ids))
    assert len(visible) == len(tokenizer.decode(ids))


def test_special_tokens_are_not_shown(tokenizer: PreTrainedTokenizerFast) -> None:
    assert "".join(pieces_of(tokenizer, tokenizer.encode("so<|end|>"))) == "so"


def test_nothing_the_model_writes_steers_the_terminal(tokenizer: PreTrainedTokenizerFast) -> None:
    shown = "".join(pieces_of(tokenizer, tokenizer.encode("a\x1b[2Jb\rc\x07\x7f\x9b\nd\te")))
    assert shown == "a␛[2Jb␍c␇␡\N{REPLACEMENT CHARACTER}\nd\te"


@pytest.mark.parametrize("width", [20, 40])
def test_at_a_terminal_no_word_breaks_that_a_line_can_hold(width: int) -> None:
    text = "The quick brown fox jumps over the lazy dog, unbelievably\noften, and 漢字 are not words at all. " * 3
    screen = Screen()
    show = shown_on(Console(file=screen, force_terminal=True, width=width))
    for first in range(0, len(text), 3):
        show(text[first : first + 3])
    lines = "".join(screen.lines).split("\n")
    assert max(map(cell_len, lines)) < width
    assert " ".join(lines).split() == text.split()
    longest = "x" * 3 * width
    show(f"\n{longest}")
    assert "".join(screen.lines).replace("\n", "").endswith(longest)
    piped = io.StringIO()
    shown_on(Console(file=piped, width=width))(text)
    assert piped.getvalue() == text


class Screen(io.StringIO):
    """Does what a terminal does with what is written: `lines` are the characters that are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def write(self, text: str) -> int:
        for back, char in re.findall(r"\x1b\[(\d+)D\x1b\[K|(.)", text, re.DOTALL):
            left = int(back or 0)
            while left > 0:
                left -= cell_len(self.lines.pop())
            self.lines += [char] if char else []
        return len(text)
