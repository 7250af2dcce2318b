"""The laws of constrained output: it fits, and its tokens are a function of history, seed and constraint alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inference_engine.decode import matching
from inference_engine.decode.automata import Automaton, ChoiceGrammar
from inference_engine.decode.constraints import Constraints
from inference_engine.decode.draft import Drafter
from inference_engine.engine import Engine
from inference_engine.errors import ConstraintFailed
from inference_engine.kernels.gumbel_noise import key
from inference_engine.kernels.sampler import Sampler, bits_of
from inference_engine.kernels.sampling import Draw, draw_all, start_drawing
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Finished, GenerateParams, Mode, Sampling, StopReason, TokenCommitted
from kv_cache_proposer.ngram import NgramDrafter
from tests.constraints import END, KINDS, TOKENS, Kind, spelled
from tests.decode.plain_sampling import plainly
from tests.further import further, in_turn
from tests.kept import after_a_kill, keeping
from tests.laws.drafters import Knowing, Wrong
from tests.laws.variants import MODES, drain, engine_for, text, tokens
from tests.tiny import VOCABULARY

MOST = 64
SAMPLINGS = [Sampling(), Sampling(temperature=1.2, top_p=0.95, repetition_penalty=1.2, logit_bias={100: 3.0}, seed=5)]
REQUEST = bytes(16)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def named(value: object) -> str:
    if isinstance(value, Sampling):
        return "greedy" if value.is_greedy else "sampled"
    return str(value.value) if isinstance(value, Mode) else str(value)


def constrained(mode: Mode = Mode.BATCHED, **settings: Any) -> Engine:
    return engine_for(mode, read_tokens=lambda: TOKENS, **settings)


def opened(engine: Engine, strategy: KVStrategy | None = None) -> str:
    session = engine.create_session(strategy=strategy or Full(), eos_token_ids=[END]).session_id
    engine.append(session, text(40))
    return session


def params_of(kind: Kind, sampling: Sampling, **changes: Any) -> GenerateParams:
    return GenerateParams(max_tokens=MOST, sampling=sampling, constraint=kind.constraint, **changes)


def generated(engine: Engine, session: str, params: GenerateParams) -> tuple[list[int], Finished]:
    events = drain(engine.generate(session, params))
    assert isinstance(events[-1], Finished)
    return [token for token, _ in tokens(events)], events[-1]


@pytest.mark.parametrize(
    ("kind", "sampling", "mode"),
    [
        (kind, sampling, mode) if (number + place + (mode is Mode.BATCHED)) % 2 else further(kind, sampling, mode)
        for number, kind in enumerate(KINDS)
        for place, sampling in enumerate(SAMPLINGS)
        for mode in MODES
    ],
    ids=named,
)
def test_constrained_tokens_fit_and_are_the_same_however_they_are_made(
    kind: Kind, sampling: Sampling, mode: Mode
) -> None:
    """Alone; without drafts; with a drafter that is right, wrong, or looks back; beside others; by the other kernels;
    in another strategy's window, drafted and not."""
    params = params_of(kind, sampling)
    with constrained(mode) as engine:
        alone, end = generated(engine, opened(engine), params)
        plain, plain_end = generated(engine, opened(engine), replace(params, drafting=False))
        sessions = [opened(engine) for _ in range(5)]
        others = [params_of(other, sampling) for other in KINDS]
        running = [engine.generate(session, each) for session, each in zip(sessions, [params, *others], strict=True)]
        beside = GenerateParams(max_tokens=20)
        unconstrained = opened(engine)
        together = drain(engine.generate(unconstrained, beside))
        batched = [token for token, _ in tokens(drain(running[0]))]
        for other in running[1:]:
            drain(other)
        free = drain(engine.generate(opened(engine), beside))
        with_logprobs, _ = generated(engine, opened(engine), replace(params, logprobs=True))
    assert kind.fits(alone), spelled(alone)
    assert end.stop_reason in (StopReason.CONSTRAINT, StopReason.EOS) and end.fits_constraint
    assert (end.stop_reason is StopReason.EOS) == (alone[-1] == END)
    assert alone == plain == batched == with_logprobs
    assert (plain_end.stop_reason, plain_end.drafted_tokens) == (end.stop_reason, 0)
    assert tokens(together) == tokens(free)
    history = [*text(40), *alone]
    drafters: list[Drafter] = [Knowing(text=history, errs=5), Wrong(), NgramDrafter(min_ngram=1)]
    for drafter in drafters:
        with constrained(mode, drafter=drafter, draft_tokens=4) as engine:
            assert generated(engine, opened(engine), params)[0] == alone, drafter
    if mode is Mode.BATCHED:
        with constrained(mode, overlap="on") as engine:
            assert generated(engine, opened(engine), params)[0] == alone
            assert (
                generated(engine, opened(engine, SinkWindow(sink=4, window=16)), params)[0]
                == generated(engine, opened(engine, SinkWindow(sink=4, window=16)), replace(params, drafting=False))[0]
            )


