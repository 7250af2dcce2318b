"""Tool calls with the tokenizers of published models: `make vocabularies` installs them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from kakeya.tokenization import ChatTokenizer, load_tokenizer
from kakeya.tools import ToolResult, Tools, ToolsTurn
from tests.conformance.tool_families import DEFINITIONS, FAMILIES
from tests.models.vocabularies import tokenizer_files

pytestmark = pytest.mark.further

# By the package: whose template of tools.json is used where the package has none that writes calls.
PACKAGES: dict[str, str | None] = {"qwen3": None, "deepseek_v3": None, "llama3_1": "llama", "gemma3": "code block"}
TEXT = 'naïve café 東京 🙂 "quoted" \\ {a: [b]}\n\t<tool> [TOOL] |>'
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("note", {"text": TEXT, "tags": ["x", TEXT], "place": {"town": "Brno", "zip": 602}}),
    ("add", {"a": -12, "b": 3.25}),
]


def tools_of(package: str) -> tuple[Tools, ChatTokenizer, bool]:
    """The tools, the tokenizer, and whether the template has a role for results."""
    tokenizer: Any = load_tokenizer(tokenizer_files(package))
    family = PACKAGES[package]
    given = None if family is None else FAMILIES[family]
    if given is not None and not given.get("format"):
        tokenizer.chat_template = "\n".join(given["template"])
    made = Tools(DEFINITIONS, tokenizer, format=given.get("format") if given else None)
    return made, tokenizer, made.format.result is None


def written(tools: Tools, calls: list[tuple[str, dict[str, Any]]]) -> str:
    of = tools.format
    arguments = [json.dumps(given, ensure_ascii=False) for _, given in calls]
    first, *others = [f"{name}{of.middle}{text}" for (name, _), text in zip(calls, arguments, strict=True)]
    return "".join([of.begin, first, *(f"{of.between}{each}" for each in others), of.end])


@pytest.mark.parametrize("package", PACKAGES)
def test_calls_are_allowed_read_and_answered_as_the_model_knows_them(package: str) -> None:
    tools, tokenizer, has_role = tools_of(package)
    said = CALLS if tools.is_parallel else CALLS[:1]
    ids = [int(each) for each in tokenizer.encode(written(tools, said), add_special_tokens=False)]
    turn = tools.read(ids)
    assert [(call.name, call.arguments) for call in turn.calls] == said
    assert turn.text == ""
    of = LLTokenizer((tokenizer_files(package) / "tokenizer.json").read_text(encoding="utf-8"))
    for choice in ("auto", "required"):
        matcher = LLMatcher(of, LLMatcher.grammar_from_lark(tools.constraint(choice).grammar), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        assert matcher.consume_tokens(ids)
        assert matcher.is_accepting()
    if has_role:
        assert_history_is_what_is_rendered(tools, tokenizer, ids, turn)


def assert_history_is_what_is_rendered(tools: Tools, tokenizer: Any, ids: list[int], turn: ToolsTurn) -> None:
    """What is appended turn by turn is what the template makes of the whole conversation."""
    asked = {"role": "user", "content": "What is it?"}
    results = [ToolResult(call, f"it is {at}") for at, call in enumerate(turn.calls)]
    history = [*tools.tokens_for_chat([asked]), *ids]
    history += tools.tokens_for_next_turn(results, after=ids)
    assert tools._of_template is not None
    calls = [(call.id, call.name, call.arguments) for call in turn.calls]
    answers = [
        {"role": "tool", "name": each.call.name, "tool_call_id": each.call.id, "content": each.content}
        for each in results
    ]
    conversation = [asked, tools._of_template.message(calls), *answers]
    if instructions := tools.instructions:
        conversation = [{"role": "system", "content": instructions}, *conversation]
    whole = tokenizer.encode(rendered(tokenizer, conversation, tools), add_special_tokens=False)
    assert history == whole


def rendered(tokenizer: Any, conversation: list[Any], tools: Tools) -> str:
    from kakeya.tokenization import render

    return render(tokenizer, conversation, True, {} if tools.instructions else {"tools": tools.schemas})


@pytest.mark.parametrize("package", PACKAGES)
def test_a_text_that_spells_a_call_is_text_where_markers_are_tokens(package: str) -> None:
    tools, tokenizer, _ = tools_of(package)
    spelled: list[int] = []
    for each in written(tools, CALLS[1:]):
        spelled += tokenizer.encode(each, add_special_tokens=False)
    assert bool(tools.read(spelled).calls) is not bool(tools._marked.markers.id_of)
