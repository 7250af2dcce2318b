"""The JSON of chat completions, whole and in chunks.

One field is an extension, `kakeya.dropped_tokens`: how many tokens of the conversation the session's strategy had
evicted when it answered. The end of every answer has it, so that nothing is dropped silently.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int

    def as_json(self) -> Json:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatReplies:
    """The answers to one request. created: seconds since 1970."""

    model: str
    created: int
    include_usage: bool = False
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")

    def whole(
        self, text: str, logprobs: Sequence[Json] | None, finish_reason: str, usage: Usage, dropped_tokens: int
    ) -> Json:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": _logprobs(logprobs),
            "finish_reason": finish_reason,
        }
        return {**self._head("chat.completion", [choice]), "usage": usage.as_json(), **_ours(dropped_tokens)}

    def first_chunk(self) -> Json:
        return self._chunk({"role": "assistant", "content": ""})

    def chunk(self, text: str, logprobs: Sequence[Json] | None) -> Json:
        return self._chunk({"content": text}, logprobs)

    def last_chunk(self, finish_reason: str, dropped_tokens: int) -> Json:
        return {**self._chunk({}, finish_reason=finish_reason), **_ours(dropped_tokens)}

    def usage_chunk(self, usage: Usage) -> Json:
        return {**self._head("chat.completion.chunk", []), "usage": usage.as_json()}

    def _chunk(
        self, delta: Mapping[str, str], logprobs: Sequence[Json] | None = None, finish_reason: str | None = None
    ) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": _logprobs(logprobs), "finish_reason": finish_reason}
        # If usage is requested, every chunk has the field; it is null in all but the last.
        usage = {"usage": None} if self.include_usage else {}
        return {**self._head("chat.completion.chunk", [choice]), **usage}

    def _head(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def model_list(model: str, created: int) -> Json:
    return {"object": "list", "data": [{"id": model, "object": "model", "created": created, "owned_by": "kakeya"}]}


def logprob_entry(token: str, token_bytes: list[int] | None, logprob: float) -> Json:
    return {"token": token, "logprob": logprob, "bytes": token_bytes, "top_logprobs": []}


def _logprobs(entries: Sequence[Json] | None) -> Json | None:
    return None if entries is None else {"content": list(entries), "refusal": None}


def _ours(dropped_tokens: int) -> Json:
    return {"kakeya": {"dropped_tokens": dropped_tokens}}
