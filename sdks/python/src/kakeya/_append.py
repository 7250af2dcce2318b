"""Appending token ids so that each is in the history once, or the caller knows how many are.

Every request has an id by which the server knows it when it comes again, and names the length it appends to
(`expected_history_length`): history only grows, so it can take effect at one length alone. Sending it again is safe.
Where no answer comes in the end, the length tells what happened:

    found == length             it did not arrive
    found == length + count     it arrived
    anything else               somebody else wrote, too: nobody can tell
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kakeya._errors import (
    DeadlineExceeded,
    HistoryLengthMismatch,
    KakeyaError,
    ProtocolError,
    ServerError,
    TransportError,
)
from kakeya._flows import Call, Flow, Sleep, repeatable
from kakeya._requests import new_request_id
from kakeya._retry import Patience
from kakeya.v1 import runtime_pb2 as pb

# A failed append asks for the length even when its own time is up; that question may take this long.
INQUIRY_SECONDS = 5.0

# The largest append request: session id, lengths and field tags, then ids of at most five bytes each.
_ENVELOPE_BYTES = 256
_BYTES_PER_ID = 5


@dataclass(slots=True)
class Tail:
    """The end of a session's history, as far as this client was told. It can lag, but never leads."""

    length: int = 0
    may_lag: bool = False  # a Generate ran and its last word was not heard
    has_open_append: bool = False  # a request may yet arrive, so the next append insists on `length`

    def saw(self, length: int) -> None:
        self.length = max(self.length, length)

    def settle(self, length: int) -> None:
        """The server said `length` with nothing of ours under way."""
        self.length, self.may_lag, self.has_open_append = length, False, False


@dataclass(slots=True)
class AppendLimit:
    """How many ids one request may carry; asked of the server once for each client."""

    tokens: int | None = None


class Append:
    """One append, in as many requests as the server's limits ask for.

    If the history is longer than `tail` knew and the caller named no length, the ids go to its end all the same.
    """

    def __init__(
        self,
        session_id: str,
        ids: Sequence[int],
        *,
        tail: Tail,
        expected_history_length: int | None,
        limit: AppendLimit,
        patience: Patience,
    ) -> None:
        self._session_id = session_id
        self._ids = ids
        self._tail = tail
        self._limit = limit
        self._patience = patience
        self._length = tail.length if expected_history_length is None else expected_history_length
        self._is_open = tail.has_open_append  # an earlier append's request may yet arrive
        self._must_match = expected_history_length is not None or self._is_open
        # Only then does a history longer by this append's ids prove that they arrived.
        self._is_exact = self._length == tail.length and not (tail.may_lag or self._is_open)
        self._is_fate_known = True  # of the last request

    def run(self) -> Flow[int]:
        """The new history length. Errors carry `appended_tokens`."""
        appended = 0
        try:
            size = yield from self._ids_per_request()
            # No ids at all is still one request: it refreshes the idle clock.
            for start in range(0, max(len(self._ids), 1), size):
                chunk = self._ids[start : start + size]
                yield from self._send(chunk)
                appended += len(chunk)
                self._must_match, self._is_exact, self._is_open = True, True, False
        except KakeyaError as error:
            error.appended_tokens = appended if self._is_fate_known else None
            at_least = "" if self._is_fate_known else "at least "
            error.add_note(f"{at_least}{appended} of {len(self._ids)} ids of this append are in the history")
            raise
        return self._length

    def _send(self, chunk: Sequence[int]) -> Flow[None]:
        """Append one request's worth at `_length`, and move `_length` behind it."""
        is_in_doubt = False  # an earlier attempt may have arrived, or may yet
        attempt = 0
        request_id = new_request_id()
        while True:
            attempt += 1
            end = self._length + len(chunk)
            # Written before the request leaves, for the case that this generator is abandoned while it is under way.
            self._tail.has_open_append, self._is_fate_known = True, False
            failure: KakeyaError
            try:
                reply: pb.AppendTokensResponse = yield self._request(chunk, request_id)
            except HistoryLengthMismatch as error:
                if error.actual is None:
                    raise
                self._tail.settle(error.actual)
                if is_in_doubt and self._is_exact and error.actual == end:  # it arrived, at a server that knows no ids
                    break
                self._is_fate_known = not is_in_doubt
                if self._must_match or is_in_doubt:
                    raise
                self._length, self._is_exact, self._is_open = error.actual, True, False
                request_id = new_request_id()  # for another length, it is another request
                continue
            except (TransportError, DeadlineExceeded, ServerError) as error:
                is_in_doubt, failure = True, error
            except KakeyaError as error:  # refused: this attempt changed nothing
                self._tail.has_open_append = self._is_open or is_in_doubt
                self._is_fate_known, failure = not is_in_doubt, error
            else:
                if reply.history_length != end:
                    raise ProtocolError(
                        f"after an append at {self._length} the history should have {end} tokens, "
                        f"the server says {reply.history_length}"
                    )
                break
            if (delay := self._patience.wait_seconds(attempt, failure)) is not None:
                yield Sleep(delay)
                continue
            if is_in_doubt:
                found = yield from self._inquire()
                if self._is_exact and found == end != self._length:
                    break
                self._is_fate_known = found == self._length
            raise failure
        self._length, self._is_fate_known = end, True
        self._tail.settle(end)

    def _request(self, chunk: Sequence[int], request_id: bytes) -> Call:
        request = pb.AppendTokensRequest(
            session_id=self._session_id,
            token_ids=chunk,
            expected_history_length=self._length,
            request_id=request_id,
        )
        return Call("AppendTokens", request, self._patience.remaining_seconds())

    def _inquire(self) -> Flow[int | None]:
        """The history length now; None if that, too, fails."""
        request = pb.GetSessionInfoRequest(session_id=self._session_id)
        try:
            reply: pb.GetSessionInfoResponse = yield from repeatable(
                "GetSessionInfo", request, self._patience.extended(INQUIRY_SECONDS)
            )
        except KakeyaError:
            return None
        return reply.history_length

    def _ids_per_request(self) -> Flow[int]:
        if self._limit.tokens is None:
            reply: pb.GetServerInfoResponse = yield from repeatable(
                "GetServerInfo", pb.GetServerInfoRequest(), self._patience
            )
            by_size = (reply.max_message_bytes - _ENVELOPE_BYTES) // _BYTES_PER_ID
            self._limit.tokens = max(1, min(reply.max_append_tokens, by_size))
        return self._limit.tokens
