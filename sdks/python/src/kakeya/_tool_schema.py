"""Tools: a name, what it does, and the JSON schema of what it takes; from a typed function, or as they are given.

def add(a: float, b: float = 0) -> float:        {"type": "object", "properties": {"a": {"type": "number",
    \"""Add two numbers.                               "description": "the first"}, "b": {"type": "number"}},
                                           →      "required": ["a"], "additionalProperties": false}
    a: the first
    \"""
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kakeya._errors import InvalidTool

# A name is written as it is, between quotes or into markup.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,127}")
_SIMPLE: Mapping[type, Mapping[str, str]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
}
_LISTS = (list, set, frozenset, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_SUBSCHEMAS = ("items", "additionalProperties", "not")


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """Something that a model can call. `tool_from` makes one of a function."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # the JSON schema of an object
    function: Callable[..., Any] | None = None  # what `Tools.call` runs

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise InvalidTool(
                "tool.name", f"must be letters, digits and _ . : / - of ASCII, 128 at most, got {self.name!r}"
            )
        if not isinstance(self.parameters, Mapping) or self.parameters.get("type", "object") != "object":
            raise InvalidTool(f"{self.name}.parameters", f"must be the schema of an object, got {self.parameters!r}")
        try:
            json.dumps(dict(self.parameters), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidTool(f"{self.name}.parameters", f"is no JSON: {error}") from None

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates take it, and the OpenAI chat API."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


ToolLike = Tool | Mapping[str, Any] | Callable[..., Any]


def tool_from(given: ToolLike) -> Tool:
    """A tool of a typed function, or of a definition as the OpenAI or the Anthropic API has it.

    Of a function: its name, its docstring, whose lines `name: text` describe parameters, and its annotations, which
    `Annotated[…, "text"]` can describe as well. A parameter with a default is optional. Raises InvalidTool for what no
    schema can say, by the parameter's name.
    """
    if isinstance(given, Tool):
        return given
    if isinstance(given, Mapping):
        return _of_definition(given)
    if callable(given):
        return _of_function(given)
    raise InvalidTool("tool", f"must be a function, a definition or a Tool, got {given!r}")


def _of_definition(given: Mapping[str, Any]) -> Tool:
    held = given["function"] if isinstance(given.get("function"), Mapping) else given
    name, parameters = held.get("name"), held.get("parameters", held.get("input_schema"))
    if not isinstance(name, str):
        raise InvalidTool("tool.name", f"is missing in {dict(given)!r}")
    description = held.get("description") or ""
    return Tool(name, str(description), {"type": "object", "properties": {}} if parameters is None else parameters)


def _of_function(function: Callable[..., Any]) -> Tool:
    name = getattr(function, "__name__", type(function).__name__)
    try:
        signature, hints = inspect.signature(function), get_type_hints(_annotated(function), include_extras=True)
    except (NameError, TypeError, ValueError) as error:
        raise InvalidTool(name, f"its annotations cannot be read: {error}") from error
    description, described = _documented(inspect.getdoc(function) or "", set(signature.parameters))
    properties, required = {}, []
    for parameter in signature.parameters.values():
        place = f"{name}.{parameter.name}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InvalidTool(place, f"is {parameter.kind.description}; a call gives arguments by name")
        if parameter.name not in hints:
            raise InvalidTool(place, "has no annotation")
        schema = schema_of(hints[parameter.name], place)
        if (text := described.get(parameter.name)) is not None:
            schema = {**schema, "description": text}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        properties[parameter.name] = schema
    parameters = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return Tool(name, description, parameters, function)


def _annotated(function: Callable[..., Any]) -> Any:
    """What has the annotations: the function itself, or what an object is called by."""
    if inspect.isroutine(function) or inspect.isclass(function):
        return function
    return type(function).__call__


def schema_of(annotation: Any, place: str) -> dict[str, Any]:
    """The JSON schema of an annotation. Raises InvalidTool at `place` for one that has none."""
    if isinstance(annotation, type) and annotation in _SIMPLE:
        return dict(_SIMPLE[annotation])
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        texts = [extra for extra in arguments[1:] if isinstance(extra, str)]
        more = [extra for extra in arguments[1:] if isinstance(extra, Mapping)]
        schema = schema_of(arguments[0], place)
        for extra in more:
            schema |= extra
        return {**schema, "description": texts[0]} if texts else schema
    if origin is Literal:
        return {"enum": list(arguments)}
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return {"enum": [member.value for member in annotation]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(each, place) for each in arguments]}
    if origin in _LISTS and len(arguments) == 1:
        return {"type": "array", "items": schema_of(arguments[0], place)}
    if origin is tuple and arguments:
        if arguments[-1] is Ellipsis:
            return {"type": "array", "items": schema_of(arguments[0], place)}
        items = [schema_of(each, place) for each in arguments]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if origin in (dict, collections.abc.Mapping) and arguments[0] is str:
        return {"type": "object", "additionalProperties": schema_of(arguments[1], place)}
    if typing.is_typeddict(annotation) or dataclasses.is_dataclass(annotation):
        return _of_class(annotation, place)
    raise InvalidTool(
        place,
        f"has the annotation {annotation!r}, which has no JSON schema; use str, int, float, bool, None, Literal, an "
        "enum, lists, dicts with text keys, unions of these, a TypedDict or a dataclass",
    )


