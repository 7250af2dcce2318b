"""Latent attention to what an indexer chooses: DeepSeek V3.2, GLM 5. That sessions continue as transformers does is in
`test_latent_families.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

from inference_engine.backends.twin import TwinSizes, admit_config, model_class
from inference_engine.cli.models import kept_of
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument, ModelError
from inference_engine.kernels.expanded_attention import WholeEntries
from inference_engine.kernels.topk import topk_by_sorting
from inference_engine.kv.strategies import parse_strategy
from inference_engine.models.indexer import IndexedQueries, IndexedStep, StepIndexer
from inference_engine.models.latent_attention import HeadHalves, LatentQueries
from inference_engine.models.layer_types import layer_types
from tests.admissions import admitted_once
from tests.backends.small_families import COUNT, forward_of, ids_of, own_model
from tests.backends.test_latent_families import KINDS, RANK, ROTATED, SIZES, config_of
from tests.further import further, further_test
from tests.laws.variants import text
from tests.tiny import PAGES, SMALL


class _Cache:
    index_keys: Tensor | None = None


@pytest.mark.parametrize("kind", ["deepseek_v32", further("glm_moe_dsa")])
def test_a_model_is_admitted_with_full_alone_and_its_logits_are_transformers(kind: str) -> None:
    config = config_of(kind)
    admitted = admitted_once(config, model_class(config))
    assert [name for name, _ in admitted.differences] == ["full"] and not admitted.refused
    assert max(difference for _, difference in admitted.differences) < 1e-5


@further_test
def test_a_twin_is_tried_with_any_number_of_rotated_numbers() -> None:
    config = config_of("deepseek_v32")
    assert not admit_config(config, model_class(config), sizes=TwinSizes(head_dim=48, kv_heads=2)).refused


def test_index_keys_are_counted_forks_and_tokens_stay_within_the_bound_and_other_strategies_are_refused() -> None:
    config = config_of("glm_moe_dsa")
    own = own_model(model_class(config), config)
    forward = forward_of(own, admitted_once(config, model_class(config)))
    geometry = forward.geometry(**PAGES)
    latent, index = RANK + ROTATED, config.index_head_dim
    assert [layer.head_dim for layer in geometry.layers] == [latent + index, latent, latent + index]
    assert geometry.entry_bytes == geometry.itemsize * (3 * latent + 2 * index)
    with Engine(forward, EngineConfig(**SMALL)) as engine:
        session = engine.create_session(limit_tokens=200).session_id
        engine.append(session, text(120))
        assert len(ids_of(engine, session)) == COUNT
        fork = engine.fork_session(session, at_position=100).session_id
        engine.append(fork, text(20, seed=3))
        assert len(ids_of(engine, fork)) == COUNT
        for each in (session, fork):
            info = engine.session_info(each)
            assert 0 < info.kv_live_bytes <= info.bound.peak_bytes
        for strategy in (
            "sink_window:sink=0,window=20",
            "full:codec=int8,exact_window=20",
            "gather:block=4,sink=4,window=16,budget=48,scorer=bounds",
            "restored:sink=2,window=20",
        ):
            with pytest.raises(InvalidArgument, match="chooses among all of them, by an indexer"):
                engine.create_session(strategy=parse_strategy(strategy))


@pytest.mark.parametrize("kind", ["glm_moe_dsa", further("deepseek_v3")])
def test_models_show_says_of_a_token_what_is_stored(kind: str) -> None:
    config = config_of(kind)
    own = own_model(model_class(config), config)
    geometry = forward_of(own, admitted_once(config, model_class(config))).geometry(**PAGES)
    kinds = layer_types(config)
    said = [kept_of(config, kinds, number)[0] for number in range(len(kinds))]
    assert said == [layer.entry_bytes(1) for layer in geometry.layers]


def test_how_many_tokens_are_read_changes_what_a_session_says() -> None:
    said = []
    for most in (4, 20, 400):
        config = config_of("deepseek_v32")
        config.index_topk = most
        own = own_model(model_class(config), config)
        with Engine(forward_of(own, admitted_once(config, model_class(config))), EngineConfig(**SMALL)) as engine:
            session = engine.create_session().session_id
            engine.append(session, text(90))
            said.append(tuple(ids_of(engine, session)))
    assert len(set(said)) == 3


@further_test
def test_the_choice_is_that_of_transformers_over_4096_tokens() -> None:
    """2,048 of them, wherever scores differ by more than rounding."""
    length, most = 4096, 2048
    config: PretrainedConfig = CONFIG_MAPPING["deepseek_v32"](
        **{**SIZES, **KINDS["deepseek_v32"], "index_n_heads": 4, "index_topk": most}
    )
    torch.manual_seed(0)
    own = DeepseekV32Indexer(config, 0).eval()
    hidden, query = torch.randn(1, length, config.hidden_size), torch.randn(1, length, config.q_lora_rank)
    angle = torch.arange(length)[:, None] * 10_000 ** -(torch.arange(0, ROTATED, 2) / ROTATED)
    angles = (torch.cat((angle, angle), -1).cos()[None], torch.cat((angle, angle), -1).sin()[None])
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    cache = _Cache()
    with torch.inference_mode():
        theirs = own(hidden, query, angles, causal[None], None)[0]
        step = StepIndexer(own)(hidden, query, angles, None, None, past_key_values=cache)
        assert cache.index_keys is not None
        mask = torch.zeros(length, length).masked_fill(~causal, float("-inf"))
        ours = step.chosen(slice(0, length), cache.index_keys[0, 0], mask)
    checked = 0
    for row in range(most, length, 97):
        mine, other = set(ours[row].tolist()), set(theirs[row].tolist())
        assert len(mine) == most and -1 not in mine
        if odd := sorted(mine ^ other):
            keys = cache.index_keys[0, 0, odd].T
            scores = step.weights[row] @ (step.queries[row] @ keys).relu()
            assert float(scores.max() - scores.min()) < 1e-5
        checked += 1
    assert checked > 20


def test_of_equal_scores_the_earliest_are_chosen_and_nothing_that_is_not_seen() -> None:
    queries, keys = torch.ones(3, 2, 4), torch.ones(9, 4)
    step = IndexedStep(queries, torch.ones(3, 2), most=4)
    mask = torch.zeros(3, 9).masked_fill(torch.arange(9) > torch.tensor([[1], [5], [8]]), float("-inf"))
    assert step.chosen(slice(0, 3), keys, mask).tolist() == [[0, 1, -1, -1], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert step.chosen(slice(0, 3), None, mask).tolist()[1] == [0, 1, 2, 3]


@pytest.mark.parametrize(("count", "before"), [(1, 40), (3, 60), (30, 0), (40, 40)])
def test_what_is_chosen_is_read_as_by_a_mask_however_many_tokens_a_step_has(count: int, before: int) -> None:
    """A few tokens read their entries one by one, many with keys and values of all heads."""
    heads, own, value, index, most = 3, 6, 5, 8, 12
    torch.manual_seed(count)
    halves = HeadHalves(torch.randn(heads * (own + value), RANK), heads=heads, key=own, value=value)
    entries = torch.randn(1, before + count, RANK + ROTATED + index)
    latent = LatentQueries(torch.randn(heads, count, own + ROTATED), halves)
    step = IndexedStep(torch.randn(count, 4, index), torch.rand(count, 4), most)
    seen = torch.arange(before + count) <= before + torch.arange(count)[:, None]
    mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    found = IndexedQueries(latent, step, index).expanded(
        slice(0, count), WholeEntries(entries, entries[..., :RANK], mask), scaling=0.3
    )
    by_head = (step.queries @ entries[0, :, -index:].mT).relu()
    chosen = topk_by_sorting((step.weights[:, None] @ by_head)[:, 0], most, candidates=seen)
    kept = torch.zeros(count, before + count + 1).scatter_(1, chosen.where(chosen >= 0, before + count), 1.0)[:, :-1]
    keys, values = entries[0, :, :-index], entries[0, :, :RANK]
    scores = torch.einsum("thd,sd->ths", latent.absorbed(slice(None)), keys) * 0.3
    weights = scores.masked_fill(kept[:, None] == 0, float("-inf")).softmax(-1)
    torch.testing.assert_close(found, latent.output(weights @ values), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("deepseek_v32", {"index_topk": 0}, "index_topk is 0"),
        ("deepseek_v32", {"index_n_heads": 0}, "index_n_heads is 0"),
        ("deepseek_v32", {"index_head_dim": 4}, "index_head_dim is 4, of which qk_rope_head_dim, 8"),
        ("deepseek_v3", {"index_topk": 16}, "no layer of it has an indexer"),
    ],
)
def test_a_configuration_at_fault_is_refused_by_name(kind: str, changes: dict[str, Any], said: str) -> None:
    config = config_of(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ModelError, match=said):
        admit_config(config)
