"""Commands that documents show can be typed as they stand."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.check_links import ROOT, documents
from scripts.reference.command_line import commands

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = ("", "sh", "bash", "shell", "console")
# Records say what made them, then; and what changed is history.
HISTORY = ("results/", "CHANGELOG.md", "docs/adr/")
DOCUMENTS = [path for path in documents() if not str(path.relative_to(ROOT)).startswith(HISTORY)]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"^([A-Z_]+) \?=", MAKEFILE, re.MULTILINE))


@pytest.fixture(scope="module")
def parsers() -> dict[str, argparse.ArgumentParser]:
    return dict(commands())


def shown_commands(document: Path) -> Iterator[str]:
    """Lines of shell that start with a command of ours; what stands behind two spaces says what it does."""
    for language, block in FENCE.findall(document.read_text(encoding="utf-8")):
        if language not in SHELL:
            continue
        for line in block.replace("\\\n", " ").splitlines():
            command = re.split(r" {2,}|\t| # | > ", line.strip().removeprefix("$ "))[0]
            if command.split(" ")[0] in ("kakeya", "make"):
                yield command


def problem_of(command: str, parsers: dict[str, argparse.ArgumentParser]) -> str | None:
    """What is wrong with a command, or None."""
    words = shlex.split(command)
    return _problem_of_make(words[1:], parsers) if words[0] == "make" else _problem_of_kakeya(words, parsers)


def _problem_of_make(words: list[str], parsers: dict[str, argparse.ArgumentParser]) -> str | None:
    given = dict(word.split("=", 1) for word in words if "=" in word)
    targets = [word for word in words if "=" not in word]
    if unknown := (set(targets) - TARGETS) | (given.keys() - VARIABLES):
        return f"the Makefile has no {', '.join(sorted(unknown))}"
    runs = [
        f"kakeya {target}" for target in targets if any(f"{name} ".startswith(f"kakeya {target} ") for name in parsers)
    ]
    return _problem_of_kakeya(shlex.split(f"{runs[0]} {given['ARGS']}"), parsers) if runs and "ARGS" in given else None


def _problem_of_kakeya(words: list[str], parsers: dict[str, argparse.ArgumentParser]) -> str | None:
    name = next((shown for n in (3, 2) if (shown := " ".join(words[:n])) in parsers), None)
    if name is None:
        return "no such command"
    try:
        parsers[name].parse_args(words[len(name.split()) :])
    except SystemExit:
        return "its own parser refuses it"
    return None


def test_every_command_in_a_document_is_taken_by_its_parser(
    parsers: dict[str, argparse.ArgumentParser], subtests: pytest.Subtests
) -> None:
    for document in DOCUMENTS:
        with subtests.test(str(document)):
            wrong = {
                command: problem for command in shown_commands(document) if (problem := problem_of(command, parsers))
            }
            assert not wrong


def test_a_command_that_cannot_be_typed_is_found(
    parsers: dict[str, argparse.ArgumentParser], subtests: pytest.Subtests
) -> None:
    for command in [
        "kakeya sreve",
        "kakeya serve --no-such-option",
        "kakeya evaluate needle --trials many",
        "kakeya train",
        "make no-such-target",
        "make demo NOTHING=1",
        "make demo ARGS=--no-such-option",
        "make bench ARGS=nothing",
    ]:
        with subtests.test(command):
            assert problem_of(command, parsers)
