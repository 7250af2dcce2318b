"""A trained drafter comes back as it was saved, or not at all; a published one is taken whole or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inference_engine.errors import ModelError
from inference_engine.models.checksums import sha256_of
from kv_cache_proposer.dflash.drafter_files import MANIFEST, TENSORS, load_drafter, save_drafter, stored_target
from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.drafter_errors import DrafterError, ForeignDrafter
from kv_cache_proposer.published_drafters import load_published
from kv_cache_proposer.stored import StoredManifest
from tests.kv_cache_proposer.drafter_cases import tiny_network

DIGEST = "5f" * 32
MADE = StoredManifest(
    target_digest=DIGEST,
    recipe={"steps": 7},
    seeds={"training": 3},
    commit="abc",
    metrics={"acceptance_length_chat": 2.5},
)

ROUNDED = 0.1  # of a matrix: 16 levels of a normal distribution lose 0.08

Edit = Callable[[dict[str, Tensor]], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_drafter(tiny_network(), tmp_path / "drafter", MADE)
    return tmp_path / "drafter"


def rewrite_manifest(folder: Path, **changes: object) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite_tensors(folder: Path, edit: Edit) -> None:
    """Other tensors, with a manifest that vouches for them."""
    tensors = load_file(folder / TENSORS)
    edit(tensors)
    save_file(tensors, folder / TENSORS)
    rewrite_manifest(folder, tensors_sha256=sha256_of(folder / TENSORS))


def test_a_drafter_comes_back_rounded_to_four_bits(folder: Path) -> None:
    network, (loaded, manifest) = tiny_network(), load_drafter(folder, target_digest=DIGEST)
    assert manifest == MADE and stored_target(folder) == DIGEST
    assert loaded.config == network.config
    for (name, exact), found in zip(network.state_dict().items(), loaded.state_dict().values(), strict=True):
        if exact.ndim == 1:
            assert torch.equal(found, exact), name
        else:
            assert float((found - exact).norm() / exact.norm()) < ROUNDED, name


def test_columns_of_different_size_are_rounded_alike(tmp_path: Path) -> None:
    network = tiny_network()
    network.fc.weight.data *= torch.logspace(-4, 4, network.fc.in_features)
    save_drafter(network, tmp_path, MADE)
    found = load_drafter(tmp_path, target_digest=DIGEST)[0].fc.weight
    errors = (found - network.fc.weight).norm(dim=0) / network.fc.weight.norm(dim=0)
    assert float(errors.max()) < 2 * ROUNDED


def test_another_models_drafter_is_refused(folder: Path) -> None:
    with pytest.raises(ForeignDrafter, match=f"{DIGEST}, this one has abc"):
        load_drafter(folder, target_digest="abc")


def drop(name: str) -> Edit:
    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return edit


def shorten(name: str) -> Edit:
    return lambda tensors: tensors.update({name: tensors[name][:-1].clone()})


def spoil(name: str) -> Edit:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[0] = torch.nan

    return edit


DAMAGES: list[tuple[Edit, str]] = [
    (drop("fc.weight"), "fc.weight is missing"),
    (drop("layers.1.mlp.up_proj.weight.groups"), "up_proj.weight.groups is missing"),
    (drop("layers.0.self_attn.q_norm.weight"), "q_norm.weight is missing"),
    (shorten("layers.0.self_attn.k_proj.weight"), "k_proj.weight is"),
    (spoil("norm.weight"), "norm.weight holds NaN"),
    (lambda tensors: tensors.update({"layers.9.weight": torch.zeros(2)}), r"layers\.9\.weight"),
]


@pytest.mark.parametrize(("edit", "message"), DAMAGES, ids=[message for _, message in DAMAGES])
def test_a_damaged_drafter_is_refused_by_the_name_of_what_is_wrong(folder: Path, edit: Edit, message: str) -> None:
    rewrite_tensors(folder, edit)
    with pytest.raises(DrafterError, match=message):
        load_drafter(folder, target_digest=DIGEST)


def test_a_truncated_file_and_an_empty_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-3])
    with pytest.raises(ModelError, match="truncated"):
        load_drafter(folder, target_digest=DIGEST)
    with pytest.raises(DrafterError, match="no drafter"):
        load_drafter(tmp_path, target_digest=DIGEST)


# -- published ones ---------------------------------------------------------------------------------------------------


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """As others save theirs: bfloat16, sizes beside what DFlash adds."""
    config = tiny_network().config
    content = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.query_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": 1_000_000,
        "rope_scaling": None,
        "attention_bias": False,
        "hidden_act": "silu",
        "block_size": 16,
        "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 9},
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in tiny_network().state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


def test_a_published_drafter_is_loaded_by_its_names(published: Path) -> None:
    network = load_published(published)
    expected = replace(
        tiny_network().config,
        tap_layers=(0, 2),
        block_size=16,
        mask_token_id=9,
        rope_theta=1_000_000,
        context_window=2048,
        embedding_scale=1.0,
    )
    assert network.config == expected
    for name, tensor in tiny_network().state_dict().items():
        assert torch.equal(network.state_dict()[name], tensor.to(torch.bfloat16).float())


PUBLISHED_DAMAGES: list[tuple[Edit, str]] = [
    (drop("hidden_norm.weight"), "1 weights are missing, first hidden_norm.weight"),
    (drop("layers.1.self_attn.k_norm.weight"), "k_norm.weight"),
    (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(2)}), "unknown, first lm_head.weight"),
    (shorten("fc.weight"), "fc.weight is"),
    (spoil("layers.0.mlp.gate_proj.weight"), "gate_proj.weight holds NaN"),
]


@pytest.mark.parametrize(("edit", "message"), PUBLISHED_DAMAGES, ids=[message for _, message in PUBLISHED_DAMAGES])
def test_published_weights_are_taken_whole_or_not_at_all(published: Path, edit: Edit, message: str) -> None:
    path = published / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)
    with pytest.raises(DrafterError, match=message):
        load_published(published)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"dflash_config": {"mask_token_id": 9}}, "target_layer_ids"),
        ({"block_size": "many"}, "block_size"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types has chunked_attention"),
        ({"layer_types": "sliding_attention"}, "'sliding_attention', not a list of 2"),
        ({"layer_types": ["full_attention"]}, "not a list of 2"),
        ({"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 8}, "windows .*8, 8"),
        ({"is_causal": "no"}, "is_causal is 'no'"),
        ({"architectures": ["DFlash2DraftModel"]}, "architectures is .*DFlash2DraftModel"),
        ({"dflash_config": {"conv_kernel_size": 4}}, "conv_kernel_size is 4"),
        ({"dflash_config": {"selector_rank": 64}}, "selector_rank is 64"),
        ({"dflash_config": {"use_swa": True}}, "use_swa is True"),
        ({"attention_sink_bias": True}, "attention_sink_bias is True.*--drafter auto"),
        ({"input_embedding_scale": 0}, "embedding_scale cannot be 0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"output_multiplier": 0.5}, "output_multiplier is 0.5"),
    ],
    ids=str,
)
def test_a_kind_of_drafter_that_cannot_be_run_is_refused(
    published: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(published, **changes)
    with pytest.raises(DrafterError, match=message):
        load_published(published)


SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWED = {"use_sliding_window": True, "sliding_window": 20}


@pytest.mark.parametrize(
    ("changes", "windows", "causal"),
    [
        ({"layer_types": [FULL] * 2, "sliding_window": 20, "is_causal": False}, (0, 0), (False, False)),
        ({"use_sliding_window": False, "sliding_window": 20, "max_window_layers": 0}, (0, 0), (False, False)),
        ({**WINDOWED, "max_window_layers": 2}, (0, 0), (False, False)),
        ({**WINDOWED, "max_window_layers": 1}, (0, 20), (False, True)),
        ({**WINDOWED, "layer_types": [SLIDING, FULL]}, (20, 0), (True, False)),
        ({**WINDOWED, "layer_types": [SLIDING] * 2}, (20, 20), (True, True)),
        ({**WINDOWED, "layer_types": [SLIDING, FULL], "is_causal": False}, (20, 0), (False, False)),
        ({**WINDOWED, "layer_types": [SLIDING, FULL], "is_causal": True}, (20, 0), (True, True)),
        ({"layer_types": [SLIDING, FULL], "sliding_window": 20}, (0, 0), (True, False)),
        ({"is_causal": True}, (0, 0), (True, True)),
        ({"final_logit_softcapping": None, "output_multiplier": 1.0, "selector_rank": None}, (0, 0), (False, False)),
    ],
    ids=str,
)
def test_layers_compute_what_the_published_code_makes_of_the_configuration(
    published: Path, changes: dict[str, Any], windows: tuple[int, ...], causal: tuple[bool, ...]
) -> None:
    edit_config(published, **changes)
    network = load_published(published)
    assert isinstance(network, DFlashNetwork)
    taps, block = (torch.randn(1, count, *width) for count, width in ((50, (2, SIZE)), (16, (SIZE,))))
    context = network.context(taps, torch.arange(50)[None])
    everything = torch.ones(1, 1, 1, 66, dtype=torch.bool)
    states = network(block, torch.arange(50, 66)[None], context, everything, torch.arange(50)[None])
    weights = load_file(published / "model.safetensors")
    expected = plain_forward({name: one.double() for name, one in weights.items()}, taps, block, windows, causal)
    torch.testing.assert_close(states.double(), expected, rtol=1e-5, atol=1e-5)


SIZE = tiny_network().config.hidden


def plain_forward(
    weights: dict[str, Tensor], taps: Tensor, block: Tensor, windows: tuple[int, ...], causal: tuple[bool, ...]
) -> Tensor:
    """What the code published with the drafters computes, in float64, without anything of ours: a sum for each query.

    taps: [1, S, taps, hidden], block: [1, T, hidden] behind them.
    """
    config = tiny_network().config
    heads, kv_heads, width = config.query_heads, config.kv_heads, config.head_dim

    def norm(states: Tensor, name: str) -> Tensor:
        return states / (states.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[f"{name}.weight"]

    def turned(states: Tensor, first: int) -> Tensor:
        """[S, heads, D], from position `first` on."""
        rates = 1_000_000 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = (torch.arange(first, first + len(states))[:, None] * rates).repeat(1, 2)[:, None]
        halves = torch.cat([-states[..., width // 2 :], states[..., : width // 2]], dim=-1)
        return states * angles.cos() + halves * angles.sin()

    before, states = norm(taps[0].double().flatten(1) @ weights["fc.weight"].T, "hidden_norm"), block[0].double()
    first = len(before)
    for layer, (window, is_causal) in enumerate(zip(windows, causal, strict=True)):
        own, inner = f"layers.{layer}", norm(states, f"layers.{layer}.input_layernorm")
        product = {name: weights[f"{own}.self_attn.{name}_proj.weight"].T for name in "qkvo"}
        queries = norm((inner @ product["q"]).view(-1, heads, width), f"{own}.self_attn.q_norm")
        read = torch.cat([before, inner])
        keys = norm((read @ product["k"]).view(-1, kv_heads, width), f"{own}.self_attn.k_norm")
        queries, keys = turned(queries, first), turned(keys, 0)
        values = (read @ product["v"]).view(-1, kv_heads, width)
        out = torch.zeros_like(queries)
        for query in range(len(states)):
            away = [first + query - key for key in range(len(read))]
            seen = [
                key
                for key, distance in enumerate(away)
                if not (is_causal and distance < 0) and not (window and abs(distance) >= window)
            ]
            for head in range(heads):
                shared = head // (heads // kv_heads)
                scores = keys[seen, shared] @ queries[query, head] * width**-0.5
                out[query, head] = scores.softmax(0) @ values[seen, shared]
        states = states + out.flatten(1) @ product["o"]
        inner = norm(states, f"{own}.post_attention_layernorm")
        gate, up, down = (weights[f"{own}.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        gates = inner @ gate
        states = states + (gates * gates.sigmoid() * (inner @ up)) @ down
    return norm(states, "norm")[None]


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
