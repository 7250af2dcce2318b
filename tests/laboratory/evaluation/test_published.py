"""Methods of papers: what reads everything is full attention, what reads less differs, and each does what it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.kv.strategies.full import Full
from laboratory.evaluation import ladder, published
from laboratory.evaluation.models import Target
from laboratory.evaluation.passages import force, text_passage
from laboratory.evaluation.published_methods import METHODS, Loki, Method, Prompted, Quest, ShadowKV, SnapKV
from tests.laboratory.typed import typed_for

LENGTH, FORCED = 300, 6
ROUNDING = 1e-4  # nats: other orders of sums


def made(target: Target, budget: int) -> list[Method]:
    methods = [kind(budget) for kind in METHODS.values()]
    published.calibrate(target, methods, "looped", 0)
    return methods


def test_what_reads_less_of_a_prompt_is_further_from_full_attention(tiny_torch_target: Target) -> None:
    passages = [text_passage(tiny_torch_target.texts, "prose", LENGTH, FORCED, "0")]
    apart = {
        budget: published.divergences(tiny_torch_target, made(tiny_torch_target, budget), passages)
        for budget in (64, 200)
    }
    for less, more in zip(*(found.values() for found in apart.values()), strict=True):
        assert np.concatenate(less).mean() > np.concatenate(more).mean() > ROUNDING / 10


def test_full_attention_here_predicts_what_the_engine_does(tiny_torch_target: Target) -> None:
    """A method without limits answers a prompt as `full` does."""
    passage = text_passage(tiny_torch_target.texts, "looped", LENGTH, 1, "0")
    sessions = published._Sessions(published.seam_of(tiny_torch_target), torch.device("cpu"), count=1, capacity=LENGTH)
    ours = sessions.read_prompts(torch.tensor([passage.prefix])).float().log_softmax(-1)
    theirs: list[Tensor] = []
    force(tiny_torch_target.engine, Full(), passage, lambda _place, logits: theirs.append(logits.clone()))
    torch.testing.assert_close(ours, theirs[0].float().log_softmax(-1), rtol=1e-3, atol=1e-3)


def prompted(seed: int = 0, tokens: int = 100, *, index: int = 2) -> Prompted:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn((1, 2, tokens, 8), generator=generator)
    queries = torch.randn((1, 4, 40, 8), generator=generator)

    def turn(keys: Tensor, *, back: bool) -> Tensor:
        return -keys

    return Prompted(keys=keys, queries=queries, scaling=8**-0.5, layer=index, turn=turn)


def test_quest_reads_the_pages_whose_bounds_allow_most_and_the_last(subtests: pytest.Subtests) -> None:
    layer = prompted()
    choice = Quest(32).choice(layer)
    query = torch.randn((1, 4, 8), generator=torch.Generator().manual_seed(1))
    seen = choice.seen(query)
    for head in range(4):
        with subtests.test(head=head):
            pages = [layer.keys[0, head // 2, start : start + 16] for start in range(0, 100, 16)]
            bounds = [
                float(torch.maximum(query[0, head] * page.amin(0), query[0, head] * page.amax(0)).sum())
                for page in pages[:-1]
            ]
            expected = {int(np.argmax(bounds)), 6}
            assert {place // 16 for place in seen[0, head].nonzero().flatten().tolist()} == expected
    assert Quest(32).choice(prompted(index=0)).seen(query).all()


def test_loki_reads_the_tokens_of_largest_product_in_few_components() -> None:
    layer = prompted()
    method = Loki(10)
    low = torch.randn((2, 2), generator=torch.Generator().manual_seed(2)) @ torch.eye(8)[:2]
    keys = torch.randn((2, 500, 2), generator=torch.Generator().manual_seed(3)) @ low
    method.calibrate(2, keys)
    query = torch.zeros((1, 4, 8))
    query[..., :2] = 1.0
    seen = method.choice(layer).seen(query)
    best = (layer.keys[0, 0, :, :2].sum(-1)).topk(10).indices.sort().values
    assert torch.equal(seen[0, 0].nonzero().flatten(), best)


def test_snapkv_keeps_what_the_last_queries_look_at_whatever_is_asked_later() -> None:
    layer = prompted()
    layer.keys[0, 0, 20] = 30 * layer.queries[0, 0, -1]
    choice = SnapKV(48).choice(layer)
    one, other = (choice.seen(torch.randn((1, 4, 8))) for _ in range(2))
    assert torch.equal(one, other)
    assert one[0, 0, 20] and one[0, :, -32:].all()
    assert one.sum(-1).tolist() == [[48] * 4]


def test_shadowkv_rebuilds_keys_of_low_rank_and_keeps_outliers_and_the_last_exact() -> None:
    layer = prompted(tokens=400)
    method = ShadowKV(200)
    choice = method.choice(layer)
    seen = choice.seen(torch.randn((1, 4, 8), generator=torch.Generator().manual_seed(1)))
    assert ((seen.sum(-1) <= 200) & (seen.sum(-1) >= 200 - method.chunk)).all()
    assert torch.equal(choice.keys[:, :, -method.local :], layer.keys[:, :, -method.local :])
    exact = (choice.keys == layer.keys).all(-1)
    assert method.exact_chunks() * method.chunk <= int(exact[0, 0].sum()) < 200
    assert not torch.equal(choice.keys, layer.keys)


def test_the_ladder_has_lines_of_papers_methods(tiny_torch_target: Target) -> None:
    common = ("--kind=looped", "--control=sink_window:sink=4,window=16", "--count=4", "--texts=1", "--rounds=1")
    few = ("--tokens=2", "--trials=1", "--lengths=401", "--trained=433", "--task=values", "--published-budget=96")
    typed = typed_for(ladder.add_arguments, *common, *few, "--published", "snapkv", "quest")
    payload = ladder.main(typed, tiny_torch_target)
    rows = payload["tables"]["as published"]
    assert [row["method"] for row in rows] == ["SnapKV, 96 of the prompt", "Quest, 96 of the prompt"]
    for row in rows:
        assert row["KL"] > 0 and row["values"] in (0, 1) and row["bytes"] > 0
