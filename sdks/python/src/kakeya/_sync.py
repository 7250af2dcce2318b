"""The blocking client. `_async.py` says the same for asyncio, name for name.

A client may be shared by threads; a session is one conversation and belongs to one of them at a time, except that
`info()`, `close()` and a stream's `cancel()` may come from anywhere.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc

from kakeya import _requests as requests
from kakeya import _values as values
from kakeya._append import Append, Tail
from kakeya._channel import TLS
from kakeya._checks import token_ids as checked_token_ids
from kakeya._client import ClientBase
from kakeya._constraints import Constraint
from kakeya._errors import KakeyaError
from kakeya._flows import Call, Flow, Step, close_session, create_session, open_session, repeatable
from kakeya._fork import fork_session, rewind_session
from kakeya._retry import Patience, RetryPolicy
from kakeya._served_tokenizer import served_tokenizer
from kakeya._session import CALL_SECONDS, DEFAULT, GENERATE_SECONDS, SessionBase, Timeout
from kakeya._status import cause_of
from kakeya._strategies import Strategy
from kakeya._stream import Fold, StreamBase
from kakeya._text import Decodes, IncrementalDetokenizer, TextStream
from kakeya._thinking import Budget, Thought
from kakeya._values import (
    GenerateResult,
    HistoryPiece,
    Progress,
    ServerInfo,
    SessionInfo,
    SessionSummary,
    TokenDetail,
)
from kakeya.v1 import runtime_pb2 as pb
from kakeya.v1.runtime_pb2_grpc import RuntimeServiceStub

if TYPE_CHECKING:
    from kakeya.tokenization import ChatTokenizer

T = TypeVar("T")


class Client(ClientBase):
    """A connection to a runtime. Closing it, or leaving its `with`, ends what runs on it and closes no session.

    `timeout` is the default, in seconds, for every call but `generate`, which has `generate_timeout`; each counts over
    all attempts of a call, and None means no limit. The connection is made by the first call.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        api_key: str | None = None,
        tls: TLS | bool = False,
        timeout: float | None = CALL_SECONDS,
        generate_timeout: float | None = GENERATE_SECONDS,
        retry: RetryPolicy | None = None,
    ) -> None:
        super().__init__(
            target, api_key=api_key, tls=tls, timeout=timeout, generate_timeout=generate_timeout, retry=retry
        )
        credentials = self._address.credentials
        self._channel = (
            grpc.insecure_channel(self._address.reached, options=self._address.options)
            if credentials is None
            else grpc.secure_channel(self._address.reached, credentials, options=self._address.options)
        )
        self._stub = RuntimeServiceStub(self._channel)
        self._ended = threading.Event()  # by close()

    def create_session(
        self,
        strategy: Strategy | None = None,
        *,
        eos_token_ids: Iterable[int] | None = None,
        limit_tokens: int | None = None,
        label: str = "",
        guaranteed: bool | None = None,
        timeout: Timeout = DEFAULT,
    ) -> Session:
        """Open a session.

        `eos_token_ids` end every Generate of the session: None for what ends a turn of the model, as `server_info()`
        has it, an empty list for nothing. `limit_tokens` is its own length limit (a smaller limit is a smaller bound);
        `label` is your own name for the session, which `info()` returns. `guaranteed`: True reserves all of
        `sustained_bytes` now, False lets the server grant memory as the history grows (an append or a Generate may then
        raise NoCapacity, the history kept); None leaves it to the server's settings.
        """
        request = requests.create_session(strategy, eos_token_ids, limit_tokens, label, guaranteed)
        created, route = self._run(create_session(request, self._patience(timeout)))
        self._warn_without_ends(request, created)
        return Session(self, created, route=route)

    def session(self, session_id: str, *, timeout: Timeout = DEFAULT) -> Session:
        """One of your own sessions, by its id, to go on with it: in another process, after a crash, from a list.

        Raises SessionNotFound if it is closed, unknown or another owner's. Leaving its `with` closes the session.
        """
        flow = open_session(requests.session_id(session_id), self._patience(timeout))
        route = requests.route_of(session_id)
        facts, info = self._run(flow, route)
        session = Session(self, facts, route=route, history_length=info.history_length)
        session._tail.may_lag = info.generating
        return session

    def sessions(self, *, page_size: int = 100, timeout: Timeout = DEFAULT) -> Iterator[SessionSummary]:
        """Your own sessions on the server, read in pages of at most `page_size`; `timeout` is for each page.

        Behind a proxy before several servers, those of one server.
        """
        self._require_open()
        return self._sessions(requests.list_sessions(page_size), timeout)

    def _sessions(self, request: pb.ListSessionsRequest, timeout: Timeout) -> Iterator[SessionSummary]:
        while True:
            reply: pb.ListSessionsResponse = self._run(repeatable("ListSessions", request, self._patience(timeout)))
            for listed in reply.sessions:
                yield values.session_summary(listed)
            request.page_token = reply.next_page_token
            if not request.page_token:
                return

    def server_info(self, *, timeout: Timeout = DEFAULT) -> ServerInfo:
        """The server's model, limits and strategies, now."""
        flow = repeatable("GetServerInfo", pb.GetServerInfoRequest(), self._patience(timeout))
        return values.server_info(self._run(flow))

    def tokenizer(self, path: str | os.PathLike[str] | None = None, *, timeout: Timeout = DEFAULT) -> ChatTokenizer:
        """The served model's tokenizer, from the folder `path` on this machine.

        None looks for the model by the name that the server says: one of Kakeya's in its cache (`KAKEYA_CACHE_DIR`),
        one of the hub in the hub's cache. No network is asked, and no path that the server says is opened. Needs
        `pip install kakeya[tokenization]`.

        Raises TokenizerError, with how to get it, if it is not there; and for another model's tokenizer, one that has
        more tokens of text than the served model has ids, or none of the ends that the server says.
        """
        return served_tokenizer(self.server_info(timeout=timeout), path)

    def close(self) -> None:
        """End the connection. Sessions stay on the server until they are closed or have been idle for long."""
        self._is_closed = True
        self._ended.set()
        self._wake_streams()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(self, flow: Flow[T], route: str = "") -> T:
        """Carry out a flow's steps until it returns; `route` is that of the session they are for."""
        self._require_open()
        try:
            step = next(flow)
            while True:
                try:
                    reply = self._perform(step, route)
                except KakeyaError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(reply)
        except StopIteration as end:
            result: T = end.value
            return result

    def _perform(self, step: Step, route: str) -> Any:
        if not isinstance(step, Call):
            self._ended.wait(step.seconds)
            return None
        self._require_open()
        try:
            method = getattr(self._stub, step.method)
            reply = method(
                step.request, timeout=step.timeout, metadata=self._metadata(route if step.route is None else step.route)
            )
        except grpc.RpcError as error:
            explained = self._explain(error)
            if self._wants_probe(explained):
                explained = self._probed(explained)
            raise explained from cause_of(explained, error)
        except ValueError as error:  # as grpc has it where the channel was closed in this very moment
            self._raise_if_closed(error)
            raise
        self._is_met = True
        return reply

    def _generate(self, request: pb.GenerateRequest, patience: Patience, route: str) -> Any:
        self._require_open()
        try:
            return self._stub.Generate(request, timeout=patience.remaining_seconds(), metadata=self._metadata(route))
        except ValueError as error:
            self._raise_if_closed(error)
            raise

    def _raise_if_closed(self, error: ValueError) -> None:
        if self._is_closed:
            raise self._closed_meanwhile() from error


