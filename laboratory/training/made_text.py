"""Texts made of parts, the same for the same seed: questions, paragraphs in several languages, and calls of tools.

phrases/questions.toml   by kind: what is asked, patterns with gaps, and what can stand in them
phrases/<language>.txt   sentences with places for {a}, {b} and {n}, an empty line, what can stand in {a} and {b}
"""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

Phrases = Mapping[str, Sequence[str]]

_PHRASES = Path(__file__).parent / "phrases"
# Of questions, in the order in which a kind's number is drawn.
_KINDS = ("knowledge", "advice", "writing", "code", "text", "numbers", "lists", "troubles")
_SENTENCES = (4, 9)  # of a paragraph
# Of calls.
_VERBS = ("get", "list", "create", "update", "delete", "search", "run", "send")
_THINGS = ("user", "invoice", "file", "event", "ticket", "order", "branch", "metric", "message", "device")
_FIELDS = ("id", "name", "path", "query", "limit", "since", "status", "tags", "amount", "is_active", "owner", "region")
_WORDS = ("alpha", "north", "draft", "urgent", "backup", "v2", "eu-west", "weekly", "ada", "kernel", "blue", "final")


def questions(seed: int) -> Iterator[str]:
    """As people put them to an assistant, without end; one may come again.

    A model that asks itself stays with what it likes to talk about. These begin elsewhere; none is evaluated on.
    """
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
    return tomllib.loads((_PHRASES / "questions.toml").read_text(encoding="utf-8"))


def _filled(rng: random.Random, patterns: Sequence[str], parts: Sequence[str]) -> str:
    """One of the patterns, with a part of its own in each of its gaps."""
    pattern = rng.choice(patterns)
    return pattern.format(*rng.sample(parts, pattern.count("{}")))


def paragraphs(seed: int) -> Iterator[str]:
    """Without end, each in one language, the languages in turn.

    They say little, but in the letters, word order and endings of each language: that is what a basis has to know of.
    """
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


def tool_calls(seed: int) -> Iterator[str]:
    """As agents exchange them, without end: a call, its result, sometimes an error; JSON."""
    rng = random.Random(seed)
    while True:
        call = {
            "name": f"{rng.choice(_VERBS)}_{rng.choice(_THINGS)}",
            "arguments": {field: _value(rng) for field in rng.sample(_FIELDS, rng.randint(1, 4))},
        }
        results = [
            {field: _value(rng) for field in rng.sample(_FIELDS, rng.randint(2, 5))} for _ in range(rng.randint(1, 4))
        ]
        result: object = {"ok": True, "results": results}
        if rng.random() < 0.2:
            result = {"ok": False, "error": f"{rng.choice(_FIELDS)} must not be {_value(rng)!r}"}
        indent = rng.choice((None, None, 2))
        yield f"<tool_call>\n{json.dumps(call, indent=indent)}\n</tool_call>\n"
        yield f"<tool_response>\n{json.dumps(result, indent=indent)}\n</tool_response>\n"


def _value(rng: random.Random) -> object:
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randint(0, 99_999)
    if kind == 1:
        return round(rng.uniform(0, 1000), 2)
    if kind == 2:
        return rng.random() < 0.5
    if kind == 3:
        return [rng.choice(_WORDS) for _ in range(rng.randint(0, 3))]
    if kind == 4:
        day = f"{rng.randint(2019, 2029)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
        return f"{day}T{rng.randint(0, 23):02d}:00:00Z"
    return "/".join(rng.choice(_WORDS) for _ in range(rng.randint(1, 3)))
