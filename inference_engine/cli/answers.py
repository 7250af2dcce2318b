"""The flag for the length of answers, of the commands that hold a conversation."""

from __future__ import annotations

import argparse


def add_max_tokens(group: argparse._ActionsContainer, default: int) -> None:
    """What is no length is refused with the command line, before a model is loaded for it."""
    text = f"longest answer (default: {default})"
    group.add_argument("--max-tokens", type=_max_tokens, default=default, metavar="N", help=text)


def _max_tokens(text: str) -> int:
    try:
        tokens = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number of tokens, got {text!r}") from None
    if tokens < 1:
        raise argparse.ArgumentTypeError(f"an answer has at least 1 token, got {tokens}")
    return tokens
