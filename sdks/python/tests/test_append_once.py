"""Every id is in the history once, or the caller knows how many are: `Append` against a server that loses requests,
answers and connections in every order, one that knows a request by its id and one that does not. No network and no
clock: the flow says what it would do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya._append import Append, AppendLimit, Tail
from kakeya._errors import (
    AppendUnresolved,
    ConnectionFailed,
    DeadlineExceeded,
    Draining,
    HistoryBehindClient,
    HistoryLengthMismatch,
    JournalAway,
    KakeyaError,
    SessionBusy,
    SessionElsewhere,
    SessionNotFound,
    StateError,
)
from kakeya._flows import Call, Flow, Step
from kakeya._retry import Patience, RetryPolicy
from kakeya.v1 import runtime_pb2 as pb


class Server:
    """A history and a list of what goes wrong next.

    Faults, one for each call: "ok", "lost" (never arrives), "unanswered" (arrives, its answer is lost), "late" (arrives
    after the next call), "pending" (arrives, and is not safe yet), "elsewhere" (so, too), "timeout", "busy",
    "draining", "refused" (no connection is made), "full" (the connection has too many calls), "gone", "closed"
    (arrives, and the client is closed), "closed before".
    """

    def __init__(
        self,
        faults: list[str],
        *,
        history: list[int] | None = None,
        max_append_tokens: int = 3,
        knows_ids: bool = True,
    ) -> None:
        self.history = list(history or [])
        self._replies: dict[bytes, pb.AppendTokensResponse] | None = {} if knows_ids else None
        self.appends = 0
        self.meanwhile: list[int] = []  # ids of another client, when a request's time is up
        self._faults = faults
        self._late: pb.AppendTokensRequest | None = None
        self._limit = max_append_tokens

    def perform(self, step: Step) -> object:
        if not isinstance(step, Call):
            return None
        late, self._late = self._late, None
        try:
            return self._call(step)
        finally:
            if late is not None:
                self._try_append(late)

    def _call(self, step: Call) -> object:
        if isinstance(step.request, pb.GetServerInfoRequest):
            return pb.GetServerInfoResponse(max_append_tokens=self._limit, max_message_bytes=4 * 2**20)
        fault = self._faults.pop(0) if self._faults else "ok"
        lost = ConnectionFailed("connection lost", code="UNAVAILABLE")
        refused = ConnectionFailed("connection refused", code="UNAVAILABLE")
        refused._was_sent = False
        refusals: dict[str, Callable[[], KakeyaError]] = {
            "busy": lambda: SessionBusy("busy", code="ABORTED", reason="SESSION_BUSY"),
            "draining": lambda: Draining("draining", code="UNAVAILABLE", reason="DRAINING"),
            "refused": lambda: refused,
            "gone": lambda: SessionNotFound("no such session", code="NOT_FOUND", reason="SESSION_NOT_FOUND"),
        }
        if fault == "full":
            refused._was_full = True
        if fault in {"refused", "full"}:
            raise refused
        if fault == "closed before":
            raise StateError("the client is closed")
        is_known = isinstance(step.request, pb.AppendTokensRequest) and step.request.request_id in (self._replies or {})
        if fault in refusals and not is_known:
            raise refusals[fault]()
        if isinstance(step.request, pb.GetSessionInfoRequest):
            if fault != "ok":
                raise lost
            return pb.GetSessionInfoResponse(history_length=len(self.history))
        assert isinstance(step.request, pb.AppendTokensRequest)
        self.appends += 1
        if fault == "lost":
            raise lost
        if fault == "late":
            self._late = step.request
            raise lost
        if fault == "lost timeout":
            self.history.extend(self.meanwhile)
            raise DeadlineExceeded("too late", code="DEADLINE_EXCEEDED")
        reply = self._try_append(step.request)
        if fault == "closed":
            closed = StateError("the client was closed while the call was running")
            closed._was_sent = True
            raise closed
        if fault == "timeout":
            self.history.extend(self.meanwhile)
            raise DeadlineExceeded("too late", code="DEADLINE_EXCEEDED")
        if fault == "pending":
            away = {"pending": "true"}
            raise JournalAway("not safe yet", code="UNAVAILABLE", reason="JOURNAL_AWAY", metadata=away)
        if fault == "elsewhere":
            taken = {"pending": "true"}
            raise SessionElsewhere("taken over", code="UNAVAILABLE", reason="SESSION_ELSEWHERE", metadata=taken)
        if fault == "unanswered":
            raise lost
        if reply is None:
            actual = len(self.history)
            raise HistoryLengthMismatch("mismatch", code="ABORTED", metadata={"actual": str(actual)})
        return reply

    def _try_append(self, request: pb.AppendTokensRequest) -> pb.AppendTokensResponse | None:
        assert len(request.token_ids) <= self._limit
        assert len(request.request_id) == 16
        if self._replies is not None and request.request_id in self._replies:
            known = self._replies[request.request_id]
            return pb.AppendTokensResponse(history_length=known.history_length, replayed=True)
        if request.HasField("expected_history_length") and request.expected_history_length != len(self.history):
            return None
        self.history.extend(request.token_ids)
        reply = pb.AppendTokensResponse(history_length=len(self.history))
        if self._replies is not None:
            self._replies[request.request_id] = reply
        return reply


def drive(flow: Flow[int], server: Server) -> int:
    try:
        step = next(flow)
        while True:
            try:
                reply = server.perform(step)
            except KakeyaError as error:
                step = flow.throw(error)
            else:
                step = flow.send(reply)
    except StopIteration as end:
        return int(end.value)


def append(server: Server, ids: list[int], tail: Tail, *, expected: int | None = None, attempts: int = 3) -> int:
    flow = Append(
        "id",
        ids,
        tail=tail,
        expected_history_length=expected,
        limit=AppendLimit(),
        patience=Patience(RetryPolicy(attempts=attempts), None, clock=lambda: 0.0, jitter=lambda: 0.5),
    )
    return drive(flow.run(), server)


FAULTS = st.lists(
    st.sampled_from(
        ["ok", "lost", "unanswered", "late", "pending", "elsewhere", "timeout", "busy", "draining", "refused", "gone"]
    ),
    max_size=12,
)


@given(faults=FAULTS, count=st.integers(0, 10), lag=st.sampled_from([0, 1, 3]), knows_ids=st.booleans())
def test_ids_arrive_once_or_the_error_says_how_many(faults: list[str], count: int, lag: int, knows_ids: bool) -> None:
    known = [900, 901, 902, 903]
    server = Server(faults, history=[*known, *range(800, 800 + lag)], knows_ids=knows_ids)
    before = list(server.history)
    ids = list(range(count))
    tail = Tail(length=len(known), may_lag=lag > 0)
    may_come_late = "late" in faults
    try:
        length = append(server, ids, tail)
    except KakeyaError as error:
        arrived = error.appended_tokens
        if arrived is not None and not may_come_late:
            assert server.history == before + ids[:arrived]
        # Whatever became of it: a beginning of the ids, once, behind what was there.
        added = server.history[len(before) :]
        assert server.history[: len(before)] == before
        assert added == ids[: len(added)]
    else:
        assert server.history == before + ids
        assert length == tail.length == len(server.history)


@given(faults=FAULTS, count=st.integers(1, 10), knows_ids=st.booleans())
def test_trying_again_with_what_is_missing_never_doubles_an_id(faults: list[str], count: int, knows_ids: bool) -> None:
    """What a caller does with `appended_tokens`: append the rest, as often as it takes."""
    server = Server(faults, knows_ids=knows_ids)
    tail = Tail()
    ids = list(range(count))
    missing = list(ids)
    for _ in range(30):
        try:
            append(server, missing, tail)
        except HistoryLengthMismatch as error:
            missing = ids[error.actual or 0 :]  # ids that came late after all
        except KakeyaError as error:
            if error.appended_tokens is None:
                missing = ids[len(server.history) :]  # the caller has to look
            else:
                missing = missing[error.appended_tokens :]
        else:
            break
    assert server.history == ids


@pytest.mark.parametrize("fault", ["lost", "unanswered", "draining", "pending", "elsewhere"])
def test_a_broken_connection_is_survived(fault: str) -> None:
    server = Server([fault])
    assert append(server, [1, 2, 3], Tail()) == 3
    assert server.history == [1, 2, 3]


@pytest.mark.parametrize("knows_ids", [True, False])
def test_an_append_whose_answers_were_lost_is_sent_again_and_arrives_once(knows_ids: bool) -> None:
    server = Server(["unanswered", "unanswered"], knows_ids=knows_ids)
    assert append(server, [1, 2, 3], Tail()) == 3
    assert server.history == [1, 2, 3]


def test_what_cannot_be_known_is_not_claimed() -> None:
    server = Server(["unanswered", *["lost"] * 5])
    tail = Tail()
    with pytest.raises(AppendUnresolved, match="it is unknown whether 2 ids for position 0 arrived") as caught:
        append(server, [1, 2], tail)
    error = caught.value
    assert (error.appended_tokens, error.history_length, error.pending_tokens) == (None, 0, 2)
    assert isinstance(error.__cause__, ConnectionFailed)
    assert error.__notes__ == ["at least 0 of 2 ids of this append are in the history"]


@pytest.mark.parametrize(
    ("faults", "known"),
    [
        (["closed"], None),
        (["unanswered", "closed"], None),
        (["unanswered", "closed before"], None),
        (["refused", "closed before"], 0),
        (["ok", "closed"], None),
        (["ok", "closed before"], 3),
    ],
)
def test_what_became_of_a_request_whose_client_was_closed_is_not_claimed(faults: list[str], known: int | None) -> None:
    server = Server([*faults, *["closed before"] * 5])
    with pytest.raises(StateError) as caught:
        append(server, [1, 2, 3, 4], Tail())
    assert caught.value.appended_tokens == known
    least = "" if known is not None else "at least "
    arrived = 3 if faults[0] == "ok" else 0
    assert caught.value.__notes__ == [f"{least}{arrived} of 4 ids of this append are in the history"]


def test_after_an_open_append_the_next_one_insists_on_the_length_known_before() -> None:
    server = Server(["unanswered", *["lost"] * 5])
    tail = Tail()
    with pytest.raises(
        AppendUnresolved, match=r"insists on a history of 0 tokens.*HistoryLengthMismatch, whose `actual`"
    ):
        append(server, [1, 2], tail)
    with pytest.raises(HistoryLengthMismatch) as caught:
        append(server, [1, 2], tail)
    assert caught.value.actual == 2
    assert caught.value.appended_tokens == 0
    # Now the length is known, and the conversation goes on.
    assert append(server, [3], tail) == 3
    assert server.history == [1, 2, 3]


def test_a_server_that_knows_ids_proves_that_an_append_did_not_arrive() -> None:
    """The same, and the append goes to the end of the history, as it would have without the loss."""
    server = Server(["lost"], history=[7, 8, 9])
    assert append(server, [1, 2, 3], Tail(length=0, may_lag=True)) == 6
    assert server.history == [7, 8, 9, 1, 2, 3]


@pytest.mark.parametrize("fate", ["unanswered", "lost"])
def test_where_the_length_does_not_show_it_the_requests_id_does(fate: str) -> None:
    """Its time is up, and another client has appended as many ids meanwhile."""
    server = Server(["timeout" if fate == "unanswered" else "lost timeout"], history=[7])
    server.meanwhile = [8, 9]
    tail = Tail(length=1)
    if fate == "unanswered":
        assert append(server, [1, 2], tail) == 3
        assert server.history == [7, 1, 2, 8, 9]
    else:
        with pytest.raises(DeadlineExceeded) as caught:
            append(server, [1, 2], tail)
        assert caught.value.appended_tokens == 0
        assert server.history == [7, 8, 9]


def test_after_a_drain_an_append_says_draining_and_that_nothing_arrived() -> None:
    server = Server(["draining", "refused", "refused", "refused"])
    with pytest.raises(Draining) as caught:
        append(server, [1, 2], Tail())
    assert caught.value.appended_tokens == 0
    assert isinstance(caught.value.__cause__, ConnectionFailed)
    assert any("connection refused" in note for note in caught.value.__notes__)
    assert append(server, [1, 2], Tail()) == 2


@pytest.mark.parametrize("fate", ["ok", "lost"])
def test_a_history_that_lost_tokens_is_an_error_and_gets_nothing(fate: str) -> None:
    """The server lost power, or goes on from a backup: what the caller believes to be before these ids is not there."""
    server = Server([fate], history=[7, 8])
    tail = Tail(length=5)
    with pytest.raises(HistoryBehindClient, match="append what is missing") as caught:
        append(server, [1], tail)
    assert (caught.value.expected, caught.value.actual, caught.value.appended_tokens) == (5, 2, 0)
    assert server.history == [7, 8]
    # After the error the caller may go on from there.
    assert append(server, [1], tail) == 3


def test_a_named_length_is_insisted_on() -> None:
    server = Server([], history=[7, 8])
    with pytest.raises(HistoryLengthMismatch):
        append(server, [1], Tail(length=2), expected=1)
    assert append(server, [1], Tail(length=0), expected=2) == 3


def test_an_abandoned_append_leaves_the_next_one_insisting() -> None:
    """What cancelling an asyncio task does: the flow is dropped while its request is under way."""
    tail = Tail()
    flow = Append(
        "id",
        [1],
        tail=tail,
        expected_history_length=None,
        limit=AppendLimit(tokens=3),
        patience=Patience(RetryPolicy(), None),
    ).run()
    next(flow)
    flow.close()
    assert tail.has_open_append


def test_a_small_message_limit_makes_smaller_requests() -> None:
    limit = AppendLimit()
    flow = Append(
        "id",
        [2**32 - 1] * 1000,
        tail=Tail(),
        expected_history_length=None,
        limit=limit,
        patience=Patience(RetryPolicy(), None),
    ).run()
    assert isinstance(next(flow), Call)
    step = flow.send(pb.GetServerInfoResponse(max_append_tokens=65_536, max_message_bytes=1024))
    assert isinstance(step, Call)
    assert 0 < step.request.ByteSize() <= 1024
