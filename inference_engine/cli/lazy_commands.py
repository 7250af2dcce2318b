"""Commands of the laboratory, imported on demand: serving does not need them.

The laboratory (measuring, training) is layered on the runtime. Here it is referred to by name only, so it is imported
when one of its commands is used, and need not be installed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Any

from inference_engine.errors import ConfigError, KakeyaError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction["LateParser"]

LABORATORY = "laboratory"
# Each is a module of `laboratory.commands` with an `add_arguments(parser)`.
COMMANDS = {
    "evaluate": "measure strategies against full, and keep the records",
    "bench": "measure speed, memory and endurance, beside something else",
    "train": "calibrate the latent codec that restores evicted KV entries; train a drafter",
}
# What other servers call an option of ours.
_CALLED_ELSEWHERE = {"--host": "--bind HOST:PORT", "--port": "--bind HOST:PORT", "-m": "--model"}
_WIDTH = max(map(len, COMMANDS)) + 2


class LateParser(argparse.ArgumentParser):
    """A parser that learns what it takes, and so imports what it runs, only when it is used."""

    learn: Callable[[Any], None] | None = None

    def __init__(self, **given: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **given})

    def complete(self) -> None:
        """Load its arguments now, if that has not happened yet. Ends the process where what it runs is not there."""
        learn, self.learn = self.learn, None
        if learn is not None:
            try:
                learn(self)
            except KakeyaError as error:
                self.exit(1, f"{self.prog}: {error}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = list(map(str, action.choices))
            close = get_close_matches(str(value), choices, n=1)
            ours = f"did you mean {close[0]}?" if close else f"choose from {', '.join(choices)}"
            raise argparse.ArgumentError(action, f"there is no {value!r}; {ours}")

    def print_help(self, file: Any = None) -> None:
        """argparse would discard an error of writing."""
        print(self.format_help(), end="", file=file)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.complete()
        if self._subparsers is not None and not (sys.argv[1:] if args is None else args):
            # Who types no more than this asks what there is.
            self.print_help(sys.stderr)
            self.exit(2)
        known, left = super().parse_known_args(args, namespace)
        if left:
            self._refuse(left)
        return known, left

    def _refuse(self, arguments: Sequence[str]) -> None:
        """Here and not by the parser above, which would show its own usage and name no command."""
        first = arguments[0].partition("=")[0]
        known = [name for name, action in self._option_string_actions.items() if action.help is not argparse.SUPPRESS]
        ours = _CALLED_ELSEWHERE.get(first, "")
        if not first.startswith("-"):
            ours = f"--model {first}" if "--model" in known else ""
        elif ours.partition(" ")[0] not in known:
            ours = next(iter(get_close_matches(first, known, n=1)), "")
        meant = f"; did you mean {ours}?" if ours else ""
        self.exit(
            2,
            f"usage: {self.prog} …; `{self.prog} --help` lists what it takes\n"
            f"{self.prog}: error: unrecognized arguments: {' '.join(arguments)}{meant}\n",
        )


def add_parsers(top: argparse.ArgumentParser, subparsers: Subparsers) -> None:
    """The laboratory's commands, listed under a heading of their own."""
    width = shutil.get_terminal_size().columns - 4  # argparse indents by 2, and leaves 2
    wrap = TextWrapper(width, subsequent_indent=" " * (_WIDTH + 2))
    lines = (wrap.fill(f"  {name:<{_WIDTH}}{summary}") for name, summary in COMMANDS.items())
    top.add_argument_group(LABORATORY, "\n".join(lines))
    for name in COMMANDS:
        subparsers.add_parser(name).learn = _learn(name)


def _learn(name: str) -> Callable[[LateParser], None]:
    def learn(parser: LateParser) -> None:
        if find_spec(LABORATORY) is None:
            raise ConfigError("the laboratory, which this command is part of, is not installed")
        import_module(f"{LABORATORY}.commands.{name}").add_arguments(parser)

    return learn
