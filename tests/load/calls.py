"""Sequences of calls against a model of what the histories can be.

A call that is answered says how a history goes on. One that is cut off may have happened or not, in part or whole: then
the model keeps what may have been added, and the next length that is reported decides. What the tokens are is known in
closed form, so that no history can hold anything else.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from inference_engine.engine import Engine
from inference_engine.kv.strategies import make_strategy
from inference_engine.kv.strategy import KVStrategy
from kakeya.v1 import runtime_pb2 as pb
from tests.load.alone import AloneSolo
from tests.load.answers import Answers
from tests.load.caller import Caller
from tests.load.known import LIMIT_TOKENS, Known
from tests.load.scripted import scripted_engine, solo_of
from tests.load.servicer import Outcome
from tests.load.solo import Solo

MAX_SESSIONS = 6
TTL_SECONDS = 100.0
STRATEGIES: tuple[KVStrategy, ...] = (make_strategy("full"), make_strategy("sink_window", sink=2, window=12))
GONE = ("SESSION_NOT_FOUND", "SESSION_EVICTED")

ids = st.lists(st.integers(0, 127), max_size=9)  # every model here has these
picks = st.integers(0, 2**16)


class Calls(RuleBasedStateMachine):
    """Every rule is one call, or a few that belong together. None has a precondition: what is there depends on time."""

    # What all machines of this process saw: calls, by method and reason. Looking what became of a session is none.
    seen: ClassVar[Counter[tuple[str, str]]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0
        self._engine = self.engine(
            clock=lambda: self._now,
            max_sessions=MAX_SESSIONS,
            session_evictable_seconds=0.0,
            session_idle_ttl_seconds=TTL_SECONDS,
            stall_seconds=1e8,  # time that is made to jump is no step that hangs,
            max_first_token_seconds=0.0,  # nor one that takes long
        )
        self._caller = Caller(self._engine, lambda: self._now, self.seen)
        self._answers = Answers()
        self._open: list[Known] = []
        self._closed: list[str] = []
        self._has_forked = False

    def engine(self, **settings: Any) -> Engine:
        """What is judged. Another model's machine has another one."""
        return scripted_engine(dtype=torch.float32, **settings)

    def solo(self, strategy: KVStrategy) -> Solo | AloneSolo:
        """The law for its tokens."""
        return solo_of(strategy)

    def teardown(self) -> None:
        failure = sys.exc_info()[1]
        try:
            if isinstance(failure, AssertionError):
                failure.add_note(self._account())  # what threads did does not come again
            else:
                self._check_pool()
        finally:
            self._engine.close()
            self._caller.close()

    def _check_pool(self) -> None:
        """When nothing runs any more, what is reserved is what the sessions that are still there reserve."""
        self._engine.drain(30.0)
        # Sessions that have been idle for too long may be cleared away while they are looked at: then they are counted
        # once more, and no time passes meanwhile.
        assert any(self._is_pool_exact() for _ in range(3))
        for known in self._open:
            self._caller.ask_unseen(pb.CloseSessionRequest(session_id=known.session_id))
        assert self._engine.info().kv_reserved_bytes == 0

    def _is_pool_exact(self) -> bool:
        of_sessions = 0
        for known in list(self._open):
            info = self._caller.look(known.session_id)
            if info.reason == "OK":
                known.reported(info.only.history_length)
                of_sessions += info.only.reserved_bytes
        # A fork keeps entries that it shares with a session that is gone.
        reserved = self._engine.info().kv_reserved_bytes
        return reserved >= of_sessions if self._has_forked else reserved == of_sessions

    # -- rules ------------------------------------------------------------------------------------------------------

    @rule(pick=picks, has_id=st.booleans())
    def create(self, pick: int, has_id: bool) -> None:
        strategy = STRATEGIES[pick % len(STRATEGIES)]
        arms: dict[str, Any] = {strategy.name: strategy.options()}
        request = pb.CreateSessionRequest(
            strategy=pb.Strategy(**arms),
            limit_tokens=LIMIT_TOKENS,
            request_id=self._answers.new_id() if has_id else b"",
        )
        outcome = self._caller.ask(request)
        if outcome.reason == "NO_CAPACITY":
            return  # all are in use, by Generates that were left or by copies of entries
        self._answers.remember(request, outcome.only, self._now)
        self._add(Known(session_id=outcome.only.session_id, strategy=strategy, solo=self.solo(strategy)))

    @rule(pick=picks, token_ids=ids, has_id=st.booleans())
    def append(self, pick: int, token_ids: list[int], has_id: bool) -> None:
        known = self._pick(pick)
        request = pb.AppendTokensRequest(
            session_id=known.session_id, token_ids=token_ids, request_id=self._answers.new_id() if has_id else b""
        )
        outcome = self._caller.ask(request)
        if self._is_gone(known, outcome):
            return
        if outcome.reason == "HISTORY_LIMIT":
            self._settle(known)
            assert len(known.history) + len(token_ids) > LIMIT_TOKENS
            return
        known.reported(outcome.only.history_length - len(token_ids))
        known.history += token_ids
        self._answers.remember(request, outcome.only, self._now)

    @rule(pick=picks, off=st.sampled_from([-1, 1]))
    def append_at_the_wrong_length(self, pick: int, off: int) -> None:
        known = self._pick(pick)
        if not self._settle(known):
            return
        expected = max(0, len(known.history) + off)
        outcome = self._caller.ask(
            pb.AppendTokensRequest(session_id=known.session_id, token_ids=[1], expected_history_length=expected)
        )
        if expected == len(known.history):
            self._take_append(known, outcome, [1])
        elif not self._is_gone(known, outcome):
            assert outcome.reason == "HISTORY_LENGTH_MISMATCH"

    @rule(pick=picks, token_ids=ids)
    def append_at_the_right_length(self, pick: int, token_ids: list[int]) -> None:
        known = self._pick(pick)
        if self._settle(known):
            expected = len(known.history)
            request = pb.AppendTokensRequest(
                session_id=known.session_id, token_ids=token_ids, expected_history_length=expected
            )
            self._take_append(known, self._caller.ask(request), token_ids)

    @rule(pick=picks, count=st.integers(1, 6), seed=st.one_of(st.none(), st.integers(0, 2**32)), has_id=st.booleans())
    def generate(self, pick: int, count: int, seed: int | None, has_id: bool) -> None:
        known = self._pick(pick)
        if not self._settle(known) or (expected := known.continued(count, seed)) is None:
            return
        request = self._generate_request(known, count, seed, self._answers.new_id() if has_id else b"")
        outcome = self._caller.ask(request)
        if self._is_gone(known, outcome):
            return
        if not known.history:
            assert outcome.reason == "INVALID_ARGUMENT"
            return
        assert outcome.reason == "OK", outcome.error
        known.reported(outcome.frames[-1].done.history_length - len(outcome.tokens))
        assert outcome.tokens == expected, (outcome.tokens, expected, known)
        known.history += outcome.tokens
        self._answers.remember(request, outcome, self._now)

    @rule(pick=picks, after=st.integers(1, 5), has_id=st.booleans())
    def leave_a_generate(self, pick: int, after: int, has_id: bool) -> None:
        """The client goes away: what it saw is in the history, and perhaps a little more."""
        known = self._pick(pick)
        if not self._settle(known) or not known.history or (whole := known.continued(6)) is None:
            return
        request = self._generate_request(known, 6, None, self._answers.new_id() if has_id else b"")
        outcome = self._caller.leave(request, after)
        if self._is_gone(known, outcome):
            return
        assert outcome.tokens == whole[: len(outcome.tokens)], (outcome.tokens, whole, known)
        known.history += outcome.tokens
        known.possible = whole[len(outcome.tokens) :]

    @rule(pick=picks)
    def run_out_of_time(self, pick: int) -> None:
        known = self._pick(pick)
        if not self._settle(known) or not known.history or (whole := known.continued(6)) is None:
            return
        outcome = self._caller.ask(self._generate_request(known, 6, None, b""), seconds=0.002)
        assert outcome.tokens == whole[: len(outcome.tokens)], (outcome.tokens, whole, known)
        known.history += outcome.tokens
        if outcome.reason == "DEADLINE":
            known.possible = whole[len(outcome.tokens) :]
        elif not self._is_gone(known, outcome):
            assert outcome.reason == "OK"

    @rule(pick=picks)
    def ask(self, pick: int) -> None:
        known = self._pick(pick)
        outcome = self._caller.ask(pb.GetSessionInfoRequest(session_id=known.session_id))
        if not self._is_gone(known, outcome, is_use=False):
            assert 0 <= outcome.only.history_length - len(known.history) <= len(known.possible)

    @rule(pick=picks, has_id=st.booleans())
    def close(self, pick: int, has_id: bool) -> None:
        known = self._pick(pick)
        request = pb.CloseSessionRequest(
            session_id=known.session_id, request_id=self._answers.new_id() if has_id else b""
        )
        outcome = self._caller.ask(request)
        if self._is_gone(known, outcome):
            return
        known.reported(outcome.only.final_history_length)
        self._answers.remember(request, outcome.only, self._now)
        self._open.remove(known)
        self._closed.append(known.session_id)

    @rule(pick=picks, has_id=st.booleans())
    def fork(self, pick: int, has_id: bool) -> None:
        known = self._pick(pick)
        if not self._settle(known):
            return
        request = pb.ForkSessionRequest(
            session_id=known.session_id, request_id=self._answers.new_id() if has_id else b""
        )
        outcome = self._caller.ask(request)
        if self._is_gone(known, outcome) or outcome.reason == "NO_CAPACITY":
            return
        assert outcome.only.history_length == len(known.history)
        self._has_forked = True
        self._answers.remember(request, outcome.only, self._now)
        session_id, history = outcome.only.session_id, list(known.history)
        self._add(Known(session_id=session_id, strategy=known.strategy, solo=known.solo, history=history))

    @rule(pick=picks, place=st.integers(0, 1000), has_id=st.booleans())
    def rewind(self, pick: int, place: int, has_id: bool) -> None:
        known = self._pick(pick)
        if not self._settle(known):
            return
        at = place % (len(known.history) + 1)
        request = pb.RewindSessionRequest(
            session_id=known.session_id, at_position=at, request_id=self._answers.new_id() if has_id else b""
        )
        outcome = self._caller.ask(request)
        if self._is_gone(known, outcome):
            return
        assert outcome.only.history_length == at
        self._answers.remember(request, outcome.only, self._now)
        self._open.remove(known)
        self._closed.append(known.session_id)
        session_id, history = outcome.only.session_id, list(known.history)[:at]
        self._add(Known(session_id=session_id, strategy=known.strategy, solo=known.solo, history=history))

    @rule(pick=picks)
    def say_it_again(self, pick: int) -> None:
        """The same call with the same id: the same answer, and nothing happens twice."""
        remembered = self._answers.remembered(self._now)
        if not remembered:
            return
        made = remembered[pick % len(remembered)]
        outcome = self._caller.ask(made.request)
        if outcome.reason in GONE:
            return
        if isinstance(made.request, pb.GenerateRequest):
            assert outcome.tokens == made.answer.tokens, (outcome.tokens, made.answer.tokens, outcome.error)
            assert outcome.frames[-1].done.replayed
            return
        expected = type(made.answer).FromString(made.answer.SerializeToString())
        expected.replayed = True
        assert outcome.only == expected

    @rule(pick=picks, skip=picks)
    def take_up_a_generate_again(self, pick: int, skip: int) -> None:
        made = [made for made in self._answers.remembered(self._now) if isinstance(made.request, pb.GenerateRequest)]
        if not made:
            return
        chosen = made[pick % len(made)]
        tokens, end = chosen.answer.tokens, chosen.answer.frames[-1].done.history_length
        skipped = skip % (len(tokens) + 1)
        request = pb.GenerateRequest.FromString(chosen.request.SerializeToString())
        request.resume_from = end - len(tokens) + skipped
        outcome = self._caller.ask(request)
        if outcome.reason not in GONE:
            assert outcome.reason == "OK", outcome.error
            assert outcome.tokens == tokens[skipped:], (outcome.tokens, tokens, skipped)

    @rule(pick=picks)
    def use_an_id_for_something_else(self, pick: int) -> None:
        remembered = self._answers.remembered(self._now)
        if not remembered:
            return
        made = remembered[pick % len(remembered)]
        request = type(made.request).FromString(made.request.SerializeToString())
        match request:
            case pb.CreateSessionRequest() | pb.ForkSessionRequest():
                request.client_label += "x"
            case pb.AppendTokensRequest():
                request.token_ids.append(1)
            case pb.GenerateRequest():
                request.max_tokens += 1
            case pb.CloseSessionRequest():
                request.expected_history_length = 2**40
            case pb.RewindSessionRequest():
                request.at_position += 1
        outcome = self._caller.ask(request)
        assert outcome.reason in (*GONE, "REQUEST_ID_REUSED")

    @rule(pick=picks)
    def call_a_closed_session(self, pick: int) -> None:
        if not self._closed:
            return
        session_id = self._closed[pick % len(self._closed)]
        for request in (
            pb.AppendTokensRequest(session_id=session_id, token_ids=[1]),
            pb.GenerateRequest(session_id=session_id, max_tokens=1),
            pb.GetSessionInfoRequest(session_id=session_id),
            pb.CloseSessionRequest(session_id=session_id),
        ):
            assert self._caller.ask(request).reason == "SESSION_NOT_FOUND"

    @rule(seconds=st.sampled_from([1.0, TTL_SECONDS / 2, TTL_SECONDS + 1]))
    def let_time_pass(self, seconds: float) -> None:
        self._now += seconds

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _account(self) -> str:
        """What the model knows, and what was said last."""
        return "\n".join(map(str, ("the sessions:", *self._open, "the last calls:", *self._caller.last)))

    def _settle(self, known: Known) -> bool:
        """Find out how long the history is. False: the session is gone."""
        outcome = self._caller.settled(known.session_id)
        if self._is_gone(known, outcome, is_use=False):
            return False
        known.reported(outcome.only.history_length)
        return True

    def _take_append(self, known: Known, outcome: Outcome, token_ids: list[int]) -> None:
        if self._is_gone(known, outcome):
            return
        if outcome.reason == "HISTORY_LIMIT":
            assert len(known.history) + len(token_ids) > LIMIT_TOKENS
            return
        known.history += token_ids
        assert outcome.only.history_length == len(known.history)

    def _is_gone(self, known: Known, outcome: Outcome, *, is_use: bool = True) -> bool:
        """Was the session evicted? Only for being idle: one evicted to make room is known at once (`_add`)."""
        if outcome.reason not in GONE:
            known.used_at = self._now if is_use else known.used_at
            return False
        assert outcome.reason == "SESSION_EVICTED"
        assert self._now - known.used_at >= TTL_SECONDS, outcome.error
        self._open.remove(known)
        return True

    def _add(self, known: Known) -> None:
        """One more session. If there were too many, exactly one had to go."""
        known.used_at = self._now
        self._open.append(known)
        gone = [other for other in self._open if self._caller.look(other.session_id).reason == "SESSION_EVICTED"]
        for other in gone:
            self._open.remove(other)
        is_old = [other for other in gone if self._now - other.used_at >= TTL_SECONDS]
        assert len(gone) - len(is_old) <= (1 if len(self._open) + len(gone) > MAX_SESSIONS else 0)

    def _pick(self, pick: int) -> Known:
        while not self._open:
            self.create(0, has_id=False)
        return self._open[pick % len(self._open)]

    def _generate_request(self, known: Known, count: int, seed: int | None, request_id: bytes) -> pb.GenerateRequest:
        temperature = None if seed is None else 1.0
        request = pb.GenerateRequest(
            session_id=known.session_id, max_tokens=count, seed=seed, temperature=temperature, request_id=request_id
        )
        self._answers.began(request)
        return request
