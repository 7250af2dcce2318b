"""Families with multi-head latent attention: one vector a token and layer, whatever the number of heads."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from inference_engine.backends.torch_forward import TorchForward
from inference_engine.backends.torch_loading import serve_loaded
from inference_engine.backends.twin import admit_config, model_class
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.errors import BackendError, InvalidArgument, ModelError
from inference_engine.kernels import expanded_attention
from inference_engine.kernels.ops import REFERENCE
from inference_engine.kernels.ragged_attention import attend_ragged
from inference_engine.kv.geometry import LayerGeometry
from inference_engine.kv.strategies import parse_strategy
from inference_engine.models.families import check_family, step_list
from inference_engine.models.operations import NoStepListError
from inference_engine.models.seam import ATTENTION
from inference_engine.types import Mode
from tests.admissions import admitted_once
from tests.backends.small_families import (
    HISTORIES,
    continued,
    continues_as_transformers,
    fills_its_bound,
    forward_of,
    ids_of,
    loaded,
    own_model,
    stays_within_its_bounds,
)
from tests.facade import in_mode
from tests.further import further
from tests.laws.variants import text
from tests.tiny import PAGES, SMALL, TRAINED_POSITIONS, VOCABULARY

RANK, ROTATED = 32, 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": ROTATED,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "max_position_embeddings": TRAINED_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": TRAINED_POSITIONS // 8,
    "mscale": 0.8,
    "mscale_all_dim": 1.0,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.05 * pair for pair in range(ROTATED // 2)],
    "long_factor": [1.5 + 0.2 * pair for pair in range(ROTATED // 2)],
    "original_max_position_embeddings": TRAINED_POSITIONS // 2,
}
# Of the tokens before it, one reads 20.
INDEXED: dict[str, Any] = {"index_topk": 20, "index_n_heads": 16, "index_head_dim": 12}
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"rope_parameters": YARN},
    # Rotated as complex numbers; queries without a rank, as in the Lite model.
    "deepseek_v2": {"q_lora_rank": None, "topk_method": "greedy", "n_shared_experts": 2},
    "glm4_moe_lite": {"n_group": 1, "rope_interleave": True},
    "minicpm3": {},
    "deepseek_v32": INDEXED,
    "glm_moe_dsa": {**INDEXED, "indexer_types": ["full", "shared", "full"]},
}
FIRST = ("deepseek_v3", "deepseek_v2", "deepseek_v32")
each_kind = pytest.mark.parametrize("kind", [kind if kind in FIRST else further(kind) for kind in KINDS])


def config_of(kind: str) -> PretrainedConfig:
    config: PretrainedConfig = CONFIG_MAPPING[kind](**{**SIZES, **KINDS[kind]})
    return config


class Served(dict[str, tuple[PreTrainedModel, TorchForward]]):
    def __missing__(self, kind: str) -> tuple[PreTrainedModel, TorchForward]:
        config = config_of(kind)
        own = own_model(model_class(config), config)
        self[kind] = own, forward_of(own, admitted_once(own.config, type(own)))
        return self[kind]


@pytest.fixture(scope="module")
def served() -> Served:
    return Served()


@each_kind
@pytest.mark.parametrize("drafts", [further(False), True])
def test_sessions_in_one_batch_their_forks_and_second_turns_continue_as_transformers_does(
    kind: str, drafts: bool, served: Served
) -> None:
    own, forward = served[kind]
    continues_as_transformers(own, forward, drafts=drafts)


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v2", further("glm4_moe_lite"), "minicpm3"])
def test_a_model_is_admitted_with_every_strategy_that_reads_entries_as_they_are(kind: str) -> None:
    config = config_of(kind)
    if kind == "minicpm3":  # as it is published: a table for short sessions, too, by which a moved sink is turned
        config.rope_parameters = LONG_ROPE
    admitted = admitted_once(config, model_class(config))
    assert not admitted.refused
    assert {each.rotary for each in admitted.traits} == {"default"}
    names = {name.partition(":")[0] for name, _ in admitted.differences}
    assert names >= {"full", "sink_window", "layer_window"}


def test_a_token_takes_one_vector_a_layer_and_the_bound_says_so(served: Served) -> None:
    _, forward = served["deepseek_v3"]
    geometry = forward.geometry(**PAGES)
    assert geometry.entry_bytes == 3 * (RANK + ROTATED) * geometry.itemsize
    assert fills_its_bound(forward, 64) == 64 * geometry.entry_bytes


def test_sessions_stay_within_their_bounds_and_other_strategies_are_refused_by_name(served: Served) -> None:
    _, forward = served["deepseek_v3"]
    stays_within_its_bounds(
        forward,
        (
            "sink_window:sink=2,window=20",
            "sink_window:sink=2,window=40,codec=int8,exact_window=20",
            "layer_window:sink=2,window=8,full_layers=1",
            "full:codec=int4,exact_window=20",
            "restored:sink=2,window=20",
        ),
    )
    with Engine(forward, EngineConfig(**SMALL)) as engine:
        for strategy in (
            "gather",
            "tiered:block=4,sink=0,window=20,budget=400,resident_tokens=20",
            "restored:window=16,source=latent,bytes_per_token=64",
        ):
            with pytest.raises(InvalidArgument, match=r"Layer 0.*key of 40 numbers.*with a codec or without"):
                engine.create_session(strategy=parse_strategy(strategy))


@pytest.mark.parametrize("kind", ["deepseek_v2", further("deepseek_v3")])
def test_a_session_past_the_trained_positions_goes_on_as_in_a_model_that_was_trained_for_them(kind: str) -> None:
    """Angles are those of each token's own position there, too: as complex numbers in DeepSeek V2."""
    said = []
    for trained in (TRAINED_POSITIONS, 4 * TRAINED_POSITIONS):
        config = config_of(kind)
        config.max_position_embeddings = trained
        own = own_model(model_class(config), config)
        forward = forward_of(own, admitted_once(config_of(kind), model_class(config)))
        with Engine(forward, EngineConfig(**SMALL)) as engine:
            session = engine.create_session(strategy=parse_strategy("sink_window:sink=4,window=40")).session_id
            engine.append(session, text(TRAINED_POSITIONS + 90))
            said.append(ids_of(engine, session))
    assert said[0] == said[1]


