"""Tool calls, on the client's side: in the model's own format, held to each tool's schema, read as they are written.

    tools = Tools([add, {"name": "search", "parameters": {…}}], tokenizer)
    session.append(tools.tokens_for_chat([{"role": "user", "content": "What is 30 + 12?"}]))
    turn = session.generate(256, constraint=tools.constraint("required"))
    for part in tools.parts(turn):                              # text, pieces of calls, and each call when it is whole
        if isinstance(part, ToolCall):
            results.append(tools.call(part))
    session.append(tools.tokens_for_next_turn(results, after=turn.token_ids))

The format is found from the tokenizer's chat template, by what it makes of a call. The constraint has it, and the
schema of every tool, so a call that was not cut can be parsed and fits its schema. Markers that are tokens of their own
are written and found by their id: text that reads like one begins no call.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kakeya._checks import flag
from kakeya._checks import token_ids as checked_ids
from kakeya._constraints import Lark
from kakeya._errors import InvalidArgument, InvalidMessages, InvalidTool, TemplateError, ToolFormatUnknown
from kakeya._tool_format import NAMED, FieldSyntax, TemplateFormat, ToolFormat, example, find_format
from kakeya._tool_grammar import Thinking, grammar
from kakeya._tool_markup import MarkedFormat
from kakeya._tool_parser import Part, TextPart, ToolCall, ToolCallParser, ToolCallPart, new_call_id
from kakeya._tool_schema import Tool, ToolLike, given_values, tool_from
from kakeya.tokenization import (
    ChatTokenizer,
    Message,
    Spoken,
    Writer,
    ids_after,
    markers,
    render,
    special_tokens,
    tokens_for_chat,
    tokens_for_next_turn,
    with_template,
)

__all__ = [
    "FieldSyntax",
    "TextPart",
    "Tool",
    "ToolCall",
    "ToolCallParser",
    "ToolCallPart",
    "ToolFormat",
    "ToolResult",
    "Tools",
    "ToolsTurn",
    "tool_from",
]

AUTO, REQUIRED, NONE = "auto", "required", "none"
_PYTHON_TAG = "<|python_tag|>"
_THINK = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered to a call, for the model to read."""

    call: ToolCall
    content: str
    is_error: bool = False  # the function raised; `content` says what


@dataclass(frozen=True, slots=True)
class ToolsTurn:
    """What was said in one turn, and called."""

    text: str
    calls: tuple[ToolCall, ...]


class _Stream(Protocol):
    """A blocking stream of a Generate."""

    def __iter__(self) -> Iterator[int]: ...


class _AsyncStream(Protocol):
    def __aiter__(self) -> AsyncIterator[int]: ...


