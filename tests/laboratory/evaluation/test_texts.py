"""Texts that are made: a model's conversations with itself, tool calls, and a language that nothing calibrates on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from inference_engine.engine import Engine
from inference_engine.errors import HistoryLimit, InvalidArgument, ModelError
from laboratory.conversations import Opening, between_turns, converse
from laboratory.evaluation import self_talk, tool_json
from laboratory.evaluation.haystack import CHAT, Texts, documents
from laboratory.evaluation.self_talk import SelfTalk
from laboratory.training import openings as calibration
from laboratory.training.made_text import tool_calls
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


def without_template() -> Any:
    bare = tiny_tokenizer()
    bare.chat_template = None
    return bare


# -- conversations ----------------------------------------------------------------------------------------------------


def test_speakers_take_turns_after_the_opening(engine: Engine) -> None:
    (made,) = talks(engine, OPENINGS[:1], tokens=400)
    text = TOKENIZER.decode(made)
    assert text.startswith(f"{START}user\nHow are you?{END}\n{START}assistant\n")
    handovers = [text.count(f"{END}\n{START}{role}\n") for role in ("assistant", "user")]
    assert handovers == [4, 3]  # no turn follows the last one


def test_no_turn_and_no_conversation_is_longer_than_allowed(engine: Engine) -> None:
    made = talks(engine, OPENINGS, tokens=130)
    assert all(len(one) <= 130 for one in made)
    turns = [turn for one in made for turn in TOKENIZER.decode(one).split(START)[2:]]
    assert all(len(turn.removesuffix(f"{END}\n")) <= len("assistant\n") + 23 for turn in turns)
    assert engine.info().kv_reserved_bytes == 0


def test_a_conversation_is_a_function_of_its_opening_and_seed_alone(engine: Engine) -> None:
    together = talks(engine, OPENINGS, tokens=110)
    assert [talks(engine, [opening], tokens=110)[0] for opening in OPENINGS] == together
    other = talks(engine, [Opening(words=OPENINGS[0].words, seed=99)], tokens=110)[0]
    assert other != together[0]


def test_an_opening_longer_than_the_conversation_is_refused_and_nothing_stays_open(engine: Engine) -> None:
    with pytest.raises(HistoryLimit):
        talks(engine, OPENINGS, tokens=20)
    assert engine.info().kv_reserved_bytes == 0


def test_a_template_that_hides_the_words_is_refused() -> None:
    shouting = tiny_tokenizer()
    shouting.chat_template = "{% for message in messages %}{{ message['content'] | upper }}{% endfor %}"
    with pytest.raises(ModelError, match="where a speaker's words go"):
        between_turns(shouting, "user")


def test_calibration_talks_as_often_as_asked_and_from_its_own_openings(engine: Engine) -> None:
    made = calibration.converse(engine, TOKENIZER, stop_ids=(STOP,), count=3, turns=2, tokens=150, seed=15)
    assert len(made) == 3
    words = [calibration.OPENINGS[index] for index in (15, 0, 1)]
    assert all(word in TOKENIZER.decode(one) for word, one in zip(words, made, strict=True))


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


def test_a_base_model_has_no_chat(engine: Engine) -> None:
    base = without_template()
    with pytest.raises(InvalidArgument, match="needs a model with a chat template"):
        Texts(base, SelfTalk(engine, base, (STOP,))).filler(CHAT, 10, seed=0)


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


def test_no_tool_and_no_argument_is_one_of_calibration() -> None:
    calls = [json.loads(text.split("\n", 1)[1].rsplit("\n", 2)[0]) for text in islice(tool_calls(0), 0, 4000, 2)]
    assert not {call["name"] for call in calls} & {tool.name for tool in tool_json.TOOLS}
    fields = {name for tool in tool_json.TOOLS for name in (*tool.parameters, *tool.fields)}
    assert not {name for call in calls for name in call["arguments"]} & fields


# -- a language -------------------------------------------------------------------------------------------------------


def test_polish_is_long_enough_to_be_read_and_is_written_in_polish_letters() -> None:
    texts = [one.text for one in documents("polish", "test")]
    assert sum(len(text.split()) for text in texts) > 1500
    assert all(sum(text.count(letter) for letter in "ąćęłńóśźż") > 0.03 * len(text) for text in texts)
