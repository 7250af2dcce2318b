"""The laws of a Generate's options: what they change is a function of history, seed and options alone.

Each case says what its option does to the tokens that there would be without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inference_engine.decode.draft import Drafter
from inference_engine.engine import Engine
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import (
    Constraint,
    ConstraintKind,
    Event,
    Finished,
    GenerateParams,
    Mode,
    Sampling,
    StopReason,
    TokenCommitted,
    TokenSet,
)
from kv_cache_proposer.ngram import NgramDrafter
from tests.constraints import END, TOKENS
from tests.further import further, in_turn
from tests.kept import after_a_kill, keeping
from tests.laws.drafters import Knowing, Wrong
from tests.laws.variants import MODES, drain, each_mechanism, engine_for, text, tokens

COUNT = 24
REQUEST = bytes(16)
SAMPLED = Sampling(temperature=1.1, top_p=0.95, seed=5)


@dataclass(frozen=True)
class Case:
    """params: by the tokens that come without the option. holds: do the tokens show it?"""

    name: str
    params: Callable[[list[int]], GenerateParams]
    holds: Callable[[list[int], list[int], Finished], bool]
    sampling: Sampling = SAMPLED

    def __str__(self) -> str:
        return self.name


def with_(**options: Any) -> GenerateParams:
    return GenerateParams(**{"max_tokens": COUNT, "sampling": SAMPLED, **options})


def ends_with(count: int, index: int | None = None) -> Callable[[list[int], list[int], Finished], bool]:
    """After so many of the tokens that there would be, by the sequence of this number."""
    return lambda plain, found, end: (
        found == plain[:count] and (end.stop_reason, end.stop_sequence) == (StopReason.EOS, index)
    )


def repeats_less(plain: list[int], found: list[int], _: Finished) -> bool:
    return len(set(found)) > len(set(plain))


def never(token: int) -> Callable[[list[int], list[int], Finished], bool]:
    return lambda plain, found, _: token in plain and token not in found


LETTERS = Constraint(kind=ConstraintKind.REGEX, source="(abc|abd){9}")

PENALISED = replace(SAMPLED, presence_penalty=0.7, frequency_penalty=0.4)
CASES = [
    Case(
        "penalties",
        lambda _: with_(sampling=PENALISED),
        repeats_less,
    ),
    Case(
        "greedy penalties",
        lambda _: with_(sampling=replace(PENALISED, temperature=0.0, top_p=1.0)),
        repeats_less,
        Sampling(),
    ),
    Case(
        "a minimum of tokens",  # the first of the stop ids is likely at once
        lambda plain: with_(
            min_tokens=9,
            stop_token_ids=tuple(plain[:3]),
            stop_sequences=(tuple(plain[3:4]),),
            sampling=replace(SAMPLED, logit_bias={plain[0]: 6.0}),
        ),
        lambda plain, found, end: (
            len(found) > 9 and not set(plain[:3]) & set(found[:9]) and end.stop_reason is StopReason.EOS
        ),
    ),
    Case(
        "a set of allowed ids",
        lambda _: with_(sampling=replace(SAMPLED, allowed_token_ids=TokenSet.of([3, 99], [(10, 60)]))),
        lambda _, found, __: all(token in (3, 99, *range(10, 60)) for token in found),
    ),
    Case(
        "a set of banned ids",
        lambda plain: with_(sampling=replace(SAMPLED, banned_token_ids=TokenSet.of([plain[5]], [(3, 9)]))),
        lambda plain, found, end: never(plain[5])(plain, found, end),
    ),
    Case(
        "a minimum and banned ids within a constraint",  # which may end after six letters
        lambda _: with_(
            constraint=Constraint(kind=ConstraintKind.REGEX, source="(abc|abd){2}x{0,9}"),
            min_tokens=9,
            sampling=replace(SAMPLED, logit_bias={END: 9.0}, banned_token_ids=TokenSet.of([100])),
        ),
        lambda _, found, end: (
            end.fits_constraint is True and len(found) == 10 and found[-1] == END and 100 not in found
        ),
    ),
    Case(
        "a minimum that a constraint does not reach",
        lambda _: with_(constraint=Constraint(kind=ConstraintKind.CHOICE, choices=((5, 6, 7),)), min_tokens=9),
        lambda _, found, end: (found, end.stop_reason, end.fits_constraint) == ([5, 6, 7], StopReason.CONSTRAINT, True),
    ),
    Case(
        "a stop sequence",
        lambda plain: with_(stop_sequences=((1, 2, 3), tuple(plain[9:11]), tuple(plain[8:11]), (plain[10], 7))),
        ends_with(11, 2),
    ),
    Case(
        "a stop sequence within a constraint",
        lambda _: with_(constraint=LETTERS, stop_sequences=((100, 97, 98), (98, 99))),  # one of which a model gives
        lambda _, found, end: end.fits_constraint is False and (found[-3:] == [100, 97, 98] or found[-2:] == [98, 99]),
    ),
]
# What a Generate keeps of its tokens differs: counts, the end of its tokens, a place in a grammar.
RESUMED = ("penalties", "a stop sequence", "a minimum and banned ids within a constraint")
each_case_resumed = pytest.mark.parametrize(
    "case", [case if case.name in RESUMED else further(case) for case in CASES], ids=str
)


def constrained(mode: Mode = Mode.BATCHED, **settings: Any) -> Engine:
    return engine_for(mode, read_tokens=lambda: TOKENS, **settings)


def opened(engine: Engine, strategy: KVStrategy | None = None) -> str:
    session = engine.create_session(strategy=strategy, eos_token_ids=[END]).session_id
    engine.append(session, text(40))
    return session


def generated(engine: Engine, session: str, params: GenerateParams, **how: Any) -> tuple[list[int], Finished]:
    return read(drain(engine.generate(session, params, **how)))


def read(events: list[Event]) -> tuple[list[int], Finished]:
    assert isinstance(events[-1], Finished)
    return [token for token, _ in tokens(events)], events[-1]


def said_of(end: Finished) -> tuple[object, ...]:
    """What an end says of the tokens, and not of what they took."""
    return end.stop_reason, end.stop_sequence, end.fits_constraint, end.generated_tokens, end.history_length


def plain_tokens(engine: Engine, case: Case) -> list[int]:
    return generated(engine, opened(engine), with_(sampling=case.sampling))[0]


@pytest.mark.parametrize(("case", "mode"), in_turn(CASES, MODES), ids=lambda value: getattr(value, "value", str(value)))
def test_an_option_does_the_same_however_tokens_are_made(case: Case, mode: Mode) -> None:
    """Alone; without drafts; with drafters that are right, wrong and look back; beside others; launched ahead."""
    with constrained(mode) as engine:
        plain = plain_tokens(engine, case)
        params = case.params(plain)
        alone, end = generated(engine, opened(engine), params)
        assert case.holds(plain, alone, end), (plain, alone, end)
        assert generated(engine, opened(engine), replace(params, drafting=False))[0] == alone
        sessions = [opened(engine) for _ in range(3)]
        beside = [params, with_(sampling=case.sampling), GenerateParams(max_tokens=COUNT)]
        running = [engine.generate(session, each) for session, each in zip(sessions, beside, strict=True)]
        (batched, batched_end), (others, _), (greedy, _) = [read(drain(each)) for each in running]
        assert (batched, said_of(batched_end), others) == (alone, said_of(end), plain)
        assert greedy == generated(engine, opened(engine), GenerateParams(max_tokens=COUNT))[0]
    drafters: list[Drafter] = [Knowing(text=[*text(40), *alone], errs=5), Wrong(), NgramDrafter(min_ngram=1)]
    for drafter in drafters:
        with constrained(mode, drafter=drafter, draft_tokens=4) as engine:
            drafted, drafted_end = generated(engine, opened(engine), params)
            assert (drafted, said_of(drafted_end)) == (alone, said_of(end)), drafter
    if mode is Mode.BATCHED:
        with constrained(overlap="on") as engine:
            assert generated(engine, opened(engine), params)[0] == alone


@each_case_resumed
def test_an_option_holds_for_a_generate_that_was_stopped_or_killed_and_for_a_fork(tmp_path: Path, case: Case) -> None:
    with constrained() as engine:
        plain = plain_tokens(engine, case)
        params = case.params(plain)
        whole, end = generated(engine, opened(engine), params)
        for taken in (1, len(whole) // 2, len(whole) - 1):
            session = opened(engine)
            generation = engine.generate(session, params, request_id=REQUEST)
            got = 0
            for event in generation:
                got += isinstance(event, TokenCommitted)
                if got == taken:
                    generation.cancel()
            again, again_end = generated(engine, session, params, request_id=REQUEST)
            assert (again, said_of(again_end)) == (whole, said_of(end))
        parent = opened(engine)
        fork = engine.fork_session(parent).session_id
        assert generated(engine, fork, params)[0] == generated(engine, parent, params)[0] == whole
    with keeping(tmp_path / "state", make=constrained) as engine:
        session = opened(engine)
        events = iter(engine.generate(session, params, request_id=REQUEST))
        seen = [next(events)]
        while len(tokens(seen)) < 2:
            seen.append(next(events))
        killed = after_a_kill(tmp_path / "state")
        drain(events)
    for _ in range(2):  # it goes on; and it is complete
        with keeping(killed, make=constrained) as engine:
            engine.recall(session)
            again, again_end = generated(engine, session, params, request_id=REQUEST)
            assert (again, said_of(again_end)) == (whole, said_of(end))


@each_mechanism
def test_every_strategy_has_the_options(strategy: KVStrategy) -> None:
    """All of them at once, drafted and not, and in parts."""
    with constrained(drafter=NgramDrafter(min_ngram=1), draft_tokens=4) as engine:
        sampling = replace(PENALISED, banned_token_ids=TokenSet.of([3], [(90, 100)]))
        options = with_(sampling=sampling, min_tokens=4, logprobs=True, top_logprobs=3)
        plain = generated(engine, opened(engine, strategy), replace(options, drafting=False))[0]
        params = replace(options, stop_sequences=(tuple(plain[2:4]), tuple(plain[12:14])))
        whole, end = generated(engine, opened(engine, strategy), replace(params, drafting=False))
        drafted, drafted_end = generated(engine, opened(engine, strategy), params)
        assert (drafted, said_of(drafted_end)) == (whole, said_of(end))
        assert whole == plain[:14]


def reported(engine: Engine, session: str, params: GenerateParams, **how: Any) -> list[TokenCommitted]:
    events = drain(engine.generate(session, params, **how))
    return [event for event in events if isinstance(event, TokenCommitted)]


@pytest.mark.parametrize("sampling", [Sampling(), PENALISED], ids=["greedy", "penalised"])
def test_top_logprobs_are_those_of_the_raw_logits_however_tokens_are_made(tmp_path: Path, sampling: Sampling) -> None:
    """Drafted, beside others that want more, fewer and none, resumed, and read again after a kill."""
    top = 5
    params = with_(sampling=sampling, logprobs=True, top_logprobs=top)
    with constrained(Mode.FIXED_SHAPE) as engine:
        alone = reported(engine, opened(engine), params)
        found: list[torch.Tensor] = []
        scored = engine.score(opened(engine), [one.token_id for one in alone], lambda _, logits: found.append(logits))
        drain(scored)
        expected = torch.cat(found).log_softmax(dim=-1).topk(top, dim=-1)
        for one, ids, values in zip(alone, expected.indices.tolist(), expected.values.tolist(), strict=True):
            assert [token for token, _ in one.top_logprobs] == ids
            assert np.allclose([value for _, value in one.top_logprobs], values, atol=1e-5)
            assert dict(one.top_logprobs).get(one.token_id, one.logprob) == one.logprob
        sessions = [opened(engine) for _ in range(4)]
        others = [params, replace(params, top_logprobs=20), replace(params, top_logprobs=0), with_(sampling=sampling)]
        running = [engine.generate(session, each) for session, each in zip(sessions, others, strict=True)]
        beside = [[event for event in drain(each) if isinstance(event, TokenCommitted)] for each in running]
        assert beside[0] == alone
        assert [one.top_logprobs[:top] for one in beside[1]] == [one.top_logprobs for one in alone]
        assert [len(one.top_logprobs) for one in beside[1]] == [20] * COUNT
        assert [one.top_logprobs for one in beside[2] + beside[3]] == [()] * (2 * COUNT)
        session = opened(engine)
        generation = engine.generate(session, params, request_id=REQUEST)
        for event in generation:
            if isinstance(event, TokenCommitted) and event.position == 45:
                generation.cancel()
        assert reported(engine, session, params, request_id=REQUEST, resume_from=42) == alone[2:]
    knowing = Knowing(text=[*text(40), *(one.token_id for one in alone)], errs=5)
    make = partial(constrained, Mode.FIXED_SHAPE, drafter=knowing, draft_tokens=4)
    with keeping(tmp_path / "state", make=make) as engine:
        session = opened(engine)
        assert reported(engine, session, params, request_id=REQUEST) == alone
        engine.append(session, text(3))
        generated(engine, session, with_(logprobs=True))  # of another width behind it
        length = engine.session_info(session).history_length
    for _ in range(2):  # from the rows of steps, and folded
        with keeping(tmp_path / "state", make=make) as engine:
            engine.recall(session)
            assert engine.session_info(session).history_length == length
            assert reported(engine, session, params, request_id=REQUEST) == alone
