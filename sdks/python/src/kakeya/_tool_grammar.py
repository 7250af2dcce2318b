"""What a model may write when it has tools, as a grammar in llguidance's variant of Lark.

    auto        start: said calls?              text, and calls wherever a marker begins one
    required    start: thought? calls
    none        start: said                     no marker
    calls       a tool's name, then arguments that fit its schema, and so on

`<[7]>` is the token of that id, and nothing that spells it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kakeya._errors import InvalidTool
from kakeya._tool_format import ToolFormat
from kakeya._tool_markup import CHANNEL, CONSTRAIN, END, ID_MARK, MESSAGE, SPEAKER, START, MarkedFormat
from kakeya._tool_schema import Tool, closed_parameters

Schema = Mapping[str, Any]

CALL_ID, CALL_NUMBER = "[a-zA-Z0-9]{9}", "[0-9]{1,4}"
_ANY = r"(.|\n)"
_NO_RULES = frozenset({"title", "description", "default", "examples", "$schema", "$defs", "definitions", "format"})
_OF_FIELDS = _NO_RULES | {"type", "properties", "required", "additionalProperties", "x-guidance"}
_OF_TEXT = _NO_RULES | {"type", "minLength", "maxLength", "pattern"}
_NUMERIC = frozenset({"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Thinking:
    """Markers of what the model says to itself before it calls, and their ids, if they are tokens."""

    begin: str
    end: str
    begin_id: int | None
    end_id: int | None
    is_open: bool  # does the prompt end within it?


def grammar(
    given: ToolFormat,
    marked: MarkedFormat,
    tools: Sequence[Tool],
    *,
    may_say: bool,
    is_parallel: bool,
    others: Iterable[int],
    names: Iterable[str],
    prefix: int | None = None,
    thinking: Thinking | None = None,
) -> str:
    """The grammar in which these tools can be called: none of them if there are none.

    may_say: text, or text before calls. others: ids of tokens that are no text and may stand in it. names: of all
    tools, also of those that are not called. prefix: an id that may stand before a call that has to be the first thing.
    Raises InvalidTool for a schema that the format cannot hold.
    """
    return _Grammar(given, marked, tuple(others), tuple(names)).whole(tools, may_say, is_parallel, prefix, thinking)


def is_text(schema: Schema) -> bool:
    """Is the value written as bare text? Text that may be null is."""
    kinds = _kinds(schema)
    return bool(kinds) and kinds <= {"string", "null"} and "string" in kinds


def resolved(schema: Any, root: Schema, path: str) -> Schema:
    """The schema itself, or what its reference within `root` names."""
    seen = 0
    while isinstance(schema, Mapping) and "$ref" in schema:
        name, seen = str(schema["$ref"]), seen + 1
        found: Any = root
        for part in name.removeprefix("#").strip("/").split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        if not name.startswith("#") or found is None or seen > 99:
            raise InvalidTool(path, f"refers to {name!r}, which is not in the schema")
        schema = found
    if not isinstance(schema, Mapping):
        raise InvalidTool(path, f"must be a schema, got {schema!r}")
    return schema


def ordered(schema: Schema, *, is_sorted: bool) -> list[str]:
    """The names of an object's fields as the format has them."""
    names = list(schema.get("properties", {}))
    return sorted(names) if is_sorted else names


