"""The scripted model says the same of a history however it was read, and another thing of any other one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.engine import Engine
from inference_engine.errors import InvariantViolated, NonFiniteLogits
from inference_engine.kv.parts.layer_entries import LayerEntries
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Finished, GenerateParams, Mode, Sampling, StopReason, TokenCommitted
from laboratory.scripted import Fault, Script, ScriptedForward, ScriptedModel
from tests.facade import context_of, forward_of, kv_of
from tests.load.scripted import LAYERS, SEGMENT, scripted_engine, solo_of

PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 250, 70)]
TOKENS = 24
FLOAT64_ERROR = 1e-13  # of an average of numbers below 1


@pytest.fixture
def engine() -> Iterator[Engine]:
    with scripted_engine() as engine:
        yield engine


def opened(engine: Engine, strategy: KVStrategy | None = None, history: list[int] | None = None) -> str:
    session_id = engine.create_session(strategy=strategy).session_id
    engine.append(session_id, PROMPT if history is None else history)
    return session_id


def generated(engine: Engine, session_id: str, count: int = TOKENS, *, sampling: Sampling | None = None) -> list[int]:
    params = GenerateParams(max_tokens=count, sampling=sampling or Sampling())
    return [event.token_id for event in engine.generate(session_id, params) if isinstance(event, TokenCommitted)]


def regions_of(engine: Engine, session_id: str) -> LayerEntries:
    kv: SessionKV = kv_of(engine, session_id)
    return kv.groups[0]


STRATEGIES = [Full(), SinkWindow(sink=2, window=20)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
def test_the_engine_gives_the_tokens_of_the_closed_form(strategy: KVStrategy, mode: Mode) -> None:
    with scripted_engine(mode=mode) as engine:
        solo = solo_of(strategy)
        assert generated(engine, opened(engine, strategy)) == solo.continued(PROMPT, TOKENS)
        sampled = generated(engine, opened(engine, strategy), sampling=Sampling(temperature=1.0, seed=5))
    assert sampled == solo.continued(PROMPT, TOKENS, seed=5)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
def test_what_others_left_in_memory_reaches_no_session(strategy: KVStrategy, mode: Mode) -> None:
    """Not even as NaN, which a mask does not hide: entries are zeroed before they are read."""
    with scripted_engine(mode=mode, kv_bytes=4 * 2**20, max_sessions=2) as engine:  # few: all of them are filled
        context_of(engine).pool.memory.fill_(torch.nan)
        assert generated(engine, opened(engine, strategy)) == solo_of(strategy).continued(PROMPT, TOKENS)


class Noting(ScriptedModel):
    """Keeps the averages that logits were made of."""

    def __init__(self) -> None:
        super().__init__(layers=LAYERS)
        self.averages: list[Tensor] = []

    def logits(self, averages: Sequence[Tensor]) -> Tensor:
        self.averages.append(torch.cat(list(averages), dim=1))
        return super().logits(averages)


def test_a_fork_reads_the_averages_of_the_closed_form_to_the_last_digits(engine: Engine) -> None:
    """If they are read less exactly, one falls into another cell once in a while, and a right history is followed by a
    wrong token."""
    model = scripted(engine).model = Noting()
    session, history = opened(engine), list(PROMPT)
    history += generated(engine, session, 1)
    for pieces in (1, 2):
        fork = engine.fork_session(session)
        assert fork.shared_bytes
        ids = [int(token) for token in np.random.default_rng(pieces).integers(0, 256, 2 * SEGMENT)]
        engine.append(fork.session_id, ids)
        history += ids
        model.averages.clear()
        first, received = len(history), generated(engine, fork.session_id)
        read, history = torch.cat(model.averages), history + received
        model.averages.clear()
        solo_of(Full(), model).logits(history[:-1], first)
        torch.testing.assert_close(read, model.averages[0], atol=FLOAT64_ERROR, rtol=0)
        session = fork.session_id


# Of a prompt whose greedy token is followed by more of the same draw: the draw's seed, and a length where a number that
# is read lies 1e-9 from the edge of a cell: further than float64 rounds, and nearer than float32 does.
NEAR_AN_EDGE = [(268, 153), (677, 140), (2209, 158), (2589, 111), (2995, 184)]


def test_a_fork_has_the_tokens_of_a_session_that_was_not_forked(engine: Engine, subtests: pytest.Subtests) -> None:
    for seed, length in NEAR_AN_EDGE:
        with subtests.test(seed=seed):
            drawn = [int(token) for token in np.random.default_rng(seed).integers(0, 256, 200)]
            prompt, rest = drawn[:64], drawn[65:length]
            parent = opened(engine, None, prompt)
            history = [*prompt, *generated(engine, parent, 1), *rest]
            fork = engine.fork_session(parent)
            assert fork.shared_bytes
            engine.append(fork.session_id, rest)
            expected = solo_of(Full()).continued(history, 1)
            assert generated(engine, opened(engine, None, history), 1) == expected
            assert generated(engine, fork.session_id, 1) == expected


@pytest.mark.parametrize("at", [0, 1, 35, len(PROMPT) - 1])
def test_another_token_anywhere_in_the_history_changes_what_follows(engine: Engine, at: int) -> None:
    other = [*PROMPT[:at], (PROMPT[at] + 1) % 250, *PROMPT[at + 1 :]]
    assert _agreement(generated(engine, opened(engine)), generated(engine, opened(engine, None, other))) < 0.2


def lose(engine: Engine, session_id: str) -> None:
    """An entry's key and value are zeroed."""
    regions_of(engine, session_id).wipe(np.array([20]))


