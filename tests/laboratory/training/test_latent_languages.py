"""Prose in several languages: the same for the same seed, every language soon, and not the one that is tested on."""

from __future__ import annotations

from itertools import islice

from laboratory.training.made_text import languages, paragraphs


def test_the_same_seed_writes_the_same_and_another_seed_other_paragraphs() -> None:
    first, again, other = (list(islice(paragraphs(seed), 30)) for seed in (3, 3, 4))
    assert first == again
    assert not set(first) & set(other)
    assert len(set(first)) == 30


def test_every_language_has_its_turn() -> None:
    found = list(islice(paragraphs(0), len(languages())))
    for text, (_, things) in zip(found, languages().values(), strict=True):
        assert any(thing[1:] in text for thing in things)
        assert "{" not in text
    assert "polish" not in languages(), "it is tested on"
