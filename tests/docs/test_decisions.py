"""Decisions are short and keep their numbers; what documents name is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from scripts.check_links import broken_links

ROOT = Path(__file__).resolve().parents[2]
DECISIONS = sorted((ROOT / "docs/adr").glob("0*.md"))
MOST_WORDS = 600
SECTIONS = ("Context", "Decision", "Alternatives", "Consequences")
NAMED_FILE = re.compile(r"`([\w./-]+\.(?:py|h|cpp|proto|ts|mjs))`")
WITHOUT_A_RECORD = re.compile(r"(without|no) (a )?record|of which there is no", re.IGNORECASE)


def words(text: str) -> int:
    return sum(re.search(r"\w", word) is not None for word in text.split())


def test_a_decision_is_short_whole_and_leads_somewhere(subtests: pytest.Subtests) -> None:
    for path in DECISIONS:
        with subtests.test(path.name):
            text = path.read_text(encoding="utf-8")
            assert words(text) <= MOST_WORDS
            sections = re.findall(r"^## (\w+)", text, re.MULTILINE)
            assert list(dict.fromkeys(sections)) == list(SECTIONS)
            assert text.startswith(f"# {path.name[:4]} ")
            assert not WITHOUT_A_RECORD.search(" ".join(text.split()))
            assert not list(broken_links(path))


def test_every_number_is_in_the_list_once() -> None:
    listed = (ROOT / "docs/adr/README.md").read_text(encoding="utf-8")
    for path in DECISIONS:
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix(f"# {path.name[:4]} ")
        assert f"| [{path.name[:4]}]({path.name}) | {title} |" in listed
    numbers = re.findall(r"(?<![\w-])\d{4}(?![\w-])", listed)
    assert sorted(numbers) == [f"{number:04}" for number in range(1, len(numbers) + 1)]


def test_a_file_that_a_document_names_is_there() -> None:
    """As `kv/part.py`, below any folder: what a document says of a file that is gone is no longer true."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    files = [f"/{path}" for path in listed.splitlines()]
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *DECISIONS]
    named = {(path.name, name) for path in documents for name in NAMED_FILE.findall(path.read_text(encoding="utf-8"))}
    assert len(named) > 100
    assert [
        (document, name) for document, name in sorted(named) if not any(f.endswith(f"/{name}") for f in files)
    ] == []
