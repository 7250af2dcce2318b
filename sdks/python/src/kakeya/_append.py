"""Appends token ids exactly once, or raises an error if that cannot be confirmed.

Every request has an id by which the server recognizes a repetition, and the length that it appends to
(`expected_history_length`): history only grows, so it can take effect at one length only. Sending it again is safe.
If there is no answer in the end, the history's length is requested:

    found == length     it did not arrive
    longer              sent once more: answered as before if it arrived, else refused, since the length differs

All other cases (no answer at all, or a server without request ids) raise AppendUnresolved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kakeya._errors import (
    AppendUnresolved,
    CallerError,
    DeadlineExceeded,
    HistoryBehindClient,
    HistoryLengthMismatch,
    JournalAway,
    KakeyaError,
    ProtocolError,
    ServerError,
    SessionElsewhere,
    StateError,
    TransportError,
)
from kakeya._flows import Call, Flow, Sleep, repeatable
from kakeya._requests import new_request_id
from kakeya._retry import Patience
from kakeya.v1 import runtime_pb2 as pb

# A failed append requests the length even after its own timeout; that request may take this long.
INQUIRY_SECONDS = 5.0

# The largest append request: session id, lengths and field tags, then ids of at most five bytes each.
_ENVELOPE_BYTES = 256
_BYTES_PER_ID = 5


@dataclass(slots=True)
class Tail:
    """The end of a session's history as known to this client. It can lag, but never leads."""

    length: int = 0
    may_lag: bool = False  # a Generate ran and its end was not received
    has_open_append: bool = False  # a request may still arrive, so the next append expects `length`

    def saw(self, length: int) -> None:
        self.length = max(self.length, length)

    def settle(self, length: int) -> None:
        """The server reported `length` with no request of this client in progress."""
        self.length, self.may_lag, self.has_open_append = length, False, False


@dataclass(slots=True)
class AppendLimit:
    """The server's limits for appends; requested once for each client."""

    tokens: int | None = None  # that one request may carry
    knows_ids: bool | None = None  # is a request that comes again known by its id?


class Append:
    """One append, in as many requests as the server's limits ask for.

    If the history is longer than `tail` knew and the caller named no length, the ids go to its end all the same. One
    that is shorter has lost tokens: that is an error, and nothing is appended.
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
        """The new history length. Errors carry `appended_tokens`; AppendUnresolved: the outcome is unknown."""
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
        given_up: KakeyaError | None = None  # with this; what follows only asks
        patience, attempt = self._patience, 0
        request = self._request(chunk)
        while True:
            attempt += 1
            end = self._length + len(chunk)
            # Written before the request leaves, for the case that this generator is abandoned while it is under way.
            self._tail.has_open_append = True
            failure: KakeyaError
            try:
                reply: pb.AppendTokensResponse = yield Call("AppendTokens", request, patience.remaining_seconds())
            except HistoryLengthMismatch as error:
                if error.actual is None:
                    self._is_fate_known = not is_in_doubt
                    raise
                confirmed = self._tail.length
                self._tail.settle(error.actual)
                if is_in_doubt and not (yield from self._server_knows_ids()):
                    if self._is_exact and error.actual == end:  # only its length shows it
                        break
                    self._is_fate_known = False
                    raise self._unresolved(given_up or error, chunk) from error
                # It did not arrive: its id would have been known. Nor can it any more, for history only grows.
                if given_up is not None:
                    raise given_up from error
                if self._must_match:
                    raise
                if error.actual < confirmed:  # to append here would leave out what the caller believes to be there
                    raise behind(confirmed, error.actual) from error
                self._length, self._is_exact, self._is_open, is_in_doubt = error.actual, True, False, False
                request = self._request(chunk)  # for another length, it is another request
                continue
            except (TransportError, DeadlineExceeded, ServerError, StateError) as error:
                is_in_doubt, failure = is_in_doubt or error._was_sent, error
            except KakeyaError as error:  # refused: this attempt changed nothing, unless it says otherwise
                is_in_doubt |= isinstance(error, JournalAway | SessionElsewhere) and error.is_pending
                failure = error
            else:
                patience.answered()
                if reply.history_length != end:
                    self._is_fate_known = False
                    raise ProtocolError(
                        f"after an append at {self._length} the history should have {end} tokens, "
                        f"the server says {reply.history_length}"
                    )
                break
            self._tail.has_open_append = self._is_open or is_in_doubt
            if (delay := patience.wait_seconds(attempt, failure)) is not None:
                yield Sleep(delay)
                continue
            failure = given_up or patience.verdict(failure)
            if not is_in_doubt:
                raise failure
            found = yield from self._inquire()
            if found == self._length:
                raise failure
            if found is not None and given_up is None:
                # It arrived, or something else made the history longer: the request's id shows which. To send it once
                # more is to ask: if it did not arrive, there is no length any more at which it could.
                given_up, patience, attempt = failure, self._patience.extended(INQUIRY_SECONDS), 0
                continue
            if self._is_exact and found == end:
                break
            self._is_fate_known = False
            if isinstance(failure, CallerError):  # such as a session that is gone, with all that was in it
                raise failure
            raise self._unresolved(failure, chunk) from failure
        self._length = end
        self._tail.settle(end)

    def _request(self, chunk: Sequence[int]) -> pb.AppendTokensRequest:
        return pb.AppendTokensRequest(
            session_id=self._session_id,
            token_ids=chunk,
            expected_history_length=self._length,
            request_id=new_request_id(),
        )

    def _unresolved(self, cause: KakeyaError, chunk: Sequence[int]) -> AppendUnresolved:
        return AppendUnresolved(cause, history_length=self._length, pending_tokens=len(chunk))

    def _server_knows_ids(self) -> Flow[bool]:
        """Does the server recognize repeated requests? Tested once, with an empty append that is sent twice."""
        if self._limit.knows_ids is None:
            request = pb.AppendTokensRequest(session_id=self._session_id, request_id=new_request_id())
            patience = self._patience.extended(INQUIRY_SECONDS)
            try:
                yield from repeatable("AppendTokens", request, patience)
                reply: pb.AppendTokensResponse = yield from repeatable("AppendTokens", request, patience)
            except KakeyaError:
                return False
            self._limit.knows_ids = reply.replayed
        return self._limit.knows_ids

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


def behind(confirmed: int, actual: int) -> HistoryBehindClient:
    """The error of a call that was refused, for the history is shorter than the server had said."""
    return HistoryBehindClient(
        f"the server had said that the history has {confirmed} tokens, and now it has {actual}: it has lost some. "
        "Nothing was changed; append what is missing, or go on from where the history ends",
        code="DATA_LOSS",
        reason="HISTORY_BEHIND_CLIENT",
        metadata={"expected": str(confirmed), "actual": str(actual)},
    )
