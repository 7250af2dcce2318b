"""How long the texts are that a constraint writes out.

llguidance finds all that must follow a place at once, under Python's lock: some 1 µs for a byte of a text that it has
not seen, 0.1 µs for one of a text that is repeated. Its limits count lexemes, not bytes. So what a place can cost
follows from the longest text and the number of lexemes.
"""

from __future__ import annotations

import json
import re
from typing import Any

from inference_engine.types import ConstraintKind

_UNREAD = frozenset({"title", "description", "$comment", "default", "examples"})  # of a schema: no output has them
_DATA = frozenset({"const", "enum"})
# Of Lark: comments, texts, regular expressions; of those what no sign ends. A text has no line break.
_LARK = re.compile(r'//[^\n]*|"((?:\\.|[^"\\\n])*)"|/((?:\\.|[^/\\\n])+)/')
_SIGNS = re.compile(r"[()\[\]{}|*+?.^$\\]")


def longest_literal(kind: ConstraintKind, source: str) -> int:
    """In characters. Raises ValueError or RecursionError for what is no JSON, or is nested too deeply."""
    if kind is ConstraintKind.JSON_SCHEMA:
        return _longest_of_schema(json.loads(source, parse_int=str, parse_float=str))
    if kind is ConstraintKind.LARK:
        return max((len(one[1] or "") or _run(one[2] or "") for one in _LARK.finditer(source)), default=0)
    return _run(source)


def _run(regex: str) -> int:
    return max(map(len, _SIGNS.split(regex)))


def _longest_of_schema(schema: Any) -> int:
    longest, left = 0, [(schema, True)]
    while left:
        value, is_schema = left.pop()
        if isinstance(value, str):
            longest = max(longest, len(value))
        elif isinstance(value, list):
            left += [(each, is_schema) for each in value]
        elif isinstance(value, dict):
            for name, each in value.items():
                longest = max(longest, len(name))
                if not (is_schema and name in _UNREAD and not isinstance(each, dict)):
                    left.append((each, is_schema and name not in _DATA))
    return longest
