"""The page with both SDKs' public names side by side, and the gaps between them.

    Session.history_length               Session.historyLength
    Session.generate(top_p=)             GenerateOptions.topP
    StopReason.MAX_TOKENS = 'max_tokens' StopReason "max_tokens"

A name goes over by rule; where the two differ on purpose, sdk_names.toml says so and why. What is left is a gap.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from scripts.reference import python_api, python_sdk, typescript_api
from scripts.reference.api import Entry
from scripts.reference.markdown import code, page, table

DIFFERENCES = Path(__file__).with_suffix(".toml")
# Where TypeScript keeps what Python takes as keywords.
OPTIONS = {
    "Client": "ClientOptions",
    "Client.create_session": "CreateSessionOptions",
    "Client.sessions": "SessionsOptions",
    "Session.append": "AppendOptions",
    "Session.fork": "ForkOptions",
    "GenerateStream.text": "TextOptions",
    "Session.generate": "GenerateOptions",
    "Session.generate_thinking": "ThinkingOptions",
    "Session.history": "HistoryOptions",
    "Session.prefill": "PrefillOptions",
    "Session.rewind": "RewindOptions",
    "Tools": "ToolsOptions",
    "Tools.constraint": "ToolConstraintOptions",
    "Tools.tokens_for_chat": "ToolsChatOptions",
    "Tools.tokens_for_next_turn": "ToolsNextTurnOptions",
    "end_of_turn_ids": "ChatOptions",
    "tokens_for_chat": "ChatOptions",
    "tokens_for_next_turn": "NextTurnOptions",
}
MISSING = "**missing**"
INTRODUCTION = """
    Names are the same in both, written as each language writes them: `snake_case` and `camelCase`, members of an enum
    as strings, keywords as fields of options. Listed is what differs, and why. A test fails on a name that neither that
    rule nor a row explains.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """`pattern` is the one of sdk_names.toml that explains the row; one pattern may explain many."""

    python: str = ""
    typescript: str = ""
    note: str = ""
    pattern: str = ""

    @property
    def is_gap(self) -> bool:
        return not self.note and not (self.python and self.typescript)


@dataclass(slots=True)
class Differences:
    """sdk_names.toml, and which of its patterns were of use."""

    python_only: dict[str, str] = field(default_factory=dict)
    typescript_only: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, tuple[str, str]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    @classmethod
    def read(cls) -> Differences:
        content = tomllib.loads(DIFFERENCES.read_text(encoding="utf-8"))
        found = cls()
        for side in ("python_only", "typescript_only"):
            for group in content.get(side, ()):
                getattr(found, side).update(dict.fromkeys(group["names"], group["reason"]))
        for one in content.get("renamed", ()):
            found.renamed[one["python"]] = (one["typescript"], one["reason"])
        return found

    def first(self, name: str, patterns: Sequence[str]) -> str | None:
        """The first pattern that fits, which then was of use."""
        pattern = next((one for one in patterns if fnmatchcase(name, one)), None)
        if pattern is not None:
            self.used.add(pattern)
        return pattern

    @property
    def unused(self) -> set[str]:
        return {*self.python_only, *self.typescript_only, *self.renamed} - self.used


def render() -> str:
    rooms = compare(python_api.entries(), typescript_api.entries(), Differences.read())
    options = [(code(f"{name}(…=)"), code(options)) for name, options in OPTIONS.items()]
    parts = [f"## Keywords and options\n\n{table(('keywords in Python', 'fields in TypeScript'), options)}"]
    for room, title in {**python_sdk.TITLES, "": "Only in TypeScript"}.items():
        if differing := dict.fromkeys(_cells(row) for row in rooms[room] if row.note or row.is_gap):
            parts.append(f"## {title}\n\n{table(('Python', 'TypeScript', 'note'), differing)}")
    return page("Both SDKs, side by side", "both SDKs and scripts/reference/sdk_names.toml", INTRODUCTION, *parts)