class Session(SessionBase):
    """A history on the server, with its K/V. `Client.create_session` makes one, `Client.session` finds it by its id;
    leaving its `with` closes it.
    """

    def __init__(
        self,
        client: Client,
        created: pb.CreateSessionResponse,
        *,
        route: str,
        history_length: int = 0,
        shared_bytes: int = 0,
        prefill_tokens: int | None = None,
    ) -> None:
        super().__init__(
            created,
            route=route,
            history_length=history_length,
            shared_bytes=shared_bytes,
            prefill_tokens=prefill_tokens,
        )
        self._client = client

    def append(
        self, token_ids: Iterable[int], *, expected_history_length: int | None = None, timeout: Timeout = DEFAULT
    ) -> int:
        """Add ids to the history; returns its new length. Their prefill happens in the next `generate`.

        Takes any number of ids, in as many requests as the server's limits ask for, each sent again if its answer was
        lost and it did not arrive. With `expected_history_length`, a history of any other length is left as it is.

        An error carries `appended_tokens`: how many of these ids are in the history, None if that cannot be known. To
        learn it, a failed append may take 5 s more than its timeout. After one whose fate is open the next append
        expects the length known before it, and raises HistoryLengthMismatch if the ids arrived late.
        """
        self._require_open()
        append = Append(
            self.id,
            checked_token_ids(token_ids),
            tail=self._tail,
            expected_history_length=requests.history_length(expected_history_length),
            limit=self._client._append_limit,
            patience=self._client._patience(timeout),
        )
        return self._client._run(append.run(), self._route)

    def generate(
        self,
        max_tokens: int,
        *,
        seed: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        stop_token_ids: Iterable[int] = (),
        stop_sequences: Iterable[Iterable[int]] = (),
        min_tokens: int = 0,
        allowed_token_ids: Iterable[int] | None = None,
        banned_token_ids: Iterable[int] = (),
        logprobs: bool = False,
        top_logprobs: int = 0,
        on_progress: Callable[[Progress], None] | None = None,
        expected_history_length: int | None = None,
        drafting: bool = True,
        constraint: Constraint | None = None,
        timeout: Timeout = DEFAULT,
    ) -> GenerateStream:
        """Generate from the history; what is generated becomes part of it, token by token.

        Greedy unless `temperature` is above 0. The same seed at the same position draws the same token; without one the
        server draws it, and the result has it. `repetition_penalty` is about all ids of the history, `presence_penalty`
        and `frequency_penalty` about those that this call gives. `on_progress` is called, while the stream is read,
        before the first token. `drafting=False` turns the server's drafter off, which changes the speed, never a token.
        When the connection breaks, the stream goes on where it was: no token is lost, none comes twice. `constraint` is
        what the tokens have to spell: the result says whether they do, or were cut by `max_tokens`. `stop_sequences`
        end it when its last tokens are one of them; `GenerateStream.text` knows stop strings.
        None of its first `min_tokens` does. `allowed_token_ids` and `banned_token_ids` say what may be drawn at all,
        any number of ids. `top_logprobs`: of so many of the likeliest tokens in each place, too, at most 20; it asks
        for `logprobs`.

        From a history that is shorter than the server had said nothing is generated: HistoryBehindClient. With
        `expected_history_length`, nothing is from one of any other length: HistoryLengthMismatch.
        """
        self._require_open()
        request = requests.generate(
            self.id,
            max_tokens,
            seed=seed,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            stop_token_ids=stop_token_ids,
            stop_sequences=stop_sequences,
            min_tokens=min_tokens,
            allowed_token_ids=allowed_token_ids,
            banned_token_ids=banned_token_ids,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            on_progress=on_progress,
            expected_history_length=self._tail.length if expected_history_length is None else expected_history_length,
            drafting=drafting,
            constraint=constraint,
        )
        return self._started(request, on_progress, expected_history_length, timeout)

    def generate_thinking(
        self, budget: int, max_tokens: int, *, end_token_ids: Iterable[int], **options: Any
    ) -> Thought[GenerateStream]:
        """Let the model think for at most `budget` tokens, end its thinking, and generate an answer of `max_tokens`.

        `end_token_ids` is what ends the thinking, such as the ids of `</think>`: if the model has not given it when the
        budget is used up, what is missing of it is appended. The answer is a stream, as `generate` gives it. `options`
        are those of `generate`, for both; `constraint` and `min_tokens` are for the answer alone. Penalties count each
        part by itself. A turn that ends within the thinking has no answer.
        """
        parts = Budget(end_token_ids, options)
        thinking = self.generate(budget, **parts.thinking).result()
        missing = parts.missing(thinking)
        if missing:
            self.append(missing)
        answer = None if missing is None else self.generate(max_tokens, **parts.answer(thinking))
        return Thought(thinking=thinking, appended_ids=tuple(missing or ()), answer=answer)

    def prefill(
        self,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        expected_history_length: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> GenerateResult:
        """Compute the K/V of the history now, but for its last token, and generate nothing.

        The next `generate`, and forks made from now on, begin without that wait. The history stays as it is; the
        result's `prefilled_tokens` and `cached_tokens` say what was computed and what was there. `on_progress` is
        called meanwhile. What a prefill has computed when it ends early is kept. Lengths are as for `generate`.
        """
        self._require_open()
        known = self._tail.length if expected_history_length is None else expected_history_length
        request = requests.prefill(self.id, on_progress=on_progress, expected_history_length=known)
        return self._started(request, on_progress, expected_history_length, timeout).result()

    def _started(
        self,
        request: pb.GenerateRequest,
        on_progress: Callable[[Progress], None] | None,
        expected_history_length: int | None,
        timeout: Timeout,
    ) -> GenerateStream:
        fold = Fold(request, on_progress)
        patience = self._client._stream_patience(timeout)
        call = self._client._generate(request, patience, self._route)
        return GenerateStream(
            self._client,
            call,
            request,
            must_match=expected_history_length is not None,
            route=self._route,
            fold=fold,
            tail=self._tail,
            patience=patience,
        )

    def fork(
        self,
        *,
        at_position: int | None = None,
        limit_tokens: int | None = None,
        label: str = "",
        expected_history_length: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> Session:
        """A new session that begins with this one's history, and diverges from there.

        `at_position`: with so many of its tokens only.

        It has this one's strategy, end ids and, unless `limit_tokens` is given, length limit.

        A history that is shorter than the server had said is not forked: HistoryBehindClient. With
        `expected_history_length`, none of any other length is: HistoryLengthMismatch.
        """
        self._require_open()
        request = requests.fork_session(self.id, at_position, limit_tokens, label, expected_history_length)
        forked = self._client._run(fork_session(request, self._tail, self._client._patience(timeout)), self._route)
        return Session(self._client, route=self._route, **self._of_fork(forked))

    def rewind(
        self, position: int, *, expected_history_length: int | None = None, timeout: Timeout = DEFAULT
    ) -> Session:
        """Close this session and return a new one in its place, whose history is this one's first `position` tokens.

        One call, whole or not at all, in this session's memory: it is not refused for lack of room. The new session has
        this one's strategy, end ids, limit and label. Its `prefill_tokens` says how many tokens at most will be
        computed again.

        What is checked of the history's length is as for `fork`.
        """
        self._require_open()
        request = requests.rewind_session(self.id, position, expected_history_length)
        rewound = self._client._run(rewind_session(request, self._tail, self._client._patience(timeout)), self._route)
        self._closed(None)
        return Session(self._client, route=self._route, **self._of_fork(rewound))

    def info(self, *, timeout: Timeout = DEFAULT) -> SessionInfo:
        """Facts about the session now. Never waits for a running Generate."""
        self._require_open()
        request = pb.GetSessionInfoRequest(session_id=self.id)
        flow = repeatable("GetSessionInfo", request, self._client._patience(timeout))
        info = values.session_info(self._client._run(flow, self._route))
        self._tail.saw(info.history_length)
        return info

    def history(
        self, *, first_position: int = 0, piece_tokens: int = requests.MAX_PIECE_TOKENS, timeout: Timeout = DEFAULT
    ) -> Iterator[HistoryPiece]:
        """The history's token ids from `first_position` to its end, in pieces of at most `piece_tokens` (16,384).

        Never waits for a running Generate. `timeout` is for each piece.
        """
        self._require_open()
        return self._pieces(requests.read_history(self.id, first_position, piece_tokens), timeout)

    def _pieces(self, request: pb.ReadHistoryRequest, timeout: Timeout) -> Iterator[HistoryPiece]:
        while True:
            flow = repeatable("ReadHistory", request, self._client._patience(timeout))
            piece = values.history_piece(self._client._run(flow, self._route))
            if piece.token_ids:
                yield piece
            if not self._saw_piece(piece, request):
                return

    def close(self, *, timeout: Timeout = DEFAULT) -> int:
        """Free everything the session holds and return the final history length. Closing again does nothing more."""
        if self._is_closed:
            return self.history_length
        flow = close_session(self.id, self._client._patience(timeout))
        return self._closed(self._client._run(flow, self._route))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except KakeyaError:
            if error is None:
                raise
            # What went wrong inside matters more than that closing failed, too.


class GenerateStream(StreamBase):
    """A Generate under way: iterate it for token ids, or `details()`, or take the whole `result()`.

    Leaving the loop early, leaving its `with`, `close()`, `cancel()` and dropping the last reference stop the
    generation. The session and everything received stay.
    """

    _client: Client

    def __init__(
        self,
        client: Client,
        call: Any,
        request: pb.GenerateRequest,
        *,
        must_match: bool,
        route: str,
        fold: Fold,
        tail: Tail,
        patience: Patience,
    ) -> None:
        self._call = call
        self._stopped = threading.Event()
        super().__init__(client, request, must_match=must_match, route=route, fold=fold, tail=tail, patience=patience)

    def __iter__(self) -> Iterator[int]:
        """The token ids, as they come. Once only."""
        self._take()
        return (token.token_id for token in self._tokens())

    def details(self) -> Iterator[TokenDetail]:
        """The tokens with position and, if asked for, logprob, as they come. Once only, in place of iterating."""
        self._take()
        return self._tokens()

    def text(self, tokenizer: Decodes, *, stop: Iterable[str] = (), skip_special_tokens: bool = True) -> TextStream:
        """The tokens as text: pieces of whole characters, in place of iterating, up to the first of the texts `stop`.

        The stop string is not given out, and what may be its beginning waits. It ends the generation; the result says
        which it was, and where to `rewind` to, to have the text without it in the history.
        """
        least = self._request.min_tokens
        detokenizer = IncrementalDetokenizer(tokenizer, stop, skip_special_tokens=skip_special_tokens, min_tokens=least)
        return TextStream(self, detokenizer)

    def result(self) -> GenerateResult:
        """Read to the end and return everything. Raises the stream's error; StateError if it was cancelled."""
        while self._next_token() is not None:
            pass
        return self._outcome()

    def cancel(self) -> None:
        """Stop generating. Safe from any thread, and after the end."""
        if not self._is_over:
            self._is_over = self._is_cancelled = True
            self._stopped.set()
            self._call.cancel()

    def close(self) -> None:
        """The same as `cancel`."""
        self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()

    def _tokens(self) -> Iterator[TokenDetail]:
        try:
            while (token := self._next_token()) is not None:
                yield token
        finally:
            self.cancel()

    def _next_token(self) -> TokenDetail | None:
        """The next token, None at the end. Whatever goes wrong here, and is not a lost connection, ends the RPC."""
        try:
            while not self._is_over:
                try:
                    frame = next(self._call, None)
                except grpc.RpcError as error:
                    if (delay := self._broke(error)) is not None:
                        self._attach_again(delay)
                    continue
                if frame is None:
                    self._ended()
                elif (token := self._received(frame)) is not None:
                    return token
        except BaseException:
            self.cancel()
            raise
        return None

    def _attach_again(self, delay: float) -> None:
        self._client._waiting.add(self._stopped)
        try:
            if not self._client._is_closed:
                self._stopped.wait(delay)
        finally:
            self._client._waiting.discard(self._stopped)
        if not self._is_cancelled:
            self._fail_if_closed()
            self._call = self._client._generate(self._request_again(), self._patience, self._route)
            if self._is_cancelled:  # meanwhile, from another thread
                self._call.cancel()
