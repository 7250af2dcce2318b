"""Forks or rewinds a session from the history that this client knows, or a longer one.

A history that is shorter than the server had said has lost tokens: a fork of it would lack what its caller believes to
be there. That is an error, and nothing is done. If it is longer and the caller named no length, a fork that names no
position has all of it.
"""

from __future__ import annotations

from typing import Any

from kakeya._append import Tail, behind
from kakeya._errors import HistoryLengthMismatch, ProtocolError
from kakeya._flows import Flow, close_session, repeatable
from kakeya._requests import new_request_id
from kakeya._retry import Patience
from kakeya.v1 import runtime_pb2 as pb


def fork_session(request: pb.ForkSessionRequest, tail: Tail, patience: Patience) -> Flow[pb.ForkSessionResponse]:
    """request: without an expected length if the caller named none; then it gets that of `tail`."""
    forked: pb.ForkSessionResponse = yield from _of_known_length("ForkSession", request, tail, patience)
    if request.HasField("at_position") and forked.history_length != request.at_position:
        yield from close_session(forked.session_id, patience)
        raise ProtocolError("the server is older than forks at a position, and forked at the end; that fork is closed")
    return forked


def rewind_session(request: pb.RewindSessionRequest, tail: Tail, patience: Patience) -> Flow[pb.RewindSessionResponse]:
    """request: as for `fork_session`."""
    rewound: pb.RewindSessionResponse = yield from _of_known_length("RewindSession", request, tail, patience)
    return rewound


def _of_known_length(
    method: str, request: pb.ForkSessionRequest | pb.RewindSessionRequest, tail: Tail, patience: Patience
) -> Flow[Any]:
    must_match = request.HasField("expected_history_length")
    if not must_match:
        request.expected_history_length = tail.length
    while True:
        try:
            reply = yield from repeatable(method, request, patience)
        except HistoryLengthMismatch as mismatch:
            confirmed, actual = request.expected_history_length, mismatch.actual
            if must_match or actual is None or actual == confirmed:
                raise
            if actual < confirmed:
                tail.settle(actual)
                raise behind(confirmed, actual) from mismatch
            tail.saw(actual)
            request.expected_history_length = actual
            request.request_id = new_request_id()  # for another length, it is another request
        else:
            return reply
