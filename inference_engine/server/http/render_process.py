"""The program that renders chat templates and encodes their texts, in a separate process.

It imports jinja2, tokenizers, and one file of the SDK by its path, which imports nothing else of the project.

A template and a tokenizer come with a model's folder, so they may be slow, huge or hostile, and so may texts. Here they
block neither the event loop nor the engine's interpreter lock, the system limits their memory, and the parent ends the
process when it takes too long.

Frames on standard input and output are a length (4 bytes, big-endian) and JSON:

    in, first   {"max_load_bytes": n, "max_bytes": n, "special_text": path or null}       out  {"ok": true}
    in, second  {"template": …, "variables": {…}, "max_characters": n, "tokenizer": …}    out  {"ok": true}
    in, then    {"messages": […], "add_generation_prompt": …, "encode": "no"}             out  {"text": …}
                {"messages": […], …, "encode": "apart", "most_ids": n or null}            out  {"ids": n}, ids
                {"messages": […], …, "encode": "together", "most_ids": n or null}         out  {"ids": n}, ids
    if the text has more ids than `most_ids`                                              {"too_long": at least so many}
    instead of any answer                                                                 {"refused": why}
    the tokenizer failed in itself                                                        {"failed": why}

ids: a frame of its own, unsigned 32-bit integers of this machine. A million numbers as JSON would hold the lock of the
interpreter that reads them for a tenth of a second.
tokenizer: null, {"file": path}, or {"specification": …, "added": […], "end_ids": […], "unknown_id": …}.
encode: "apart" makes special tokens of the template's text only, "together" of the messages' text, too.
max_load_bytes: until template and tokenizer are loaded; max_bytes: on top of what is held then.

Templates get what transformers documents for chat templates: the jinja sandbox for immutable values, loop
controls, `{% generation %}`, `raise_exception`, `strftime_now`, and `tojson` without HTML escapes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import struct
import sys
import unicodedata
from array import array
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

LENGTH = struct.Struct(">I")
_IDS = "ids"


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
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it renders its content."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict` for templates: a callable, not a class whose attributes give access to internals."""

    def __call__(self, *values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """jinja's namespace without names with a leading underscore, which would give access to Python's internals."""

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
    """Raises TemplateError, anything that the template's expressions raise, and ValueError if the text is too long."""
    pieces: list[str] = []
    characters = 0
    for piece in template.generate(**variables):
        characters += len(piece)
        if characters > max_characters:
            raise ValueError(f"the rendered text is longer than {max_characters} characters")
        pieces.append(piece)
    return "".join(pieces)


class Encoder:
    """Encodes rendered texts; special tokens come from the template only."""

    def __init__(self, given: dict[str, Any], template: str, special_text: Any) -> None:
        from tokenizers import Tokenizer

        self._module = special_text
        specification = given.get("specification")
        if specification is None:
            specification = Path(given["file"]).read_text(encoding="utf-8")
        self._tokens = Tokenizer.from_str(specification)
        self._tokens.no_truncation()
        self._tokens.no_padding()
        self._special = special_text.SpecialTokens.of(
            given.get("added", ()),
            end_ids=given.get("end_ids", ()),
            template=template,
            unknown_id=given.get("unknown_id"),
        )
        # Now, not on first use: with a large vocabulary it takes longer than a request may.
        self._copy = special_text.Respelled(specification, self._special) if self._special.ids else None
        self._fewest = fewest_ids(json.loads(specification))
        self.plain("The quick brown fox: 1 + 1 = 2.\n")

    def ids(self, template: jinja2.Template, most: int, asked: dict[str, Any], variables: dict[str, Any]) -> Any:
        """The answer for messages whose ids are asked for."""
        options = {name: asked[name] for name in ("tools", "documents")}
        conversation = None
        if asked["encode"] == "apart":
            conversation = self._module.Conversation(self._special, asked["messages"], options)

        def written(messages: Any, options: Any) -> str:
            return render(template, most, {**_seen(asked), **options, "messages": messages, **variables})

        if conversation is None:
            text = written(asked["messages"], options)
        else:
            text = written(conversation.messages, conversation.options)
        most_ids = asked["most_ids"]
        if most_ids is not None and self._fewest is not None and (fewest := self._fewest(text)) > most_ids:
            return {"too_long": fewest}
        if conversation is None:
            ids = self.plain(text)
        else:
            if conversation.is_doubtful:
                conversation.check_broken(text, written(*conversation.broken()))
            ids = conversation.encode(text, self.plain, lambda: self._copy)
        return {_IDS: ids} if most_ids is None or len(ids) <= most_ids else {"too_long": len(ids)}

    def plain(self, text: str) -> list[int]:
        ids: list[int] = self._tokens.encode(text, add_special_tokens=False).ids
        return ids


def fewest_ids(specification: dict[str, Any]) -> Callable[[str], int] | None:
    """A lower bound on a text's ids from its number of characters: no id stands for more than the longest token.

    None if the tokenizer may drop characters, or if that is unknown.
    """
    parts = _parts(specification.get("normalizer"), "normalizers")
    parts += _parts(specification.get("pre_tokenizer"), "pretokenizers")
    model = specification["model"]
    composes = any(part["type"] == "NFC" for part in parts)
    whole = {"NFC", "Prepend", "ByteLevel", "Metaspace", "Digits"}
    if any(part["type"] not in whole and not _keeps_characters(part) for part in parts):
        return None
    is_bytes = any(part["type"] == "ByteLevel" for part in parts) or model.get("byte_fallback")
    strips = any(token["lstrip"] or token["rstrip"] for token in specification["added_tokens"])
    if model.get("type") != "BPE" or not is_bytes or strips:
        return None
    pieces = [*model["vocab"], *(token["content"] for token in specification["added_tokens"])]
    longest = max(map(len, pieces), default=1)

    def fewest(text: str) -> int:
        return -(-len(unicodedata.normalize("NFC", text) if composes else text) // longest)

    return fewest


def _parts(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [inner for each in part[name] for inner in _parts(each, name)]
    return [part]


def _keeps_characters(part: dict[str, Any]) -> bool:
    if part["type"] == "Split":
        return bool(part["behavior"] != "Removed")
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(part["content"]) >= len(pattern)
    return False


def _answers(stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    """One answer for each frame of `stream`."""
    first = read_frame(stream)
    if first is None:
        return
    start = json.loads(first)
    special_text = None if start["special_text"] is None else _load(start["special_text"])
    _limit_memory(start["max_load_bytes"])
    yield {"ok": True}
    second = read_frame(stream)
    if second is None:
        return
    given = json.loads(second)
    encoder = None
    try:
        template = compile_template(given["template"])
        if given["tokenizer"] is not None:
            encoder = Encoder(given["tokenizer"], given["template"], special_text)
    except BaseException as error:  # noqa: BLE001 - anything that loading raises, a panic too, makes them unusable
        yield {"refused": _reason(error)}
        return
    if held := _held_bytes():
        _limit_memory(min(start["max_load_bytes"], held + start["max_bytes"]))
    yield {"ok": True}
    most, variables = given["max_characters"], given["variables"]
    while (frame := read_frame(stream)) is not None:
        asked = json.loads(frame)
        try:
            if asked["encode"] != "no":
                assert encoder is not None
                yield encoder.ids(template, most, asked, variables)
            else:
                yield {"text": render(template, most, {**_seen(asked), **variables})}
        except Exception as error:  # noqa: BLE001 - a template is a program: it can raise anything
            yield {"refused": _reason(error)}
        except BaseException as error:  # noqa: BLE001 - a panic of the tokenizers' library
            yield {"failed": type(error).__name__}


def _seen(asked: dict[str, Any]) -> dict[str, Any]:
    """The part of a request that templates see."""
    return {name: asked[name] for name in ("messages", "tools", "documents", "add_generation_prompt")}


def _load(path: str) -> Any:
    """The module in that file, without its package. Its imports are loaded before memory is limited."""
    import tokenizers  # noqa: F401

    spec = importlib.util.spec_from_file_location("special_text", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _reason(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "rendering needs too much memory"
    return str(error) or type(error).__name__


def _held_bytes() -> int:
    """The address space of this process; 0 where the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _limit_memory(max_bytes: int) -> None:
    import resource

    # Some systems have no such limit. The one on time holds everywhere.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))


def main() -> None:
    out = sys.stdout.buffer
    for answer in _answers(sys.stdin.buffer):
        if _IDS in answer:
            ids = array("I", answer[_IDS])
            write_frame(out, json.dumps({_IDS: len(ids)}).encode())
            write_frame(out, ids.tobytes())
        else:
            write_frame(out, json.dumps(answer).encode())


if __name__ == "__main__":
    main()
