"""`POST /v1/chat/completions`, as OpenAI has it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from time import time
from typing import Annotated, Any, Literal

from pydantic import Field

from kakeya import TokenDetail, TopLogprob
from kakeya.tools import ToolCall, ToolCallPart
from kakeya_gateway.bodies import Ask, Body, Format, Json, Refused, Sampled, Tool, as_chat
from kakeya_gateway.thinking import BUDGETS, Effort
from kakeya_gateway.turns import Piece, Turn

_RECORDS = ("user", "metadata", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention")
HARMLESS = frozenset(_RECORDS)
_NAMES = {False: "content", True: "reasoning_content"}


class StreamOptions(Body):
    harmless = frozenset({"include_obfuscation"})
    include_usage: bool = False


class Function(Body):
    type: Literal["function"]
    function: Tool


class Named(Body):
    name: str


class Choice(Body):
    type: Literal["function"]
    function: Named


class Request(Sampled):
    harmless = HARMLESS | {"store"}
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] = []
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], float] = {}
    logprobs: bool = False
    response_format: Format | None = None
    stream_options: StreamOptions = StreamOptions()
    n: Literal[1] = 1
    modalities: list[Literal["text"]] = ["text"]
    top_logprobs: int = 0
    tools: list[Function] = []
    tool_choice: Literal["none", "auto", "required"] | Choice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Effort = "high"

    def ask(self) -> Ask:
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if self.max_tokens not in (None, most):
            raise Refused("max_completion_tokens has another value; send one of them", param="max_tokens")
        bias = {int(token): value for token, value in self.logit_bias.items()}
        if self.top_logprobs and not self.logprobs:
            raise Refused("needs logprobs: true", param="top_logprobs")
        others: Json = {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs, "logit_bias": bias}
        options = self.options(self.response_format, "response_format", **others)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        choice = self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.function.name
        tools = [tool.function.definition() for tool in self.tools]
        asked = stops, tools, choice, self.parallel_tool_calls
        budget: Json = {"budget": BUDGETS[self.reasoning_effort], "budget_at": "reasoning_effort"}
        return Ask(self.model, as_chat(self.messages), most, options, *asked, **budget)


class Reply:
    """The answer of one turn, whole or in chunks. ending: what comes behind the last one."""

    ending = "data: [DONE]\n\n"

    def __init__(self, asked: Request, turn: Turn) -> None:
        self._asked = asked
        self._turn = turn
        self._head: Json = {"id": f"chatcmpl-{turn.name}", "created": int(time()), "model": asked.model}

    def begin(self) -> Iterable[Json]:
        yield self._chunk({"role": "assistant", "content": ""})

    def more(self, piece: Piece | ToolCallPart) -> Iterable[Json]:
        if isinstance(piece, Piece):
            yield self._chunk({_NAMES[piece.is_reasoning]: piece.text}, piece.tokens)
        else:
            is_first = not piece.arguments
            head = {"id": piece.id, "type": "function"} if is_first else {}
            function = {"arguments": piece.arguments, **({"name": piece.name} if is_first else {})}
            yield self._chunk({"tool_calls": [{"index": piece.index, **head, "function": function}]})

    def end(self) -> Iterable[Json]:
        yield self._chunk({}, reason=self._reason)
        if self._asked.stream_options.include_usage:
            yield {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self._usage}

    def whole(self) -> Json:
        message: Json = {"role": "assistant", "content": self._turn.text, "refusal": None}
        if self._turn.reasoning:
            message["reasoning_content"] = self._turn.reasoning
        if self._turn.calls:
            message["content"] = self._turn.text or None
            message["tool_calls"] = [*map(_called, self._turn.calls)]
        choice = {"index": 0, "message": message, "finish_reason": self._reason}
        choices = [{**choice, "logprobs": self._logprobs(self._turn.tokens)}]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage}

    @property
    def _reason(self) -> str:
        return "length" if self._turn.is_cut else "tool_calls" if self._turn.calls else "stop"

    @property
    def _usage(self) -> Json:
        read, written = self._turn.start, self._turn.output_tokens
        counts: Json = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        counts |= {"prompt_tokens_details": {"cached_tokens": self._turn.cached_tokens}}
        return {**counts, "completion_tokens_details": {"reasoning_tokens": self._turn.reasoning_tokens}}

    def _chunk(self, delta: Json, tokens: Sequence[TokenDetail] = (), reason: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": self._logprobs(tokens)}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _logprobs(self, tokens: Sequence[TokenDetail]) -> Json | None:
        return {"content": logprobs(self._turn, tokens), "refusal": None} if self._asked.logprobs and tokens else None


def logprobs(turn: Turn, tokens: Iterable[TokenDetail]) -> list[Json]:
    def entry(token: TokenDetail | TopLogprob) -> Json:
        text = turn.owner.texts.token(token.token_id)
        return {"token": text, "bytes": [*text.encode()], "logprob": token.logprob}

    return [{**entry(token), "top_logprobs": [*map(entry, token.top_logprobs)]} for token in tokens]


def _called(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
    return {"id": call.id, "type": "function", "function": function}


def error(refused: Refused) -> Json:
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(refused.status, "server_error" if refused.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}}
