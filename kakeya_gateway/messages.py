"""`POST /v1/messages` and `/v1/messages/count_tokens`, as Anthropic has them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from kakeya.tools import ToolCallPart
from kakeya_gateway.bodies import Ask, Body, Format, Json, Part, Parts, Refused, Sampled, Tool, as_chat, in_parts
from kakeya_gateway.turns import Piece, Turn

_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class ToolUse(Body):
    harmless = frozenset({"cache_control", "caller"})
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(Body):
    harmless = frozenset({"cache_control", "is_error"})
    type: Literal["tool_result"]
    tool_use_id: str
    content: Parts = []


class Thought(Body):
    harmless = frozenset({"signature"})
    type: Literal["thinking"]
    thinking: str


Content = list[Annotated[Part | Thought | ToolUse | ToolResult, Field(discriminator="type")]]


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Content, BeforeValidator(in_parts)]

    def chat(self) -> Iterable[Json]:
        """As chat completions have it: results of tools come before what else is said, in messages of their own."""
        texts, calls = [part.as_chat() for part in self.content if isinstance(part, Part)], []
        for part in self.content:
            if isinstance(part, ToolResult):
                content = [each.as_chat() for each in part.content] or ""
                yield {"role": "tool", "tool_call_id": part.tool_use_id, "content": content}
            elif isinstance(part, ToolUse):
                calls.append({"id": part.id, "function": {"name": part.name, "arguments": part.input}})
        thought = "".join(part.thinking for part in self.content if isinstance(part, Thought))
        if texts or calls or thought or not self.content:
            said = {"role": self.role, "content": texts or None, "tool_calls": calls}
            yield said | ({"reasoning_content": thought} if thought else {})


class Output(Body):
    format: Format | None = None


class Thinking(Body):
    type: Literal["disabled", "enabled", "adaptive"]
    budget_tokens: int | None = Field(None, gt=0)

    def budget(self, most: int | None) -> int | None:
        """most: of the whole answer."""
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise Refused("goes with type enabled, and with no other", param="thinking.budget_tokens")
        if self.budget_tokens is not None and most is not None and self.budget_tokens >= most:
            raise Refused("must be less than max_tokens", param="thinking.budget_tokens")
        return 0 if self.type == "disabled" else self.budget_tokens


class Choice(Body):
    type: Literal["none", "auto", "any", "tool"] = "auto"
    name: str = ""
    disable_parallel_tool_use: bool = False


class Counted(Sampled):
    """What is counted, which may have what is asked for as well."""

    harmless = frozenset({"metadata", "service_tier", "cache_control", "inference_geo"})
    system: Parts = []
    messages: list[Message]
    max_tokens: int | None = None
    stop_sequences: list[str] = []
    output_config: Output = Output()
    thinking: Thinking | None = None
    tools: list[Tool] = []
    tool_choice: Choice = Choice()

    def ask(self) -> Ask:
        options = self.options(self.output_config.format, "output_config.format")
        said = [{"role": "system", "content": [part.as_chat() for part in self.system]}] if self.system else []
        messages = as_chat([*said, *(each for message in self.messages for each in message.chat())])
        tools = [tool.definition() for tool in self.tools]
        choice = _CHOICES.get(self.tool_choice.type, self.tool_choice.name)
        asked = self.stop_sequences, tools, choice, not self.tool_choice.disable_parallel_tool_use
        budget = None if self.thinking is None else self.thinking.budget(self.max_tokens)
        return Ask(self.model, messages, self.max_tokens, options, *asked, budget=budget, budget_at="thinking")


class Request(Counted):
    max_tokens: int


class Reply:
    ending = ""

    def __init__(self, asked: Request, turn: Turn) -> None:
        self._model = asked.model
        self._turn = turn
        self._content: list[Json] = []  # the last block is under way

    def begin(self) -> Iterable[Json]:
        yield {"type": "message_start", "message": self._message([], None)}

    def more(self, piece: Piece | ToolCallPart) -> Iterable[Json]:
        if isinstance(piece, Piece):
            kind = "thinking" if piece.is_reasoning else "text"
            if not self._content or self._content[-1]["type"] != kind:
                yield from self._open({"type": kind, kind: "", **({"signature": ""} if piece.is_reasoning else {})})
            self._content[-1][kind] += piece.text
            delta = {"type": f"{kind}_delta", kind: piece.text}
        else:
            if not piece.arguments:
                yield from self._open({"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
            delta = {"type": "input_json_delta", "partial_json": piece.arguments}
        yield {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def end(self) -> Iterable[Json]:
        if not self._content:
            yield from self._open({"type": "text", "text": ""})
        yield from self._close()
        uses = [block for block in self._content if block["type"] == "tool_use"]
        for block, call in zip_longest(uses, self._turn.calls):
            if call is None:  # it was cut
                self._content.remove(block)
            else:
                block["input"] = dict(call.arguments)
        delta = {"stop_reason": self._reason, "stop_sequence": self._turn.stop}
        yield {"type": "message_delta", "delta": delta, "usage": self._usage}
        yield {"type": "message_stop"}

    def _open(self, block: Json) -> Iterable[Json]:
        yield from self._close()
        self._content.append(block)
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": {**block}}

    def _close(self) -> Iterable[Json]:
        if self._content:
            yield {"type": "content_block_stop", "index": len(self._content) - 1}

    def whole(self) -> Json:
        return self._message(self._content, self._reason)

    def _message(self, content: list[Json], reason: str | None) -> Json:
        head = {"id": f"msg_{self._turn.name}", "type": "message", "role": "assistant", "model": self._model}
        ending = {"stop_reason": reason, "stop_sequence": self._turn.stop}
        return {**head, "content": content, **ending, "usage": self._usage}

    @property
    def _reason(self) -> str:
        if self._turn.is_cut:
            return "max_tokens"
        ended = "end_turn" if self._turn.stop is None else "stop_sequence"
        return "tool_use" if self._turn.calls else ended

    @property
    def _usage(self) -> Json:
        cached = self._turn.cached_tokens
        read = {"input_tokens": self._turn.start - cached, "cache_read_input_tokens": cached}
        return {**read, "cache_creation_input_tokens": 0, "output_tokens": self._turn.output_tokens}


def error(refused: Refused) -> Json:
    kind = _ERRORS.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
    kind = "overloaded_error" if refused.status == 503 else kind
    return {"type": "error", "error": {"type": kind, "message": str(refused)}}
