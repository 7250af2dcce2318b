"""What evaluations do with sessions: see whether one fits, open one for a while, give it a history, take turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from inference_engine.engine import Engine
from inference_engine.kv.strategy import KVStrategy


def check_fits(engine: Engine, strategy: KVStrategy, tokens: int) -> None:
    """Raise InvalidArgument or NoCapacity if no session of this strategy can hold that many tokens."""
    with opened(engine, strategy, tokens):
        pass


@contextmanager
def opened(engine: Engine, strategy: KVStrategy, tokens: int) -> Iterator[str]:
    """A session for that many tokens, closed at the end. Raises InvalidArgument or NoCapacity as the engine does."""
    session = engine.create_session(strategy=strategy, limit_tokens=tokens, guaranteed=True).session_id
    try:
        yield session
    finally:
        engine.close_session(session)


def append_all(engine: Engine, session: str, token_ids: Sequence[int]) -> None:
    """Append ids of any number, in pieces that the engine takes."""
    most = engine.config.max_append_tokens
    for start in range(0, len(token_ids), most):
        engine.append(session, token_ids[start : start + most])


def circular(token_ids: Sequence[int], start: int, count: int) -> list[int]:
    """`count` ids from `start` on, read round and round, so that sessions can have histories of their own."""
    return [token_ids[(start + place) % len(token_ids)] for place in range(count)]


def turned(names: list[str], number: int) -> list[str]:
    """The names of round `number`: neither side of a comparison always comes first."""
    number %= len(names)
    return names[number:] + names[:number]
