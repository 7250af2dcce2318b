"""The program that renders chat templates, in a process of its own. It imports jinja2 and nothing of ours.

A template comes with a model's folder, so it may be slow, huge or hostile. Here it can hold neither the event loop nor
the engine's interpreter lock, its memory is limited by the system, and whoever started us ends us when it takes too
long.

Frames on standard input and output are a length (4 bytes, big-endian) and JSON:

    in, first   {"template": …, "variables": {…}, "max_characters": n, "max_bytes": n}    out  {"ok": true}
    in, then    {"messages": […], "add_generation_prompt": …}                             out  {"text": …}
    instead of either answer                                                              {"refused": why}

The template finds what transformers documents for chat templates: the jinja sandbox for immutable values, loop
controls, `{% generation %}`, `raise_exception`, `strftime_now`, and `tojson` without HTML escapes.
"""

from __future__ import annotations

import contextlib
import json
import struct
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import IO, Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

LENGTH = struct.Struct(">I")


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame; None at the end of the stream, also in the middle of a frame."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = stream.read(length)
    return body if len(body) == length else None


def write_frame(stream: IO[bytes], body: bytes) -> None:
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant said, for training; here it is its content."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict` for templates: something to call, not a class whose attributes lead elsewhere."""

    def __call__(self, *values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """jinja's namespace without names that begin with an underscore, by which Python's internals could be had."""

    def __init__(*args: Any, **named: Any) -> None:
        self, *values = args
        given = dict(*values, **named)
        for name in given:
            _refuse_underscore(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name with a leading underscore, got {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    # The machine's own time zone, as transformers has it.
    return datetime.now().astimezone().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(text: str) -> jinja2.Template:
    """Raises TemplateError (jinja's) for wrong syntax."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(text)


def render(template: jinja2.Template, max_characters: int, variables: dict[str, Any]) -> str:
    """Raises TemplateError, or whatever the template's expressions raise, and ValueError for too long a text."""
    pieces: list[str] = []
    characters = 0
    for piece in template.generate(**variables):
        characters += len(piece)
        if characters > max_characters:
            raise ValueError(f"the rendered text is longer than {max_characters} characters")
        pieces.append(piece)
    return "".join(pieces)


def _answers(stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    """One answer for each frame of `stream`."""
    first = read_frame(stream)
    if first is None:
        return
    start = json.loads(first)
    _limit_memory(start["max_bytes"])
    try:
        template = compile_template(start["template"])
    except Exception as error:  # noqa: BLE001 - whatever compiling it raises, the template cannot be used
        yield {"refused": _reason(error)}
        return
    yield {"ok": True}
    while (frame := read_frame(stream)) is not None:
        asked = json.loads(frame)
        try:
            yield {"text": render(template, start["max_characters"], {**asked, **start["variables"]})}
        except Exception as error:  # noqa: BLE001 - a template is a program: it can raise anything
            yield {"refused": _reason(error)}


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "rendering needs too much memory"
    return str(error) or type(error).__name__


def _limit_memory(max_bytes: int) -> None:
    import resource

    # Some systems know no such limit. The one on time holds everywhere.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))


def main() -> None:
    for answer in _answers(sys.stdin.buffer):
        write_frame(sys.stdout.buffer, json.dumps(answer).encode())


if __name__ == "__main__":
    main()
