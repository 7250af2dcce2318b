"""Ids to text piece by piece, and text up to a stop string: the same however it is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from inference_engine.config import ModelConfig, resolve
from inference_engine.models import tokenizer_folder
from kakeya._reply_text import ReplyText, StopStrings

BROKEN = "\N{REPLACEMENT CHARACTER}"
# Characters of one to four bytes, and joined ones.
WRITING = st.text(alphabet=st.sampled_from("aé ß你😀👩‍👧\n"), max_size=60)


@lru_cache(maxsize=1)
def byte_tokenizer() -> Tokenizer:
    """One token a byte, as byte-level vocabularies have for what they have no word for."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@lru_cache(maxsize=1)
def fallback_tokenizer() -> Tokenizer:
    """Words with a marker for the space before them, bytes for what is no word, as SentencePiece has it."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "a", "▁"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: index for index, word in enumerate(words)},
            merges=[("▁", "a")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    stream = ReplyText(tokenizer.decode)
    return [stream.push(token_id) for token_id in ids]


@pytest.mark.parametrize("make", [byte_tokenizer, fallback_tokenizer], ids=["bytes", "fallback"])
@given(text=WRITING)
def test_pieces_joined_are_the_text_and_none_shows_half_a_character(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    given_out = pieces(tokenizer, ids)
    assert "".join(given_out) == tokenizer.decode(ids)
    assert not any(BROKEN in piece for piece in given_out)


@given(text=WRITING)
def test_a_replacement_character_that_was_written_is_text_unless_it_is_the_last(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(f"{BROKEN}{text}{BROKEN}a{BROKEN}", add_special_tokens=False).ids
    assert "".join(pieces(tokenizer, ids)) == f"{BROKEN}{text}{BROKEN}a"


@given(ids=st.lists(st.integers(0, 255), max_size=80))
def test_bytes_that_are_no_text_come_out_as_they_decode_and_wait_for_three_more_at_most(ids: list[int]) -> None:
    tokenizer = byte_tokenizer()
    stream, shown = ReplyText(tokenizer.decode), ""
    for count, token_id in enumerate(ids, start=1):
        shown += stream.push(token_id)
        whole = tokenizer.decode(ids[:count])
        assert whole.startswith(shown)
        assert len(whole) - len(shown) <= 3


def test_a_character_that_was_cut_off_is_left_out() -> None:
    ids = byte_tokenizer().encode("a😀", add_special_tokens=False).ids
    assert "".join(pieces(byte_tokenizer(), ids[:-1])) == "a"


@lru_cache(maxsize=1)
def real_tokenizer() -> Tokenizer:
    folder = tokenizer_folder("smollm2-135m", resolve(ModelConfig).cache_path)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


# Emoji with skin tones and joiners, flags, Chinese, Japanese, Korean, marks that combine and such that are joined,
# right to left, and letters beyond the first plane.
SCRIPTS = "ab \n.😀👍🏽👩‍👩‍👧‍👦🏳️‍🌈🇩🇪你好世界日本語テスト한국어각é́ñZ͑ͫ̓שלוםمرحباनमस्ते𝔘𓀀‍"


@pytest.mark.real_model
@given(text=st.text(alphabet=st.sampled_from(SCRIPTS), max_size=40))
def test_at_every_token_of_a_real_vocabulary_what_is_shown_is_whole_characters_of_the_text(text: str) -> None:
    tokenizer = real_tokenizer()
    stream, shown = ReplyText(tokenizer.decode), ""
    for token_id in tokenizer.encode(text, add_special_tokens=False).ids:
        shown += stream.push(token_id)
        assert text.startswith(shown)
    assert shown == text


def stopped(stops: Sequence[str], given_pieces: Sequence[str]) -> tuple[str, bool]:
    strings = StopStrings(stops)
    shown = "".join([strings.push(piece) for piece in given_pieces])
    return shown + strings.end(), strings.matched is not None


def expected(stops: Sequence[str], text: str) -> tuple[str, bool]:
    """Read character by character: the first prefix that ends with a stop string, without the longest such one."""
    for end in range(1, len(text) + 1):
        matched = [stop for stop in stops if text[:end].endswith(stop)]
        if matched:
            return text[: end - max(map(len, matched))], True
    return text, False


@given(
    text=st.text(alphabet="ab", max_size=24),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 24), max_size=8),
)
def test_a_stop_string_ends_the_text_wherever_it_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    cut = [text[start:end] for start, end in pairwise(edges)]
    assert stopped(stops, cut) == expected(stops, text)


@given(
    text=st.text(alphabet="ab", max_size=24),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_nothing_of_a_stop_string_is_shown_and_only_what_may_become_one_waits(text: str, stops: list[str]) -> None:
    strings, shown = StopStrings(stops), ""
    for count, character in enumerate(text, start=1):
        shown += strings.push(character)
        if strings.matched is not None:
            break
        waiting = text[len(shown) : count]
        assert waiting == "" or any(stop.startswith(waiting) for stop in stops)
    assert shown == expected(stops, text)[0] or strings.matched is None
