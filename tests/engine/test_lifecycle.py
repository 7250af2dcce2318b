"""Sessions through the engine: histories, holding, stopping, and what is left after each fault."""

from __future__ import annotations

import queue
import threading

import pytest
import torch

from inference_engine.backends.base import Result, Step
from inference_engine.engine.generation import Generation
from inference_engine.errors import (
    AppendTooLarge,
    Draining,
    HistoryLengthMismatch,
    HistoryLimit,
    InternalError,
    InvalidArgument,
    InvariantViolated,
    NonFiniteLogits,
    SessionBusy,
    SessionClosed,
    SessionNotFound,
    TokenOutOfRange,
)
from inference_engine.session.history import TokenIds
from inference_engine.session.journal import GenerateRecord, Logprobs, MemoryJournal
from inference_engine.types import Failed, Finished, GenerateParams, Mark, StopReason
from tests.engine.sessions import Gate, opened, still_works
from tests.facade import forward_of, session_of, steps_run_by
from tests.laws.variants import drain, generate, tokens
from tests.tiny import TRAINED_POSITIONS, VOCABULARY, tiny_engine, tiny_forward
from tests.tiny_native import served_engine

# -- histories --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, VOCABULARY, 2**32 - 1])
def test_one_id_out_of_the_vocabulary_rejects_the_whole_append(wrong: int) -> None:
    with served_engine() as engine:
        session = opened(engine)
        with pytest.raises(TokenOutOfRange, match=str(wrong)):
            engine.append(session, [1, 2, wrong])
        assert engine.session_info(session).history_length == 20
        with pytest.raises(TokenOutOfRange):
            engine.create_session(eos_token_ids=[wrong])
        with pytest.raises(TokenOutOfRange):
            engine.generate(session, GenerateParams(max_tokens=1, stop_token_ids=(wrong,)))
        still_works(engine)


def test_what_is_wrong_with_a_call_is_said_before_anything_happens() -> None:
    with served_engine(max_append_tokens=30, max_generate_tokens=50) as engine:
        session = opened(engine)
        with pytest.raises(AppendTooLarge):
            engine.append(session, [1] * 31)
        with pytest.raises(HistoryLengthMismatch, match="20 tokens"):
            engine.append(session, [1], expected_history_length=19)
        with pytest.raises(HistoryLengthMismatch):
            engine.generate(session, GenerateParams(max_tokens=1, expected_history_length=21))
        with pytest.raises(InvalidArgument, match="50"):
            engine.generate(session, GenerateParams(max_tokens=51))
        with pytest.raises(InvalidArgument, match=r"^history: it is empty; append tokens to the session"):
            engine.generate(engine.create_session().session_id, GenerateParams(max_tokens=1))
        with pytest.raises(InvalidArgument, match="limit_tokens"):
            engine.create_session(limit_tokens=TRAINED_POSITIONS + 1)
        with pytest.raises(InvalidArgument, match="limit_tokens"):
            engine.create_session(limit_tokens=0)
        with pytest.raises(InvalidArgument, match=r"printable characters, got '\\n' at index 1"):
            engine.create_session(label="a\nb")
        with pytest.raises(InvalidArgument, match="at most 128 characters, got 129"):
            engine.create_session(label="x" * 129)
        assert engine.append(session, [5], expected_history_length=20) == 21
        still_works(engine)


def test_a_session_ends_at_its_limit_and_says_so() -> None:
    with served_engine() as engine:
        session = opened(engine, limit_tokens=26)
        with pytest.raises(HistoryLimit, match="26"):
            engine.append(session, [1] * 7)
        events = drain(engine.generate(session, GenerateParams(max_tokens=50)))
        done = events[-1]
        assert isinstance(done, Finished)
        assert (done.stop_reason, done.generated_tokens, done.history_length) == (StopReason.TRUNCATED, 6, 26)
        again = drain(engine.generate(session, GenerateParams(max_tokens=5)))[-1]
        assert isinstance(again, Finished)
        assert (again.stop_reason, again.generated_tokens) == (StopReason.TRUNCATED, 0)
        assert again.prefilled_tokens == 0


