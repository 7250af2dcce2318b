"""What an experiment is given on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def typed_for(add_arguments: Callable[[argparse.ArgumentParser], None], *words: str) -> argparse.Namespace:
    """As `kakeya evaluate` parses it, which knows --quick besides."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args(words)
