"""How a model family writes tool calls, as its chat template has it.

Families differ in markers and in how arguments are written, and models are trained on what their template makes of
earlier calls. So the template is asked: it renders calls of made-up names and values, and what stands between those is
the format.

    <tool_call>\\n{"name": "    NAME    ", "arguments": {…}    }\\n</tool_call>
    begin                      name    middle      JSON     end

    <tool_call>\\n<function=    NAME    >\\n<parameter=    FIELD    >\\n    VALUE    \\n</parameter>\\n</function>…
    begin                      name    middle             name     after  value    end

Between two calls the template writes `between`; one that cannot write two has none. `{{id}}` stands for a call's id.
Where a template writes ids and no names, an id holds the name: `functions.NAME:0`.

This file knows no tokenizer: what it renders with is given to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kakeya._errors import TemplateError

ID, NAME = "{{id}}", "{{name}}"
_NAMING_ID = f"functions.{NAME}:{ID}"
# Values of which no template makes anything else, in this order of the alphabet.
_NAMES = ("kqzwxjvbm", "vhgtfyprd")
_IDS = ("k7q2zw9xj", "v3h8gt5fy")
_FIRST, _SECOND, _WORD, _INNER = "jqfield", "kqfield", "Zqvalue", "Yqvalue"
_NUMBERS = ((74611, 74612), (74613, 74614))
_MARKER = "Kqzwxjvbm"
_USER = {"role": "user", "content": "The quick brown fox"}

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldSyntax:
    """Arguments that are written one by one, each behind its name."""

    after_name: str  # between the name of an argument and its value
    between: str  # between a value and the next argument's name
    empty: str  # after the tool's name, where there are no arguments: to the call's end
    open: str = ""  # before text, and `close` behind it
    close: str = ""
    has_json: bool = True  # are objects and lists JSON? False: braces, with names and text as they are here
    is_sorted: bool = False  # are they in the order of their names, not of the schema?


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat:
    """How tool calls are written. `{{id}}` in `middle`, `between` and `end` stands for the id of the call there."""

    begin: str  # before the first call's name
    middle: str  # between a tool's name and its arguments
    end: str  # behind the last call's arguments
    between: str | None = None  # from one call's arguments to the next one's name; None: one call only
    fields: FieldSyntax | None = None  # None: arguments are one JSON object
    item_separator: str = ", "  # in JSON
    key_separator: str = ": "
    result: str | None = None  # a result as a user's message, `{{result}}` in it; None: the template has a role for it
    call_id: str | None = None  # a call's id, made of `{{name}}` and of a number, its `{{id}}`; None: `{{id}}` is all


def _json_format(begin: str, middle: str, end: str, between: str | None, result: str) -> ToolFormat:
    return ToolFormat(begin=begin, middle=middle, end=end, between=between, result=result)


# For models whose template writes no calls, by name.
NAMED: Mapping[str, ToolFormat] = {
    "hermes": _json_format(
        '<tool_call>\n{"name": "',
        '", "arguments": ',
        "}\n</tool_call>",
        '}\n</tool_call>\n<tool_call>\n{"name": "',
        "<tool_response>\n{{result}}\n</tool_response>",
    ),
    "llama": _json_format('{"name": "', '", "parameters": ', "}", None, "The function answered: {{result}}"),
    "code_block": _json_format('```json\n{"name": "', '", "parameters": ', "}\n```", None, "```json\n{{result}}\n```"),
}


@dataclass(frozen=True, slots=True)
class TemplateFormat:
    """A format that a template has, and how it wants to be given calls."""

    format: ToolFormat
    content: str | None  # of a message that holds calls
    takes_text: bool  # are arguments JSON text, not an object?

    def message(self, calls: Sequence[tuple[str, str, Mapping[str, Any]]], text: str = "") -> Message:
        """The assistant's message with these calls: id, name and arguments of each."""
        return _calling(calls, text or self.content, self.takes_text)


