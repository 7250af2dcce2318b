"""The part of a Generate stream shared by both clients: folding frames, retries, and checks of the order of use."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import grpc

from kakeya._append import Tail, behind
from kakeya._client import ClientBase
from kakeya._errors import HistoryLengthMismatch, KakeyaError, ProtocolError, StateError
from kakeya._requests import new_request_id
from kakeya._retry import Patience
from kakeya._status import cause_of
from kakeya._values import STOP_REASONS, GenerateResult, Progress, StopReason, TokenDetail, TopLogprob
from kakeya.v1 import runtime_pb2 as pb


class Fold:
    """Turns frames into tokens, and at the end into the result."""

    def __init__(self, request: pb.GenerateRequest, on_progress: Callable[[Progress], None] | None) -> None:
        self.token_ids: list[int] = []
        self.result: GenerateResult | None = None
        self.next_position: int | None = None  # None: no token yet
        self._logprobs: list[float] | None = [] if request.logprobs else None
        self._tops: list[tuple[TopLogprob, ...]] | None = [] if request.top_logprobs else None
        self._wanted_tops = request.top_logprobs
        self._on_progress = on_progress
        self._queue_position = 0
        self._reported = (0, 0)  # a heartbeat has nothing newer
        self._truncated_tokens = 0

    def feed(self, frame: pb.GenerateResponse) -> TokenDetail | None:
        """The token of this frame, if it is one. Raises ProtocolError for an unexpected frame."""
        if self.result is not None:
            raise ProtocolError("the server sent a frame after the last one")
        match frame.WhichOneof("payload"):
            case "token":
                return self._token(frame.token)
            case "done":
                self.result = self._finish(frame.done)
            case "truncated":
                self._truncated_tokens = frame.truncated.dropped_token_count
            case "accepted":
                self._queue_position = frame.accepted.queue_position
                self._report(0, frame.accepted.prefill_token_count)
            case "progress":
                counts = frame.progress.done_token_count, frame.progress.total_token_count
                if counts != self._reported:
                    self._report(*counts)
            case "token_id":
                raise ProtocolError("the server sent a bare token id, but details were requested")
            case _:  # a frame newer than this SDK, which it did not ask for
                pass
        return None

    def _token(self, token: pb.TokenDetail) -> TokenDetail:
        logprob = token.logprob if token.HasField("logprob") else None
        if self._logprobs is not None:
            if logprob is None:
                raise ProtocolError(f"the server sent no logprob for position {token.position}")
            self._logprobs.append(logprob)
        tops = tuple[TopLogprob, ...]()
        if self._tops is not None:
            if not len(token.top_token_ids) == len(token.top_logprobs) == self._wanted_tops:
                raise ProtocolError(
                    f"the server sent {len(token.top_token_ids)} top_logprobs for position {token.position}, "
                    f"{self._wanted_tops} were asked for"
                )
            pairs = zip(token.top_token_ids, token.top_logprobs, strict=True)
            tops = tuple(TopLogprob(token_id=top, logprob=value) for top, value in pairs)
            self._tops.append(tops)
        if self.next_position not in (None, token.position):
            raise ProtocolError(f"the server sent position {token.position} where {self.next_position} comes next")
        self.next_position = token.position + 1
        self.token_ids.append(token.token_id)
        return TokenDetail(token_id=token.token_id, position=token.position, logprob=logprob, top_logprobs=tops)

    def _report(self, done_tokens: int, total_tokens: int) -> None:
        self._reported = done_tokens, total_tokens
        if self._on_progress is not None:
            self._on_progress(
                Progress(queue_position=self._queue_position, done_tokens=done_tokens, total_tokens=total_tokens)
            )

    def _finish(self, done: pb.GenerateDone) -> GenerateResult:
        if done.generated_token_count != len(self.token_ids):
            raise ProtocolError(
                f"the server counts {done.generated_token_count} generated tokens, {len(self.token_ids)} were received"
            )
        return GenerateResult(
            token_ids=tuple(self.token_ids),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            top_logprobs=None if self._tops is None else tuple(self._tops),
            stop_reason=STOP_REASONS.get(done.stop_reason, StopReason.UNKNOWN),
            history_length=done.history_length,
            seed=done.seed,
            prefill_seconds=done.prefill_duration_seconds,
            total_seconds=done.total_duration_seconds,
            prefilled_tokens=done.prefilled_token_count,
            cached_tokens=done.cached_token_count,
            attended_positions=done.attended_position_count,
            evicted_positions=done.evicted_position_count,
            restored_positions=done.restored_position_count,
            truncated_tokens=self._truncated_tokens,
            drafted_tokens=done.drafted_token_count,
            accepted_tokens=done.accepted_token_count,
            is_degraded=done.degraded,
            fits_constraint=done.fits_constraint if done.HasField("fits_constraint") else None,
            stop_sequence=done.stop_sequence if done.HasField("stop_sequence") else None,
        )


class StreamBase:
    """A running Generate: its tokens so far, and how it may be used.

    When its RPC breaks, another one with the same id continues after the last token received: the server sends lost
    tokens again, and resumes a Generate that it stopped because the client was gone.

    Its request names the length of the history that this client knows. If the history is longer and the caller named no
    length, the Generate begins at its end all the same. One that is shorter has lost tokens: that is an error, and
    nothing is generated.
    """

    def __init__(
        self,
        client: ClientBase,
        request: pb.GenerateRequest,
        *,
        must_match: bool,
        route: str,
        fold: Fold,
        tail: Tail,
        patience: Patience,
    ) -> None:
        """must_match: the caller named the length."""
        self._client = client
        self._route = route
        self._request = request
        self._must_match = must_match
        self._fold = fold
        self._tail = tail
        self._patience = patience
        self._attempt = 1  # since the last token
        self._is_taken = False  # it is or was iterated
        self._is_over = False  # nothing more will be read
        self._is_cancelled = False
        self._error: Exception | None = None  # ours, or one of on_progress
        tail.may_lag = True

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens received so far. All of them are in the session's history, also if the stream fails."""
        return tuple(self._fold.token_ids)

    @property
    def is_finished(self) -> bool:
        """The server has sent its last frame; `result()` returns at once."""
        return self._is_over and self._fold.result is not None

    def __repr__(self) -> str:
        state = "failed" if self._error else "cancelled" if self._is_cancelled else "over" if self._is_over else "open"
        return f"<{type(self).__name__} {state}, {len(self._fold.token_ids)} tokens>"

    def _take(self) -> None:
        """Hand the tokens to one reader. Raises StateError if there was one."""
        if self._is_taken:
            raise StateError("this stream is or was iterated already; its tokens are in token_ids and in result()")
        if self._is_over:
            raise StateError(f"this {self!r} has nothing left to iterate; its tokens are in token_ids")
        self._is_taken = True

    def _received(self, frame: pb.GenerateResponse) -> TokenDetail | None:
        try:
            token = self._fold.feed(frame)
        except Exception as error:
            self._error = error
            raise
        if token is not None:
            self._attempt = 1
            self._patience.answered()
            self._tail.saw(token.position + 1)
        elif self._fold.result is not None:
            self._tail.settle(self._fold.result.history_length)
        return token

    def _ended(self) -> None:
        """The RPC ended with OK."""
        self._is_over = True
        if self._fold.result is None:
            self._fail(ProtocolError("the stream ended without its last frame"))

    def _broke(self, error: grpc.RpcError) -> float | None:
        """The RPC ended with an error: seconds to wait before the next one, None if it does not matter any more.

        Raises the error if it is not worth another try.
        """
        if self._is_cancelled or self._fold.result is not None:
            self._is_over = True
            return None
        explained = self._client._explain(error)
        if isinstance(explained, HistoryLengthMismatch) and self._has_moved(explained):
            return 0.0
        delay = self._patience.wait_seconds(self._attempt, explained)
        if delay is None:
            explained.__cause__ = cause_of(explained, error)
            verdict = self._patience.verdict(explained)
            self._fail(verdict, verdict.__cause__)
        self._attempt += 1
        return delay

    def _has_moved(self, mismatch: HistoryLengthMismatch) -> bool:
        """Was nothing generated only because the history is longer than this client knew? Then the request names its
        length now. Raises HistoryBehindClient if it is shorter.
        """
        confirmed, actual = self._request.expected_history_length, mismatch.actual
        # One that had begun already, and has been stopped, names the place where it would go on.
        if self._must_match or actual is None or mismatch.expected != confirmed:
            return False
        if actual < confirmed:
            self._tail.settle(actual)
            self._fail(behind(confirmed, actual), mismatch)
        self._tail.saw(actual)
        self._request.expected_history_length = actual
        self._request.request_id = new_request_id()  # for another length, it is another request
        return True

    def _request_again(self) -> pb.GenerateRequest:
        """The request for the rest. Before the first token it is unknown whether the server has received the call."""
        if self._fold.next_position is not None:
            self._request.resume_from = self._fold.next_position
        return self._request

    def _fail_if_closed(self) -> None:
        """Before another attempt: was the client closed meanwhile?"""
        if self._client._is_closed:
            self._fail(self._client._closed_meanwhile())

    def _fail(self, error: KakeyaError, cause: BaseException | None = None) -> NoReturn:
        self._is_over = True
        self._error = error
        raise error from cause

    def _outcome(self) -> GenerateResult:
        """The result of a stream that is over. Raises its error, or StateError if it was cancelled."""
        if self._fold.result is not None:
            return self._fold.result
        if self._error is not None:
            raise self._error
        raise StateError(
            f"the stream was cancelled after {len(self._fold.token_ids)} tokens, so it has no result; "
            "token_ids has what was received, session.info() what the history holds"
        )
