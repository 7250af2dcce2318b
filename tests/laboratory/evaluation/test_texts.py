"""Texts that are made: a model's conversations with itself, tool calls, and a language that nothing calibrates on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from inference_engine.engine import Engine
from laboratory.conversations import Opening, converse
from laboratory.evaluation import self_talk, tool_json
from laboratory.evaluation.haystack import CHAT, Texts
from laboratory.evaluation.self_talk import SelfTalk
from laboratory.training import openings as calibration
from tests.tiny import tiny_engine
from tests.tiny_folder import END, START, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
STOP = TOKENIZER.convert_tokens_to_ids(END)
OPENINGS = [Opening(words=words, seed=seed) for seed, words in enumerate(("How are you?", "Why?", "Tell me a story."))]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with tiny_engine() as running:
        yield running


def talks(engine: Engine, openings: list[Opening], tokens: int) -> list[list[int]]:
    return converse(engine, TOKENIZER, openings, stop_ids=(STOP,), turns=6, turn_tokens=23, tokens=tokens)


# -- conversations ----------------------------------------------------------------------------------------------------


def test_speakers_take_turns_after_the_opening(engine: Engine) -> None:
    (made,) = talks(engine, OPENINGS[:1], tokens=400)
    text = TOKENIZER.decode(made)
    assert text.startswith(f"{START}user\nHow are you?{END}\n{START}assistant\n")
    handovers = [text.count(f"{END}\n{START}{role}\n") for role in ("assistant", "user")]
    assert handovers == [4, 3]  # no turn follows the last one


# -- conversations to be tested on ------------------------------------------------------------------------------------


def test_no_opening_is_one_of_calibration() -> None:
    assert not set(self_talk.OPENINGS) & set(calibration.OPENINGS)
    assert len(set(self_talk.OPENINGS)) == len(self_talk.OPENINGS) == 2 * self_talk.CONVERSATIONS


def test_chat_is_made_once_goes_on_without_repeating_and_is_the_same_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_talk, "TOKENS", 200)  # of a conversation; it goes on in a second one
    texts = Texts(TOKENIZER, SelfTalk(engine, TOKENIZER, (STOP,), conversations=1))
    short = texts.filler(CHAT, 100, seed=1)
    made = texts.digest(CHAT)
    assert texts.filler(CHAT, 100, seed=1) == short
    assert texts.digest(CHAT) == made
    longer = texts.filler(CHAT, 320, seed=1)
    assert longer[:100] == short
    text = TOKENIZER.decode(longer)
    assert all(text.count(opening) == 1 for opening in self_talk.OPENINGS[:2])
    again = Texts(TOKENIZER, SelfTalk(engine, TOKENIZER, (STOP,), conversations=1))
    assert again.digest(CHAT) == made


# -- tool calls -------------------------------------------------------------------------------------------------------


def values_in(text: str) -> list[Any]:
    """The JSON values that stand one after another in a text."""
    found, rest = [], text.strip()
    while rest:
        value, end = json.JSONDecoder().raw_decode(rest)
        found.append(value)
        rest = rest[end:].strip()
    return found


def test_every_call_fits_a_schema_reported_before_it_and_every_result_its_call() -> None:
    schemas: dict[str, Any] = {}
    seen = 0
    for text in islice(tool_json.exchanges(random.Random(3)), 200):
        values = values_in(text)
        if "parameters" in values[0]:
            schemas = {schema["name"]: schema["parameters"] for schema in values}
            continue
        call, result = values
        schema = schemas[call["name"]]
        assert set(schema["required"]) <= call["arguments"].keys() <= schema["properties"].keys()
        kinds = {"string": str, "integer": int, "number": float, "boolean": bool}
        for name, value in call["arguments"].items():
            assert type(value) is kinds[schema["properties"][name]["type"]]
        assert result["call"] == call["id"]
        seen += 1
    assert seen > 100


# -- a language -------------------------------------------------------------------------------------------------------