def lose_keys(engine: Engine, session_id: str) -> None:
    """Only the key of an entry is zeroed."""
    group = regions_of(engine, session_id)
    group.buffer.keys[(group.starts[:, None] + group.region_offsets(np.array([20]))).reshape(-1)] = 0


def forget(engine: Engine, session_id: str) -> None:
    """An entry is still there, and no query reads it."""
    regions_of(engine, session_id).held[20] = -1


def double(engine: Engine, session_id: str) -> None:
    """An entry is in its neighbour's slot, too."""
    group = regions_of(engine, session_id)
    source, target = ((group.starts[:, None] + group.region_offsets(np.array([slot]))).reshape(-1) for slot in (20, 21))
    group.buffer.keys[target], group.buffer.values[target] = group.buffer.keys[source], group.buffer.values[source]


def foreign(engine: Engine, session_id: str) -> None:
    """An entry of another session is where ours was."""
    other = opened(engine, None, [7] * len(PROMPT))
    generated(engine, other, 1)
    ours, theirs = regions_of(engine, session_id), regions_of(engine, other)
    target, source = (
        (group.starts[:, None] + group.region_offsets(np.array([20]))).reshape(-1) for group in (ours, theirs)
    )
    ours.buffer.keys[target], ours.buffer.values[target] = ours.buffer.keys[source], ours.buffer.values[source]


@pytest.mark.parametrize("fault", [lose, lose_keys, forget, double, foreign], ids=lambda fault: fault.__name__)
def test_one_wrong_entry_changes_what_follows(engine: Engine, fault: Callable[[Engine, str], None]) -> None:
    healthy, ill = opened(engine), opened(engine)
    assert generated(engine, healthy, 4) == generated(engine, ill, 4)
    fault(engine, ill)
    assert _agreement(_until_it_fails(engine, healthy), _until_it_fails(engine, ill)) < 0.2


def test_a_poisoned_token_gives_no_token_and_its_neighbours_theirs(engine: Engine) -> None:
    script = script_of(engine)
    script.faults[255] = (Fault.NON_FINITE, None)
    ill, well = opened(engine, None, [*PROMPT, 255]), opened(engine)
    running = [engine.generate(session, GenerateParams(max_tokens=8)) for session in (ill, well)]
    with pytest.raises(NonFiniteLogits):
        list(running[0])
    assert [event.token_id for event in running[1] if isinstance(event, TokenCommitted)] == solo_of(Full()).continued(
        PROMPT, 8
    )


def test_a_step_that_hangs_goes_on_when_it_is_let_go(engine: Engine) -> None:
    script, hanging = script_of(engine), threading.Event()
    script.faults[255] = (Fault.HANG, 1)
    script.on_step = lambda _: hanging.set()
    session = opened(engine, None, [*PROMPT, 255])
    generation = engine.generate(session, GenerateParams(max_tokens=3))
    assert hanging.wait(30)
    generation.cancel()
    script.let_go.set()
    ended = list(generation)[-1]
    assert isinstance(ended, Finished)
    assert (ended.stop_reason, ended.generated_tokens) == (StopReason.CANCELLED, 0)


def scripted(engine: Engine) -> ScriptedForward:
    forward = forward_of(engine)
    assert isinstance(forward, ScriptedForward)
    return forward


def script_of(engine: Engine) -> Script:
    return scripted(engine).script


def _until_it_fails(engine: Engine, session_id: str) -> list[int]:
    """The tokens of a Generate. At its end, and not before, a session may find that an entry is missing."""
    tokens: list[int] = []
    with contextlib.suppress(InvariantViolated):
        events = engine.generate(session_id, GenerateParams(max_tokens=TOKENS))
        tokens.extend(event.token_id for event in events if isinstance(event, TokenCommitted))
    assert len(tokens) == TOKENS
    return tokens


def _agreement(one: list[int], other: list[int]) -> float:
    """Which part of the tokens are the same at the same place."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)
