"""Text to ids and back: conversations by the model's template, reasoning apart from what is said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import TypeVar

from kakeya import InvalidMessages, ToolFormatUnknown
from kakeya.tokenization import ChatTokenizer, tokens_for_chat, tokens_for_next_turn
from kakeya.tools import ToolCall, ToolResult, Tools
from kakeya_gateway.bodies import Json, Refused

T = TypeVar("T")

THINKING = "<think>", "</think>"
_PROMPT_ENDS = 32  # ids, in which a template may begin or end the reasoning
_KEPT_TOOLS = 64  # lists of tools, each with what was found of their format


class Texts:
    """A tokenizer, used by one thread at a time, so that long conversations do not hold up the answers of others."""

    def __init__(self, tokenizer: ChatTokenizer, *, tool_format: str | None = None) -> None:
        """tool_format: for a chat template that writes no tool calls; see `kakeya.tools`."""
        self._tokenizer = tokenizer
        self._tool_format = tool_format
        self._thread = ThreadPoolExecutor(1, "texts")
        self._tools = lru_cache(_KEPT_TOOLS)(self._found_tools)
        # Does the template know the markers of reasoning?
        self.thinks = THINKING[1] in str(getattr(tokenizer, "chat_template", ""))

    async def tools(self, definitions: Sequence[Json]) -> Tools | None:
        """None for none. Raises InvalidTool, and Refused where the model's format is not known."""
        return await self._run(partial(self._tools, json.dumps(definitions))) if definitions else None

    async def begin(self, messages: Sequence[Json], tools: Tools | None) -> list[int]:
        """The ids of a whole conversation. Raises TemplateError, InvalidMessages or TokenizerError."""
        if tools is None:
            return await self._run(partial(tokens_for_chat, messages, self._tokenizer))
        if tools.instructions and any(message.get("tool_calls") for message in messages):
            said = "has tool calls that this gateway did not make, and the chat template does not write any"
            raise Refused(said, param="messages")
        return await self._run(partial(tools.tokens_for_chat, messages))

    async def go_on(
        self, messages: Sequence[Json], after: Sequence[int], calls: Sequence[Json] | None, tools: Tools | None
    ) -> list[int]:
        """The ids of new messages behind an answer, whose ids are `after`. Raises as `begin`.

        calls: those in it, as messages have them; None: their ids are not known, and results come in their order.
        """
        if tools is None:
            return await self._run(partial(tokens_for_next_turn, messages, self._tokenizer, after=after))
        results = {message["tool_call_id"]: message["content"] for message in messages if message["role"] == "tool"}
        if calls is None:
            read = tools.read(after).calls
            made = [ToolCall(name, call.name, call.arguments) for name, call in zip(results, read, strict=False)]
        else:
            made = [ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
        if results.keys() != {call.id for call in made}:
            raise InvalidMessages("messages", f"must have the results of the calls {[call.id for call in made]}")
        said = [ToolResult(call, results[call.id]) for call in made]
        others = [message for message in messages if message["role"] != "tool"]
        return await self._run(partial(tools.tokens_for_next_turn, [*said, *others], after=after))

    def thoughts(self, prompt: Sequence[int]) -> Thoughts:
        """Of an answer behind this prompt, which may have begun the reasoning."""
        end = self.decode(prompt[-_PROMPT_ENDS:]) if self.thinks else ""
        return Thoughts(is_known=self.thinks, is_open=end.rfind(THINKING[0]) > end.rfind(THINKING[1]))

    def thought_end(self) -> tuple[list[int], list[int]]:
        """The ids of the marker that ends reasoning, and of what comes before the answer."""
        return self._ids(THINKING[1]), self._ids("\n\n")

    def thought_begun(self, prompt: Sequence[int], *, is_empty: bool) -> list[int]:
        """Ids behind which the model reasons, or, if that is to be empty, answers at once. None are needed where the
        prompt says so already, and none help where it has ended the reasoning."""
        end = self.decode(prompt[-_PROMPT_ENDS:])
        if not self.thinks or end.rstrip().endswith(THINKING[1]):
            return []
        is_open = end.rfind(THINKING[0]) > end.rfind(THINKING[1])
        begin, behind = f"{THINKING[0]}\n", f"\n{THINKING[1]}\n\n"
        return self._ids(("" if is_open else begin) + (behind if is_empty else ""))

    def _ids(self, text: str) -> list[int]:
        return [int(each) for each in self._tokenizer.encode(text, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def token(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False))

    def _found_tools(self, definitions: str) -> Tools:
        given: list[Json] = json.loads(definitions)
        try:
            return Tools(given, self._tokenizer)
        except ToolFormatUnknown as error:
            if self._tool_format is None:
                said = "the model's chat template writes no tool calls; start the gateway with --tool-format"
                raise Refused(said, param="tools") from error
            return Tools(given, self._tokenizer, format=self._tool_format)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class Thoughts:
    """Tells the reasoning with which an answer begins, between its markers, from what is said.

    Space beside the markers belongs to neither. What may be the beginning of a marker waits for what follows.
    """

    def __init__(self, *, is_known: bool, is_open: bool) -> None:
        """is_known: does the model's template know the markers? is_open: did the prompt end within?"""
        self._waiting = ""
        self._may_begin = is_known and not is_open
        self.is_within = is_open
        self._is_at_edge = is_open  # space is left out

    def push(self, piece: str) -> Iterable[tuple[bool, str]]:
        """Texts, each with whether it is reasoning."""
        begin, end = THINKING
        text = self._waiting + piece
        self._waiting = ""
        if self._may_begin:
            said = text.lstrip()
            if begin.startswith(said):
                self._waiting = text
                return
            self._may_begin, self.is_within = False, said.startswith(begin)
            if self.is_within:
                text, self._is_at_edge = said.removeprefix(begin), True
        if self.is_within:
            text = self._without_space(text)
            thought, found, rest = text.partition(end)
            if not found:
                kept = text[: len(text) - _overlap(text, end)].rstrip()
                thought, self._waiting = kept, text[len(kept) :]
            if thought := thought.rstrip():
                yield True, thought
            if not found:
                return
            text, self.is_within, self._is_at_edge = rest, False, True
        if text := self._without_space(text):
            yield False, text

    def end(self) -> Iterable[tuple[bool, str]]:
        """What waited, once no more comes."""
        text, self._waiting = self._waiting, ""
        if text and not (self.is_within and text.isspace()):
            yield self.is_within, text

    def _without_space(self, text: str) -> str:
        text = text.lstrip() if self._is_at_edge else text
        self._is_at_edge &= not text
        return text


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)
