"""Typed functions as tools: their schema, their call, and what cannot be said is refused by its name."""

from __future__ import annotations

import asyncio
import copy
import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from kakeya import InvalidArgument, InvalidMessages, InvalidTool, ToolFormatUnknown
from kakeya.tools import Tool, ToolCall, ToolResult, Tools, tool_from
from tests.conformance.tool_families import DEFINITIONS, FAMILIES, tokenizer_of, tools_of


class Unit(enum.Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


@dataclass
class Place:
    town: str
    zip: int | None = None


class Span(TypedDict, total=False):
    hours: int


def forecast(
    place: Place,
    unit: Unit,
    days: list[int],
    kind: Literal["short", "long"] = "short",
    span: Span | None = None,
    rain: Annotated[float, "millimetres", {"minimum": 0}] = 0,
) -> str:
    """The weather at a place.

    Args:
        place: where
        unit (Unit): of temperatures,
            as they are shown
    """
    return f"{place.town} {unit.name} {days} {kind} {span} {rain}"


def test_a_functions_annotations_and_docstring_are_its_schema() -> None:
    tool = tool_from(forecast)
    assert (tool.name, tool.description) == ("forecast", "The weather at a place.")
    town = {"town": {"type": "string"}, "zip": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}
    closed: dict[str, Any] = {"additionalProperties": False}
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "place": {"type": "object", "properties": town, "required": ["town"], **closed, "description": "where"},
            "unit": {"enum": ["celsius", "kelvin"], "description": "of temperatures, as they are shown"},
            "days": {"type": "array", "items": {"type": "integer"}},
            "kind": {"enum": ["short", "long"]},
            "span": {
                "anyOf": [
                    {"type": "object", "properties": {"hours": {"type": "integer"}}, "required": [], **closed},
                    {"type": "null"},
                ]
            },
            "rain": {"type": "number", "minimum": 0, "description": "millimetres"},
        },
        "required": ["place", "unit", "days"],
        **closed,
    }


def test_a_call_runs_the_function_with_values_of_its_types() -> None:
    tools = Tools([forecast], tokenizer_of("hermes"))
    call = ToolCall("a", "forecast", {"place": {"town": "Brno"}, "unit": "kelvin", "days": [1]})
    assert tools.call(call).content == "Brno KELVIN [1] short None 0"


def test_what_a_function_raises_is_a_result_for_the_model() -> None:
    def divide(a: int) -> float:
        return 1 / a

    result = Tools([divide], tokenizer_of("hermes")).call(ToolCall("a", "divide", {"a": 0}))
    assert (result.is_error, result.content) == (True, "ZeroDivisionError: division by zero")


def test_an_asynchronous_function_is_awaited() -> None:
    async def fetch(url: str) -> dict[str, str]:
        return {"url": url}

    tools = Tools([fetch], tokenizer_of("hermes"))
    call = ToolCall("a", "fetch", {"url": "x"})
    with pytest.raises(InvalidTool, match="call_async"):
        tools.call(call)
    assert asyncio.run(tools.call_async(call)).content == '{"url": "x"}'


def test_what_no_schema_can_say_is_refused_by_its_name(subtests: pytest.Subtests) -> None:
    def bytes_in(data: bytes) -> None: ...
    def untyped(data) -> None: ...  # type: ignore[no-untyped-def]
    def many(*data: int) -> None: ...
    def keyed(data: dict[int, str]) -> None: ...
    def fine() -> None: ...

    definition = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
    wrong: list[tuple[Any, str]] = [
        (bytes_in, "bytes_in.data"),
        (untyped, "untyped.data"),
        (many, "many.data"),
        (keyed, "keyed.data"),
        (lambda: None, "tool.name"),
        ({"description": "nameless"}, "tool.name"),
        (definition, "f.parameters"),
        (7, "tool"),
    ]
    for tool, path in wrong:
        with subtests.test(path), pytest.raises(InvalidTool) as caught:
            tool_from(tool)
        assert caught.value.path == path
    with pytest.raises(InvalidTool, match="two tools"):
        Tools([fine, fine], tokenizer_of("hermes"))


