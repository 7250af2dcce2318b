"""Haystacks are the same for the same words and seed, exactly as long as asked, and never made of calibration text."""

from __future__ import annotations

import pytest

from inference_engine.errors import InvalidArgument
from laboratory.evaluation.haystack import CHAT, KINDS, LOOP, Texts, calibration_texts, documents
from tests.tiny_folder import tiny_tokenizer

TEXTS = Texts(tiny_tokenizer())
WRITTEN = tuple(kind for kind in KINDS if kind != CHAT)
OF_DOCUMENTS = ("prose", "code", "cpp", "polish")


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


@pytest.mark.parametrize("kind", ["prose", "code", "tool_json", "cpp", "polish"])
def test_another_seed_gives_another_text(kind: str) -> None:
    assert len({tuple(TEXTS.filler(kind, 1500, seed)) for seed in range(12)}) == 12


def test_looped_text_is_the_loop_and_nothing_else() -> None:
    text = TEXTS.tokenizer.decode(TEXTS.filler("looped", 500, seed=1))
    assert text in "".join(LOOP) * 20


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


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("prose", "code")])
def test_there_is_nothing_to_calibrate_on_of_most_kinds(kind: str) -> None:
    with pytest.raises(InvalidArgument, match=f"no documents of kind '{kind}' for calibration"):
        calibration_texts(kind)


def test_prose_is_sentences_and_code_parses() -> None:
    paragraphs = [part for one in documents("prose", "test") for part in one.text.split("\n\n")]
    assert all(part[0].isupper() and part[-1] in ".!?" and ">>>" not in part for part in paragraphs)
    for document in documents("code", "test")[:20]:
        compile(document.text, document.name, "exec", dont_inherit=True)


def test_headers_are_many_and_none_is_of_a_device_that_only_some_builds_have() -> None:
    found = documents("cpp", "test")
    assert len(found) > 100
    assert all(one.name.endswith(".h") and "cuda" not in one.name.split("/") for one in found)


def test_names_of_documents_are_relative() -> None:
    assert not [one.name for kind in OF_DOCUMENTS for one in documents(kind, "test") if one.name.startswith("/")]


def test_every_kind_has_its_own_digest() -> None:
    assert len({TEXTS.digest(kind) for kind in WRITTEN}) == len(WRITTEN)
    assert all(len(TEXTS.digest(kind)) == 64 for kind in WRITTEN)


def test_without_a_model_there_is_no_chat() -> None:
    for ask in (lambda: TEXTS.filler(CHAT, 10, seed=0), lambda: TEXTS.digest(CHAT)):
        with pytest.raises(InvalidArgument, match="what a model says to itself"):
            ask()
