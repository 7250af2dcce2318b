"""What several experiments ask for on the command line, and find out of a target in the same way."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from inference_engine.errors import InvalidArgument, KakeyaError
from inference_engine.evaluation.models import Target
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.strategies import parse_strategy
from inference_engine.kv.strategy import KVStrategy


def strategy_argument(text: str) -> KVStrategy:
    """For `type=`: a strategy as people write it, or argparse's own error."""
    try:
        return parse_strategy(text)
    except KakeyaError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def require_at_least(arguments: argparse.Namespace, **floors: int) -> None:
    """Raise InvalidArgument for the first number, or number of a list, that is below its floor."""
    for name, floor in floors.items():
        given = getattr(arguments, name)
        for number in given if isinstance(given, Sequence) else (given,):
            if number < floor:
                raise InvalidArgument(name, f"must be at least {floor}, got {number}")


def geometry_of(target: Target) -> Geometry:
    """The geometry that the target's engine works with."""
    config = target.engine.config
    return target.forward.geometry(
        mode=config.mode, page_tokens=config.page_tokens, segment_tokens=config.segment_tokens
    )