def test_definitions_of_both_apis_are_tools() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    expected = Tool("f", "does", parameters)
    function = {"name": "f", "description": "does", "parameters": parameters}
    assert tool_from({"type": "function", "function": function}) == expected
    assert tool_from({"name": "f", "description": "does", "input_schema": parameters}) == expected
    assert tool_from(function) == expected


def test_a_template_without_calls_is_refused_with_the_formats_there_are() -> None:
    plain = tokenizer_of("text markers")
    with pytest.raises(ToolFormatUnknown, match=r"im_start.*hermes.*llama.*code_block"):
        Tools([forecast], plain)
    with pytest.raises(InvalidArgument, match="format"):
        Tools([forecast], plain, format="xml")
    tools = Tools([forecast], plain, format="hermes")
    assert "forecast" in tools.instructions
    assert "<tool_call>" in tools.instructions
    said = plain.decode(
        tools.tokens_for_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}])
    )
    assert said.count("<|im_start|>system") == 1
    assert "Be brief.\n\nYou can call these functions:" in said


def test_a_choice_is_one_of_the_tools_and_every_call_has_a_result() -> None:
    tools = tools_of("hermes")
    with pytest.raises(InvalidArgument, match="add, note, now"):
        tools.constraint("subtract")
    ids = tokenizer_of("hermes").encode(FAMILIES["hermes"]["turns"][-1]["written"], add_special_tokens=False)
    first = tools.read(ids).calls[0]
    with pytest.raises(InvalidMessages, match="note, now, add called"):
        tools.tokens_for_next_turn([ToolResult(first, "done")], after=ids)


def test_a_model_may_think_before_it_has_to_call() -> None:
    tokenizer: Any = copy.deepcopy(tokenizer_of("hermes"))
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    tokenizer.chat_template += "{# <think>…</think> #}"
    call = FAMILIES["hermes"]["turns"][1]["written"]
    of = LLTokenizer(tokenizer.backend_tokenizer.to_str())

    def is_allowed(text: str) -> bool:
        grammar = LLMatcher.grammar_from_lark(Tools(DEFINITIONS, tokenizer).constraint("required").grammar)
        matcher, ids = LLMatcher(of, grammar, log_level=0), tokenizer.encode(text, add_special_tokens=False)
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    thought = "<think>\nNumbers: add them.\n</think>\n\n"
    assert is_allowed(call)
    assert is_allowed(thought + call)
    assert not is_allowed(f"{thought}Let me see.\n{call}")
    assert not is_allowed(thought)
    # Where the prompt has begun the thought, it has to end.
    tokenizer.chat_template += "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"
    assert is_allowed(f"Add them.</think>\n\n{call}")
    assert not is_allowed(call)
    turn = Tools(DEFINITIONS, tokenizer).read(tokenizer.encode(thought + call, add_special_tokens=False))
    assert (turn.text, len(turn.calls)) == (thought.strip(), 1)


def test_a_format_of_ones_own_is_used_as_it_is_and_parts_come_from_the_asyncio_client_too() -> None:
    found = tools_of("hermes")
    tools = Tools(DEFINITIONS, tokenizer_of("text markers"), format=found.format)
    ids = tokenizer_of("text markers").encode(FAMILIES["hermes"]["turns"][-1]["written"], add_special_tokens=False)

    async def stream() -> AsyncIterator[int]:
        for token_id in ids:
            yield token_id

    async def parts() -> list[Any]:
        return [part async for part in tools.parts_async(stream())]

    calls = [part for part in asyncio.run(parts()) if isinstance(part, ToolCall)]
    assert [call.name for call in calls] == ["note", "now", "add"]


def test_one_call_only_where_several_are_not_wanted() -> None:
    tools = tools_of("hermes")
    assert "</tool_call>\n<tool_call>" not in tools.constraint("auto", parallel=False).grammar
    assert tools.is_parallel
    assert not tools_of("llama").is_parallel


def test_markup_cannot_be_held_to_every_schema(subtests: pytest.Subtests) -> None:
    for family, schema in (
        ("markup", {"type": "string", "pattern": "^(?=a)b$"}),
        ("gemma", {"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
        ("gemma", {"description": "anything"}),
    ):
        definition = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
        tools = Tools([definition], tokenizer_of(family))
        with subtests.test(str(schema)), pytest.raises(InvalidTool, match=r"f\.parameters\.a"):
            tools.constraint("required")
