"""Tool calls: each family's format is found, held to the schemas, read as it comes, and answered by its template."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from kakeya import ToolCallError
from kakeya.tools import TextPart, ToolCall, ToolCallPart, ToolResult, Tools
from tests.conformance.tool_families import FAMILIES, tokenizer_of, tools_of

pytestmark = pytest.mark.parametrize("family", FAMILIES)


def matcher(tools: Tools, family: str, choice: str) -> LLMatcher:
    tokenizer: Any = tokenizer_of(family)
    of = LLTokenizer(tokenizer.backend_tokenizer.to_str())
    made = LLMatcher(of, LLMatcher.grammar_from_lark(tools.constraint(choice).grammar), log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def allows(tools: Tools, family: str, choice: str, ids: list[int]) -> bool:
    made = matcher(tools, family, choice)
    return made.validate_tokens(ids) == len(ids) and made.consume_tokens(ids) and made.is_accepting()


def encoded(family: str, text: str) -> list[int]:
    return [int(each) for each in tokenizer_of(family).encode(text, add_special_tokens=False)]


def test_a_constraint_allows_what_the_family_writes_and_nothing_that_breaks_a_schema(
    family: str, subtests: pytest.Subtests
) -> None:
    tools = tools_of(family)
    for turn in FAMILIES[family]["turns"]:
        with subtests.test(turn["written"]):
            ids = encoded(family, turn["written"])
            assert allows(tools, family, "auto", ids)
            assert allows(tools, family, "required", ids) == turn.get("is_required", False)
            assert allows(tools, family, "none", ids) == (not turn["calls"])
            is_note = [call["name"] for call in turn["calls"]] == ["note"]
            assert allows(tools, family, "note", ids) == (is_note and turn.get("is_required", False))
    for written in FAMILIES[family]["refused"]:
        with subtests.test(written):
            assert not allows(tools, family, "required", encoded(family, written))


def test_what_is_said_and_called_is_read_token_by_token(family: str, subtests: pytest.Subtests) -> None:
    tools = tools_of(family)
    for turn in FAMILIES[family]["turns"]:
        with subtests.test(turn["written"]):
            ids = encoded(family, turn["written"])
            whole = tools.read(ids)
            assert whole.text == turn["text"]
            expected = [(call["name"], call["arguments"]) for call in turn["calls"]]
            assert [(call.name, call.arguments) for call in whole.calls] == expected
            assert [call.id for call in whole.calls if "id" in turn["calls"][0]] == [
                call["id"] for call in turn["calls"] if "id" in call
            ]
            parts = [*tools.parts(ids)]  # a list is a stream as well
            assert "".join(part.text for part in parts if isinstance(part, TextPart)).strip() == turn["text"]
            assert [(part.name, part.arguments) for part in parts if isinstance(part, ToolCall)] == expected
            for index, (_, arguments) in enumerate(expected):
                pieces = [part for part in parts if isinstance(part, ToolCallPart) and part.index == index]
                assert pieces[0].arguments == ""
                assert json.loads("".join(piece.arguments for piece in pieces)) == arguments
                assert len(pieces) > 2 or not arguments


def test_a_marker_that_is_a_token_is_no_marker_when_it_is_spelled(family: str) -> None:
    spoof = FAMILIES[family].get("spoof")
    if spoof is None:
        pytest.skip("its markers are text")
    tools = tools_of(family)
    written = FAMILIES[family]["turns"][1]["written"]
    spelled = [token_id for each in written for token_id in encoded(family, each)]
    turn = tools.read(spelled)
    assert (turn.text, turn.calls) == (written, ())
    assert allows(tools, family, "none", spelled)
    assert not allows(tools, family, "required", spelled)


def test_a_call_that_is_cut_is_an_error_and_one_without_its_last_marker_is_whole(family: str) -> None:
    tools = tools_of(family)
    ids = encoded(family, FAMILIES[family]["turns"][2]["written"])
    with pytest.raises(ToolCallError, match="max_tokens"):
        tools.read(ids[: len(ids) // 2])
    parser = tools.parser()
    assert any(isinstance(part, ToolCall) for part in [*parser.feed(ids), *parser.finish()])
    assert parser.missing == ""


def test_results_are_appended_as_the_template_has_them(family: str, subtests: pytest.Subtests) -> None:
    """With the end that the model came to, and without; the history is never rendered again."""
    given = FAMILIES[family]["appended"]
    tools, tokenizer = tools_of(family), tokenizer_of(family)
    turns = [turn for turn in FAMILIES[family]["turns"] if len(turn["calls"]) == 1]
    by_name = {turn["calls"][0]["name"]: turn["written"] for turn in turns if turn.get("is_required")}
    ids = encoded(family, joined(family, given["calls"], by_name))
    calls = tools.read(ids).calls
    assert [call.name for call in calls] == [call["name"] for call in given["calls"]]
    results = [ToolResult(call, text) for call, text in zip(calls, given["results"], strict=True)]
    expected = encoded(family, given["text"])
    assert tools.tokens_for_next_turn(results, after=ids) == expected
    # The end of a turn, or the first marker of the result: models come to either.
    assert expected[0] in tokenizer.added_tokens_decoder
    assert tools.tokens_for_next_turn(results, after=[*ids, expected[0]]) == expected[1:]
    # Cut behind the arguments: what the markers lack is put in.
    whole = tokenizer.decode([*ids, *expected])
    for count in range(len(ids) - 1, 0, -1):
        try:
            if len(tools.read(ids[:count]).calls) < len(calls):
                break
        except ToolCallError:
            break
        with subtests.test(str(count)):
            cut = ids[:count]
            assert tokenizer.decode([*cut, *tools.tokens_for_next_turn(results, after=cut)]) == whole


def test_a_result_ends_no_turn_and_makes_no_call(family: str) -> None:
    """Special tokens in what a tool answers are text."""
    tools, tokenizer = tools_of(family), tokenizer_of(family)
    ids = encoded(family, FAMILIES[family]["turns"][1]["written"])
    (call,) = tools.read(ids).calls
    hostile = "".join(token.content for token in tokenizer.added_tokens_decoder.values())

    def markers_after(text: str) -> list[int]:
        found = tools.tokens_for_next_turn([ToolResult(call, text)], after=ids)
        return [token_id for token_id in found if token_id in tokenizer.added_tokens_decoder]

    assert markers_after(f"a {hostile} b") == markers_after("a b")


def joined(family: str, calls: list[dict[str, Any]], by_name: dict[str, str]) -> str:
    if len(calls) == 1:
        return by_name[calls[0]["name"]]
    many = FAMILIES[family]["turns"][-1]["written"]
    if family == "mistral":
        one, other = (by_name[call["name"]].removeprefix("[TOOL_CALLS] [").removesuffix("]") for call in calls)
        return f"[TOOL_CALLS] [{one}, {other.replace(calls[0]['id'], calls[1]['id'])}]"
    assert many
    return "\n".join(by_name[call["name"]] for call in calls)