def compare(python: Sequence[Entry], typescript: Sequence[Entry], differences: Differences) -> dict[str, list[Row]]:
    """Rows by the room of the Python SDK; what is in TypeScript alone under the empty name."""
    offered = {shown for entry in typescript for shown in _typescript_names(entry)}
    left = dict.fromkeys(shown for entry in typescript for shown in _typescript_names(entry))
    rooms: dict[str, list[Row]] = {entry.room: [] for entry in python}
    for entry in python:
        for shown, expected in _python_names(entry):
            row = _row(shown, expected, offered, differences)
            rooms[entry.room].append(row)
            left.pop(row.typescript, None)
    rooms[""] = []
    for shown in left:
        pattern = differences.first(shown, list(differences.typescript_only))
        note = differences.typescript_only[pattern] if pattern else ""
        rooms[""].append(Row(typescript=shown, note=note, pattern=pattern or ""))
    return rooms


def _row(shown: str, expected: str, offered: set[str], differences: Differences) -> Row:
    if expected in offered:
        return Row(python=shown, typescript=expected)
    if pattern := differences.first(shown, list(differences.python_only)):
        return Row(python=shown, note=differences.python_only[pattern], pattern=pattern)
    if pattern := differences.first(shown, list(differences.renamed)):
        name, note = differences.renamed[pattern]
        expected = f"{expected.rpartition('.')[0]}.{name}".lstrip(".")
        if expected in offered:
            return Row(python=shown, typescript=expected, note=note, pattern=pattern)
    return Row(python=shown)


def _python_names(entry: Entry) -> Iterator[tuple[str, str]]:
    """Each name with what it should be called in TypeScript."""
    yield entry.name, entry.name if entry.name[0].isupper() else _camel(entry.name)
    if entry.name in OPTIONS and entry.declaration.startswith("def "):
        yield from _options(entry.name, entry.declaration.removeprefix(f"def {entry.name}"))
    is_enum = "enum.Enum" in entry.declaration
    for member in entry.members:
        shown = f"{entry.name}.{member.name}"
        if is_enum:
            yield shown, f'{entry.name} "{ast.literal_eval(member.signature.removeprefix(" = "))}"'
            continue
        if member.name == python_api.CONSTRUCTOR:
            shown = entry.name
            yield f"{shown}(…)", f"{shown}.constructor"
        else:
            yield shown, f"{entry.name}.{_camel(member.name)}"
        if shown in OPTIONS:
            yield from _options(shown, member.signature)


def _options(shown: str, signature: str) -> Iterator[tuple[str, str]]:
    """Parameters that are named or have a default, but for the address of a client, which comes first in both."""
    node = ast.parse(f"def call{signature}: ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    given = node.args
    optional = [*given.args[len(given.args) - len(given.defaults) :], *given.kwonlyargs]
    for argument in (*optional, *([given.kwarg] if given.kwarg else ())):
        if argument.arg != "target":
            yield f"{shown}({argument.arg}=)", f"{OPTIONS[shown]}.{_camel(argument.arg)}"


def _typescript_names(entry: Entry) -> Iterator[str]:
    yield entry.name
    for member in entry.members:
        yield f"{entry.name}.{member.name}" if member.signature else f'{entry.name} "{member.name}"'


def _camel(name: str) -> str:
    return re.sub(r"_([a-z0-9])", lambda match: match[1].upper(), name)


def _cells(row: Row) -> tuple[str, str, str]:
    gap = MISSING if row.is_gap else ""
    python, typescript = row.python, row.typescript
    if "*" in row.pattern:  # each name that it explains makes the same row; [[] is how fnmatch spells [
        pattern = row.pattern.replace("[[]", "[")
        python = python and pattern
        typescript = typescript and (f"*.{typescript.rpartition('.')[2]}" if python else pattern)
    return code(python) or gap, code(typescript) or gap, row.note
