"""Constraints over TinyModel's vocabulary, whose ids stand for bytes and for a few longer pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from inference_engine.types import Constraint, ConstraintKind, TokenBytes
from tests.tiny import VOCABULARY

END = 0
_PIECES = [
    '{"',
    '": ',
    '", "',
    "name",
    "count",
    "tags",
    '"}',
    "ann",
    "bob",
    " and ",
    "hello",
    "carol",
    "[]",
    "ab",
    "abc",
]
PIECES = {place: piece.encode() for place, piece in enumerate(_PIECES, start=1)}
TOKENS = TokenBytes(
    tokens=tuple(PIECES.get(at, b"<end>" if at == END else bytes([at])) for at in range(VOCABULARY)), specials=(END,)
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ann", "bob and carol"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3, "pattern": "^[a-z]*$"}, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}
CHOICES = ((5, 6, 7, 8), (5, 6, 9), (70, 71), (5, 6))
LARK = """start: greeting " " name
greeting: "hello" | "hi"
name: /[a-z]{1,6}/
"""


def spelled(token_ids: Sequence[int]) -> str:
    return b"".join(TOKENS.tokens[token] for token in token_ids if token != END).decode()


def fits_schema(token_ids: Sequence[int]) -> bool:
    found = json.loads(spelled(token_ids))
    return (
        list(found) == ["name", "count", "tags"]
        and found["name"] in ("ann", "bob and carol")
        and found["count"] in range(1000)
        and len(found["tags"]) <= 3
        and all(re.fullmatch("[a-z]{0,3}", tag) for tag in found["tags"])
    )


class Kind(NamedTuple):
    """A constraint, and what outputs fit it, its end included."""

    constraint: Constraint
    fits: Callable[[Sequence[int]], bool]

    def __str__(self) -> str:
        return self.constraint.kind.value


def text(kind: ConstraintKind, source: object) -> Constraint:
    return Constraint(kind=kind, source=source if isinstance(source, str) else json.dumps(source))


def matches(pattern: str) -> Callable[[Sequence[int]], bool]:
    return lambda token_ids: re.fullmatch(pattern, spelled(token_ids)) is not None


KINDS = [
    Kind(text(ConstraintKind.JSON_SCHEMA, SCHEMA), fits_schema),
    Kind(text(ConstraintKind.REGEX, "(abc|abd){2,5}x{0,9}"), matches("(abc|abd){2,5}x{0,9}")),
    Kind(text(ConstraintKind.LARK, LARK), matches("(hello|hi) [a-z]{1,6}")),
    Kind(
        Constraint(kind=ConstraintKind.CHOICE, choices=CHOICES),
        lambda token_ids: tuple(token for token in token_ids if token != END) in CHOICES,
    ),
]
