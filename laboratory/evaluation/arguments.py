"""What several experiments ask for on the command line, and what they find out of a target alike."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from inference_engine.errors import InvalidArgument, KakeyaError
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.strategies import parse_strategy
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Bound
from laboratory.evaluation.models import Target

_FAR = 2**20  # tokens: beyond every window, and so many that the rounding to whole pages does not count


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
    return target.forward.geometry(page_tokens=config.page_tokens, segment_tokens=config.segment_tokens)


def bytes_table(target: Target, strategies: Iterable[KVStrategy]) -> list[dict[str, Any]]:
    """A record's table of what each further token adds to a session between Generates, by the strategy's own bound."""
    geometry = geometry_of(target)
    return [
        {
            "strategy": name,
            "bytes per token": bytes_per_token(one, geometry),
            "tier bytes per token": tier_bytes_per_token(one, geometry),
        }
        for name, one in {str(one): one for one in strategies}.items()
    ]


def bytes_per_token(strategy: KVStrategy, geometry: Geometry) -> int:
    """What a session keeps of a further token on the device between Generates, once windows are full, or 0."""
    return _of_a_further_token(strategy, geometry, lambda bound: bound.sustained_bytes)


def tier_bytes_per_token(strategy: KVStrategy, geometry: Geometry) -> int:
    """What a session keeps of a further token off the device, beside those."""
    return _of_a_further_token(strategy, geometry, lambda bound: bound.tier_bytes)


def _of_a_further_token(strategy: KVStrategy, geometry: Geometry, read: Callable[[Bound], int]) -> int:
    spec = strategy.resolved(geometry)
    near, far = (read(spec.bound(geometry, _FAR * times)) for times in (1, 2))
    return round((far - near) / _FAR)
