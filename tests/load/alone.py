"""The law for any model: the same Generate again, in a session of its own, in an engine that has no other session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from inference_engine.engine import Engine
from inference_engine.kv.strategy import KVStrategy
from inference_engine.session.journal import Journal, TokensRecord
from inference_engine.types import GenerateParams, Sampling, TokenCommitted
from tests.facade import rebuild_session


class Alone:
    """Runs streams again from what the journal of the engine that is judged says of their sessions."""

    def __init__(self, engine: Engine, journal: Journal) -> None:
        self._engine, self._journal = engine, journal

    def tokens(
        self, session_id: str, history: Sequence[int], first: int, count: int, *, seed: int | None = None
    ) -> list[int]:
        """The `count` tokens that follow the first `first` of `history`, the session's, which must still be open.

        seed None: greedy; otherwise drawn at temperature 1.
        """
        began, records = self._journal.read(session_id)
        records = list(_until(records, first))
        recorded = [int(token) for record in records for token in record.token_ids]
        assert recorded == list(history[:first]), "the journal holds another history than was reported to the client"
        opened = rebuild_session(self._engine, began, records)
        generated = _generated(self._engine, opened.session_id, count, seed, owner=began.owner)
        self._engine.close_session(opened.session_id, owner=began.owner)
        return generated


@dataclass(frozen=True, slots=True)
class AloneSolo:
    """Stands in for a closed form (`tests/load/solo.py`) where a model has none."""

    engine: Engine
    strategy: KVStrategy

    def continued(self, history: Sequence[int], count: int, *, seed: int | None = None) -> list[int]:
        """The `count` tokens that follow, the whole history appended at once."""
        session_id = self.engine.create_session(strategy=self.strategy).session_id
        self.engine.append(session_id, history)
        generated = _generated(self.engine, session_id, count, seed)
        self.engine.close_session(session_id)
        return generated

    def is_certain(self, _history: Sequence[int], _first: int) -> bool:
        return True


def _generated(engine: Engine, session_id: str, count: int, seed: int | None, *, owner: str = "") -> list[int]:
    sampling = Sampling() if seed is None else Sampling(temperature=1.0, seed=seed)
    events = engine.generate(session_id, GenerateParams(max_tokens=count, sampling=sampling), owner=owner)
    return [event.token_id for event in events if isinstance(event, TokenCommitted)]


def _until(records: Sequence[TokensRecord], length: int) -> Iterator[TokensRecord]:
    """What a journal said when the history had `length` tokens."""
    for record in records:
        if record.position < length:
            yield replace(record, token_ids=record.token_ids[: length - record.position])
