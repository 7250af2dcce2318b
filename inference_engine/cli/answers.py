"""The flag for the length of answers, of the commands that hold a conversation."""

from __future__ import annotations

import argparse

from inference_engine.errors import ConfigError


def add_max_tokens(group: argparse._ActionsContainer, default: int) -> None:
    """What is no length is refused with the command line, before a model is loaded for it."""
    text = f"longest answer (default: {default})"
    group.add_argument("--max-tokens", type=_max_tokens, default=default, metavar="N", help=text)


def refuse_longer(tokens: int, limit: int, *, flag: str = "--max-tokens") -> None:
    """Before a session is opened for it. limit: `max_generate_tokens` of the server. Raises ConfigError."""
    if tokens > limit:
        raise ConfigError(
            f"{flag} {tokens} is more than the server's limit of {limit} tokens a Generate; ask for at most {flag} "
            f"{limit}, or start a server with a larger max_generate_tokens"
        )


def _max_tokens(text: str) -> int:
    try:
        tokens = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number of tokens, got {text!r}") from None
    if tokens < 1:
        raise argparse.ArgumentTypeError(f"an answer has at least 1 token, got {tokens}")
    return tokens
