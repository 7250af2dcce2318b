"""Prose in several languages to calibrate on, made of parts of sentences, the same for the same seed.

It says little, but in the letters, word order and endings of each language: that is what a basis has to know of.

    phrases/<language>.txt   sentences with places for {a}, {b} and {n}, an empty line, what can stand in {a} and {b}
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

_PHRASES = Path(__file__).parent / "phrases"
_SENTENCES = (4, 9)  # of a paragraph


def paragraphs(seed: int) -> Iterator[str]:
    """Paragraphs without end, each in one language, the languages in turn."""
    rng = random.Random(seed)
    while True:
        for sentences, things in languages().values():
            chosen = []
            for _ in range(rng.randint(*_SENTENCES)):
                one, other = rng.sample(things, 2)
                text = rng.choice(sentences).format(a=one, b=other, n=rng.randint(2, 900))
                chosen.append(text[0].upper() + text[1:])
            yield " ".join(chosen) + "\n\n"


@lru_cache(maxsize=1)
def languages() -> dict[str, tuple[list[str], list[str]]]:
    """Sentences, and what can stand in them, by language."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for path in sorted(_PHRASES.glob("*.txt")):
        sentences, things = path.read_text(encoding="utf-8").split("\n\n")
        found[path.stem] = (sentences.splitlines(), things.splitlines())
    return found