# -- one operation at a time ------------------------------------------------------------------------------------------


def test_a_second_operation_on_a_busy_session_is_refused_and_facts_never_wait() -> None:
    with served_engine() as engine:
        session, gate = opened(engine), Gate()
        engine.generate(session, GenerateParams(max_tokens=3), listener=gate)
        assert gate.reached.wait(30)
        with pytest.raises(SessionBusy):
            engine.append(session, [1])
        with pytest.raises(SessionBusy):
            engine.generate(session, GenerateParams(max_tokens=1), wait_seconds=0.01)
        info = engine.session_info(session)
        assert info.is_generating
        assert info.history_length == 21
        gate.go_on.set()
        assert engine.append(session, [1], wait_seconds=30) == 24
        assert isinstance(gate.rest()[-1], Finished)


def test_cancelling_keeps_what_was_committed_and_the_session() -> None:
    with served_engine() as engine:
        expected = [token for token, _ in generate(engine, opened(engine), 10)]
        session, gate = opened(engine), Gate()
        generation = engine.generate(session, GenerateParams(max_tokens=400), listener=gate)
        assert gate.reached.wait(30)
        generation.cancel()
        generation.expire()  # the first stop wins
        gate.go_on.set()
        done = gate.rest()[-1]
        assert isinstance(done, Finished)
        assert (done.stop_reason, done.generated_tokens) == (StopReason.CANCELLED, 1)
        assert engine.session_info(session).history_length == 21
        assert [token for token, _ in generate(engine, session, 9)] == expected[1:]


@pytest.mark.parametrize("at_step", [1, 2, 5])
def test_a_stop_that_comes_while_a_step_runs_loses_nothing(at_step: int) -> None:
    """The step's token is not kept, and the next Generate samples it again."""
    with served_engine() as engine:
        expected = [token for token, _ in generate(engine, opened(engine), 10)]
        session = opened(engine)
        started: queue.SimpleQueue[Generation] = queue.SimpleQueue()
        run, steps = forward_of(engine).run, 0

        def stopping(step: Step) -> Result:
            nonlocal steps
            steps += 1
            if steps == at_step + 1:  # the history takes two chunks
                started.get(timeout=30).cancel()
            return run(step)

        with steps_run_by(engine, stopping):
            generation = engine.generate(session, GenerateParams(max_tokens=400))
            started.put(generation)
            events = drain(generation)
        assert isinstance(events[-1], Finished)
        assert events[-1].stop_reason is StopReason.CANCELLED
        kept = [token for token, _ in tokens(events)]
        assert engine.session_info(session).history_length == 20 + len(kept)
        assert kept + [token for token, _ in generate(engine, session, 10 - len(kept))] == expected


def test_closing_a_running_session_ends_its_generate_and_frees_its_memory() -> None:
    with served_engine() as engine:
        session, gate = opened(engine), Gate()
        engine.generate(session, GenerateParams(max_tokens=400), listener=gate)
        assert gate.reached.wait(30)
        assert engine.close_session(session) == 21
        with pytest.raises(SessionNotFound):
            engine.session_info(session)
        gate.go_on.set()
        failed = gate.rest()[-1]
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, SessionClosed)
        assert engine.info().kv_reserved_bytes == 0
        still_works(engine)


def test_draining_lets_running_generates_end_and_refuses_new_work() -> None:
    with served_engine() as engine:
        session, gate = opened(engine), Gate()
        engine.generate(session, GenerateParams(max_tokens=4), listener=gate)
        assert gate.reached.wait(30)
        drainer = threading.Thread(target=engine.drain, args=(30.0,))
        drainer.start()
        while True:
            try:
                engine.close_session(engine.create_session().session_id)
            except Draining:
                break
        gate.go_on.set()
        drainer.join(30)
        done = gate.rest()[-1]
        assert isinstance(done, Finished)
        assert done.generated_tokens == 4
        with pytest.raises(Draining):
            engine.generate(session, GenerateParams(max_tokens=1))


# -- faults -----------------------------------------------------------------------------------------------------------


