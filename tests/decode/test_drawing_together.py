"""Many tokens drawn at once: each is, bit for bit, what it is alone and in the spelled-out draw."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inference_engine.engine import Engine
from inference_engine.kernels import filters
from inference_engine.kernels.filters import Filters, draw, logprobs
from inference_engine.kernels.graph_io import PLAIN_ENDS
from inference_engine.kernels.gumbel_noise import key
from inference_engine.kernels.sampler import Sampler, permitted_by
from inference_engine.kernels.sampling import Draw, Draws, draw_all, start_drawing
from inference_engine.kv.strategies.full import Full
from inference_engine.types import MAX_SEED, GenerateParams, Mode, Sampling, TokenSet
from tests.decode.plain_sampling import filtered_probabilities, left, plainly
from tests.facade import standing_still
from tests.laws.variants import drain, engine_for, generate, text, tokens

LARGE = 49_152  # where torch adds up the logits of a lone token by several threads

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.01, 0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 10_000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-6, 0.25, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
)
noise_keys = st.integers(-(2**63), 2**63 - 1)


@st.composite
def steps(draw_from: st.DrawFn) -> tuple[Tensor, list[Sampling], list[int]]:
    """Logits of one step, with ties and all-equal logits among them, and how each token is drawn."""
    vocab = draw_from(st.integers(1, 70))
    count = draw_from(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw_from(st.integers(0, 2**32)))
    logits = torch.randn(count, vocab, generator=generator) * draw_from(st.sampled_from([0.0, 1.0, 3.0, 40.0]))
    if draw_from(st.booleans()):
        logits = logits.round()
    lists = st.lists(samplings, min_size=count, max_size=count), st.lists(noise_keys, min_size=count, max_size=count)
    return logits, draw_from(lists[0]), draw_from(lists[1])


def mixed(count: int) -> list[Sampling]:
    """Every filter alone and with the others, as many times as it takes."""
    kinds = [
        Sampling(temperature=0.7),
        Sampling(temperature=1.3, top_k=50),
        Sampling(temperature=0.9, top_p=0.95),
        Sampling(temperature=1.0, min_p=0.02),
        Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01),
    ]
    return [kinds[place % len(kinds)] for place in range(count)]


@pytest.mark.parametrize("order", list(itertools.permutations((1.0, 0.9, 0.5))), ids=str)
def test_greedy_draws_found_by_the_step_itself_are_those_drawn_from_its_logits(order: tuple[float, ...]) -> None:
    """Whatever filters were asked for: they change nothing of a greedy draw, not its place among the others either."""
    logits = torch.randn(len(order), 40, generator=torch.Generator().manual_seed(3))
    samplers = [Sampler(Sampling(temperature=0.0, top_p=top_p, top_k=row), 1) for row, top_p in enumerate(order)]
    draws = Draws(
        [Draw(indices=range(row, row + 1), sampler=sampler, position=9) for row, sampler in enumerate(samplers)]
    )
    assert draws.are_largest and draws.following().are_largest
    table = torch.empty(4 * len(order))
    ids = PLAIN_ENDS.publish(PLAIN_ENDS.peaks(logits), len(order), table)

    class Arrived:
        memory = table

        def wait(self) -> None:
            pass

    found = draws.following().drawn(ids, Arrived()).samples()
    assert found == start_drawing(logits, draws).samples()
    assert [own[0].token_id for own in found] == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("other", ["sampled", "penalised", "with logprobs", "of two rows", "of another row"])
def test_other_draws_are_not_the_largest_logits_of_their_rows(other: str) -> None:
    greedy = Sampler(Sampling(temperature=0.0), 1)
    first = Draw(indices=range(1), sampler=greedy, position=3)
    second = Draw(indices=range(1, 2), sampler=greedy, position=5)
    match other:
        case "sampled":
            second = replace(second, sampler=Sampler(Sampling(temperature=1.0), 1))
        case "penalised":
            second = replace(second, sampler=Sampler(Sampling(frequency_penalty=0.1), 1))
        case "with logprobs":
            second = replace(second, needs_logprob=True)
        case "of two rows":
            second = replace(second, indices=range(1, 3), drafted=[4])
        case _:
            second = replace(second, indices=range(2, 3))
    assert not Draws([first, second]).are_largest
    assert Draws([first]).are_largest


@given(steps(), st.lists(st.integers(0, MAX_SEED), min_size=9, max_size=9), st.integers(0, 3))
@settings(deadline=None)
def test_the_draws_of_steps_behind_another_are_those_of_later_positions(
    step: tuple[Tensor, list[Sampling], list[int]], seeds: list[int], ahead: int
) -> None:
    logits, samplings, places = step
    positions = [abs(place) >> 1 for place in places]
    greedy = [sampling if index % 3 else Sampling() for index, sampling in enumerate(samplings)]
    draws = Draws(
        [
            Draw(indices=range(index, index + 1), sampler=Sampler(sampling, seed), position=position)
            for index, (sampling, seed, position) in enumerate(zip(greedy, seeds, positions, strict=False))
        ]
    )
    for _ in range(ahead):
        start_drawing(logits, draws)
        draws = draws.following()

    found = [own[0].token_id for own in start_drawing(logits, draws).samples()]

    keys = [key(seed, position + ahead) for seed, position in zip(seeds, positions, strict=False)]
    assert found == [
        int(row.argmax()) if sampling.is_greedy else int(draw(row[None], [sampling], [noise_key])[0])
        for row, sampling, noise_key in zip(logits, greedy, keys, strict=True)
    ]
    assert [each.position for each in draws] == [position + ahead for position in positions]


@given(steps(), st.permutations(range(9)))
@settings(deadline=None)
def test_logits_give_the_same_token_alone_and_among_others_in_any_order(
    step: tuple[Tensor, list[Sampling], list[int]], order: list[int]
) -> None:
    logits, samplings, keys = step
    order = [place for place in order if place < len(logits)]
    alone = [int(draw(logits[place : place + 1], [samplings[place]], [keys[place]])[0]) for place in order]
    assert (
        draw(logits[order], [samplings[place] for place in order], [keys[place] for place in order]).tolist() == alone
    )


@pytest.mark.parametrize("vocab", [LARGE, LARGE + 1], ids=["even", "odd"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_distribution_has_the_same_bits_alone_and_among_others(vocab: int, threads: int) -> None:
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(1)) * 3
    samplings = mixed(len(logits))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = left(logits, samplings)
        for place, sampling in enumerate(samplings):
            assert torch.equal(left(logits[place : place + 1], [sampling])[0], together[place])
            assert torch.equal(filtered_probabilities(logits[place], sampling), together[place].softmax(dim=0))
        # What top_p is a share of; a bit of it seldom shows in what is left.
        sums = filters._running_sums_(together.exp())
        for place in range(len(logits)):
            assert torch.equal(filters._running_sums_(together[place : place + 1].exp())[0], sums[place])
        keys = [key(6, place) for place in range(len(logits))]
        drawn = [
            int(draw(logits[place : place + 1], [samplings[place]], [keys[place]])[0]) for place in range(len(logits))
        ]
        assert draw(logits, samplings, keys).tolist() == drawn
        likely = logits.argmax(dim=-1)
        reported = [
            logprobs(logits[place : place + 1], likely[place : place + 1])[0][0] for place in range(len(logits))
        ]
        assert torch.equal(logprobs(logits, likely)[0], torch.stack(reported))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("tokens_at_once", [1, 2, 3, 50])
def test_how_many_tokens_are_drawn_at_once_changes_nothing(
    tokens_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(11, 97, generator=torch.Generator().manual_seed(2)) * 2
    samplings = sorted(mixed(len(logits)), key=lambda sampling: sampling.top_k > 0)
    keys = [key(5, place) for place in range(len(logits))]
    expected = [plainly(one, sampling, key) for one, sampling, key in zip(logits, samplings, keys, strict=True)]
    sizes: list[int] = []

    def counting(filters: Filters, part: Tensor) -> Tensor:
        sizes.append(len(part))
        return of_filters(filters, part)

    of_filters = Filters.left
    monkeypatch.setattr(Filters, "left", counting)
    monkeypatch.setattr(filters, "MAX_ARRAY_BYTES_ON_CPU", tokens_at_once * 97 * 8 + 5)
    assert draw(logits, samplings, keys).tolist() == expected
    assert max(sizes) <= tokens_at_once and sum(sizes) == len(logits)
    (reported,) = logprobs(logits, logits.argmax(dim=-1))
    assert torch.allclose(reported, logits.log_softmax(dim=-1).amax(dim=-1), atol=1e-6)


@pytest.mark.parametrize("cut", [Sampling(temperature=1.0, top_k=2), Sampling(temperature=1.0, top_p=0.4)])
def test_of_equals_the_lower_ids_are_left(cut: Sampling) -> None:
    logits = torch.zeros(60, 5)
    assert set(draw(logits, [cut] * 60, [key(3, place) for place in range(60)]).tolist()) == {0, 1}
    logits[:, 1], logits[:, 2] = -1.0, 0.2
    assert set(draw(logits, [cut] * 60, [key(3, place) for place in range(60)]).tolist()) == {0, 2}


def test_logits_that_are_not_finite_disturb_no_others() -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(3))
    samplings, keys = mixed(5), [key(1, place) for place in range(5)]
    expected = draw(logits, samplings, keys).tolist()
    for place, wrong in ((1, torch.nan), (2, torch.inf), (3, -torch.inf)):
        logits[place, 4] = wrong
    got = draw(logits, samplings, keys).tolist()
    assert [got[0], got[4]] == [expected[0], expected[4]]
    assert all(0 <= token < 30 for token in got)


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, seed=1),
    Sampling(repetition_penalty=1.4),
    Sampling(temperature=0.8, presence_penalty=0.5, frequency_penalty=0.2, seed=3),
    Sampling(temperature=1.2, top_p=0.9, seed=2),
    Sampling(temperature=0.8, min_p=0.1, repetition_penalty=1.2, logit_bias={5: 1.5}, seed=3),
    Sampling(temperature=1.5, top_k=20, seed=4),
]


def said_together(engine: Engine, count: int) -> list[list[tuple[int, float | None]]]:
    """What sessions say that run in the same steps, one for each of SAMPLINGS; every other wants log-probabilities."""
    sessions = [engine.create_session(strategy=Full()).session_id for _ in SAMPLINGS]
    for place, session in enumerate(sessions):
        engine.append(session, text(30 + place, seed=place))
    with standing_still(engine):  # so that all are there before the first begins
        running = [
            engine.generate(session, GenerateParams(max_tokens=count, sampling=sampling, logprobs=place % 2 == 0))
            for place, (session, sampling) in enumerate(zip(sessions, SAMPLINGS, strict=True))
        ]
    return [tokens(drain(generation)) for generation in running]


def test_sessions_with_different_samplings_generate_in_one_step_what_each_generates_alone() -> None:
    with engine_for(Mode.FIXED_SHAPE) as engine:
        alone = []
        for place, sampling in enumerate(SAMPLINGS):
            session = engine.create_session(strategy=Full()).session_id
            engine.append(session, text(30 + place, seed=place))
            alone.append(generate(engine, session, 12, sampling=sampling))
        together = said_together(engine, 12)
    for place, (expected, got) in enumerate(zip(alone, together, strict=True)):
        assert got == [(token, reported if place % 2 == 0 else None) for token, reported in expected]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 39), max_size=30),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=5),
)
def test_a_set_holds_its_ids_and_ranges_and_is_equal_to_the_same_ids(
    token_ids: list[int], ranges: list[tuple[int, int]]
) -> None:
    held = {*token_ids, *itertools.chain(*(range(*each) for each in ranges))}
    found = TokenSet.of(token_ids, ranges)
    assert found == TokenSet.of(sorted(held))
    for sampling, expected in (
        (Sampling(allowed_token_ids=found), held),
        (Sampling(banned_token_ids=found), {*range(40)} - held),
    ):
        permitted = permitted_by(sampling, 40)
        assert permitted is not None and {*permitted.nonzero()[0].tolist()} == expected


@pytest.mark.parametrize("permitted", [1, 40, 12_000])
@pytest.mark.parametrize("sampling", [Sampling(), *mixed(5)], ids=str)
def test_a_draw_from_a_set_of_ids_is_the_spelled_out_one(sampling: Sampling, permitted: int) -> None:
    """On a host, from few ids and from many; and as on a device, where ends are refused for two of three places."""
    generator = torch.Generator().manual_seed(permitted)
    logits = torch.randn(3, 20_000, generator=generator) * 3.0
    chosen = torch.randperm(20_000, generator=generator)[: permitted + 1].sort().values
    ends = [int(chosen[0])]
    own = replace(sampling, allowed_token_ids=TokenSet.of(chosen.tolist()))
    sampler = Sampler.start(own, 9, None, 20_000, torch.device("cpu"), ends=ends, ends_from=32)
    each = Draw(indices=range(3), sampler=sampler, position=30, drafted=(1, 2))
    only = torch.full_like(logits, -torch.inf)
    only[:, chosen] = logits[:, chosen]
    only[:2, ends] = -torch.inf
    expected = [
        int(row.argmax()) if sampling.is_greedy else plainly(row, sampling, key(9, 30 + place))
        for place, row in enumerate(only)
    ]
    assert [sample.token_id for sample in draw_all(logits, [each])[0]] == expected
    assert [sample.token_id for sample in start_drawing(logits, [each]).samples()[0]] == expected
