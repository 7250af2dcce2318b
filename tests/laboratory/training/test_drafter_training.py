"""A drafter learns what its target says, in as many calls as it takes, and what it learnt is measured rightly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.dflash.target import words_of
from kv_cache_proposer.drafter_errors import DrafterError
from laboratory.training.drafter import DrafterPlan, read_log, train
from laboratory.training.drafter_blocks import Texts, blocks_at, draw_blocks
from laboratory.training.drafter_data import TextSet, text_set
from laboratory.training.drafter_init import deepened, new_network
from laboratory.training.drafter_loss import head_loss
from laboratory.training.drafter_measure import acceptance_length, draft_states
from laboratory.training.drafter_taps import read_taps
from tests.kv_cache_proposer.drafter_cases import greedy_texts, tiny_config, tiny_network
from tests.tiny import tiny_model

PLAN = DrafterPlan(steps=6, batch=3, anchors=8, rate=3e-3)


def texts() -> TextSet:
    return text_set(greedy_texts())


def trained(
    folder: Path, plan: DrafterPlan, *, seconds: float = 1e9, clock: float = 0.0, read: TextSet | None = None
) -> DFlashNetwork:
    """`clock`: seconds that each look at the clock takes."""
    network = new_network(tiny_config(), seed=0)
    ticks = iter(range(10**6))
    train(
        tiny_model(),
        network,
        texts() if read is None else read,
        plan,
        folder,
        seconds=seconds,
        report=lambda *_: None,
        every=4,
        now=lambda: next(ticks) * clock,
    )
    return network


def test_the_loss_falls_and_draft_tokens_come_to_be_right(tmp_path: Path) -> None:
    network = trained(tmp_path, replace(PLAN, steps=120))
    readings = read_log(tmp_path)
    assert readings[-1].loss < 0.5 * readings[0].loss
    whole = text_set(greedy_texts()).batches(3)
    assert acceptance_length(tiny_model(), network.eval(), words_of(tiny_model()), whole) > 2.5


def test_what_was_trained_can_be_trained_further_from_where_it_was(tmp_path: Path) -> None:
    network = trained(tmp_path / "first", replace(PLAN, steps=120))
    reached = read_log(tmp_path / "first")[-1].loss
    more = replace(PLAN, steps=1, rate=1e-9)
    train(
        tiny_model(),
        network,
        texts(),
        more,
        tmp_path / "more",
        seconds=1e9,
        report=lambda *_: None,
        begins_ready=True,
    )
    assert read_log(tmp_path / "more")[0].loss == pytest.approx(reached, rel=0.5)
    whole = text_set(greedy_texts()).batches(3)
    assert acceptance_length(tiny_model(), network.eval(), words_of(tiny_model()), whole) > 2.5


def test_training_in_two_calls_is_training_in_one(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", PLAN)
    trained(tmp_path / "parts", PLAN, seconds=5, clock=1.0)
    first = read_log(tmp_path / "parts")[-1].steps
    parts = trained(tmp_path / "parts", PLAN)
    assert 0 < first < PLAN.steps
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_training_ends_when_its_time_is_up(tmp_path: Path) -> None:
    trained(tmp_path, replace(PLAN, steps=10**6, total_seconds=20.0), clock=1.0)
    assert read_log(tmp_path)[-1].seconds >= 20.0


def test_a_training_begun_with_another_plan_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, PLAN)
    with pytest.raises(DrafterError, match="another plan"):
        trained(tmp_path, replace(PLAN, rate=1e-3))


def test_a_training_begun_with_other_texts_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, PLAN)
    with pytest.raises(DrafterError, match="another plan or other texts"):
        trained(tmp_path, PLAN, read=text_set(greedy_texts()[:-1]))


# -- blocks -----------------------------------------------------------------------------------------------------------


def sample() -> Texts:
    answers = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1]], dtype=torch.bool)
    return Texts(torch.arange(11)[None] + 50, answers)


def test_a_block_learns_the_models_own_words_up_to_the_first_that_is_not() -> None:
    blocks = blocks_at(sample(), torch.tensor([[1, 3, 6, 9]]), block_size=4)
    assert blocks.targets[0, :3].tolist() == [[52, 53, 54], [54, 55, 56], [57, 58, 59]]
    assert blocks.is_learnt[0].tolist() == [[True] * 3, [True, False, False], [True] * 3, [True, False, False]]


def test_blocks_of_one_text_draft_as_each_would_alone() -> None:
    network, model = tiny_network(), tiny_model()
    batch = texts().batch([0, 1])
    taps, _ = read_taps(model, batch.token_ids, network.config.tap_layers)
    anchors = torch.tensor([[9, 30, 12], [40, 11, 25]])
    together = draft_states(network, words_of(model), batch, blocks_at(batch, anchors, block_size=4), taps)
    for place in range(3):
        alone = blocks_at(batch, anchors[:, place : place + 1], block_size=4)
        one = draft_states(network, words_of(model), batch, alone, taps)
        torch.testing.assert_close(together[:, place : place + 1], one)


# -- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_loss_and_its_gradient_are_those_of_plain_cross_entropy(share: float) -> None:
    generator = torch.Generator().manual_seed(1)
    states, head, teacher = (torch.randn(count, 16, generator=generator) for count in (13, 31, 13))
    targets = torch.randint(0, 31, (13,), generator=generator)
    weights = torch.rand(13, generator=generator)

    states.requires_grad_()
    loss, is_right = head_loss(states, head, targets, weights, teacher=teacher, teacher_share=share)
    loss.backward()  # type: ignore[no-untyped-call]
    ours, states.grad = states.grad, None

    logits = states @ head.T
    hard = F.cross_entropy(logits, targets, reduction="none")
    soft = F.cross_entropy(logits, (teacher @ head.T).softmax(-1), reduction="none")
    plain = (weights * ((1 - share) * hard + share * soft)).sum()
    plain.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(ours, states.grad)
    assert torch.equal(is_right, logits.argmax(-1) == targets)


# -- what it begins with, and with what --------------------------------------------------------------------------------


def test_added_layers_change_no_state_until_they_have_learnt(tmp_path: Path) -> None:
    network = tiny_network(chain=8)
    deeper = deepened(network, 4, seed=1)
    assert deeper.config == replace(network.config, layers=4)
    words, batch = words_of(tiny_model()), texts().step(0, 3, 0)
    blocks = draw_blocks(batch, count=2, block_size=4, generator=torch.Generator().manual_seed(0))
    taps, _ = read_taps(tiny_model(), batch.token_ids, network.config.tap_layers)
    with torch.inference_mode():
        torch.testing.assert_close(*(draft_states(one, words, batch, blocks, taps) for one in (network, deeper)))
    train(tiny_model(), deeper, texts(), replace(PLAN, steps=2), tmp_path, seconds=1e9, report=lambda *_: None)
    for layer in deeper.layers[2:]:
        for name, parameter in layer.named_parameters():
            assert not name.endswith(("o_proj.weight", "down_proj.weight")) or parameter.abs().max() > 0
