"""`kakeya completion`: commands, options and their values for bash, zsh and fish, from the parsers themselves.

The scripts are click's, which ask the command again, with _KAKEYA_COMPLETE set, at each press of the key.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem, ShellComplete

    from inference_engine.cli.lazy_commands import LateParser

    Subparsers = argparse._SubParsersAction[LateParser]

VARIABLE = "_KAKEYA_COMPLETE"
# For a shell's start file.
_LOADED = {
    "bash": 'eval "$(kakeya completion bash)"',
    "zsh": 'eval "$(kakeya completion zsh)"',
    "fish": "kakeya completion fish | source",
}


def add_parser(subparsers: Subparsers) -> None:
    lines = "; ".join(f"{shell}: {line}" for shell, line in _LOADED.items())
    parser = subparsers.add_parser(
        "completion",
        help="completion of commands and options for your shell",
        description=f"Print a script that completes commands, options and values. In your shell's start file: {lines}.",
    )
    parser.add_argument("shell", choices=tuple(_LOADED), metavar="|".join(_LOADED))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(_shell(args.shell, None).source())
    return 0


def answer(instruction: str, top: LateParser) -> None:
    """Print what can come next. instruction: such as bash_complete, as the script says it."""
    print(_shell(instruction.partition("_")[0], top).complete())


def items(top: LateParser, words: list[str], begun: str) -> list[tuple[str, str, str]]:
    """What can stand behind `words` and begins like `begun`: (text, what it says, plain or file)."""
    parser, values = top, None
    for word in words:
        if word == "=":  # bash gives --name, = and a value as words of their own
            continue
        parser.complete()
        commands = next((one for one in parser._actions if isinstance(one, argparse._SubParsersAction)), None)
        values = parser._option_string_actions.get(word)
        if commands is not None and word in commands.choices:
            parser = commands.choices[word]
    parser.complete()
    name, is_joined, value = begun.partition("=")
    if begun.startswith("-") and is_joined:
        joined = parser._option_string_actions.get(name)
        return [(f"{name}={one}", said, what) for one, said, what in _values(joined, value)] if joined else []
    if values is not None and values.nargs != 0:
        return _values(values, begun)
    if begun.startswith("-"):
        options = parser._option_string_actions.items()
        shown = [(text, action) for text, action in options if action.help is not argparse.SUPPRESS]
        return [(text, action.help or "", "plain") for text, action in shown if text.startswith(begun)]
    return [one for action in parser._actions if not action.option_strings for one in _values(action, begun)]


def _values(action: argparse.Action, begun: str) -> list[tuple[str, str, str]]:
    if isinstance(action, argparse._SubParsersAction):
        said = {one.dest: one.help or "" for one in action._choices_actions}
        return [(name, said.get(name, ""), "plain") for name in action.choices if name.startswith(begun)]
    if action.choices is not None:
        return [(text, "", "plain") for text in map(str, action.choices) if text.startswith(begun)]
    shown = str(action.metavar)
    return [(begun, "", "file")] if any(word in shown for word in ("FILE", "FOLDER", "DIR", "PATH")) else []


def _shell(shell: str, top: LateParser | None) -> ShellComplete:
    from click.shell_completion import CompletionItem, get_completion_class

    kind: Any = get_completion_class(shell)
    if kind is None:
        sys.exit(2)

    class Completion(kind):  # type: ignore[misc]
        def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
            assert top is not None
            found = items(top, args, "" if incomplete == "=" else incomplete)
            return [CompletionItem(text, type=what, help=said.replace("%%", "%")) for text, said, what in found]

    made: ShellComplete = Completion(None, {}, "kakeya", VARIABLE)
    return made