def find_format(render: Render) -> TemplateFormat | None:
    """The format in which the template writes calls; None if it writes none, or in no way that is known here.

    render: the template's text for messages, without the head of a next turn. Raises TemplateError as it does.
    """
    said = render([_USER, {"role": "assistant", "content": _MARKER}])
    if said.count(_MARKER) != 1:
        return None
    head, _, end = said.partition(_MARKER)
    for content in ("", None):
        for takes_text in (False, True):
            for call_id in (None, _NAMING_ID):
                probe = _Probe(render, content, takes_text, head, end, call_id)
                if (found := probe.format()) is not None:
                    return TemplateFormat(replace(found, call_id=call_id), content, takes_text)
    return None


class _Probe:
    """One way of giving a template calls, and what it writes for them."""

    def __init__(
        self, render: Render, content: str | None, takes_text: bool, head: str, end: str, call_id: str | None
    ) -> None:
        """head, end: around the assistant's words. call_id: as a format has it."""
        self._render = render
        self._call_id = call_id or ID
        self._content, self._takes_text = content, takes_text
        self._head, self._end = head, end

    def format(self) -> ToolFormat | None:
        numbers = [dict(zip((_FIRST, _SECOND), pair, strict=True)) for pair in _NUMBERS]
        written = self._written(numbers)
        is_alone = written is None
        if written is None and (written := self._written(numbers[:1])) is None:
            return None
        at = written.find(_NAMES[0])
        begin, rest = written[:at], written[at + len(_NAMES[0]) :]
        if ID in begin or not begin.strip():
            return None
        try:
            return self._with_json(begin, rest, is_alone) or self._with_fields(begin, rest, is_alone)
        except ValueError:  # of a part that is not where it has to be
            return None

    def _with_json(self, begin: str, rest: str, is_alone: bool) -> ToolFormat | None:
        found = _object_in(rest, _NUMBERS[0])
        if found is None:
            return None
        middle, after = rest[: found.start()], rest[found.end() :]
        between = None
        if not is_alone:
            between, _, second = after.partition(_NAMES[1])
            again = _object_in(second, _NUMBERS[1])
            if again is None or second[: again.start()] != middle:
                return None
            after = second[again.end() :]
        return ToolFormat(
            begin=begin,
            middle=middle,
            between=between,
            end=after,
            key_separator=found["key"],
            item_separator=found["item"],
        )

    def _with_fields(self, begin: str, rest: str, is_alone: bool) -> ToolFormat | None:
        alone = self._one({_FIRST: _NUMBERS[0][0]})
        middle, after_name, end = _around(alone, _FIRST, str(_NUMBERS[0][0]))
        between = _around(rest, str(_NUMBERS[0][0]), _SECOND)[1]
        # Before the name of a further call: all of this one's end, and then that.
        more = None
        if not is_alone:
            _, _, more = rest.partition(str(_NUMBERS[0][1]))
            more, _, _ = more.partition(_NAMES[1])
            if not more.startswith(end):
                more = None
        opened, closed = _around(self._one({_FIRST: _WORD}), _FIRST, _WORD)[1:]
        if not opened.startswith(after_name) or not closed.endswith(end):
            return None
        syntax = FieldSyntax(
            after_name=after_name,
            between=between,
            empty=self._one({}),
            open=opened[len(after_name) :],
            close=closed[: len(closed) - len(end)],
        )
        nested = _between(self._one({_FIRST: {_SECOND: _INNER}}), middle + _FIRST + after_name, end)
        if nested != json.dumps({_SECOND: _INNER}):
            if nested != f"{{{_SECOND}{after_name}{syntax.open}{_INNER}{syntax.close}}}":
                return None
            syntax = replace(syntax, has_json=False)
        backwards = self._one({_SECOND: 1, _FIRST: 2})
        syntax = replace(syntax, is_sorted=backwards.index(_FIRST) < backwards.index(_SECOND))
        return ToolFormat(begin=begin, middle=middle, between=more, end=end, fields=syntax)

    def _one(self, arguments: Mapping[str, Any]) -> str:
        """What follows the name of a call that is alone. Raises ValueError if there is none."""
        written = self._written([arguments])
        if written is None:
            raise ValueError("no call")
        return written.partition(_NAMES[0])[2]

    def _written(self, arguments: Sequence[Mapping[str, Any]]) -> str | None:
        """What is written of calls with these arguments, without what is around any words of the assistant."""
        calls = [(id_of(self._call_id, _IDS[at], _NAMES[at]), _NAMES[at], of) for at, of in enumerate(arguments)]
        asked = [_USER, _calling(calls, self._content, self._takes_text)]
        try:
            text = self._render(asked)
            if any(text.count(name) != 1 for _, name, _ in calls):
                return None
            if text.endswith(self._end):
                text = text[: len(text) - len(self._end)]
            elif (cut := self._without_cue(text, [*asked, *map(_answering, calls)])) is not None:
                text = cut
            else:
                return None
        except TemplateError:
            return None
        text = text[common(text, self._head) :]
        for one in _IDS:
            text = text.replace(one, ID)
        return text if _in_order(text, [name for _, name, _ in calls]) else None

    def _without_cue(self, text: str, answered: Sequence[Message]) -> str | None:
        """The text without its last marker, where that is the first one of a result in place of a turn's end."""
        cue = re.search(r"<[^<>\s]+>\s*$", text)
        return text[: cue.start()] if cue and self._render(answered).startswith(text) else None


