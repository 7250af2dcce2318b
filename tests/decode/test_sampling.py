"""Sampling: the documented order of operations, randomness by (seed, position), and the right distribution."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.errors import InvalidArgument
from inference_engine.kernels.filters import draw as draw_all
from inference_engine.kernels.gumbel_noise import key
from inference_engine.kernels.sampler import Sampler
from inference_engine.kernels.sampling import Draw
from inference_engine.kernels.sampling import draw_all as draw_step
from inference_engine.types import Sampling
from tests.decode.plain_sampling import filtered_probabilities, next_token, penalised, seen

V = 12


def logits(seed: int = 0) -> Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 2


def sampler(sampling: Sampling, history: list[int] | None = None, seed: int = 3) -> Sampler:
    return Sampler.start(sampling, seed, seen(history or [], V), V, torch.device("cpu"))


def draw(sampling: Sampling, raw: Tensor, position: int = 5, history: list[int] | None = None, seed: int = 3) -> int:
    return next_token(sampler(sampling, history, seed), raw, position)


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals() -> None:
    raw = torch.tensor([0.0, 3.0, 1.0, 3.0])
    assert next_token(Sampler(Sampling(), 0), raw, 0) == 1


@pytest.mark.parametrize("place", [0, 100, 48_000])
def test_a_greedy_draw_by_itself_is_the_one_beside_others(place: int, subtests: pytest.Subtests) -> None:
    """Alone it takes a shorter way."""
    for bad in [None, math.nan, math.inf, -math.inf]:
        with subtests.test(str(bad)):
            raw = torch.randn(3, 49_152, generator=torch.Generator().manual_seed(1)).round()  # with many equals
            if bad is not None:
                raw[1, place] = bad
            greedy, random = Sampler(Sampling(), 0), Sampler(Sampling(temperature=1.0), 0)
            one = Draw(indices=range(2), sampler=greedy, position=5, drafted=(7,))
            (alone,) = draw_step(raw, [one])
            beside, _ = draw_step(raw, [one, Draw(indices=range(2, 3), sampler=random, position=9)])
            assert [sample.is_finite for sample in alone] == [True, bad is None]
            assert alone == beside


def test_a_draw_is_a_function_of_seed_and_position_alone() -> None:
    sampling = Sampling(temperature=1.0)
    tokens = [draw(sampling, logits(), position) for position in range(200)]
    assert tokens == [draw(sampling, logits(), position) for position in range(200)]
    assert tokens != [draw(sampling, logits(), position, seed=4) for position in range(200)]
    assert len(set(tokens)) > 3


COUNT = 4000
PLACES = {
    "positions": [key(3, position) for position in range(COUNT)],
    "seeds": [key(seed, 5) for seed in range(COUNT)],
}


@pytest.mark.parametrize("over", PLACES)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=2.5),
        Sampling(temperature=0.7, top_k=5),
        Sampling(temperature=1.3, top_p=0.8),
        Sampling(temperature=1.1, min_p=0.1),
        Sampling(temperature=0.8, top_k=6, top_p=0.9, min_p=0.02),
    ],
    ids=["plain", "hot", "top_k", "top_p", "min_p", "all"],
)
def test_draws_follow_the_filtered_distribution(sampling: Sampling, over: str) -> None:
    raw = logits()
    expected = filtered_probabilities(raw, sampling).numpy()
    assert expected.sum() == pytest.approx(1.0)
    drawn = draw_all(raw.expand(COUNT, -1), [sampling] * COUNT, PLACES[over])
    counts = np.bincount(drawn.numpy(), minlength=V)
    kept = expected > 0
    assert (counts[~kept] == 0).all()
    chi_square = ((counts[kept] - COUNT * expected[kept]) ** 2 / (COUNT * expected[kept])).sum()
    # At most 11 degrees of freedom, for which 37.4 is the 0.01 % point.
    assert chi_square < 37.4


def test_filters_cut_in_the_documented_order() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    raw = probabilities.log()

    def kept(**options: float) -> list[int]:
        return filtered_probabilities(raw, Sampling(temperature=1.0, **options)).nonzero().flatten().tolist()  # type: ignore[arg-type]

    assert kept(top_k=3) == [0, 1, 2]
    assert kept(top_p=0.7) == [0, 1]
    assert kept(top_p=0.71) == [0, 1, 2]
    assert kept(min_p=0.5) == [0, 1]
    # top_p is a share of what top_k left: of 0.4 and 0.3, 0.5 is reached by the first alone.
    assert kept(top_k=2, top_p=0.5) == [0]
    assert kept(top_k=4, top_p=0.999, min_p=0.3) == [0, 1, 2]
    assert kept() == kept(top_k=0, top_p=1.0, min_p=0.0) == [0, 1, 2, 3, 4]


def test_the_penalty_touches_every_id_of_the_history_and_what_is_generated_since() -> None:
    raw = torch.tensor([2.0, 1.9, -1.0, -1.05])
    penalised = Sampler.start(Sampling(repetition_penalty=1.2), 0, seen([0], 4), 4, torch.device("cpu"))
    assert next_token(penalised, raw, 0) == 1
    penalised.observe(1)
    assert next_token(penalised, raw, 1) == 0
    assert next_token(Sampler(Sampling(), 0), raw, 0) == 0
    negative = Sampler.start(Sampling(repetition_penalty=1.2), 0, seen([2], 4), 4, torch.device("cpu"))
    assert next_token(negative, torch.tensor([-9.0, -9.0, -1.0, -1.05]), 0) == 3


def test_presence_and_frequency_penalties_count_what_is_generated_and_what_is_drafted() -> None:
    """Each row as if the draft tokens before it had come: by observing them, one by one, the same to the bit."""
    sampling = Sampling(presence_penalty=0.3, frequency_penalty=-0.7, repetition_penalty=1.3, logit_bias={2: 0.1})
    came, drafted = [4, 4, 7], [2, 4, 2, 9, 2]
    raw = torch.randn(len(drafted) + 1, V, generator=torch.Generator().manual_seed(2))
    history = [0, 2, *came]

    def at(generated: list[int]) -> Sampler:
        known = seen([*history, *generated[len(came) :]], V)
        return Sampler.start(sampling, 3, known, V, torch.device("cpu"), generated=generated)

    along, observing = at(came).adjusted(raw, drafted), at(came)
    for row in range(len(raw)):
        generated = [*came, *drafted[:row]]
        expected = penalised(raw[row], replace(sampling, logit_bias={}), [*history, *drafted[:row]])
        for token in set(generated):
            expected[token] -= torch.tensor(0.3 - 0.7 * generated.count(token))
        expected[2] += torch.tensor(0.1)
        assert torch.equal(along[row], expected)
        assert torch.equal(observing.adjusted(raw[row : row + 1], [])[0], expected)
        assert torch.equal(at(generated).adjusted(raw[row : row + 1], [])[0], expected)
        if row < len(drafted):
            observing.observe(drafted[row])


def test_of_equal_logits_the_lower_ids_are_the_likeliest() -> None:
    raw = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0, 2.0, 2.0]])
    draws = [
        Draw(
            indices=range(row, row + 1),
            sampler=Sampler(Sampling(), 1),
            position=row,
            needs_logprob=True,
            top_logprobs=top,
        )
        for row, top in enumerate((3, 4))
    ]
    found = [[token for token, _ in own[0].top_logprobs] for own in draw_step(raw, draws)]
    assert found == [[1, 3, 0], [0, 1, 2, 3]]


OUT_OF_RANGE: list[tuple[str, object]] = [
    ("temperature", -0.1),
    ("temperature", 5e-324),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", math.nan),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 1e-30),
    ("repetition_penalty", math.inf),
    ("presence_penalty", 2.01),
    ("frequency_penalty", math.nan),
    ("top_k", -1),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: 1001.0}),
    ("seed", -1),
    ("seed", 2**64),
]


def test_a_number_out_of_range_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for field, value in OUT_OF_RANGE:
        with subtests.test(field=field, value=value):
            with pytest.raises(InvalidArgument) as refusal:
                Sampling(**{field: value})  # type: ignore[arg-type]
            assert refusal.value.field == field
