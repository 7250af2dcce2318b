"""Words that the vocabulary has replaced do not come back, in code or in documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "inference_engine", "kv_cache_proposer", "laboratory", "proto", "scripts", "sdks", "tests")
KINDS = {".cpp", ".css", ".h", ".html", ".js", ".json", ".md", ".mjs", ".proto", ".py", ".pyi", ".toml", ".ts"}
# Installed, built, or text that a model is trained on; and this file.
ASIDE = {"node_modules", "dist", "build", "__pycache__", "phrases", "test_words.py", "package-lock.json"}
# Lane, row, ring and way are not among them: a vector, a table, a buffer and an error message have these.
RETIRED = re.compile(
    r"\b(told|nobody|asleep|(?<!malloc )arenas?|trunks?|slabs?|bells?|news|condemn\w*|sayings|strangers?|keep[- ]sets?"
    r"|guess(?!-Verify)\w*|want of memory|somebody|anybody|everybody|whoever)\b",
    re.IGNORECASE,
)


def files() -> Iterator[Path]:
    yield from (ROOT / name for name in ("CONTRIBUTING.md", "Makefile", "README.md", "SECURITY.md"))
    for folder in FOLDERS:
        yield from (
            path
            for path in (ROOT / folder).rglob("*")
            if path.suffix in KINDS and not ASIDE.intersection(path.relative_to(ROOT).parts)
        )


def words(line: str) -> str:
    """A line with the words of its identifiers apart."""
    return re.sub(r"_|(?<=[a-z])(?=[A-Z])", " ", line)


def retired(text: str) -> list[str]:
    """Lines with a retired word, outside of the table that says what the field calls it."""
    lines = text.split("\n## Words\n")
    text = lines[0] + "".join(part[part.find("\n## ") :] for part in lines[1:])
    return [line for line in text.splitlines() if RETIRED.search(words(line))]


def test_words_that_were_replaced_do_not_come_back() -> None:
    found = {str(path.relative_to(ROOT)): lines for path in files() if (lines := retired(path.read_text()))}
    assert found == {}


def test_a_retired_word_is_found(subtests: pytest.Subtests) -> None:
    for line in (
        "# Nobody is told.",
        "def condemned(x):",
        "the keep-set of a query",
        "self._told = 0",
        "def test_what_is_told():",
        "keep_sets",
        "KeepSet",
        "isAsleep",
    ):
        with subtests.test(line):
            assert retired(f"fine\n{line}\nfine") == [line]
    assert retired("a page\n\n## Words\n\n| keep-set | selected blocks |\n\n## Rooms\nnews\n") == ["news"]