def id_of(form: str | None, written: str, name: str) -> str:
    """Of the call of that name, the id. form: as a format has it. written: what stands for `{{id}}`."""
    return written if form is None else form.replace(NAME, name).replace(ID, written)


def _answering(call: tuple[str, str, Mapping[str, Any]]) -> Message:
    return {"role": "tool", "name": call[1], "tool_call_id": call[0], "content": _WORD}


def _calling(
    calls: Sequence[tuple[str, str, Mapping[str, Any]]], content: str | None, takes_text: bool
) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": of_id,
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": json.dumps(given, ensure_ascii=False) if takes_text else dict(given),
                },
            }
            for of_id, name, given in calls
        ],
    }


def _object_in(text: str, numbers: tuple[int, int]) -> re.Match[str] | None:
    """A JSON object of the two fields and these numbers."""
    key, one, two = r"\s*:\s*", *numbers
    return re.search(rf'{{"{_FIRST}"(?P<key>{key}){one}(?P<item>\s*,\s*)"{_SECOND}"(?P=key){two}}}', text)


def _around(text: str, first: str, second: str) -> tuple[str, str, str]:
    """What is before, between and behind two texts. Raises ValueError unless both are there."""
    start = text.index(first)
    then = text.index(second, start + len(first))
    return text[:start], text[start + len(first) : then], text[then + len(second) :]


def _between(text: str, before: str, behind: str) -> str:
    if not text.startswith(before) or not text.endswith(behind):
        raise ValueError("not between them")
    return text[len(before) : len(text) - len(behind)]


def common(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    differing = (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(differing, min(len(one), len(other)))


def _in_order(text: str, names: Sequence[str]) -> bool:
    places = [text.find(name) for name in names]
    return places[0] >= 0 and places == sorted(places)


def example(of: ToolFormat, name: str, arguments: Mapping[str, str]) -> str:
    """A call as the format writes it, whose values are texts that describe them."""
    if of.fields is None:
        written = json.dumps(dict(arguments), separators=(of.item_separator, of.key_separator), ensure_ascii=False)
        return f"{of.begin}{name}{of.middle}{written}{of.end}".replace(ID, "ID")
    return "".join(_spelled_fields(of, of.fields, name, arguments)).replace(ID, "ID")


def _spelled_fields(of: ToolFormat, syntax: FieldSyntax, name: str, arguments: Mapping[str, str]) -> Iterator[str]:
    yield of.begin + name
    before = of.middle
    for key, value in arguments.items():
        yield f"{before}{key}{syntax.after_name}{syntax.open}{value}{syntax.close}"
        before = syntax.between
    yield of.end if arguments else syntax.empty
