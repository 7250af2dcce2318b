"""Sessions through the engine: histories, holding, stopping, making room, and what is left after each fault."""

from __future__ import annotations

import queue
import threading

import pytest
import torch

from inference_engine.backends.torch_forward import TorchForward
from inference_engine.engine import Engine
from inference_engine.errors import (
    InternalError,
    InvariantViolated,
    NonFiniteLogits,
    RequestError,
)
from inference_engine.types import Event, Failed, Finished, GenerateParams, TokenCommitted
from tests.laws.variants import drain, generate, text, tokens
from tests.tiny import tiny_engine, tiny_forward


class Clock:
    """Monotonic seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Gate:
    """A listener that holds the engine's thread at the first token, so that a test can act while a Generate runs."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.put(event)
        if isinstance(event, TokenCommitted) and not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(30)

    def rest(self) -> list[Event]:
        """All events up to the last."""
        seen = [self.events.get(timeout=30)]
        while not isinstance(seen[-1], Finished | Failed):
            seen.append(self.events.get(timeout=30))
        return seen


def opened(engine: Engine, length: int = 20, **options: object) -> str:
    session_id = engine.create_session(**options).session_id  # type: ignore[arg-type]
    engine.append(session_id, text(length))
    return session_id


def still_works(engine: Engine) -> None:
    """The closing assertion of every fault: another session generates what it always did."""
    with tiny_engine() as fresh:
        session = opened(engine)
        seen: list[Event] = []
        with pytest.raises(InternalError, match="incident"):
            for event in engine.generate(session, GenerateParams(max_tokens=10)):
                seen.append(event)
        assert len(tokens(seen)) == 3
        assert engine.session_info(session).history_length == 23
        # The session itself is well: its history is what was acknowledged.
        engine.append(session, [1])
        assert engine.session_info(session).history_length == 24


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


def test_a_forward_that_fails_leaves_every_session_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny_engine() as engine:
        session = opened(engine)
        first = generate(engine, session, 4)

        def out_of_memory(step: object) -> torch.Tensor:
            raise torch.OutOfMemoryError("no")

        with monkeypatch.context() as patch:
            patch.setattr(TorchForward, "run", lambda self, step: out_of_memory(step))
            with pytest.raises(InternalError) as failure:
                drain(engine.generate(session, GenerateParams(max_tokens=3)))
            assert "OutOfMemory" not in failure.value.message
        second = generate(engine, session, 4)
        with tiny_engine() as fresh:
            assert [*first, *second] == generate(fresh, opened(fresh), 8)


@pytest.mark.parametrize("kind", ["INV1", "INV2"])
def test_a_broken_invariant_fails_the_session_alone_and_frees_it(kind: str) -> None:
    with tiny_engine() as engine:
        session = opened(engine)
        generate(engine, session, 3)
        internal = engine._store.find(session, "")
        if kind == "INV1":
            internal.kv.groups[0].held[0] = -1
        else:
            internal.cached_tokens += 100
        with pytest.raises(InvariantViolated, match=kind):
            drain(engine.generate(session, GenerateParams(max_tokens=3)))
        info = engine.session_info(session)
        assert info.failure_reason == kind
        assert (info.inv1_violations, info.inv2_violations) == ((1, 0) if kind == "INV1" else (0, 1))
        assert info.kv_live_bytes == engine.info().kv_reserved_bytes == 0
        for call in (
            lambda: engine.append(session, [1]),
            lambda: engine.generate(session, GenerateParams(max_tokens=1)),
        ):
            with pytest.raises(RequestError) as refusal:
                call()
            assert isinstance(refusal.value, InvariantViolated)
        assert engine.close_session(session) >= 20
        still_works(engine)
