"""Messages of the OpenAI chat API, checked and turned into what chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kakeya._errors import InvalidMessages

Message = Mapping[str, Any]

# What a message of each role may say.
_FIELDS: dict[str, frozenset[str]] = {
    "system": frozenset({"role", "content", "name"}),
    "developer": frozenset({"role", "content", "name"}),
    "user": frozenset({"role", "content", "name"}),
    "assistant": frozenset({"role", "content", "name", "tool_calls", "reasoning_content"}),
    "tool": frozenset({"role", "content", "name", "tool_call_id"}),
}


def from_openai_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages in the format of the OpenAI chat API as the messages that chat templates expect.

    Roles system, developer (as system), user, assistant and tool. Content is text, or text parts, which are joined by
    line ends. The JSON text of a tool call's arguments becomes an object. An assistant's `reasoning_content` stays, for
    the template to show or leave out. Raises InvalidMessages with the path of what cannot be expressed: images and
    audio, unknown roles or fields, arguments that are not a JSON object.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidMessages("messages", f"must be a list of messages, got {type(messages).__name__}")
    return [_convert(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _convert(message: Message, path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidMessages(path, f"must be an object, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _FIELDS:
        raise InvalidMessages(f"{path}.role", f"must be one of {', '.join(_FIELDS)}; got {role!r}")
    for name, value in message.items():
        # Replies of the API carry fields that say nothing: `"refusal": null`, `"annotations": []`.
        if name not in _FIELDS[role] and value not in (None, [], {}, ""):
            raise InvalidMessages(f"{path}.{name}", f"cannot be expressed in a {role} message of a chat template")
    calls, thought = message.get("tool_calls") or [], message.get("reasoning_content")
    rendered: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _text(message.get("content"), f"{path}.content", may_be_missing=bool(calls or thought)),
    }
    if thought:
        rendered["reasoning_content"] = _required_text(message, "reasoning_content", path)
    if calls:
        rendered["tool_calls"] = [_tool_call(call, f"{path}.tool_calls[{n}]") for n, call in enumerate(calls)]
    if role == "tool":
        rendered["tool_call_id"] = _required_text(message, "tool_call_id", path)
    if message.get("name"):
        rendered["name"] = _required_text(message, "name", path)
    return rendered


def _text(content: object, path: str, *, may_be_missing: bool) -> str:
    if isinstance(content, str):
        return content
    if content in (None, []) and may_be_missing:
        return ""
    if not isinstance(content, Sequence) or not content:
        raise InvalidMessages(path, f"must be text or a list of text parts, got {content!r}")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidMessages(
                f"{path}[{index}]", f"must be a text part, got {kind!r}; the runtime's models read text"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_call(call: object, path: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise InvalidMessages(path, f"must be an object, got {type(call).__name__}")
    if call.get("type", "function") != "function" or not isinstance(call.get("function"), Mapping):
        raise InvalidMessages(path, "must be a call of type 'function'")
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise InvalidMessages(f"{path}.function.arguments", f"is not JSON: {error}") from error
    if not isinstance(arguments, Mapping):
        raise InvalidMessages(f"{path}.function.arguments", f"must be a JSON object, got {arguments!r}")
    return {
        "id": _required_text(call, "id", path),
        "type": "function",
        "function": {"name": _required_text(function, "name", f"{path}.function"), "arguments": dict(arguments)},
    }


def _required_text(holder: Mapping[str, Any], name: str, path: str) -> str:
    value = holder.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidMessages(f"{path}.{name}", f"must be a text that is not empty, got {value!r}")
    return value
