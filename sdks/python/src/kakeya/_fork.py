"""Forks a session from the history that this client knows, or a longer one.

A history that is shorter than the server had said has lost tokens: a fork of it would lack what its caller believes to
be there. That is an error, and nothing is forked. If it is longer and the caller named no length, the fork has all of
it.
"""

from __future__ import annotations

from kakeya._append import Tail, behind
from kakeya._errors import HistoryLengthMismatch
from kakeya._flows import Flow, repeatable
from kakeya._requests import new_request_id
from kakeya._retry import Patience
from kakeya.v1 import runtime_pb2 as pb


def fork_session(request: pb.ForkSessionRequest, tail: Tail, patience: Patience) -> Flow[pb.ForkSessionResponse]:
    """request: without an expected length if the caller named none; then it gets that of `tail`."""
    must_match = request.HasField("expected_history_length")
    if not must_match:
        request.expected_history_length = tail.length
    while True:
        try:
            forked: pb.ForkSessionResponse = yield from repeatable("ForkSession", request, patience)
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
            return forked
