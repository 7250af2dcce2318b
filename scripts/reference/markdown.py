"""Markdown as plain text: tables, headings, code, and the first lines of a page that is made from code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from inspect import cleandoc


def page(title: str, source: str, introduction: str, *parts: str) -> str:
    """A whole page. `source` says which code it is made from, so that the page itself is not edited."""
    made = f"<!-- Made by `make reference` from {source}; edit that. -->"
    return "\n\n".join([f"# {title}", made, cleandoc(introduction), *(part for part in parts if part)]) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells may hold markup, line breaks become spaces and bars are escaped. No rows: an empty text."""
    lines = ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join([f"| {' | '.join(header)} |", "|" + "---|" * len(header), *lines]) if lines else ""


def code(text: str) -> str:
    """Text in a typewriter's letters; an empty text stays empty."""
    return f"`{text}`" if text else ""


def fence(text: str, language: str = "") -> str:
    return f"```{language}\n{text}\n```"


def paragraphs(docstring: str) -> str:
    """A docstring as Markdown: paragraphs keep their breaks, indented pictures and code become fences."""
    text = cleandoc(docstring)
    return re.sub(r"(?:^ {4}.*(?:\n(?=\n* {4})|$)\n?)+", _fenced, text, flags=re.MULTILINE).strip()


def one_line(text: str) -> str:
    return " ".join(text.split())


def anchor(heading: str) -> str:
    """The id that a heading gets, here and where repositories are read: lower case, words joined by hyphens."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def _fenced(match: re.Match[str]) -> str:
    return fence(cleandoc(match[0])) + "\n"


def _cell(text: str) -> str:
    return one_line(re.sub(r"(?<!\\)\|", r"\\|", text))