def test_what_must_follow_is_drafted_and_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The off-switch of the law above: drafts that never came would change no token, either."""
    monkeypatch.setattr(matching, "SLOW_SECONDS", math.inf)  # on a machine that is busy, too
    with constrained() as engine:
        _, end = generated(engine, opened(engine), params_of(KINDS[0], Sampling()))
    assert end.accepted_tokens >= end.generated_tokens // 3


@pytest.mark.parametrize(("kind", "sampling"), in_turn(KINDS, SAMPLINGS), ids=named)
def test_a_constrained_generate_goes_on_where_it_was_stopped_or_killed(
    tmp_path: Path, kind: Kind, sampling: Sampling
) -> None:
    params = params_of(kind, replace(sampling, seed=3))
    with constrained() as engine:
        whole, _ = generated(engine, opened(engine), params)
        for taken in range(1, len(whole), 3):
            session = opened(engine)
            generation = engine.generate(session, params, request_id=REQUEST)
            got: list[int] = []
            for event in generation:
                if isinstance(event, TokenCommitted):
                    got.append(event.token_id)
                    if len(got) == taken:
                        generation.cancel()
            again = engine.generate(session, params, request_id=REQUEST)
            assert [token for token, _ in tokens(drain(again))] == whole
    with keeping(tmp_path / "state", make=constrained) as engine:
        session = opened(engine)
        events = iter(engine.generate(session, params, request_id=REQUEST))
        seen = [next(events)]
        while not tokens(seen):
            seen.append(next(events))
        killed = after_a_kill(tmp_path / "state")
        drain(events)
    with keeping(killed, make=constrained) as engine:
        engine.recall(session)
        events_again = drain(engine.generate(session, params, request_id=REQUEST))
        assert [token for token, _ in tokens(events_again)] == whole
        assert isinstance(events_again[-1], Finished) and events_again[-1].fits_constraint
        engine.append(session, [1, 2])
    with keeping(killed, make=constrained) as engine:  # complete, and the history has gone on
        engine.recall(session)
        replayed = drain(engine.generate(session, params, request_id=REQUEST))
        assert [token for token, _ in tokens(replayed)] == whole
        assert isinstance(replayed[-1], Finished) and replayed[-1].fits_constraint
        assert replayed[-1].stop_reason is events_again[-1].stop_reason


@each_kind
def test_a_mask_after_a_roll_back_is_the_one_before(kind: Kind) -> None:
    """Along random outputs: what follows is the same however a place was reached, and some id always does."""
    constraints = Constraints(VOCABULARY, lambda: TOKENS)
    grammar = constraints.compile(kind.constraint, "owner").result()
    rng = np.random.default_rng(1)
    for _ in range(20):
        automaton, masks, ids = grammar.start(), list[bytes](), list[int]()
        while not automaton.is_over:
            mask = automaton.mask()
            masks.append(mask.tobytes())
            allowed = bits_of(mask, VOCABULARY).nonzero()[0]
            assert len(allowed) or automaton.may_end
            if automaton.may_end and (not len(allowed) or rng.random() < 0.3):
                break
            fitting = [token for token in range(VOCABULARY) if automaton.fitting([token])]
            assert allowed.tolist() == ([*automaton.forced()[:1]] or fitting)
            ids.append(int(rng.choice(allowed)))
            assert automaton.fitting(ids[-1:]) == 1 and automaton.consume(ids[-1])
        assert kind.fits(ids)
        back = int(rng.integers(1, len(ids) + 1))
        automaton.roll_back(back)
        assert automaton.mask().tobytes() == masks[len(ids) - back]
        assert automaton.fitting(ids[-back:]) == back
        fresh = grammar.start()
        for token, expected in zip(ids, masks, strict=False):
            assert fresh.mask().tobytes() == expected and fresh.consume(token)


class Dead:
    """Implements Automaton and Grammar: allows one id twice, then none, and does not say so."""

    broken, is_over, may_end = "", False, False

    def __init__(self) -> None:
        self.consumed = 0

    def start(self) -> Automaton:
        return Dead()

    def consume(self, token_id: int) -> bool:
        self.consumed += token_id == 7
        return token_id == 7

    def fitting(self, token_ids: Sequence[int]) -> int:
        return 0

    def roll_back(self, count: int) -> None:
        self.consumed -= count

    def forced(self) -> tuple[int, ...]:
        return ()

    def mask(self) -> Any:
        mask = np.zeros(VOCABULARY // 8, dtype=np.uint8)
        mask[0] = 1 << 7 if self.consumed < 2 else 0
        return mask


def test_nothing_is_sampled_where_no_id_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Constraints, "_compiled", lambda *_: Dead())
    with constrained() as engine:
        session = opened(engine)
        generation = engine.generate(session, params_of(KINDS[0], Sampling()))
        seen: list[int] = []
        with pytest.raises(ConstraintFailed, match="allows no token at position 42") as failed:
            seen.extend(event.token_id for event in generation if isinstance(event, TokenCommitted))
        assert seen == [7, 7] and failed.value.metadata == {"position": "42"}
        assert engine.session_info(session).history_length == 42


def test_the_limit_of_tokens_says_whether_the_output_is_whole() -> None:
    """A regex whose output is whole after six characters, and after any more of them."""
    kind = KINDS[1]
    with constrained() as engine:
        whole, _ = generated(engine, opened(engine), params_of(kind, Sampling(), drafting=False))
        found = {}
        for most in range(1, len(whole) + 1):
            params = replace(params_of(kind, Sampling()), max_tokens=most)
            cut, end = generated(engine, opened(engine), params)
            assert cut == whole[:most]
            assert end.fits_constraint == kind.fits(cut), spelled(cut)
            found[end.stop_reason, end.fits_constraint] = True
        unbound = drain(engine.generate(opened(engine), GenerateParams(max_tokens=2)))[-1]
    assert (StopReason.MAX_TOKENS, False) in found
    assert isinstance(unbound, Finished) and unbound.fits_constraint is None


def test_a_stop_id_ends_where_the_output_may_end_and_nowhere_else() -> None:
    """Even one that a bias makes the likeliest, and that the constraint allows as text: `x`, after two groups.

    Where it is the only one that could follow, there is an error.
    """
    kind, stop = KINDS[1], ord("x")
    sampling = Sampling(logit_bias={stop: 1000.0, END: -1000.0})
    with constrained() as engine:
        params = replace(params_of(kind, sampling), stop_token_ids=(stop,))
        found, end = generated(engine, opened(engine), params)
        forbidden = replace(params_of(KINDS[3], Sampling(logit_bias={5: 1000.0})), stop_token_ids=(6,))
        with pytest.raises(ConstraintFailed, match="only by ids that may not be drawn here"):
            generated(engine, opened(engine), forbidden)
    assert found[-1] == stop and kind.fits(found[:-1]) and len(spelled(found[:-1])) == 6
    assert end.stop_reason is StopReason.EOS and end.fits_constraint


@pytest.mark.parametrize("vocab", [70, 5000, 20_000])
@pytest.mark.parametrize("sampling", [
    Sampling(), Sampling(temperature=0.7), Sampling(temperature=1.3, top_k=50), Sampling(temperature=0.9, top_p=0.9),
    Sampling(temperature=1.0, min_p=0.05), Sampling(temperature=1.1, top_k=9, top_p=0.8, min_p=0.1),
], ids=str)  # fmt: skip
def test_every_way_to_draw_takes_the_reference_token_of_what_is_allowed(vocab: int, sampling: Sampling) -> None:
    """From few ids on a host, and from all as on a device; masks that allow one id, few, most, and all."""
    generator = torch.Generator().manual_seed(4)
    rng = np.random.default_rng(4)
    for share in (0.0, 0.02, 0.5, 0.99, 1.0):
        logits = torch.randn(6, vocab, generator=generator) * 3.0
        allowed = rng.random((6, vocab)) < share
        allowed[:, rng.integers(0, vocab)] = True
        masks = list(np.packbits(allowed, axis=1, bitorder="little"))

        class Given:
            def along(self, drafted: Any, masks: Any = masks) -> Any:
                return masks

            def allow(self, drafted: Any, token_ids: Any, allowed: Any = allowed) -> bool:
                return bool(allowed[range(6), token_ids].all())

        sampler = Sampler(sampling, seed=9, masks=Given())
        each = Draw(indices=range(6), sampler=sampler, position=30, drafted=(1, 2, 3, 4, 5))
        on_host = [sample.token_id for sample in draw_all(logits, [each])[0]]
        on_device = [sample.token_id for sample in start_drawing(logits, [each]).samples()[0]]
        only = torch.where(torch.from_numpy(allowed), logits, -torch.inf)
        reference = [
            int(row.argmax()) if sampling.is_greedy else plainly(row, sampling, key(9, 30 + place))
            for place, row in enumerate(only)
        ]
        assert on_host == on_device == reference


def test_a_choice_forces_what_all_that_is_left_have_in_common() -> None:
    automaton = ChoiceGrammar([(5, 6, 7, 8), (5, 6, 9), (70, 71)], VOCABULARY).start()
    assert automaton.forced() == () and automaton.consume(5)
    assert automaton.forced() == (6,) and automaton.consume(6)
    assert automaton.forced() == () and not automaton.consume(8) and automaton.consume(7)
    assert automaton.forced() == (8,) and not automaton.may_end