def _of_class(kind: Any, place: str) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    if typing.is_typeddict(kind):
        required = [name for name in hints if name in kind.__required_keys__]
    else:
        fields = [field for field in dataclasses.fields(kind) if field.init]
        hints = {field.name: hints[field.name] for field in fields}
        missing = dataclasses.MISSING
        required = [each.name for each in fields if each.default is missing and each.default_factory is missing]
    properties = {}
    for name, hint in hints.items():
        is_marked = get_origin(hint) in (typing.Required, typing.NotRequired)
        properties[name] = schema_of(get_args(hint)[0] if is_marked else hint, f"{place}.{name}")
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _documented(text: str, parameters: set[str]) -> tuple[str, dict[str, str]]:
    """What a docstring says of the function and of each parameter: `name: …`, `name (int): …`, `:param name: …`."""
    said: list[str] = []
    described: dict[str, str] = {}
    last = ""
    for line in text.splitlines():
        found = re.match(r"\s*(?::param\s+)?[*`]*(\w+)[*`]*(?:\s*\([^)]*\))?\s*:\s+(.*)", line)
        if found and found[1] in parameters:
            last = found[1]
            described[last] = found[2].strip()
        elif last and line.startswith(" ") and line.strip():
            described[last] += f" {line.strip()}"
        else:
            last = ""
            if not re.fullmatch(r"\s*(Args|Arguments|Parameters)\s*:\s*", line):
                said.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(said)).strip(), described


def given_values(tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call as the tool's function takes them: enums, dataclasses, sets and tuples are made."""
    assert tool.function is not None
    hints = get_type_hints(_annotated(tool.function))
    return {name: _value(value, hints.get(name)) for name, value in arguments.items()}


def _value(value: Any, annotation: Any) -> Any:
    origin, of = get_origin(annotation), get_args(annotation)
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return annotation(value)
    if dataclasses.is_dataclass(annotation) and isinstance(value, Mapping):
        hints = get_type_hints(annotation)
        kind: Any = annotation
        return kind(**{name: _value(each, hints.get(name)) for name, each in value.items()})
    if origin in (Union, types.UnionType):
        fitting = next((each for each in of if _is_made_of(value, each)), None)
        return value if fitting is None else _value(value, fitting)
    if isinstance(value, list) and of:
        if origin is tuple:
            kinds = of if of[-1] is not Ellipsis else (of[0],) * len(value)
            return tuple(_value(each, kind) for each, kind in zip(value, kinds, strict=True))
        made = [_value(each, of[0]) for each in value]
        return origin(made) if origin in (set, frozenset) else made
    if isinstance(value, Mapping) and origin in (dict, collections.abc.Mapping):
        return {name: _value(each, of[1]) for name, each in value.items()}
    return value


def _is_made_of(value: Any, annotation: Any) -> bool:
    """Of a union's members, is it this one that has to be made?"""
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return any(member.value == value for member in annotation)
    if dataclasses.is_dataclass(annotation):
        return isinstance(value, Mapping)
    return isinstance(value, list) and get_origin(annotation) in (tuple, *_LISTS)


def closed_parameters(tool: Tool) -> dict[str, Any]:
    """A tool's schema, in which an object that lists properties has no others unless it says that it may."""
    found: dict[str, Any] = _closed({"type": "object", "properties": {}, **tool.parameters})
    return found


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    # What lies under allOf speaks of one object in several places, none of which knows all of it.
    for name in ("properties", "$defs", "definitions"):
        if isinstance(made.get(name), Mapping):
            made[name] = {key: _closed(each) for key, each in made[name].items()}
    for name in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(made.get(name), Sequence):
            made[name] = [_closed(each) for each in made[name]]
    for name in _SUBSCHEMAS:
        if isinstance(made.get(name), Mapping):
            made[name] = _closed(made[name])
    is_open = {"additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "$ref"} & made.keys()
    if isinstance(made.get("properties"), Mapping) and not is_open:
        made["additionalProperties"] = False
    return made