class _Grammar:
    """The rules of one grammar, by name, as they are needed."""

    def __init__(
        self, given: ToolFormat, marked: MarkedFormat, others: tuple[int, ...], names: tuple[str, ...]
    ) -> None:
        self._given, self._marked, self._names = given, marked, names
        self._other_ids, self._others = others, _ranges(others)
        self._rules: dict[str, str] = {}
        self._objects: dict[str, str] = {}

    def whole(
        self,
        tools: Sequence[Tool],
        may_say: bool,
        is_parallel: bool,
        prefix: int | None,
        thinking: Thinking | None,
    ) -> str:
        trigger = self._marked.trigger
        calls = self._calls(tools, is_parallel) if tools else ""
        if self._marked.has_channels:
            start = self._channelled(tools, calls, may_say)
        elif not may_say:
            before = "" if thinking is None or not trigger else self._thought(thinking)
            tag = "" if prefix is None else f"<[{prefix}]>? "
            start = f"{before}{tag}{self._literal(trigger)} {calls}"
        elif not trigger:
            tag = "" if prefix is None else f"<[{prefix}]>? "
            start = self._said(self._unlike_calls()) + (f" | {tag}{calls}" if calls else "")
        elif trigger in self._marked.markers.id_of:
            self._set("TEXT", f"/{_ANY}+/")
            start = self._said("TEXT") + (f" ({self._literal(trigger)} {calls})?" if calls else "")
        else:
            self._set("TEXT", f"/{_ANY}+/ & ~/{_ANY}*{_escaped(trigger)}{_ANY}*/")
            self._set(f"head[suffix={_quoted(trigger)}]", f"/{_ANY}*/")
            start = self._said("TEXT")
            if calls:
                said = f"(TEXT? {self._other()})* " if self._others else ""
                start = f"{said}(TEXT | head {calls})?"
            else:
                del self._rules[f"head[suffix={_quoted(trigger)}]"]
        return "\n".join([f"start: {start}", *(f"{name}: {body}" for name, body in self._rules.items())]) + "\n"

    # -- text ----------------------------------------------------------------------------------------------------------

    def _said(self, first: str) -> str:
        """Text, with other tokens in it. first: the rule of the text before the first of these."""
        if first != "TEXT":
            self._set("TEXT", f"/{_ANY}+/")
        return f"{first}? ({self._other()} TEXT?)*" if self._others else f"{first}?"

    def _other(self) -> str:
        return self._set("other", f"<[{self._others}]>")

    def _unlike_calls(self) -> str:
        """Text that does not begin as a call of one of the tools."""
        if not self._names:
            return self._set("TEXT", f"/{_ANY}+/")
        names = "|".join(map(_escaped, self._names))
        begins = f"{_escaped(self._marked.begin)}({names}){_escaped(self._marked.middle)}"
        return self._set("FIRST", f"/{_ANY}+/ & ~/{begins}{_ANY}*/")

    def _thought(self, thinking: Thinking) -> str:
        """What the model says to itself, and then a few line ends."""
        self._set("GAP", r"/[ \n]{1,4}/")
        if thinking.end_id is not None:
            self._set("TEXT", f"/{_ANY}+/")
            others = _ranges(each for each in self._other_ids if each not in (thinking.begin_id, thinking.end_id))
            said = f"TEXT? (<[{others}]> TEXT?)*" if others else "TEXT?"
            thought = f"{said} <[{thinking.end_id}]> GAP?"
        else:
            self._set(f"thought[suffix={_quoted(thinking.end)}]", f"/{_ANY}*/")
            thought = "thought GAP?"
        begin = _quoted(thinking.begin) if thinking.begin_id is None else f"<[{thinking.begin_id}]>"
        return f"{thought} " if thinking.is_open else f"({begin} {thought})? "

    def _channelled(self, tools: Sequence[Tool], calls: str, may_say: bool) -> str:
        """Messages of reasoning and asides, and then a call, or the answer. A call is written as the template has it,
        or with its receiver behind the channel, as models do."""
        self._set("TEXT", f"/{_ANY}+/")

        def headed(text: str) -> str:
            return self._literal(self._marked.markers.marked(text))

        next_one = headed(f"{END}{START}{SPEAKER}")
        before = [f"{headed(f'{CHANNEL}{each}{MESSAGE}')} TEXT? {next_one}" for each in ("analysis", "commentary")]
        lasts = [f"{headed(f'{CHANNEL}final{MESSAGE}')} TEXT?"] if may_say else []
        if calls:
            begin = self._literal(self._marked.markers.marked(f"{CHANNEL}commentary") + self._marked.begin)
            middle = headed(f" {CONSTRAIN}json{MESSAGE}")
            said = (f"{_quoted(tool.name)} {middle} arguments_{at}" for at, tool in enumerate(tools))
            lasts += [calls, f"{begin} {self._one_of(said)}"]
        return f"({' | '.join(before)})* ({' | '.join(lasts)}){'?' if may_say else ''}"

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _calls(self, tools: Sequence[Tool], is_parallel: bool) -> str:
        marked = self._marked
        bodies = [self._body(tool, f"arguments_{at}") for at, tool in enumerate(tools)]
        first = self._one_of(f"{self._literal(marked.begin + head)} {body}" for head, body in bodies)
        end = "" if marked.fields is not None else f" {self._literal(marked.end)}"
        if marked.between is None or not is_parallel:
            return f"({first}){end}"
        between = marked.between
        more = self._one_of(f"{self._literal(between + head)} {body}" for head, body in bodies)
        return f"({first}) ({more})*{end}"

    def _body(self, tool: Tool, rule: str) -> tuple[str, str]:
        """What is written of a tool's call: its name, and what follows it up to the arguments; and these."""
        parameters = closed_parameters(tool)
        marked = self._marked
        if marked.fields is None:
            return tool.name + marked.middle, self._set(rule, self._json(parameters))
        _refuse(parameters, _OF_FIELDS, f"{tool.name}.parameters")
        return tool.name, self._set(rule, self._fields(parameters, f"{tool.name}.parameters", rule))

    def _fields(self, schema: Schema, path: str, rule: str) -> str:
        """The arguments of a call, one by one, and the call's end."""
        syntax, marked = self._marked.fields, self._marked
        assert syntax is not None

        def value(name: str) -> str:
            place = f"{path}.{name}"
            held = resolved(schema["properties"][name], schema, place)
            if syntax.has_json:
                return self._bare(held, schema, place)
            return f"{self._braced(held, schema, place)} {self._literal(marked.tail)}"

        return self._optional_fields(
            schema, rule, path, before=marked.middle, end=marked.end, empty=syntax.empty, value=value
        )

    def _optional_fields(
        self, schema: Schema, rule: str, path: str, *, before: str, end: str, empty: str, value: Any
    ) -> str:
        """Fields in their order, those that are not required or left out. value: a field's rule, by its name."""
        syntax = self._marked.fields
        assert syntax is not None
        names, required = ordered(schema, is_sorted=syntax.is_sorted), set(schema.get("required", ()))
        if lacking := required - set(names):
            raise InvalidTool(path, f"requires {', '.join(sorted(lacking))}, of which it says nothing")
        for name in names:
            if re.search(r"[\s<>{}:,\"\[\]=]", name) or not name:
                raise InvalidTool(f"{path}.{name}", "is no name that this model's format can hold")
        # Behind a field, and at the beginning: from the last field on.
        later, first = self._literal(end), self._literal(empty)
        for at in range(len(names) - 1, -1, -1):
            name = names[at]
            written = f"{self._literal(name + syntax.after_name)} {value(name)}"
            later_rule = self._set(f"{rule}_after_{at}", later)
            began = f"{self._literal(before)} {written} {later_rule}"
            went_on = f"{self._literal(syntax.between)} {written} {later_rule}"
            is_required = name in required
            first = began if is_required else f"{began} | {self._set(f'{rule}_first_{at}', first)}"
            later = went_on if is_required else f"{went_on} | {later_rule}"
        return first

    def _bare(self, schema: Schema, root: Schema, path: str) -> str:
        """A value in markup: text as it is, anything else as JSON. With what follows each."""
        syntax, tail = self._marked.fields, self._marked.tail
        assert syntax is not None
        if "enum" in schema or "const" in schema:
            return f"{self._values(schema)} {self._literal(tail)}"
        if is_text(schema):
            return self._text(_text_rules(schema, path), path, tail)
        return f"{self._set(f'value_{len(self._rules)}', self._json(schema, root))} {self._literal(tail)}"

    def _text(self, schema: Schema, path: str, tail: str) -> str:
        """Text between what opens and closes it, and the tail behind it."""
        syntax = self._marked.fields
        assert syntax is not None
        body = _pattern(schema, path)
        closing = syntax.close + tail
        if closing[0] in self._marked.markers.id_of:
            name = self._set(f"TEXT_{len(self._rules)}", f"/{body}/")
            return f"{self._literal(syntax.open)} {name}{'?' if _may_be_empty(schema) else ''} {self._literal(closing)}"
        marks = [at for at, each in enumerate(closing) if each in self._marked.markers.id_of]
        until = marks[0] if marks else len(closing)
        name = f"text_{len(self._rules)}"
        self._set(f"{name}[suffix={_quoted(closing[:until])}]", f"/{body}/")
        return f"{self._literal(syntax.open)} {name} {self._literal(closing[until:])}"

    def _braced(self, schema: Schema, root: Schema, path: str) -> str:
        """A value whose objects and lists are in braces, and whose texts are between tokens."""
        syntax = self._marked.fields
        assert syntax is not None
        if "enum" in schema or "const" in schema:
            return self._values(schema)
        for union in ("anyOf", "oneOf"):
            if union in schema:
                _refuse(schema, _NO_RULES | {union}, path)
                return self._one_of(self._braced(resolved(each, root, path), root, path) for each in schema[union])
        kind = schema.get("type")
        if isinstance(kind, (list, tuple)):
            return self._one_of(self._braced({**schema, "type": each}, root, path) for each in kind)
        if kind == "string":
            return self._text(_text_rules(schema, path), path, "")
        if kind in ("integer", "number", "boolean", "null"):
            numeric = {name: of for name, of in schema.items() if name in _NUMERIC}
            return self._set(f"value_{len(self._rules)}", self._json(numeric))
        if kind == "array":
            return self._listed(schema, root, path)
        if kind == "object":
            return self._object(schema, root, path)
        raise InvalidTool(path, "says no type, and this model's format writes each in a way of its own")

    def _values(self, schema: Schema) -> str:
        """One of the values that a schema lists."""
        syntax = self._marked.fields
        assert syntax is not None
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return self._one_of(
            self._literal(f"{syntax.open}{each}{syntax.close}" if isinstance(each, str) else json.dumps(each))
            for each in values
        )

    def _listed(self, schema: Schema, root: Schema, path: str) -> str:
        _refuse(schema, _NO_RULES | {"type", "items", "minItems", "maxItems"}, path)
        rule = f"list_{len(self._rules)}"
        self._set(rule, "")
        item = self._set(f"{rule}_item", self._braced(resolved(schema.get("items"), root, path), root, path))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        more = f"{{{max(least - 1, 0)},{'' if most is None else max(most - 1, 0)}}}"
        items = "" if most == 0 else f'{item} ("," {item}){more}'
        self._rules[rule] = f'"[" ({items}){"?" if not least else ""} "]"' if items else '"[]"'
        return rule

    def _object(self, schema: Schema, root: Schema, path: str) -> str:
        _refuse(schema, _OF_FIELDS, path)
        if not schema.get("properties"):
            raise InvalidTool(path, "lists no properties, and this model's format holds no others")
        # One that refers to itself is met again.
        key = json.dumps(schema, sort_keys=True)
        if key in self._objects:
            return self._objects[key]
        rule = self._objects[key] = f"object_{len(self._rules)}"
        self._set(rule, "")

        def value(name: str) -> str:
            return self._braced(resolved(schema["properties"][name], root, path), root, path)

        self._rules[rule] = self._optional_fields(schema, rule, path, before="{", end="}", empty="{}", value=value)
        return rule

    # -- writing -------------------------------------------------------------------------------------------------------

    def _set(self, name: str, body: str) -> str:
        self._rules[name] = body
        return name

    @staticmethod
    def _one_of(bodies: Iterable[str]) -> str:
        return f"({' | '.join(dict.fromkeys(bodies))})"

    def _literal(self, marked: str) -> str:
        """A text with marks, as a sequence of texts and tokens."""
        parts, text = [], ""
        for each in marked:
            if each in self._marked.markers.id_of or each == ID_MARK:
                parts += [_quoted(text)] if text else []
                call_id = CALL_ID if self._given.call_id is None else CALL_NUMBER
                parts.append(self._set("CALL_ID", f"/{call_id}/") if each == ID_MARK else self._token(each))
                text = ""
            else:
                text += each
        return " ".join(parts + ([_quoted(text)] if text else []))

    def _token(self, mark: str) -> str:
        return f"<[{self._marked.markers.id_of[mark]}]>"

    def _json(self, schema: Schema, root: Schema | None = None) -> str:
        spelling = {
            "whitespace_flexible": False,
            "item_separator": self._given.item_separator,
            "key_separator": self._given.key_separator,
        }
        shared = {name: root[name] for name in ("$defs", "definitions") if root is not None and name in root}
        return f"%json {json.dumps({'x-guidance': spelling, **shared, **schema}, ensure_ascii=False)}"


