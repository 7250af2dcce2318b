"""Constraints as frozen values: what the tokens of one Generate must spell. Each has an arm of its own on the wire."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kakeya._checks import invalid, text, token_ids
from kakeya.v1 import runtime_pb2 as pb


class Constraint(ABC):
    """Base of the constraints. None in place of one lets a Generate say anything."""

    @abstractmethod
    def _to_wire(self) -> pb.Constraint:
        """As a protobuf message. Raises InvalidArgument for what protobuf would take wrongly."""


@dataclass(frozen=True, slots=True)
class JsonSchema(Constraint):
    """JSON that fits a schema, given as a mapping or as JSON text.

    Written as Python's `json.dumps` writes it, with keys in the order of "properties"; "x-guidance" in the schema
    changes that.
    """

    schema: Mapping[str, Any] | str

    def _to_wire(self) -> pb.Constraint:
        if isinstance(self.schema, str):
            return pb.Constraint(json_schema=text(self.schema, "constraint.schema"))
        if not isinstance(self.schema, Mapping):
            raise invalid("constraint.schema", f"must be a mapping or JSON text, got {self.schema!r}")
        try:
            source = json.dumps(self.schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise invalid("constraint.schema", f"is no JSON: {error}") from None
        return pb.Constraint(json_schema=text(source, "constraint.schema"))


@dataclass(frozen=True, slots=True)
class Regex(Constraint):
    """Text that a regular expression matches from its beginning to its end, in Rust's syntax without look-around."""

    pattern: str

    def _to_wire(self) -> pb.Constraint:
        return pb.Constraint(regex=text(self.pattern, "constraint.pattern"))


@dataclass(frozen=True, slots=True)
class Lark(Constraint):
    """Text that fits a grammar, in the variant of Lark's syntax that llguidance documents."""

    grammar: str

    def _to_wire(self) -> pb.Constraint:
        return pb.Constraint(lark=text(self.grammar, "constraint.grammar"))


@dataclass(frozen=True, slots=True)
class Choice(Constraint):
    """One of several lists of token ids. The server needs no tokenizer for it."""

    choices: Iterable[Iterable[int]]

    def _to_wire(self) -> pb.Constraint:
        if isinstance(self.choices, (str, bytes, Mapping)) or not isinstance(self.choices, Iterable):
            raise invalid("constraint.choices", f"must be lists of token ids, got {self.choices!r}")
        lists = [token_ids(ids, f"constraint.choices[{place}]") for place, ids in enumerate(self.choices)]
        return pb.Constraint(choice=pb.TokenChoice(choices=[pb.TokenIds(token_ids=ids) for ids in lists]))
