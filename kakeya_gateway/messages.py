"""`POST /v1/messages` and `/v1/messages/count_tokens`, as Anthropic has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from kakeya.tokenization import from_openai_messages
from kakeya_gateway.bodies import Ask, Body, Format, Json, Parts, Refused, Sampled
from kakeya_gateway.chat_completions import None_
from kakeya_gateway.turns import Piece, Turn

_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: Parts


class Output(Body):
    format: Format | None = None


class Thinking(Body):
    type: Literal["disabled"]


class Choice(Body):
    harmless = frozenset({"disable_parallel_tool_use"})
    type: Literal["none", "auto"]


class Counted(Sampled):
    """What is counted, which may have what is asked for as well."""

    harmless = frozenset({"metadata", "service_tier", "cache_control", "inference_geo"})
    system: Parts = []
    messages: list[Message]
    max_tokens: int | None = None
    stop_sequences: list[str] = []
    output_config: Output = Output()
    thinking: Thinking | None = None
    tools: None_ = []
    tool_choice: Choice | None = None

    def chat(self) -> list[Json]:
        said: list[tuple[str, Parts]] = [("system", self.system)] if self.system else []
        said += ((message.role, message.content) for message in self.messages)
        messages: list[Any] = [{"role": role, "content": [part.as_chat() for part in parts]} for role, parts in said]
        return from_openai_messages(messages)


class Request(Counted):
    max_tokens: int

    def ask(self) -> Ask:
        options = self.options(self.output_config.format, "output_config.format")
        return Ask(self.model, self.chat(), self.max_tokens, options, self.stop_sequences)


class Reply:
    ending = ""

    def __init__(self, asked: Request, turn: Turn) -> None:
        self._model = asked.model
        self._turn = turn

    def begin(self) -> Iterable[Json]:
        yield {"type": "message_start", "message": self._message([], None)}
        yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}

    def more(self, piece: Piece) -> Iterable[Json]:
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece.text}}

    def end(self) -> Iterable[Json]:
        yield {"type": "content_block_stop", "index": 0}
        delta = {"stop_reason": self._reason, "stop_sequence": self._turn.stop}
        yield {"type": "message_delta", "delta": delta, "usage": self._usage}
        yield {"type": "message_stop"}

    def whole(self) -> Json:
        return self._message([{"type": "text", "text": self._turn.text}], self._reason)

    def _message(self, content: list[Json], reason: str | None) -> Json:
        head = {"id": f"msg_{self._turn.name}", "type": "message", "role": "assistant", "model": self._model}
        ending = {"stop_reason": reason, "stop_sequence": self._turn.stop}
        return {**head, "content": content, **ending, "usage": self._usage}

    @property
    def _reason(self) -> str:
        return "max_tokens" if self._turn.is_cut else "end_turn" if self._turn.stop is None else "stop_sequence"

    @property
    def _usage(self) -> Json:
        cached = self._turn.cached_tokens
        read = {"input_tokens": self._turn.start - cached, "cache_read_input_tokens": cached}
        return {**read, "cache_creation_input_tokens": 0, "output_tokens": self._turn.output_tokens}


def error(refused: Refused) -> Json:
    kind = _ERRORS.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
    kind = "overloaded_error" if refused.status == 503 else kind
    return {"type": "error", "error": {"type": kind, "message": str(refused)}}
