"""The page of the wire contract: every RPC, message, field and value with the comment it has in the .proto file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

from scripts.reference.markdown import anchor, code, one_line, page, table

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = "kakeya/v1/runtime.proto"

INTRODUCTION = """
    The source is [runtime.proto](../../proto/kakeya/v1/runtime.proto). On the same port: `grpc.health.v1.Health`, and
    on loopback server reflection. What errors mean: [errors](errors.md).
"""

Path_: TypeAlias = tuple[int, ...]  # where something stands in a descriptor, as protoc numbers it


def render() -> str:
    file = contract()
    comments = _Comments(file)
    parts = [comments.of(_SYNTAX)]
    parts += [part for place, service in enumerate(file.service) for part in _service(service, (6, place), comments)]
    for heading, message, place in messages(file):
        parts += [f"## {heading}", comments.of(place), _fields(message, place, comments)]
        for number, enum in enumerate(message.enum_type):
            parts += _enum(enum, f"{heading}.{enum.name}", (*place, 4, number), comments)
    for number, enum in enumerate(file.enum_type):
        parts += _enum(enum, enum.name, (5, number), comments)
    return page("Wire contract", f"proto/{CONTRACT}", INTRODUCTION, *parts)


def contract() -> FileDescriptorProto:
    """The descriptor of the contract, comments included. Raises SystemExit if it does not compile."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder) / "contract"
        options = [f"--proto_path={ROOT / 'proto'}", "--include_source_info", f"--descriptor_set_out={compiled}"]
        if status := protoc.main(["protoc", *options, CONTRACT]):
            raise SystemExit(status)
        files = FileDescriptorSet.FromString(compiled.read_bytes()).file
    return next(file for file in files if file.name == CONTRACT)


def messages(file: FileDescriptorProto) -> Iterator[tuple[str, DescriptorProto, Path_]]:
    """Every message by its heading, those within others after them; entries of maps are no messages of their own."""

    def within(message: DescriptorProto, prefix: str, place: Path_) -> Iterator[tuple[str, DescriptorProto, Path_]]:
        yield prefix + message.name, message, place
        for number, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from within(nested, f"{prefix}{message.name}.", (*place, 3, number))

    for number, message in enumerate(file.message_type):
        yield from within(message, "", (4, number))


_SYNTAX = (12,)  # the comment above `syntax` is the file's own


class _Comments:
    def __init__(self, file: FileDescriptorProto) -> None:
        self._text = {
            tuple(place.path): one_line(place.leading_comments or place.trailing_comments)
            for place in file.source_code_info.location
        }

    def of(self, place: Path_) -> str:
        return self._text.get(place, "")


def _service(service: ServiceDescriptorProto, place: Path_, comments: _Comments) -> Iterator[str]:
    yield f"## {service.name}"
    yield comments.of(place)
    rows = []
    for number, method in enumerate(service.method):
        reply = _link(method.output_type)
        stream = f"a stream of {reply}" if method.server_streaming else reply
        rows.append((code(method.name), _link(method.input_type), stream, comments.of((*place, 2, number))))
    yield table(("RPC", "takes", "answers", "says"), rows)


def _fields(message: DescriptorProto, place: Path_, comments: _Comments) -> str:
    if not message.field:
        return "No fields."
    entries = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    rows = (
        (str(field.number), code(field.name), _type(field, entries, message), comments.of((*place, 2, number)))
        for number, field in enumerate(message.field)
    )
    return table(("number", "field", "type", "says"), rows)


def _type(field: FieldDescriptorProto, entries: dict[str, DescriptorProto], message: DescriptorProto) -> str:
    name = field.type_name.rpartition(".")[2]
    if field.type == FieldDescriptorProto.TYPE_MESSAGE and name in entries:
        key, value = (_scalar(part) for part in entries[name].field)
        return f"map of {key} to {value}"
    shown = _scalar(field)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {shown}"
    if field.proto3_optional:
        return f"optional {shown}"
    if field.HasField("oneof_index"):
        return f"{shown}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return shown


def _scalar(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _link(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _link(type_name: str) -> str:
    """A link to the message or enum, whose heading is its name without the package."""
    name = type_name.removeprefix(".kakeya.v1.")
    return f"[{name}](#{anchor(name)})"


def _enum(enum: EnumDescriptorProto, heading: str, place: Path_, comments: _Comments) -> Sequence[str]:
    rows = (
        (str(value.number), code(value.name), comments.of((*place, 2, number)))
        for number, value in enumerate(enum.value)
    )
    return f"## {heading}", comments.of(place), table(("number", "value", "says"), rows)