class Tools:
    """Tools in the format of one tokenizer's chat template."""

    def __init__(
        self,
        tools: Sequence[ToolLike],
        tokenizer: ChatTokenizer,
        *,
        format: str | ToolFormat | None = None,  # noqa: A002 - the field's own word
        **template_options: Any,
    ) -> None:
        """tools: typed functions, definitions as the OpenAI or the Anthropic API has them, or `Tool`s.

        format: for a template that writes no calls, `"hermes"`, `"llama"`, `"code_block"`, or one of your own; then the
        tools are described in the system message. template_options: what the chat template takes besides.

        Raises ToolFormatUnknown if the template writes no calls that can be read again, InvalidTool for a tool.
        """
        made = [tool_from(tool) for tool in tools]
        self.tools: Mapping[str, Tool] = {tool.name: tool for tool in made}
        for tool in made:
            if tool.name in (AUTO, REQUIRED, NONE):
                raise InvalidTool(tool.name, "is what a choice of tools is called; name it otherwise")
        if len(self.tools) < len(made):
            names = [tool.name for tool in made]
            raise InvalidTool(next(name for name in names if names.count(name) > 1), "is the name of two tools")
        self._tokenizer = tokenizer
        schemas = self.schemas or None
        self._options = {
            name: value
            for name, value in with_template(tokenizer, {**template_options, "tools": schemas}).items()
            if name != "tools"
        }
        found = None if format is not None else find_format(self._rendered)
        if isinstance(format, str) and format not in NAMED:
            raise InvalidArgument(
                f"format must be one of {', '.join(NAMED)}, or a ToolFormat, got {format!r}",
                metadata={"field": "format"},
            )
        self._of_template: TemplateFormat | None = found
        if found is not None:
            self.format: ToolFormat = found.format
        elif format is not None:
            self.format = NAMED[format] if isinstance(format, str) else format
        else:
            raise ToolFormatUnknown(_unknown(tokenizer, self._options))
        self._special = special_tokens(tokenizer, self._options.get("chat_template"))
        self._marked = MarkedFormat.of(self.format, self._special.ids)
        self._shows_tools = found is not None and self._are_shown()
        self._added = {
            token_id: (str(getattr(token, "content", token)), bool(getattr(token, "special", False)))
            for token_id, token in tokenizer.added_tokens_decoder.items()
        }
        tag = next((at for at, (text, _) in self._added.items() if text == _PYTHON_TAG), None)
        self._prefix = None if self._marked.trigger else tag

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates and the OpenAI API take them."""
        return [tool.schema for tool in self.tools.values()]

    @property
    def is_parallel(self) -> bool:
        """Can one turn hold several calls?"""
        return self.format.between is not None

    @property
    def instructions(self) -> str:
        """What a system message says of the tools; empty where the chat template says it."""
        if self._shows_tools or not self.tools:
            return ""
        described = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in self.schemas)
        said = f"You can call these functions:\n<tools>\n{described}\n</tools>"
        if self._marked.markers.id_of:
            return said  # in a message a marker is text, and no example of the token
        written = example(self.format, "NAME", {"PARAMETER": "VALUE"})
        return f"{said}\n\nTo call one, write its name and its arguments in this form:\n{written}"

    # -- what is said to the model -------------------------------------------------------------------------------------

    def tokens_for_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        allow_special_tokens: bool = False,
    ) -> list[int]:
        """The ids of a conversation that starts a session, and of the tools. As `kakeya.tokenization.tokens_for_chat`;
        where the template does not show tools, they are described in the system message."""
        if instructions := self.instructions:
            messages = _with_system(messages, instructions)
        return tokens_for_chat(
            messages,
            self._tokenizer,
            add_generation_prompt=add_generation_prompt,
            tools=self.schemas if self._shows_tools else None,
            allow_special_tokens=allow_special_tokens,
            **self._options,
        )

    def tokens_for_next_turn(
        self,
        said: Sequence[ToolResult | Message],
        *,
        after: Sequence[int],
        add_generation_prompt: bool = True,
        allow_special_tokens: bool = False,
    ) -> list[int]:
        """The ids to append for the next turn: results of the calls that were made last, in their order, and messages.

        As `kakeya.tokenization.tokens_for_next_turn`: only what is new, and what the tokens of `after` lack of the
        turn's end, a call's markers included. Raises InvalidMessages if a call has no result, ToolCallError if the last
        turn was cut within a call: rewind the session to before it.
        """
        results = [each for each in said if isinstance(each, ToolResult)]
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "tools": self.schemas if self._shows_tools else None,
            "allow_special_tokens": allow_special_tokens,
            **self._options,
        }
        generated = checked_ids(after, "after")
        parser = self.parser()
        calls = [part for part in [*parser.feed(generated), *parser.finish()] if isinstance(part, ToolCall)]
        if [call.name for call in calls] != [result.call.name for result in results]:
            raise InvalidMessages(
                "results",
                f"must be one for each call, in their order: {_names(calls)} called, and there are results of "
                f"{_names([result.call for result in results])}",
            )
        missing = self._encoded(parser.missing)
        generated += missing
        if not results or self._of_template is None:
            messages = _as_messages(said, self.format)
            return missing + tokens_for_next_turn(messages, self._tokenizer, after=generated, **options)
        return missing + self._after_calls(said, [result.call for result in results], generated, options)

    def _after_calls(
        self,
        said: Sequence[ToolResult | Message],
        calls: Sequence[ToolCall],
        generated: list[int],
        options: dict[str, Any],
    ) -> list[int]:
        of_prompt = options.pop("add_generation_prompt")
        writer = Writer(self._tokenizer, options, options.pop("allow_special_tokens"))
        messages = _as_messages(said, self.format)
        words = markers([messages, options])
        try:
            one, other = (self._spoken(calls, word) for word in words)
            return ids_after(writer, one, other, messages, generated, of_prompt)
        except TemplateError:
            # Some templates write the end of calls only where there are several.
            if not self.is_parallel or len(calls) > 1:
                raise
            twice = [ToolCall(new_call_id(), calls[0].name, {}), *calls]
            one, other = (self._spoken(twice, word) for word in words)
            return ids_after(writer, one, other, messages, generated, of_prompt)

    def _spoken(self, calls: Sequence[ToolCall], word: str) -> Spoken:
        """A message with these calls, the last one of which has the word as its argument."""
        assert self._of_template is not None
        syntax = self.format.fields
        given = [(call.id, call.name, {"z": word if call is calls[-1] else "z"}) for call in calls]
        closing = ('"}' if syntax is None else syntax.close) + self.format.end
        return Spoken(self._of_template.message(given), word, closing.replace("{{id}}", calls[-1].id))

    # -- what the model says -------------------------------------------------------------------------------------------

    def constraint(self, choice: str = AUTO, *, parallel: bool = True) -> Lark:
        """What a Generate is held to.

        choice: `"auto"`, text, and calls if the model makes some; `"required"`, one call at least; `"none"`, text; or
        the name of the tool that is to be called. parallel: may there be several calls, where the format can have them?

        Raises InvalidArgument for another choice, InvalidTool for a schema that the format cannot be held to.
        """
        if choice not in (AUTO, REQUIRED, NONE, *self.tools):
            raise InvalidArgument(
                f"choice must be auto, required, none or the name of a tool ({', '.join(self.tools)}), got {choice!r}",
                metadata={"field": "choice"},
            )
        if choice == REQUIRED and not self.tools:
            raise InvalidArgument("there is no tool to be called", metadata={"field": "choice"})
        tools = [] if choice == NONE else [self.tools[choice]] if choice in self.tools else [*self.tools.values()]
        held = self._marked.markers.mark_of
        others = [
            token_id
            for token_id, (text, is_special) in self._added.items()
            if token_id not in held
            and token_id != self._prefix
            and (is_special or (text.startswith("<") and text.endswith(">")))
        ]
        return Lark(
            grammar(
                self.format,
                self._marked,
                tools,
                may_say=choice in (AUTO, NONE),
                is_parallel=flag(parallel, "parallel") and choice not in self.tools,
                others=others,
                names=self.tools,
                prefix=self._prefix,
                thinking=self._thinking(),
            )
        )

    def parser(self) -> ToolCallParser:
        """What reads the tokens of one turn, as they come."""
        decoder = self._tokenizer

        def decode(ids: Sequence[int]) -> str:
            return str(decoder.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

        return ToolCallParser(
            self._marked,
            self.tools,
            decode,
            anchor=self._encoded("a")[-1:],
            silent=frozenset(token_id for token_id, (_, is_special) in self._added.items() if is_special),
            shown={token_id: text for token_id, (text, _) in self._added.items()},
            prefix=self._prefix,
        )

    def parts(self, stream: _Stream) -> Iterator[Part]:
        """The parts of a turn, as its tokens come. Raises what the stream raises, and ToolCallError for a call that is
        cut, or without a constraint written wrongly; its tokens are in the history then, and `rewind` drops them."""
        parser = self.parser()
        for token_id in stream:
            yield from parser.feed([token_id])
        yield from parser.finish()

    async def parts_async(self, stream: _AsyncStream) -> AsyncIterator[Part]:
        """The same of a stream of the asyncio client."""
        parser = self.parser()
        async for token_id in stream:
            for part in parser.feed([token_id]):
                yield part
        for part in parser.finish():
            yield part

    def read(self, token_ids: Iterable[int]) -> ToolsTurn:
        """A whole turn: its text and its calls. Raises ToolCallError as `parts`."""
        parser = self.parser()
        parts = [*parser.feed(token_ids), *parser.finish()]
        text = "".join(part.text for part in parts if isinstance(part, TextPart))
        return ToolsTurn(text.strip(), tuple(part for part in parts if isinstance(part, ToolCall)))

    # -- running -------------------------------------------------------------------------------------------------------

    def call(self, call: ToolCall) -> ToolResult:
        """Run the function of a call. What it raises becomes the result, with `is_error`, for the model to read.

        Raises InvalidTool for a tool that has no function, or an asynchronous one, which is for `call_async`.
        """
        result = self._run(call)
        if isinstance(result, ToolResult):
            return result
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise InvalidTool(call.name, "is asynchronous; use call_async")
        return ToolResult(call, _shown(result))

    async def call_async(self, call: ToolCall) -> ToolResult:
        """The same, of a function that may be asynchronous."""
        result = self._run(call)
        if inspect.isawaitable(result):
            try:
                result = await result
            except Exception as error:  # noqa: BLE001 - for the model to read
                return _failed(call, error)
        return result if isinstance(result, ToolResult) else ToolResult(call, _shown(result))

    def _run(self, call: ToolCall) -> Any:
        tool = self.tools.get(call.name)
        if tool is None or tool.function is None:
            raise InvalidTool(call.name, "is a tool without a function; make its result with ToolResult(call, text)")
        try:
            return tool.function(**given_values(tool, call.arguments))
        except Exception as error:  # noqa: BLE001 - for the model to read
            return _failed(call, error)

    # -- the template --------------------------------------------------------------------------------------------------

    def _rendered(self, messages: Sequence[Message]) -> str:
        return render(self._tokenizer, messages, False, {**self._options, "tools": self.schemas or None})

    def _are_shown(self) -> bool:
        asked = self._rendered([{"role": "user", "content": "a"}])
        return all(name in asked for name in self.tools)

    def _thinking(self) -> Thinking | None:
        """Markers of reasoning, if the template knows them and the prompt has not ended it."""
        begin, end = _THINK
        source = str(self._options.get("chat_template") or getattr(self._tokenizer, "chat_template", ""))
        if begin not in source or end not in source:
            return None
        options = {**self._options, "tools": self.schemas or None}
        asked: list[Message] = [{"role": "user", "content": "a"}]
        whole = render(self._tokenizer, asked, True, options)
        head = whole.removeprefix(self._rendered(asked))
        if end in head:
            return None
        ids = {text: token_id for token_id, (text, _) in self._added.items()}
        return Thinking(begin=begin, end=end, begin_id=ids.get(begin), end_id=ids.get(end), is_open=begin in head)

    def _encoded(self, text: str) -> list[int]:
        return [int(each) for each in self._tokenizer.encode(text, add_special_tokens=False)] if text else []


def _unknown(tokenizer: ChatTokenizer, options: Mapping[str, Any]) -> str:
    source = options.get("chat_template") or getattr(tokenizer, "chat_template", None)
    name = str(getattr(tokenizer, "name_or_path", "") or "the tokenizer")
    begin = " ".join(str(source).split())[:60] if source else "there is none"
    return (
        f"the chat template of {name} ({begin}…) writes no tool calls that can be read again; name a format for its "
        f"model: format={' or '.join(map(repr, NAMED))}, or a ToolFormat of your own"
    )


def _with_system(messages: Sequence[Message], instructions: str) -> list[Message]:
    first = messages[0] if messages and isinstance(messages[0], Mapping) else {}
    if first.get("role") == "system" and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{instructions}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def _as_messages(said: Sequence[ToolResult | Message], of: ToolFormat) -> list[Message]:
    """Results as messages: of the role that templates have for them, or together as one of the user."""
    messages: list[Message] = []
    together: list[str] = []
    for each in said:
        if not isinstance(each, ToolResult):
            messages.append(each)
        elif of.result is None:
            call = each.call
            messages.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": each.content})
        else:
            together.append(of.result.replace("{{result}}", each.content))
    return [{"role": "user", "content": "\n".join(together)}, *messages] if together else messages


def _names(calls: Sequence[ToolCall]) -> str:
    return ", ".join(call.name for call in calls) or "none"


def _shown(result: Any) -> str:
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


def _failed(call: ToolCall, error: Exception) -> ToolResult:
    return ToolResult(call, f"{type(error).__name__}: {error}", is_error=True)
