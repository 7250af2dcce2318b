"""Haystacks are the same for the same words and seed, exactly as long as asked, and never made of calibration text."""

from __future__ import annotations

import pytest

from inference_engine.errors import InvalidArgument
from laboratory.evaluation.haystack import CHAT, KINDS, Texts, calibration_texts, documents
from tests.tiny_folder import tiny_tokenizer

TEXTS = Texts(tiny_tokenizer())
WRITTEN = tuple(kind for kind in KINDS if kind != CHAT)


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_haystack_has_exactly_as_many_ids_as_asked(kind: str, subtests: pytest.Subtests) -> None:
    for count in (1, 37, 1009, 7001):
        with subtests.test(str(count)):
            assert len(TEXTS.filler(kind, count, seed=3)) == count


@pytest.mark.parametrize("kind", WRITTEN)
def test_the_same_seed_gives_the_same_text_and_a_longer_one_begins_with_the_shorter(kind: str) -> None:
    short = TEXTS.filler(kind, 700, seed=5)
    assert TEXTS.filler(kind, 700, seed=5) == short
    assert TEXTS.filler(kind, 1501, seed=5)[:700] == short


def test_a_haystack_of_documents_ends_where_they_do_and_has_each_paragraph_once() -> None:
    parts = [part for one in documents("polish", "test") for part in one.text.split("\n\n")]
    there = sum(len(TEXTS.tokenizer.encode(f"{part}\n\n")) for part in parts)
    whole = TEXTS.tokenizer.decode(TEXTS.filler("polish", there, seed=2))
    readable = [TEXTS.tokenizer.decode(TEXTS.tokenizer.encode(part)) for part in parts]
    assert sorted(whole.strip("\n").split("\n\n")) == sorted(readable)
    with pytest.raises(InvalidArgument, match=rf"there are {there} ids of kind polish, and {there + 1} are asked for"):
        TEXTS.filler("polish", there + 1, seed=2)


@pytest.mark.parametrize("kind", ["prose", "code"])
def test_no_document_is_in_both_halves_and_neither_half_is_small(kind: str) -> None:
    test, calibration = documents(kind, "test"), documents(kind, "calibration")
    assert not {one.name for one in test} & {one.name for one in calibration}
    sizes = [sum(len(one.text) for one in half) for half in (test, calibration)]
    assert min(sizes) > 0.4 * sum(sizes)
    assert min(sizes) > 300_000


@pytest.mark.parametrize("kind", ["prose", "code"])
def test_no_paragraph_is_in_both_halves(kind: str) -> None:
    tested, calibrated = (
        {part.strip() for text in texts for part in text.split("\n\n")} - {""}
        for texts in ([one.text for one in documents(kind, "test")], calibration_texts(kind))
    )
    assert not tested & calibrated