class FailingJournal(MemoryJournal):
    """Refuses generated tokens from a position on, as a full disk would."""

    def __init__(self, from_position: int) -> None:
        super().__init__()
        self.from_position = from_position

    def append(
        self,
        session_id: str,
        position: int,
        token_ids: TokenIds,
        mark: Mark,
        *,
        began: GenerateRecord | None = None,
        logprobs: Logprobs | None = None,
    ) -> None:
        if mark is Mark.GENERATED and position >= self.from_position:
            raise OSError("no space left")
        super().append(session_id, position, token_ids, mark, began=began, logprobs=logprobs)


def test_a_token_the_journal_did_not_take_is_never_shown() -> None:
    with served_engine(journal=FailingJournal(23)) as engine:
        session = opened(engine)
        gate = Gate()
        gate.go_on.set()
        engine.generate(session, GenerateParams(max_tokens=10), listener=gate)
        events = gate.rest()
        assert isinstance(events[-1], Failed)
        assert isinstance(events[-1].error, InternalError)
        assert len(tokens(events)) == 3
        assert engine.session_info(session).history_length == 23
        # The session itself is well: its history is what was acknowledged.
        assert engine.append(session, [1]) == 24


def test_logits_that_are_not_finite_end_only_their_generate() -> None:
    with tiny_engine(seed=5) as engine:
        session = opened(engine)
        weight = tiny_forward(seed=5, windowed=True).seam.model.lm_head.weight
        kept = weight[3].clone()
        weight.data[3] = torch.nan
        try:
            with pytest.raises(NonFiniteLogits) as failure:
                drain(engine.generate(session, GenerateParams(max_tokens=3)))
            assert failure.value.metadata["position"] == "20"
        finally:
            weight.data[3] = kept
        with tiny_engine(seed=5) as fresh:
            assert generate(engine, session, 5) == generate(fresh, opened(fresh), 5)


def test_a_forward_that_fails_leaves_every_session_as_it_was() -> None:
    with served_engine() as engine:
        session = opened(engine)
        first = generate(engine, session, 4)

        def fail(step: Step) -> Result:
            raise RuntimeError("device-side assert triggered")

        with steps_run_by(engine, fail):
            with pytest.raises(InternalError) as failure:
                drain(engine.generate(session, GenerateParams(max_tokens=3)))
            assert "device-side" not in failure.value.message
            assert engine.is_alive()
            for _ in range(2):
                with pytest.raises(InternalError):
                    drain(engine.generate(session, GenerateParams(max_tokens=3)))
            assert not engine.is_alive(), "a device that fails every forward is not well"
        second = generate(engine, session, 4)
        assert engine.is_alive()
        with served_engine() as fresh:
            assert [*first, *second] == generate(fresh, opened(fresh), 8)


@pytest.mark.parametrize("kind", ["INV1", "INV2"])
def test_a_broken_invariant_fails_the_session_alone_and_frees_it(kind: str) -> None:
    with served_engine() as engine:
        session = opened(engine)
        generate(engine, session, 3)
        internal = session_of(engine, session)
        if kind == "INV1":
            internal.kv.groups[0].held[0] = -1
        else:
            internal.cached_tokens += 100
        with pytest.raises(InvariantViolated, match=kind):
            drain(engine.generate(session, GenerateParams(max_tokens=3)))
        info = engine.session_info(session)
        assert info.failure_reason == kind
        assert (info.inv1_violations, info.inv2_violations) == ((1, 0) if kind == "INV1" else (0, 1))
        # In both spellings, as long as there are two.
        counted = {
            sample.labels["kind"]
            for metric in engine.metrics.invariant_violations.collect()
            for sample in metric.samples
            if sample.name.endswith("_total") and sample.value
        }
        assert counted == {kind.lower(), kind}
        assert info.kv_live_bytes == engine.info().kv_reserved_bytes == 0
        for call in (
            lambda: engine.append(session, [1]),
            lambda: engine.generate(session, GenerateParams(max_tokens=1)),
        ):
            with pytest.raises(InvariantViolated):
                call()
        assert engine.close_session(session) >= 20
        still_works(engine)
