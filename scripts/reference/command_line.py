"""The page of the command line: every command of `kakeya` with its own options; settings have a page of their own."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from inference_engine.cli.lazy_commands import LateParser
from inference_engine.cli.main import parser
from inference_engine.cli.settings import HELP, TITLES, USUAL_TITLE
from scripts.reference.markdown import code, page, table

INTRODUCTION = """
    `make` installs the command into `.venv/bin`. Exit status: 0 done; 1 something is at fault, and one line on standard
    error says what; 2 wrong usage; 130 interrupted. Most commands take settings: [what they say](settings.md).
"""


# Benchmarks are for developers, but for the one of a server under load.
BENCH, SERVE = "kakeya bench ", "kakeya bench serve"


def render() -> str:
    every = dict(commands())
    benches = [words for words in every if words.startswith(BENCH) and words != SERVE]
    parts = [part for words, one in every.items() if words not in benches for part in _command(words, one)]
    rows = [(code(words), every[words].description or "") for words in benches]
    parts += [f"## {BENCH.strip()}", "Each measures, and `--help` lists its options.", table(("command", "says"), rows)]
    return page("Command line", "the command's own parsers", INTRODUCTION, *parts)


def commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command that can be run, as its words, with its complete parser."""
    yield from _below("kakeya", parser())


def _below(words: str, one: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    if isinstance(one, LateParser):
        one.complete()
    nested = [action for action in one._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield words, one
    for action in nested:
        for name, below in action.choices.items():
            yield from _below(f"{words} {name}", below)


def _command(words: str, one: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## {words}"
    yield one.description or ""
    settings, rows = [], []
    for group in one._action_groups:
        for action in group._group_actions:
            if isinstance(action, argparse._HelpAction) or action.help is argparse.SUPPRESS:
                continue
            if group.title in (*TITLES.values(), USUAL_TITLE) and action.dest in HELP:
                settings.append(code(action.option_strings[0]))
            else:
                rows.append((_invocation(action), _says(action)))
    yield table(("option", "says"), rows)
    if settings:
        yield f"Settings: {', '.join(settings)}."


def _invocation(action: argparse.Action) -> str:
    """How it is typed: `--lengths N …`, or the name of what stands without an option."""
    values = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    shown = " ".join(values) if isinstance(values, tuple) else values
    if action.nargs in ("+", "*"):
        shown += " …"
    if not action.option_strings:
        return code(shown)
    return code(action.option_strings[-1] + (f" {shown}" if action.nargs != 0 else ""))


def _says(action: argparse.Action) -> str:
    text = (action.help or "").replace("%%", "%")
    return f"{text} (required)" if action.required and action.option_strings else text
