"""Questions as people put them to an assistant, made of parts: what is asked, and what about; the same for one seed.

A model that asks itself stays with what it likes to talk about. These begin elsewhere; none is what is evaluated on.

    phrases/questions.toml   by kind: patterns with gaps, and what can stand in them
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

_PHRASES = Path(__file__).parent / "phrases" / "questions.toml"
# In the order in which a kind's number is drawn.
_KINDS = ("knowledge", "advice", "writing", "code", "text", "numbers", "lists", "troubles")

Phrases = Mapping[str, Sequence[str]]


def questions(seed: int) -> Iterator[str]:
    """Without end; a question may come again."""
    rng, phrases = random.Random(seed), _phrases()
    while True:
        kind = _KINDS[rng.randrange(len(_KINDS))]
        own = phrases[kind]
        if kind == "code":
            yield rng.choice(own["patterns"]).format(rng.choice(own["languages"]), rng.choice(own["parts"]))
        elif kind == "numbers":
            yield rng.choice(own["patterns"]).format(rng.randint(10, 900), rng.randint(2, 40))
        elif kind == "troubles":
            yield f"I am {rng.choice(own['roles'])}, and {rng.choice(own['parts'])}. {rng.choice(own['wishes'])}"
        else:
            yield _filled(rng, own["patterns"], own["parts"])


@lru_cache(maxsize=1)
def _phrases() -> Mapping[str, Phrases]:
    return tomllib.loads(_PHRASES.read_text(encoding="utf-8"))


def _filled(rng: random.Random, patterns: Sequence[str], parts: Sequence[str]) -> str:
    """One of the patterns, with a part of its own in each of its gaps."""
    pattern = rng.choice(patterns)
    return pattern.format(*rng.sample(parts, pattern.count("{}")))
