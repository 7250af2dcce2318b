"""Gemma 4: heads of a size by layer, keys rotated in part, values that are keys, layers that read another's entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, PreTrainedModel

from inference_engine.backends.torch_forward import TorchForward
from inference_engine.backends.twin import Twin, TwinSizes, _in_chunks, admit_config
from inference_engine.cli.models import kept_of
from inference_engine.errors import InvalidArgument, ModelError
from inference_engine.kv.strategies import parse_strategy
from inference_engine.models import seam
from laboratory.training.capture import capture, require_stored_keys
from tests.admissions import admitted_once
from tests.backends.small_families import (
    continues_as_transformers,
    fills_its_bound,
    forward_of,
    own_model,
    stays_within_its_bounds,
)
from tests.further import further
from tests.laws.variants import text
from tests.tiny import PAGES, TRAINED_POSITIONS, VOCABULARY

SLIDING, FULL = "sliding_attention", "full_attention"
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
    "sliding_window": 24,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": TRAINED_POSITIONS,
    "final_logit_softcapping": 30.0,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Dense and large: the values of global layers are their keys, normed apart.
LARGE: dict[str, Any] = {
    **SIZES,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "use_bidirectional_attention": "vision",
}
MIXTURE: dict[str, Any] = {
    **LARGE,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
# E2B's: inputs for each layer, and the last four layers read what layers 2 and 3 keep.
SMALL_E: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 8,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 2,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}
KINDS = {"large": LARGE, "mixture": MIXTURE, "small": SMALL_E}
each_kind = pytest.mark.parametrize("kind", [further("large"), "mixture", "small"])


def gemma4(kind: str) -> PreTrainedModel:
    return own_model(Gemma4ForCausalLM, Gemma4TextConfig(**KINDS[kind]))


@pytest.fixture(scope="module")
def served() -> dict[str, tuple[PreTrainedModel, TorchForward]]:
    found = {}
    for kind in KINDS:
        own = gemma4(kind)
        found[kind] = own, forward_of(own, admitted_once(own.config, type(own)))
    return found


@each_kind
@pytest.mark.parametrize("drafts", [further(False), True])
def test_sessions_in_one_batch_their_forks_and_second_turns_continue_as_transformers_does(
    kind: str, drafts: bool, served: dict[str, tuple[PreTrainedModel, TorchForward]]
) -> None:
    own, forward = served[kind]
    continues_as_transformers(own, forward, drafts=drafts)


@each_kind
def test_every_strategy_serves_it_and_stays_within_its_bound(
    kind: str, served: dict[str, tuple[PreTrainedModel, TorchForward]]
) -> None:
    _, forward = served[kind]
    assert not forward.facts.refused_strategies
    stays_within_its_bounds(
        forward,
        (
            "sink_window:sink=2,window=20",
            "layer_window:sink=2,window=8,full_layers=3",
            "full:codec=int8,exact_window=20",
            "gather:block=4,sink=4,window=16,budget=48",
        ),
    )


def test_entries_that_several_layers_read_are_stored_and_counted_once(
    served: dict[str, tuple[PreTrainedModel, TorchForward]],
) -> None:
    _, forward = served["small"]
    geometry = forward.geometry(**PAGES)
    assert geometry.reads == (0, 1, 2, 3, 2, 2, 2, 3)
    assert [(layer.kv_heads, layer.head_dim, layer.native_window) for layer in geometry.layers] == [
        (1, 16, 24),
        (1, 16, 24),
        (1, 16, 24),
        (1, 32, None),
    ]
    assert geometry.entry_bytes == 2 * (3 * 16 + 32) * geometry.itemsize
    fills_its_bound(forward)


def test_options_of_strategies_number_the_layers_of_the_model(
    served: dict[str, tuple[PreTrainedModel, TorchForward]],
) -> None:
    geometry = served["small"][1].geometry(**PAGES)
    last = parse_strategy("layer_window:sink=2,window=8,full_layers=7")  # which reads what layer 3 keeps
    last.check(geometry)
    assert [last.rule(layer, geometry).window for layer in (2, 3)] == [None, None]
    exact = parse_strategy("full:codec=int8,exact_window=8,exact_layers=7")
    exact.check(geometry)
    assert exact.rule(3, geometry).exact is None and exact.rule(2, geometry).exact == 8
    for strategy, said in (
        ("layer_window:sink=2,window=8,full_layers=6", "layers that can be kept full: 3, 7"),
        ("layer_window:sink=2,window=8,full_layers=8", "the model has 8 layers, 0 to 7"),
        ("full:codec=int8,exact_window=8,exact_layers=8", "layers 0 to 7, got 8"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            parse_strategy(strategy).check(geometry)


def test_calibration_sees_values_that_come_from_the_projection_of_the_keys() -> None:
    own = gemma4("large")
    (state,) = next(capture(own, [torch.tensor([text(20)])], layers=[3]))
    turned = 8  # of 32 numbers
    assert torch.equal(state.keys[..., :-turned], state.values[..., turned:])
    weight = own.get_submodule("model.layers.3.self_attn.k_norm").weight
    first = torch.cat((weight[:4], weight[16:20]))
    torch.testing.assert_close(state.keys[..., -turned:], state.values[..., :turned] * first)
    require_stored_keys(own, layers=[3])


def test_values_made_of_keys_are_stored_once_and_give_the_logits_of_both(
    served: dict[str, tuple[PreTrainedModel, TorchForward]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, forward = served["mixture"]
    geometry = forward.geometry(**PAGES)
    *sliding, wide = geometry.layers
    assert (wide.head_dim, wide.shared_dim, wide.entry.width) == (32, 24, 40) and not any(
        layer.shared_dim for layer in sliding
    )
    assert wide.entry_bytes(2) == 0.625 * 2 * 2 * wide.head_dim
    assert kept_of(own.config, own.config.layer_types, 3)[0] == wide.entry_bytes(1)
    traits = admitted_once(own.config, type(own)).traits

    def logits() -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            twin = Twin(type(own), own.config, traits, TwinSizes())
        shared.append(twin.geometry.layers[-1].shared_dim)
        return _in_chunks(twin, 16, is_alone=False)

    shared: list[int] = []
    once = logits()
    monkeypatch.setattr(seam, "keyed_layers", lambda *_: {})
    twice = logits()
    assert shared == [24, 0]
    assert float((once - twice).abs().max()) <= 1e-6 * float(twice.abs().max())


def test_layers_that_read_entries_of_such_a_layer_read_them_as_it_does() -> None:
    """No published size has both; a configuration may."""
    config = Gemma4TextConfig(**{**SMALL_E, "attention_k_eq_v": True, "num_global_key_value_heads": 1})
    admitted = admit_config(config)
    assert [trait.reads for trait in admitted.traits[4:]] == [2, 2, 2, 3]
    assert not admitted.refused and max(difference for _, difference in admitted.differences) < 1e-5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_bidirectional_attention": "all"}, "bidirectional attention"),
        ({"layer_types": [SLIDING] * 4 + [FULL] * 4}, "no earlier layer of their type"),
        ({"layer_types": [SLIDING] * 3 + ["chunked_attention"] * 4 + [FULL]}, "layers of type chunked_attention"),
        ({"num_key_value_heads": 3}, "layer 0: 4 query heads are no multiple of 3 KV heads"),
    ],
)
def test_a_configuration_at_fault_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        admit_config(Gemma4TextConfig(**{**SMALL_E, **changes}))