def test_every_weight_of_the_projection_counts(served: Served) -> None:
    """Both halves of `kv_b_proj` are read: a change of either changes what transformers and the engine generate."""
    own, _ = served["deepseek_v3"]
    halves = own.get_submodule("model.layers.1.self_attn.kv_b_proj")
    before = halves.weight.detach().clone()
    history, seen = text(40, seed=5), []
    try:
        for first in (0, SIZES["qk_nope_head_dim"]):
            with torch.no_grad():
                halves.weight.copy_(before)
                halves.weight[first : first + 4] *= -3.0
            with Engine(forward_of(own, admitted_once(own.config, type(own))), EngineConfig(**SMALL)) as engine:
                session = engine.create_session().session_id
                engine.append(session, history)
                seen.append(ids_of(engine, session))
            assert seen[-1] == continued(own, history)
    finally:
        with torch.no_grad():
            halves.weight.copy_(before)
    assert seen[0] != seen[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({"q_lora_rank": 0}, "q_lora_rank is 0"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; numbers are rotated in pairs"),
        ({"qk_nope_head_dim": -1}, "qk_nope_head_dim is -1"),
        ({"v_head_dim": 0}, "v_head_dim is 0"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, of 4 experts"),
        ({"n_group": 3}, "1 of 3 groups"),
    ],
)
def test_a_configuration_at_fault_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    config = DeepseekV3Config(**SIZES)
    for name, value in changes.items():  # past the checks of the library
        setattr(config, name, value)
    with pytest.raises(ModelError, match=said):
        admit_config(config, DeepseekV3ForCausalLM)


def test_a_list_of_keys_and_values_is_not_made_of_such_layers() -> None:
    """Families with such layers have an operation of its own, of which only GPUs have a kernel."""
    for kind in ("minicpm3", "deepseek_v32", "glm_moe_dsa"):
        with pytest.raises(NoStepListError, match=f"no list of operations for the model type '{kind}'"):
            check_family(config_of(kind))
    layer = LayerGeometry(query_heads=4, kv_heads=1, head_dim=48, value_dim=32, shared_dim=32)
    plain = LlamaConfig(vocab_size=VOCABULARY, hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    with pytest.raises(NoStepListError, match="keys of 48 numbers and values of 32, 32 of which"):
        step_list(plain, [layer], ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"])


def test_on_a_device_whose_kernels_take_even_entries_alone_sessions_are_attended_to_by_themselves(
    served: Served,
) -> None:
    """As on a GPU: its operation over all sessions refuses values of another size than keys."""
    own, _ = served["deepseek_v3"]
    taken = copy.deepcopy(own)
    taken.set_attn_implementation(ATTENTION)
    ops = replace(REFERENCE, attends_together=True, attend_ragged=replace(attend_ragged, is_even=True))
    settings = ModelConfig(linear="plain")
    forward = serve_loaded(loaded(taken), settings, admitted_once(own.config, type(own)), ops=ops)
    assert forward.listed is None
    with Engine(forward, EngineConfig(**SMALL)) as engine:
        session = engine.create_session().session_id
        engine.append(session, HISTORIES[0])
        assert ids_of(engine, session) == continued(own, HISTORIES[0])


def test_batch_invariance_is_refused_where_experts_run_on_torchs_modules(served: Served) -> None:
    """The product of an expert is over as many tokens as the step has for it."""
    with pytest.raises(BackendError, match=r"mixture of experts.*start with determinism=off"):
        Engine(in_mode(served["deepseek_v3"][1], Mode.FIXED_SHAPE), EngineConfig(**SMALL))


def test_a_long_prompt_is_expanded_and_single_tokens_are_not(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """And both give what transformers does."""
    own, forward = served["deepseek_v3"]
    counts: list[tuple[int, int]] = []
    expand = expanded_attention.attend_expanded

    def counted(queries: torch.Tensor, compressed: torch.Tensor, *rest: Any, **words: Any) -> torch.Tensor:
        counts.append((len(queries), len(compressed)))
        found: torch.Tensor = expand(queries, compressed, *rest, **words)
        return found

    monkeypatch.setattr(expanded_attention, "attend_expanded", counted)
    with Engine(forward, EngineConfig(**SMALL)) as engine:
        session = engine.create_session().session_id
        engine.append(session, HISTORIES[2])
        assert ids_of(engine, session) == continued(own, HISTORIES[2])
        engine.append(session, [5, 6])
        assert ids_of(engine, session)
    layers = SIZES["num_hidden_layers"]
    assert counts and len(counts) % layers == 0 and min(count for count, _ in counts) > 2
    assert sum(count for count, _ in counts) >= layers * (len(HISTORIES[2]) - 16)
