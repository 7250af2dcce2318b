"""Parses a chat completions request strictly: an unsupported parameter is refused by name, never ignored.

Each value is checked once, here or where it is used: `types.Sampling` checks the sampling ranges.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from inference_engine.errors import InvalidArgument
from inference_engine.server.http.error_replies import BadJson, said
from inference_engine.types import MAX_LOGIT_BIAS, Sampling

MAX_MESSAGES = 4096
# Values in a body: that many messages with a text part each, and a quarter more. Parsing holds the interpreter's lock:
# 4 MiB of empty lists would keep every stream waiting for a fifth of a second.
MAX_VALUES = 2**15
# And escapes such as \n and \u00e9, each of which takes the parser as long as some twenty other characters.
MAX_ESCAPES = 2**18
MAX_DIGITS = 4000  # of a whole number; the interpreter reads few more, and refuses others with advice for programmers
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256
ROLES = ("system", "user", "assistant")
HONOURED = (
    "model",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "logit_bias",
    "logprobs",
    "n",
    "stream",
    "stream_options",
)
# Extensions to chat completions.
OWN = ("allow_special_tokens",)
# Unsupported parameters are accepted at these values, which request the behaviour there is.
_OFF: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_logprobs": 0,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "tools": [],
    "tool_choice": "none",
    "store": False,
}


_PIECE_BYTES = 2**16
_MOST_NAMED = 10  # of parameters that one refusal names
_PATH_CHARACTERS = 200  # of a path that a refusal says, the last ones

# An escape of half a surrogate pair; most are followed by the other half.
_MAY_BE_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """max_tokens: None for as many as fit. max_tokens_name: the name of the parameter that the caller used."""

    model: str
    messages: tuple[Mapping[str, str], ...]
    sampling: Sampling
    max_tokens: int | None = None
    max_tokens_name: str = "max_tokens"
    stops: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    allow_special_tokens: bool = False


def read_request(body: bytes) -> ChatRequest:
    """Raises BadJson, or InvalidArgument with the parameter's name."""
    given = {name: value for name, value in _object(body).items() if value is not None}
    _refuse_not_honoured(given)
    name, max_tokens = _max_tokens(given)
    stream = _flag(given, "stream")
    return ChatRequest(
        model=_text(_required(given, "model"), "model"),
        messages=_messages(_required(given, "messages")),
        sampling=_sampling(given),
        max_tokens=max_tokens,
        max_tokens_name=name,
        stops=_stops(given.get("stop", [])),
        logprobs=_flag(given, "logprobs"),
        stream=stream,
        include_usage=_include_usage(given.get("stream_options"), stream=stream),
        allow_special_tokens=_flag(given, "allow_special_tokens"),
    )


