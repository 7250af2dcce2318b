"""What llguidance does not look at in a constraint: how long the texts are, and what it would take for something else.

llguidance finds all that must follow a place at once, under Python's lock: some 1 µs for a byte of a text that it has
not seen, 0.1 µs for one of a text that is repeated. Its limits count lexemes, not bytes. So what a place can cost
follows from the longest text and the number of lexemes.

It reads numbers as float64, whole bounds as int64 then, and counts properties by their places. In a regular expression
a line break is a text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from inference_engine.types import ConstraintKind

_UNREAD = frozenset({"title", "description", "$comment", "default", "examples"})  # of a schema: no output has them
_DATA = frozenset({"const", "enum"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_BESIDE = frozenset({"allOf", "anyOf", "oneOf"})
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")
_LEAST, _MOST = -(2**63), 2**63 - 1
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


def misread(kind: ConstraintKind, source: str) -> str:
    """What would be taken for something else, and what to say in its place; "" for nothing. Raises as
    `longest_literal`."""
    if kind is ConstraintKind.REGEX:
        return _misread_line(source)
    return _misread_of_schema(json.loads(source)) if kind is ConstraintKind.JSON_SCHEMA else ""


def _misread_line(regex: str) -> str:
    return "with (?x) it has to be on one line" if "\n" in regex and _VERBOSE.search(regex) else ""


def _misread_of_schema(document: Any) -> str:
    schemas: list[dict[str, Any]] = []
    beside: dict[int, int] = {}  # of schemas, by identity: another one of the same value
    left: list[tuple[Any, bool, Any]] = [(document, True, None)]
    while left:
        value, is_schema, other = left.pop()
        if isinstance(value, list):
            left += [(each, is_schema, other) for each in value]
        elif isinstance(value, dict):
            if is_schema:
                if found := _misread_count(value) or _misread_pattern(value):
                    return found
                schemas.append(value)
                for one in (other, _referred(document, value.get("$ref"))):
                    if isinstance(one, dict):
                        beside[_first(beside, id(value))] = _first(beside, id(one))
            for name, each in value.items():
                if is_schema and name in _BY_NAME and isinstance(each, dict):
                    left += [(one, True, None) for one in each.values()]
                elif not (is_schema and name in _UNREAD):
                    is_beside = is_schema and name in _BESIDE
                    left.append((each, is_schema and name not in _DATA, value if is_beside else None))
        elif not is_schema and _is_number(value) and not _is_kept(value):
            return f"{value} has more digits than a float64; give it as a text"
    together: dict[int, list[dict[str, Any]]] = {}
    for schema in schemas:
        together.setdefault(_first(beside, id(schema)), []).append(schema)
    return next(filter(None, map(_misread_bound, together.values())), "")


def _first(beside: dict[int, int], one: int) -> int:
    while (other := beside.get(one, one)) != one:
        beside[one] = beside.get(other, other)  # a shorter way, for the next one who asks
        one = other
    return one


def _referred(document: Any, reference: Any) -> Any:
    """The schema within the document that a `$ref` names; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = document
    for name in unquote(reference).split("/")[1:]:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_kept(value: float) -> bool:
    """Is it what a float64 of it is written as?"""
    try:
        return isinstance(value, float) or Decimal(repr(float(value))) == value
    except OverflowError:
        return False


def _misread_bound(schemas: Sequence[dict[str, Any]]) -> str:
    """Of those that may hold of the same value."""
    bounds = [(name, schema[name]) for schema in schemas for name in (*_LOWER, *_UPPER) if _is_number(schema.get(name))]
    is_integer = any(schema.get("type") == "integer" for schema in schemas)
    # By the whole number before the point, of bounds that have more.
    broken = {names: {int(one): one for name, one in bounds if name in names and one != int(one)}
              for names in (_LOWER, _UPPER)}  # fmt: skip
    for name, bound in bounds:
        is_least = name in _LOWER
        if abs(bound) >= 2**53:
            read = math.inf if abs(bound) > 1e300 else max(_LEAST, min(int(float(bound)), _MOST))
            if read < bound if is_least else read > bound:
                return f"{name}: {bound} has more digits than are read of it; give a number with fewer"
        # The one that is nearer to 0 is allowed where both have the same whole number before the point.
        other = broken[_UPPER if is_least else _LOWER].get(bound)
        if name.startswith("exclusive") and other is not None and not is_integer:
            nearest = "least" if is_least else "largest"
            return f"{name}: {bound} would be allowed beside {other}; give the {nearest} number that may be there"
    return ""


def _misread_pattern(schema: dict[str, Any]) -> str:
    by_pattern = schema.get("patternProperties")
    patterns = [schema.get("pattern"), *(by_pattern if isinstance(by_pattern, dict) else ())]
    found = next(filter(None, (_misread_line(each) for each in patterns if isinstance(each, str))), "")
    return f"pattern: {found}" if found else ""


def _misread_count(schema: dict[str, Any]) -> str:
    least, required = schema.get("minProperties", 0), schema.get("required")
    names = len({*map(str, required)}) if isinstance(required, list) else 0
    if _is_number(least) and least > names + 1:
        return f"minProperties: {least}: a name that is not required may come again; require {least - 1} by their names"
    return ""
