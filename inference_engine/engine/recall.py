"""What the journal keeps of calls, back into memory: replies to repeated calls, and Generates that may go on.

A reply is kept as JSON. Its sizes are those that were promised when the session was made.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from inference_engine.engine.results import HistoryLength, SessionForked, SessionOpened
from inference_engine.kv.strategies import parse_strategy
from inference_engine.scheduler.transcript import Transcript
from inference_engine.session.journal import Logprobs, SessionKept, TokensRecord
from inference_engine.session.session import Session
from inference_engine.types import Bound, Mark

_GENERATED = np.uint8(Mark.GENERATED)


def opened_to_text(opened: SessionOpened) -> str:
    """Of a SessionForked, too."""
    fields = {name: getattr(opened, name) for name in opened.__dataclass_fields__ if name != "is_replayed"}
    return json.dumps({**fields, "strategy": str(opened.strategy), "bound": asdict(opened.bound)})


def opened_from_text(text: str) -> SessionOpened:
    fields = json.loads(text)
    fields |= {"strategy": parse_strategy(fields["strategy"]), "bound": Bound(**fields["bound"])}
    return SessionForked(**fields) if "history_length" in fields else SessionOpened(**fields)


def length_to_text(length: HistoryLength) -> str:
    return json.dumps(length.tokens)


def length_from_text(text: str) -> HistoryLength:
    return HistoryLength(tokens=json.loads(text))


def recalled_generates(session: Session, kept: SessionKept) -> list[Transcript]:
    """The Generates of a restored session that a call can name, oldest first."""
    found = []
    for index, record in enumerate(kept.generates):
        later = kept.generates[index + 1 :]
        end = later[0].position if later else len(session.history)
        if not record.request_id:
            continue
        appended = np.flatnonzero(session.history.marks(record.position, end) != _GENERATED)
        tokens = int(appended[0]) if len(appended) else end - record.position
        logprobs = _logprobs(kept.tokens, record.position, record.position + tokens)
        found.append(Transcript.recalled(session, record, tokens, logprobs))
    return found


def _logprobs(records: Sequence[TokensRecord], start: int, stop: int) -> Logprobs | None:
    """Of the tokens at [start, stop), if they were reported."""
    pieces = []
    for record in records:
        first, last = max(start, record.position), min(stop, record.position + len(record.token_ids))
        if first < last:
            if record.logprobs is None:
                return None
            pieces.append(record.logprobs[first - record.position : last - record.position])
    return np.concatenate(pieces) if pieces else None
