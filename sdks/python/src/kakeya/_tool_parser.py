"""Tokens to text and tool calls, as they come.

    ids ▸ text, in which markers are characters ▸ text for the user
                                                ▸ a call's name ▸ its arguments, piece by piece ▸ the call

What may still become a marker is held back, so text is at most a marker late. A call is given out when its arguments
are whole.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kakeya._errors import ToolCallError
from kakeya._tool_format import id_of
from kakeya._tool_grammar import is_text, resolved
from kakeya._tool_markup import CHANNEL, END, ID_MARK, MESSAGE, SPEAKER, START, MarkedFormat
from kakeya._tool_schema import Tool, closed_parameters

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_ID_LENGTH = 9  # some templates take no other
_ID_LETTERS = string.ascii_letters + string.digits
_SCALAR = re.compile(r'[^,\]}\s"{\[]+')


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text that is said, or the next piece of it."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A piece of a call under way. The pieces of one call joined are its arguments as JSON text."""

    index: int  # which call of the turn, from 0 on
    id: str
    name: str
    arguments: str  # empty in the first one, which says that the call has begun


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call, whole."""

    id: str  # as the model wrote it, or drawn
    name: str
    arguments: Mapping[str, Any]


Part = TextPart | ToolCallPart | ToolCall
Decode = Callable[[Sequence[int]], str]
_Steps = Generator[None, None, Any]


class ToolCallParser:
    """Reads the tokens of one turn. `Tools.parser` makes one."""

    def __init__(
        self,
        marked: MarkedFormat,
        tools: Mapping[str, Tool],
        decode: Decode,
        *,
        anchor: Sequence[int],
        silent: frozenset[int],
        shown: Mapping[int, str],
        prefix: int | None,
    ) -> None:
        self._marked, self._tools = marked, tools
        self._prefix = None if prefix is None else chr(0xDBFF)
        marks = dict(marked.markers.mark_of) | ({} if prefix is None else {prefix: chr(0xDBFF)})
        self._words = _Words(decode, anchor, marks, silent, shown)
        self._rest = ""  # that is not read yet
        self._is_ended = False
        self._said = ""  # of the call under way, as it was written
        self._parts: list[Part] = []
        self._calls = 0
        self._missing = ""
        self._steps = self._turn()
        next(self._steps, None)

    @property
    def missing(self) -> str:
        """After the end: what the last call lacks of its markers; empty where it lacks none."""
        return self._missing

    def feed(self, token_ids: Iterable[int]) -> list[Part]:
        """What these tokens add. Raises ToolCallError for a call that is written wrongly."""
        for token_id in token_ids:
            self._rest += self._words.push(token_id)
        return self._go_on()

    def finish(self) -> list[Part]:
        """What was held back. Raises ToolCallError if the tokens end within a call."""
        self._rest += self._words.end()
        self._is_ended = True
        return self._go_on()

    def _go_on(self) -> list[Part]:
        try:
            next(self._steps, None)
        except ToolCallError as error:
            error.parts = tuple(_joined(self._parts))
            raise
        parts, self._parts = self._parts, []
        return _joined(parts)

    # -- a turn --------------------------------------------------------------------------------------------------------

    def _turn(self) -> _Steps:
        if self._marked.has_channels:
            yield from self._messages()
        elif not self._marked.trigger:
            yield from self._perhaps_calls()
        while (yield from self._text()):
            yield from self._all_calls()
        while True:
            yield

    def _messages(self) -> _Steps:
        """Messages with headers, to the end of the turn: reasoning is left out, all else is said or called."""
        marked = self._marked.markers.marked
        message, end = marked(MESSAGE), marked(END)
        while True:
            is_plain = False
            while (at := self._rest.find(message)) < 0:
                if is_plain := is_plain or self._is_no_header():
                    self._say(len(self._rest))
                if self._is_ended:
                    return
                yield
            self._said = ""
            self._take(at + len(message))
            if (receiver := re.search(r" to=functions\.([\w.-]+)", self._said)) is not None:
                if receiver[1] not in self._tools:
                    raise self._wrong(f"{receiver[1]!r} is no tool")
                begun = self._begin("", receiver[1])
                self._give(begun, (yield from self._json(begun)))
                continue
            pass_on = self._take if f"{CHANNEL}analysis" in self._said else self._say
            while (at := self._rest.find(end)) < 0:
                pass_on(len(self._rest))
                if self._is_ended:
                    return
                yield
            pass_on(at)
            self._take(len(end))

    def _is_no_header(self) -> bool:
        """Is it what is said without a header? A model writes that if nothing holds it."""
        shown = self._shown_rest()
        begins = (START, CHANNEL, END, SPEAKER, self._marked.begin)
        return not any(shown.startswith(each) or each.startswith(shown) for each in begins)

    def _text(self) -> _Steps:
        """Text, up to what begins a call, or to the end. Does a call begin?"""
        trigger = self._marked.trigger
        while True:
            at = self._rest.find(trigger) if trigger else -1
            if at >= 0:
                self._say(at)
                self._take(len(trigger))
                return True
            held = 0 if self._is_ended or not trigger else _overlap(self._rest, trigger)
            self._say(len(self._rest) - held)
            if self._is_ended:
                return False
            yield

    def _perhaps_calls(self) -> _Steps:
        """Calls, if the turn begins with one."""
        marked = self._marked
        begins = [marked.begin + name + marked.middle for name in self._tools]
        if self._prefix is not None:
            while not self._rest and not self._is_ended:
                yield
            if self._rest.startswith(self._prefix):
                self._rest = self._rest[1:]
        while not any(self._rest.startswith(each) for each in begins):
            if self._is_ended or not any(each.startswith(self._rest) for each in begins):
                return
            yield
        yield from self._all_calls()

    def _all_calls(self) -> _Steps:
        marked = self._marked
        before: str | None = marked.begin
        self._said = marked.markers.shown(marked.trigger)
        while before is not None:
            yield from self._expect([before])
            before = yield from self._call()
            self._said = ""

    def _call(self) -> _Steps:
        """A call from its name on. Returns the text before the name of the next one, if there is one."""
        marked, syntax = self._marked, self._marked.fields
        if syntax is None:
            heads = {name + marked.middle: name for name in self._tools}
            call_id, name = yield from self._headed(heads)
            begun = self._begin(call_id, name)
            arguments = yield from self._json(begun)
        else:
            heads = {name + end: name for name in self._tools for end in (marked.middle, syntax.empty)}
            call_id, name = yield from self._headed(heads)
            begun = self._begin(call_id, name)
            if self._said.endswith(marked.markers.shown(syntax.empty)) and not self._said.endswith(
                marked.markers.shown(marked.middle)
            ):
                self._add(begun, "{}")
                self._give(begun, {})
                return (yield from self._next_or_none())
            arguments = yield from self._fields(begun)
        # A call whose id follows its arguments is whole with it.
        has_id = ID_MARK in marked.end
        if not has_id:
            self._give(begun, arguments)
        endings = [marked.end] if marked.between is None or syntax is not None else [marked.between, marked.end]
        ending, call_id = yield from self._ending(endings)
        if has_id:
            self._give(ToolCallPart(begun.index, call_id or begun.id, begun.name, ""), arguments)
        if syntax is not None:
            return (yield from self._next_or_none())
        return "" if ending is not None and ending == marked.between else None

    def _next_or_none(self) -> _Steps:
        """Between calls that are each whole: is there another one?"""
        between = self._marked.between
        if between is None:
            return None
        while not self._rest.startswith(between):
            if self._is_ended or not between.startswith(self._rest):
                return None
            yield
        self._take(len(between))
        return ""

    def _headed(self, heads: Mapping[str, str]) -> _Steps:
        """The id, if it stands there, and the name."""
        found, call_id = yield from self._expect_with_id(list(heads))
        return call_id, heads[found]

    def _ending(self, endings: Sequence[str]) -> _Steps:
        """What stands behind the arguments; None where the tokens end before that is whole."""
        try:
            return (yield from self._expect_with_id(endings))
        except _CutError:
            last = endings[-1]
            if not last.startswith(self._rest) or ID_MARK in last[len(self._rest) :]:
                raise
            self._missing = self._marked.markers.shown(last[len(self._rest) :])
            self._rest = ""
            return None, ""

    # -- arguments -----------------------------------------------------------------------------------------------------

    def _json(self, begun: ToolCallPart) -> _Steps:
        """One JSON object."""
        depth, in_text, is_escaped, text = 0, False, False, ""
        while True:
            for at, each in enumerate(self._rest):
                if in_text:
                    in_text = is_escaped or each != '"'
                    is_escaped = each == "\\" and not is_escaped
                elif each == '"':
                    in_text = True
                elif each in "{[":
                    depth += 1
                elif each in "}]":
                    depth -= 1
                elif not depth:
                    raise self._wrong("arguments are no JSON object")
                if "\ud800" <= each <= "\udbff":
                    raise self._wrong("a marker stands in its arguments")
                if not depth:
                    added = self._take(at + 1)
                    self._add(begun, added)
                    return self._loaded(text + added)
            added = self._take(len(self._rest))
            self._add(begun, added)
            text += added
            yield from self._more()

    def _fields(self, begun: ToolCallPart) -> _Steps:
        """Arguments one by one, which are given out as JSON."""
        marked, syntax = self._marked, self._marked.fields
        assert syntax is not None
        schema = closed_parameters(self._tools[begun.name])
        names = {name + syntax.after_name: name for name in schema["properties"]}
        found: dict[str, Any] = {}
        while True:
            name = names[(yield from self._expect(list(names)))]
            of = resolved(schema["properties"][name], schema, name)
            value = yield from (self._bare(of) if syntax.has_json else self._braced())
            if name in found:
                raise self._wrong(f"{name!r} is given twice")
            found[name] = value
            self._add(begun, f"{', ' if len(found) > 1 else '{'}{json.dumps(name)}: {_dumped(value)}")
            if not syntax.has_json:
                yield from self._expect([marked.tail])
            followed = [syntax.between, marked.end]
            if (yield from self._seen(followed)) == marked.end:
                self._add(begun, "}")
                return found
            yield from self._expect([syntax.between])

    def _bare(self, schema: Mapping[str, Any]) -> _Steps:
        """A value in markup, and the tail behind it."""
        marked, syntax = self._marked, self._marked.fields
        assert syntax is not None
        yield from self._expect([syntax.open])
        closing, start = syntax.close + marked.tail, 0
        value: Any = None
        while True:
            while (at := self._rest.find(closing, start)) < 0:
                yield from self._more()
            text = self._rest[:at]
            if is_text(schema):
                value = None if text == "null" and _may_be_null(schema) else text
                break
            try:
                value = json.loads(text)
                break
            except ValueError:
                start = at + 1  # it may be in a text of the JSON
        self._take(at + len(closing))
        return value

    def _braced(self) -> _Steps:
        """A value whose objects and lists are in braces."""
        syntax = self._marked.fields
        assert syntax is not None
        while not self._rest:
            yield from self._more()
        if self._rest.startswith(syntax.open):
            self._take(len(syntax.open))
            while (at := self._rest.find(syntax.close)) < 0:
                yield from self._more()
            text = self._take(at)
            self._take(len(syntax.close))
            return text
        if self._rest[0] == "[":
            return (yield from self._listed())
        if self._rest[0] == "{":
            return (yield from self._object())
        while (found := _SCALAR.match(self._rest)) is None or found.end() == len(self._rest):
            if found is None:
                raise self._wrong("a value is missing")
            yield from self._more()
        return self._loaded(self._take(found.end()))

    def _listed(self) -> _Steps:
        yield from self._expect(["["])
        values: list[Any] = []
        while (yield from self._seen(["]", ""])) != "]":
            if values:
                yield from self._expect([","])
            values.append((yield from self._braced()))
        yield from self._expect(["]"])
        return values

    def _object(self) -> _Steps:
        syntax = self._marked.fields
        assert syntax is not None
        yield from self._expect(["{"])
        values: dict[str, Any] = {}
        while (yield from self._seen(["}", ""])) != "}":
            if values:
                yield from self._expect([syntax.between])
            while (at := self._rest.find(syntax.after_name)) < 0:
                yield from self._more()
            name = self._take(at)
            yield from self._expect([syntax.after_name])
            values[name] = yield from self._braced()
        yield from self._expect(["}"])
        return values

    # -- what is read --------------------------------------------------------------------------------------------------

    def _more(self) -> _Steps:
        """Wait for more. Raises _CutError at the end of the tokens."""
        if self._is_ended:
            raise _CutError("the tokens end within a call; give it more max_tokens", self._said + self._shown_rest())
        yield

    def _seen(self, texts: Sequence[str]) -> _Steps:
        """The one of the texts that comes next, as soon as it can be no other; it is left there."""
        while not self._rest:
            yield from self._more()
        while True:
            possible = [text for text in texts if text.startswith(self._rest) or self._rest.startswith(text)]
            if not possible:
                raise self._wrong(f"{self._shown_rest()[:24]!r} does not follow")
            if len(possible) == 1 or self._rest.startswith(possible[0]):
                return possible[0]
            yield from self._more()

    def _expect(self, texts: Sequence[str]) -> _Steps:
        found, _ = yield from self._expect_with_id(texts)
        return found

    def _expect_with_id(self, texts: Sequence[str]) -> _Steps:
        """The longest of the texts that comes next, which is taken, and the id in it."""
        patterns = [(text, _with_id(text)) for text in sorted(texts, key=len, reverse=True)]
        while True:
            is_open = False
            for text, pattern in patterns:
                found = pattern.match(self._rest)
                if found and not is_open:
                    self._take(found.end())
                    return text, found[1] if pattern.groups else ""
                is_open = is_open or (not self._is_ended and _may_become(text, self._rest))
            if not is_open:
                if self._is_ended and any(_may_become(text, self._rest) for text, _ in patterns):
                    yield from self._more()
                raise self._wrong(f"{self._marked.markers.shown(self._rest[:24])!r} does not follow")
            yield

    def _take(self, count: int) -> str:
        taken, self._rest = self._rest[:count], self._rest[count:]
        self._said += self._marked.markers.shown(taken)
        return taken

    def _say(self, count: int) -> None:
        taken, self._rest = self._rest[:count], self._rest[count:]
        # A marker that begins no call here is no text.
        text = "".join(each for each in taken if not "\ud800" <= each <= "\udbff")
        if text:
            self._parts.append(TextPart(text))

    def _begin(self, call_id: str, name: str) -> ToolCallPart:
        own_id = id_of(self._marked.call_id, call_id, name) if call_id else new_call_id()
        part = ToolCallPart(self._calls, own_id, name, "")
        self._calls += 1
        self._parts.append(part)
        return part

    def _add(self, begun: ToolCallPart, arguments: str) -> None:
        if arguments:
            self._parts.append(ToolCallPart(begun.index, begun.id, begun.name, arguments))

    def _give(self, begun: ToolCallPart, arguments: Mapping[str, Any]) -> None:
        self._parts.append(ToolCall(begun.id, begun.name, arguments))

    def _loaded(self, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise self._wrong(f"it is no JSON: {error}") from None

    def _shown_rest(self) -> str:
        return self._marked.markers.shown(self._rest)

    def _wrong(self, problem: str) -> ToolCallError:
        text = self._said + self._shown_rest()
        return ToolCallError(f"the model wrote a tool call wrongly: {problem} in {text[-120:]!r}", text)


class _CutError(ToolCallError):
    """The tokens ended too early."""


class _Words:
    """Ids as text that grows by whole characters; some ids as a character of their own, some as nothing."""

    def __init__(
        self,
        decode: Decode,
        anchor: Sequence[int],
        marks: Mapping[int, str],
        silent: frozenset[int],
        shown: Mapping[int, str],
    ) -> None:
        """anchor: ids of a text. Behind a token that is no text a decoder would take a space for one of its own."""
        self._decode, self._anchor = decode, list(anchor)
        self._marks, self._silent, self._shown = marks, silent, shown
        self._ids: list[int] = []
        self._start = self._given = 0  # decoding starts at the one; ids before the other have been given out

    def push(self, token_id: int) -> str:
        mark = self._marks.get(token_id)
        if mark is None and token_id in self._silent:
            mark = ""
        if mark is None:
            mark = self._shown.get(token_id)
        if mark is not None:
            before = self.end()
            self._ids, self._given = list(self._anchor), len(self._anchor)
            return before + mark
        self._ids.append(token_id)
        text = self._added()
        if not text or text.endswith(_BROKEN):
            return ""
        self._start, self._given = self._given, len(self._ids)
        return text

    def end(self) -> str:
        """The rest, with an incomplete character replaced."""
        text = self._added()
        self._ids, self._start, self._given = [], 0, 0
        return text

    def _added(self) -> str:
        before = self._decode(self._ids[self._start : self._given]) if self._given > self._start else ""
        return (self._decode(self._ids[self._start :]) if len(self._ids) > self._start else "")[len(before) :]


def new_call_id() -> str:
    """An id that every template takes."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Neighbouring pieces of one text or one call's arguments as one."""
    made: list[Part] = []
    for part in parts:
        last = made[-1] if made else None
        if isinstance(part, TextPart) and isinstance(last, TextPart):
            made[-1] = TextPart(last.text + part.text)
        elif isinstance(part, ToolCallPart) and isinstance(last, ToolCallPart) and last.arguments:
            made[-1] = ToolCallPart(last.index, last.id, last.name, last.arguments + part.arguments)
        else:
            made.append(part)
    return made


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of the text could begin the marker."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


def _with_id(text: str) -> re.Pattern[str]:
    before, mark, behind = text.partition(ID_MARK)
    return re.compile(re.escape(before) + (r"([a-zA-Z0-9_-]+)" if mark else "") + re.escape(behind))


def _may_become(text: str, rest: str) -> bool:
    """Could what is there be the beginning of the text?"""
    before, mark, behind = text.partition(ID_MARK)
    if not mark or len(rest) <= len(before):
        return text.startswith(rest) if not mark else before.startswith(rest)
    if not rest.startswith(before):
        return False
    after = rest[len(before) :].lstrip(_ID_LETTERS + "_-")
    return behind.startswith(after)


def _may_be_null(schema: Mapping[str, Any]) -> bool:
    kinds = [each.get("type") for each in schema.get("anyOf", ())] + [schema.get("type")]
    return (
        "null" in kinds
        or any(isinstance(kind, (list, tuple)) and "null" in kind for kind in kinds)
        or ("enum" in schema and None in schema["enum"])
    )


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
