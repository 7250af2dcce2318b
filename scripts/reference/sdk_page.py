"""The reference page of an SDK: its public names by room, each with its declaration, its words and its members."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scripts.reference.api import Entry
from scripts.reference.markdown import code, fence, paragraphs, table


def sections(entries: Sequence[Entry], titles: dict[str, str], language: str) -> Iterator[str]:
    """The parts of the page. `titles` names the rooms, in their order; an entry of any other room is a KeyError."""
    if unknown := {entry.room for entry in entries} - titles.keys():
        raise KeyError(f"these rooms have no title: {', '.join(sorted(unknown))}")
    for room, title in titles.items():
        yield f"## {title}"
        for entry in entries:
            if entry.room == room:
                yield from _entry(entry, language)


def _entry(entry: Entry, language: str) -> Iterator[str]:
    yield f"### {entry.name}"
    yield fence(entry.declaration, language)
    yield paragraphs(entry.says)
    plain = [member for member in entry.members if not member.signature.startswith("(")]
    yield table(("member", "says"), ((code(member.name + member.signature), member.says) for member in plain))
    for member in entry.members:
        if member.signature.startswith("("):
            yield fence(_constructor(entry, member.name, language) + member.signature, language)
            yield paragraphs(member.says)


def _constructor(entry: Entry, name: str, language: str) -> str:
    if name in ("__init__", "constructor"):
        return entry.name if language == "python" else f"new {entry.name}"
    return f"{entry.name}.{name}"
