"""Haystacks are the same for the same words and seed, exactly as long as asked, and never made of calibration text."""

from __future__ import annotations

import pytest

from inference_engine.errors import InvalidArgument
from inference_engine.evaluation.haystack import KINDS, LOOP, calibration_texts, digest, documents, filler
from tests.tiny_folder import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 37, 1009, 20_011])
def test_a_haystack_has_exactly_as_many_ids_as_asked(kind: str, count: int) -> None:
    assert len(filler(TOKENIZER, kind, count, seed=3)) == count


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_text_and_a_longer_one_begins_with_the_shorter(kind: str) -> None:
    short = filler(TOKENIZER, kind, 700, seed=5)
    assert filler(TOKENIZER, kind, 700, seed=5) == short
    assert filler(TOKENIZER, kind, 1501, seed=5)[:700] == short


@pytest.mark.parametrize("kind", ["prose", "code"])
def test_another_seed_gives_another_text(kind: str) -> None:
    assert len({tuple(filler(TOKENIZER, kind, 200, seed)) for seed in range(12)}) == 12


def test_looped_text_is_the_loop_and_nothing_else() -> None:
    text = TOKENIZER.decode(filler(TOKENIZER, "looped", 500, seed=1))
    assert text in "".join(LOOP) * 20


@pytest.mark.parametrize("kind", ["prose", "code"])
def test_no_document_is_in_both_halves_and_neither_half_is_small(kind: str) -> None:
    test, calibration = documents(kind, "test"), documents(kind, "calibration")
    assert not {one.name for one in test} & {one.name for one in calibration}
    sizes = [sum(len(one.text) for one in half) for half in (test, calibration)]
    assert min(sizes) > 0.4 * sum(sizes)
    assert min(sizes) > 300_000


def test_no_paragraph_of_prose_is_in_both_halves() -> None:
    tested = {part for one in documents("prose", "test") for part in one.text.split("\n\n")}
    assert not tested & {part for text in calibration_texts("prose") for part in text.split("\n\n")}


def test_prose_is_sentences_and_code_parses() -> None:
    paragraphs = [part for one in documents("prose", "test") for part in one.text.split("\n\n")]
    assert all(part[0].isupper() and part[-1] in ".!?" and ">>>" not in part for part in paragraphs)
    for document in documents("code", "test")[:20]:
        compile(document.text, document.name, "exec", dont_inherit=True)


def test_names_of_documents_are_relative() -> None:
    assert not [one.name for kind in ("prose", "code") for one in documents(kind, "test") if one.name.startswith("/")]


def test_every_kind_has_its_own_digest() -> None:
    assert len({digest(kind) for kind in KINDS}) == len(KINDS)
    assert all(len(digest(kind)) == 64 for kind in KINDS)


def test_there_is_nothing_to_calibrate_on_in_a_loop() -> None:
    with pytest.raises(InvalidArgument, match="not 'looped'"):
        calibration_texts("looped")