def _object(body: bytes) -> dict[str, Any]:
    if len(body) > MAX_VALUES:  # fewer bytes hold no more
        _refuse_slow(body)
    if body.startswith(codecs.BOM_UTF8):
        raise BadJson("the body is not JSON: it begins with a byte order mark; send it without")
    try:
        value, has_repeats = _parsed(body.decode())
        if _MAY_BE_HALF.search(body):
            _refuse_half_names(value)
        if has_repeats:
            path = "".join(reversed(_repeated(value))).removeprefix(".")
            raise InvalidArgument(path[-_PATH_CHARACTERS:], "stands more than once in its object; send it once")
    except UnicodeDecodeError:
        raise BadJson("the body is not JSON: it is not UTF-8") from None
    except RecursionError:
        raise BadJson("the body has lists or objects too deep in each other; a request needs five levels") from None
    except ValueError as error:
        raise BadJson(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadJson(f"the body must be a JSON object, got {type(value).__name__}")
    return value


def _refuse_slow(body: bytes) -> None:
    """Raises BadJson for what the parser would be busy with for too long."""
    values, escapes = counted(body)
    if values > MAX_VALUES:
        raise BadJson(
            f"the body has {values} JSON values; the limit is {MAX_VALUES}. A request has at most {MAX_MESSAGES} "
            "messages; send fewer, or longer ones"
        )
    if escapes > MAX_ESCAPES:
        raise BadJson(
            f"the body has {escapes} escapes such as \\n and \\u00e9; the limit is {MAX_ESCAPES}. Send characters as "
            "they are, in UTF-8 (in Python json.dumps(…, ensure_ascii=False)), or a shorter text"
        )


def counted(body: bytes, piece_bytes: int = _PIECE_BYTES) -> tuple[int, int]:
    """How many values and escapes JSON has, without parsing it. The interpreter's lock is not held.

    Values are commas and opening brackets outside strings, and one: at least as many as there are, where empty lists
    and objects count twice. Anything for what is no JSON.
    """
    values, escapes, in_string, is_escaped = 1, 0, False, False
    for first in range(0, len(body), piece_bytes):
        piece = np.frombuffer(body, dtype=np.uint8, count=min(piece_bytes, len(body) - first), offset=first)
        quotes = piece == ord('"')
        backslashes = piece == ord("\\")
        if is_escaped or backslashes.any():
            # A character is escaped after an odd number of backslashes in a row.
            index = np.arange(1, len(piece) + 1, dtype=np.int32)
            others = np.maximum.accumulate(np.where(backslashes, np.int32(0), index))
            run = index - others + is_escaped * (others == 0)
            odd = (run & 1).astype(np.bool_)
            quotes[1:] &= ~odd[:-1]
            quotes[0] &= not is_escaped
            is_escaped = bool(odd[-1])
            escapes += int(np.count_nonzero(odd))
        inside = np.logical_xor.accumulate(quotes) ^ in_string
        marks = (piece == ord(",")) | (piece == ord("[")) | (piece == ord("{"))
        values += int(np.count_nonzero(marks & ~inside))
        in_string = bool(inside[-1])
    return values, escapes


class _Repeating(dict[str, Any]):
    """An object with a name that stands in it more than once."""

    name = ""


def _parsed(text: str) -> tuple[Any, bool]:
    """The value, and whether it has a _Repeating in it. Raises ValueError or RecursionError."""
    repeating: list[_Repeating] = []

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
        repeating.append(_Repeating(found))
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                repeating[-1].name = name
                break
            seen.add(name)
        return repeating[-1]

    value = json.loads(text, parse_int=_int, parse_constant=_no_constant, object_pairs_hook=made)
    return value, bool(repeating)


def _int(text: str) -> int:
    if (digits := len(text.removeprefix("-"))) > MAX_DIGITS:
        raise ValueError(f"a number has {digits} digits; the limit is {MAX_DIGITS}")
    return int(text)


def _repeated(value: object) -> list[str]:
    """The path of the first repeated name, the innermost part first; empty if there is none.

    Joined by the caller, once: a body may have a long name around many others.
    """
    if isinstance(value, _Repeating):
        return [f".{value.name}"]
    if isinstance(value, dict):
        for name, item in value.items():
            if found := _repeated(item):
                return [*found, f".{name}"]
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if found := _repeated(item):
                return [*found, f"[{index}]"]
    return []


def _refuse_half_names(value: object) -> None:
    """Raise BadJson for a name with an unpaired surrogate, which no answer could quote. Values are checked where they
    are used, with their path."""
    if isinstance(value, dict):
        for name, item in value.items():
            if any("\ud800" <= character <= "\udfff" for character in name):
                raise BadJson("a name in the body has an unpaired surrogate, which is not a valid character")
            _refuse_half_names(item)
    elif isinstance(value, list):
        for item in value:
            _refuse_half_names(item)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _refuse_not_honoured(given: Mapping[str, Any]) -> None:
    refused = [name for name in given if name not in (*HONOURED, *OWN) and not _is_off(name, given[name])]
    if refused:
        named = ", ".join(map(said, refused[:_MOST_NAMED]))
        if more := len(refused[_MOST_NAMED:]):
            named += f" and {more} more"
        raise InvalidArgument(
            said(refused[0]),
            f"this interface is frozen and does not support {named}; leave it out. It supports "
            f"{', '.join((*HONOURED, *OWN))}; sessions over gRPC support more",
        )
    if (count := given.get("n", 1)) != 1 or isinstance(count, bool):
        raise InvalidArgument("n", f"must be 1, got {said(repr(count))}; send one request for each answer")


def _is_off(name: str, value: object) -> bool:
    # JSON's false is not its 0, though Python's is.
    return name in _OFF and value == _OFF[name] and isinstance(value, bool) == isinstance(_OFF[name], bool)


def _required(given: Mapping[str, Any], name: str) -> Any:
    if name not in given:
        raise InvalidArgument(name, "is required")
    return given[name]


def _max_tokens(given: Mapping[str, Any]) -> tuple[str, int | None]:
    """The old and the new name of the parameter are synonyms."""
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
    values = {_whole(given[name], name) for name in names}
    if len(values) > 1:
        raise InvalidArgument(
            "max_tokens", f"is {given['max_tokens']}, but max_completion_tokens has another value; send one of them"
        )
    if not names:
        return "max_tokens", None
    if (value := values.pop()) < 1:
        raise InvalidArgument(names[0], f"must be ≥ 1, got {value}")
    return names[0], value


def _sampling(given: Mapping[str, Any]) -> Sampling:
    return Sampling(
        temperature=_number(given.get("temperature", 0.0), "temperature"),
        top_p=_number(given.get("top_p", 1.0), "top_p"),
        seed=None if "seed" not in given else _whole(given["seed"], "seed"),
        logit_bias=_logit_bias(given.get("logit_bias", {})),
    )


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise InvalidArgument("logit_bias", f"must be an object from token id to bias, got {_kind(value)}")
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidArgument("logit_bias", f"at most {MAX_LOGIT_BIAS} entries, got {len(value)}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not key.isascii() or not key.isdigit() or len(key) > len(str(2**32)):
            raise InvalidArgument("logit_bias", f"its names must be token ids, got {key[:20]!r}")
        if int(key) in biases:
            raise InvalidArgument("logit_bias", f"has token {int(key)} twice, once as {key!r}; send it once")
        biases[int(key)] = _number(bias, "logit_bias")
    return biases


def _stops(value: object) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or len(values) > MAX_STOPS:
        raise InvalidArgument("stop", f"must be a string or a list of at most {MAX_STOPS} strings")
    for stop in values:
        if not 1 <= len(_text(stop, "stop")) <= MAX_STOP_CHARACTERS:
            raise InvalidArgument("stop", f"each must have 1 to {MAX_STOP_CHARACTERS} characters, got {len(stop)}")
    return tuple(values)


def _include_usage(options: object, *, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise InvalidArgument("stream_options", "requires stream: true; set it, or leave stream_options out")
    if not isinstance(options, dict):
        raise InvalidArgument("stream_options", f"must be an object, got {_kind(options)}")
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name != "include_usage":
            raise InvalidArgument(f"stream_options.{said(name)}", "is not honoured; leave it out")
    return _flag(given, "include_usage", path="stream_options.include_usage")


def _messages(value: object) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise InvalidArgument("messages", "must be a list of at least one message")
    if len(value) > MAX_MESSAGES:
        raise InvalidArgument("messages", f"must be at most {MAX_MESSAGES}, got {len(value)}")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(value))


def _message(value: object, path: str) -> Mapping[str, str]:
    if not isinstance(value, dict):
        raise InvalidArgument(path, f"must be an object, got {_kind(value)}")
    given = {name: item for name, item in value.items() if item is not None}
    if (role := given.get("role")) not in ROLES:
        raise InvalidArgument(f"{path}.role", f"must be {', '.join(ROLES[:-1])} or {ROLES[-1]}, got {role!r:.40}")
    for name, item in given.items():
        # An answer that is sent back unchanged has empty lists, such as `"annotations": []`.
        if name not in ("role", "content") and item not in ([], ""):
            raise InvalidArgument(f"{path}.{said(name)}", "is not honoured; a message has a role and content")
    return {"role": role, "content": _content(given.get("content"), f"{path}.content")}


def _content(value: object, path: str) -> str:
    """A string, or text parts, joined by line breaks like in the Python SDK."""
    if not isinstance(value, list):
        return _text(value, path)
    if not value:
        raise InvalidArgument(path, "must hold at least one part")
    return "\n".join(_part(part, f"{path}[{index}]") for index, part in enumerate(value))


def _part(value: object, path: str) -> str:
    if not isinstance(value, dict) or value.get("type") != "text" or set(value) != {"type", "text"}:
        raise InvalidArgument(path, 'must be {"type": "text", "text": …}; the model reads text')
    return _text(value["text"], f"{path}.text")


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(path, f"must be text, got {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(path, "has an unpaired surrogate, which is not a valid character") from None
    return value


def _number(value: object, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgument(path, f"must be a number, got {_kind(value)}")
    try:
        return float(value)
    except OverflowError:
        raise InvalidArgument(path, "is too large") from None


def _whole(value: object, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(path, f"must be a whole number, got {_kind(value)}")
    return value


def _flag(given: Mapping[str, Any], name: str, *, path: str | None = None) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise InvalidArgument(path or name, f"must be true or false, got {_kind(value)}")
    return value


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