def _kinds(schema: Schema) -> set[str]:
    """The types that a schema names; none where it names none for all of its values."""
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return {"string" if isinstance(each, str) else "null" if each is None else "other" for each in values}
    if "anyOf" in schema:
        parts = [_kinds(each) if isinstance(each, Mapping) else set() for each in schema["anyOf"]]
        return set().union(*parts) if all(parts) else set()
    kind = schema.get("type")
    return {kind} if isinstance(kind, str) else set(kind or ())


def _text_rules(schema: Schema, path: str) -> Schema:
    """What a schema says of text that may be null."""
    if "anyOf" in schema:
        _refuse(schema, _NO_RULES | {"anyOf"}, path)
        texts = [each for each in schema["anyOf"] if _kinds(each) != {"null"}]
        if len(texts) != 1 or "enum" in texts[0] or "const" in texts[0]:
            raise InvalidTool(path, "is a choice between texts, which this model's format cannot hold; use an enum")
        schema = texts[0]
    _refuse(schema, _OF_TEXT, path)
    return schema


def _pattern(schema: Schema, path: str) -> str:
    """A regular expression of the text."""
    pattern, least, most = schema.get("pattern"), schema.get("minLength", 0), schema.get("maxLength")
    if pattern is None:
        return f"{_ANY}{{{least},{'' if most is None else most}}}" if least or most is not None else f"{_ANY}*"
    inner = pattern.removeprefix("^")
    is_ended = inner.endswith("$") and not inner.endswith("\\$")
    inner = inner.removesuffix("$") if is_ended else inner
    if least or most is not None or re.search(r"(?<!\\)[$]|(?<![\\\[])\^|\(\?", inner):
        raise InvalidTool(path, f"has the pattern {pattern!r} of a kind, or with a length, that text cannot be held to")
    begins, ends = "" if pattern.startswith("^") else f"{_ANY}*", "" if is_ended else f"{_ANY}*"
    return f"{begins}({inner.replace('/', chr(92) + '/')}){ends}"


def _may_be_empty(schema: Schema) -> bool:
    return not schema.get("minLength") and "pattern" not in schema


def _refuse(schema: Schema, known: Iterable[str], path: str) -> None:
    if unknown := sorted(set(schema) - set(known)):
        raise InvalidTool(path, f"has {', '.join(unknown)}, which this model's format cannot be held to; leave it out")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Of a regular expression in Rust's syntax, between slashes."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/&~#-]", lambda found: f"\\{found.group()}", text).replace("\n", r"\n")


def _ranges(ids: Iterable[int]) -> str:
    found: list[list[int]] = []
    for each in sorted(set(ids)):
        if found and found[-1][1] == each - 1:
            found[-1][1] = each
        else:
            found.append([each, each])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in found)
