"""JSON schemas of the kinds that are met in public, made by a seeded generator, and what fits them.

Objects, enums, constants, nested arrays, references, formats, bounded numbers, patterns, choices of types, keys in
several alphabets. Everything that a value may hold is bounded, so that it fits into some hundred tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from datetime import datetime, time
from functools import cache, partial
from typing import Any

Schema = dict[str, Any]

_KEYS = (
    *("name", "id", "created_at", "total", "items", "status", "address", "is_active", "tags", "unit price", "e-mail"),
    *("größe", "naïve", "имя", "цена", "名前", "数量", "عنوان", "emoji 🙂", 'quote "', "back\\slash", "x" * 24),
)
_WORDS = ("red", "green", "large", "small", "Berlin", "東京", "São Paulo", "yes", "no", "42", "", "a b", "tab\t")
_FORMATS = ("date", "time", "date-time", "ipv4", "uuid", "email")
_PATTERNS = ("^[A-Z]{3}-[0-9]{2,4}$", "^(low|high)( risk)?$", "^#[0-9a-f]{6}$", "^[a-z]+$")
_DEEPEST = 3


def schemas(seed: int) -> Iterator[Schema]:
    """Without end. Each is an object, or an array of them."""
    rng = random.Random(seed)
    while True:
        shared = {f"part{number}": _leaf(rng) for number in range(rng.randrange(3))}
        schema = _object(rng, 0, shared)
        if rng.random() < 0.15:
            schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 2}
        yield {**schema, "$defs": shared} if shared else schema


def is_valid(text: str, schema: Schema) -> bool:
    """Does the text parse, and is the value what the schema asks for, its formats included?"""
    try:
        return value_is_valid(json.loads(text), schema)
    except ValueError:
        return False


def begins_validly(text: str, schema: Schema) -> bool:
    """As `is_valid`, of the first JSON value in a text, whatever is around it."""
    starts = [at for at in (text.find("{"), text.find("[")) if at >= 0]
    if not starts:
        return False
    try:
        value, _ = json.JSONDecoder().raw_decode(text, min(starts))
    except ValueError:
        return False
    return value_is_valid(value, schema)


def value_is_valid(value: object, schema: Schema) -> bool:
    from jsonschema import Draft202012Validator

    return bool(Draft202012Validator(schema, format_checker=_checker()).is_valid(value))


@cache
def _checker() -> Any:
    """Of today's formats. jsonschema's own checker of all has an older draft's `time`, and none of `date-time`."""
    from jsonschema import Draft202012Validator, FormatChecker

    checker = FormatChecker(Draft202012Validator.FORMAT_CHECKER.checkers)

    def has_offset(value: object, read: Callable[[str], datetime | time]) -> bool:
        # RFC 3339 has leap seconds, which Python does not read.
        return not isinstance(value, str) or read(value.replace(":60", ":59")).tzinfo is not None

    checker.checks("time", raises=ValueError)(partial(has_offset, read=time.fromisoformat))
    checker.checks("date-time", raises=ValueError)(partial(has_offset, read=datetime.fromisoformat))
    return checker


def _object(rng: random.Random, depth: int, shared: Schema) -> Schema:
    keys = rng.sample(_KEYS, rng.randint(1, 4))
    required = [key for key in keys if rng.random() < 0.8] or keys[:1]
    properties = {key: _value(rng, depth + 1, shared) for key in keys}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(rng: random.Random, depth: int, shared: Schema) -> Schema:
    choice = rng.random()
    if shared and choice < 0.15:
        return {"$ref": f"#/$defs/{rng.choice(sorted(shared))}"}
    if depth < _DEEPEST and choice < 0.3:
        return _object(rng, depth, shared)
    if depth < _DEEPEST and choice < 0.45:
        most = rng.randint(1, 3)
        return {
            "type": "array",
            "items": _value(rng, depth + 1, shared),
            "minItems": rng.randint(0, 1),
            "maxItems": most,
        }
    if choice < 0.52:
        return {"anyOf": [_leaf(rng), {"type": "null"}]}
    return _leaf(rng)


def _leaf(rng: random.Random) -> Schema:
    made: tuple[Callable[[], Schema], ...] = (
        lambda: {"enum": rng.sample(_WORDS, rng.randint(1, 5))},
        lambda: {"const": rng.choice((*_WORDS, 7, True, None))},
        lambda: {"type": "boolean"},
        lambda: {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 24)},
        lambda: {"type": "string", "format": rng.choice(_FORMATS)},
        lambda: {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 24},
        lambda: {"type": "integer", "minimum": rng.randint(-500, 0), "maximum": rng.randint(1, 100_000)},
        lambda: {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": rng.randint(2, 50)},
        lambda: {"type": "number", "minimum": 0, "maximum": rng.choice((1, 10.5, 1000))},
    )
    return rng.choice(made)()
