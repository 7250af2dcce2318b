"""An EAGLE-3 drafter drafts what the code published with such drafters computes, from bounded, counted memory.

The checkpoints are made, of the names that published ones have; what they compute is written out here once more.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inference_engine.compose import find_drafter, open_backend
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.decode.draft import CommittedTokens, DraftMemory
from inference_engine.engine import Engine
from inference_engine.errors import ModelError
from inference_engine.kernels.gumbel_noise import key, noise
from inference_engine.types import GenerateParams
from kv_cache_proposer.dflash import dflash_fields as dflash
from kv_cache_proposer.dflash.draft_tokens import LIKELIEST
from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.drafter_errors import DrafterError
from kv_cache_proposer.eagle3 import eagle3_fields as eagle3
from kv_cache_proposer.eagle3.eagle3_drafter import Eagle3Drafter
from kv_cache_proposer.eagle3.eagle3_network import Eagle3Network
from kv_cache_proposer.published_drafters import check_published, is_published_drafter, load_published
from tests.kv_cache_proposer.drafter_cases import tiny_eagle3
from tests.kv_cache_proposer.test_dflash import LENGTH, WINDOW, context, drafts, history, wanted
from tests.laws.variants import drain, text, tokens
from tests.tiny import tiny_model

FLAT, NESTED = "AngelSlim", "speculators"
NORMS = {"norm_before_fc": "norms_taps", "norm_before_residual": "norms_residual", "norm_output": "norms_output"}
Weights = dict[str, Tensor]


def embeddings() -> Tensor:
    found: Tensor = tiny_model().get_input_embeddings().weight.detach()
    return found


def made(folder: Path, kind: str, *, seed: int = 0, **own: bool) -> Path:
    """A checkpoint as others save theirs, in one of two formats and in bfloat16. own: of NORMS, and `has_embedding`."""
    network = tiny_eagle3(seed=seed, **{NORMS.get(name, name): value for name, value in own.items()})
    config = network.config
    layer = {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 128, "num_hidden_layers": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6, "model_type": "llama",
        "rope_theta": 10_000.0, "rope_scaling": None, "attention_bias": False, "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16", "use_cache": True,
    }  # fmt: skip
    extra = {"draft_vocab_size": 48, **{name: value for name, value in own.items() if name in NORMS}}
    content: dict[str, Any]
    if kind == FLAT:
        taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}}
        content = {"architectures": ["LlamaForCausalLMEagle3"], **layer, **extra, **taps}
    else:
        proposed = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        content = {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.3.0",
            "transformer_layer_config": layer, "eagle_aux_hidden_state_layer_ids": [1, 2, 3], **extra,
            "speculators_config": {"algorithm": "eagle3", "proposal_methods": [proposed], "verifier": {}},
        }  # fmt: skip
    named = {name: one.to(torch.bfloat16) for name, one in network.state_dict().items()}
    if kind == FLAT:
        named = {name.replace("layers.0.", "midlayer."): one for name, one in named.items()}
    named["d2t"] = network.draft_ids - torch.arange(config.draft_vocabulary)
    named["t2d"] = torch.zeros(config.vocabulary, dtype=torch.bool).index_fill(0, network.draft_ids, True)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    save_file(named, folder / "model.safetensors")
    return folder


def drafter_of(folder: Path, *, window: int = WINDOW) -> Eagle3Drafter:
    network = load_published(folder, target_layers=3, context_window=window)
    assert isinstance(network, Eagle3Network)
    return Eagle3Drafter(network, embeddings(), target_hidden=64)


def taps_of(length: int = LENGTH) -> Tensor:
    return torch.randn(length, 3, 64, generator=torch.Generator().manual_seed(8))


def seen(memory: DraftMemory, ids: Tensor, taps: Tensor, first: int, end: int) -> CommittedTokens:
    return CommittedTokens(memory, first, ids[first:end].numpy().astype(np.uint32), taps[first:end])


def opened(drafter: Eagle3Drafter) -> DraftMemory:
    memory = drafter.open(context())
    assert memory is not None
    return memory


def published_forward(
    folder: Path,
    ids: Tensor,
    taps: Tensor,
    count: int = 5,
    *,
    missing: Sequence[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """The draft that the published code makes of a checkpoint, in float64, without anything of ours: no cache, and the
    whole sequence anew for each token. missing: positions without an entry.
    """
    weights: Weights = {
        name.replace("midlayer.", "layers.0."): one.double() if one.is_floating_point() else one
        for name, one in load_file(folder / "model.safetensors").items()
    }
    content = json.loads((folder / "config.json").read_text())
    table = weights.get("embed_tokens.weight", embeddings().double())

    def norm(states: Tensor, name: str) -> Tensor:
        return states / (states.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"{name}.weight"]

    def product(states: Tensor, name: str) -> Tensor:
        return states @ weights[f"layers.0.{name}.weight"].T

    def turned(states: Tensor, positions: Sequence[int]) -> Tensor:
        rates = 10_000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
        angles = (torch.tensor(positions)[:, None] * rates).repeat(1, 2)[:, None]
        halves = torch.cat([-states[..., 8:], states[..., :8]], dim=-1)
        return states * angles.cos() + halves * angles.sin()

    flat = taps.double().flatten(1)
    if content.get("norm_before_fc"):
        flat = norm(flat, "input_norm")
    first = len(ids) - 2
    states = list(flat[: first + 1] @ weights["fc.weight"].T)
    words = ids.tolist()
    for place in range(count):
        last = first + place
        held = [p for p in range(last + 1) if p >= first or (p >= first - WINDOW and p not in missing)]
        embedded = norm(table[[words[p + 1] for p in held]], "layers.0.input_layernorm")
        hidden = norm(torch.stack([states[p] for p in held]), "layers.0.hidden_norm")
        inputs = torch.cat([embedded, hidden], dim=-1)
        keys = turned(product(inputs, "self_attn.k_proj").view(-1, 2, 16), held)
        values = product(inputs, "self_attn.v_proj").view(-1, 2, 16)
        query = turned(product(inputs[-1:], "self_attn.q_proj").view(1, 4, 16), [last])[0]
        heads = [((keys[:, h // 2] @ query[h]) / 4).softmax(0) @ values[:, h // 2] for h in range(4)]
        residual = hidden[-1] if content.get("norm_before_residual") else states[last]
        state = residual + product(torch.cat(heads), "self_attn.o_proj")
        inner = norm(state, "layers.0.post_attention_layernorm")
        gate = product(inner, "mlp.gate_proj")
        state = state + product(gate * gate.sigmoid() * product(inner, "mlp.up_proj"), "mlp.down_proj")
        normed = norm(state, "norm")
        states.append(normed if content.get("norm_output") else state)
        scores = weights["lm_head.weight"] @ normed
        own = torch.arange(48) + weights["d2t"]
        if temperature:
            likeliest = scores.topk(LIKELIEST).indices
            drawn = noise(torch.tensor(key(seed, last + 2)), own).double() * temperature
            scores = torch.full_like(scores, -torch.inf).index_copy(0, likeliest, (scores + drawn)[likeliest])
        words.append(int(own[scores.argmax()]))
    return words[len(ids) :]


@pytest.mark.parametrize("ends", [(60,), (1, 2, 3, 60), (5, 30, 31, 59, 60), (23, 24, 25, 48, 60)], ids=str)
@pytest.mark.parametrize("kind", [FLAT, NESTED])
def test_a_draft_is_what_the_published_code_computes_however_tokens_arrived(
    kind: str, ends: tuple[int, ...], tmp_path: Path
) -> None:
    folder, ids, taps = made(tmp_path / "drafter", kind), history(), taps_of()
    drafter = drafter_of(folder)
    memory = opened(drafter)
    for first, end in zip([0, *ends], ends, strict=False):
        drafter.observe([seen(memory, ids, taps, first, end)])
    expected = published_forward(folder, ids, taps)
    assert drafts(drafter, [wanted(memory, ids, 5)]) == [expected]
    assert len(set(expected)) > 2
    # Another text behind the same entries, and hidden states of another model, must draft otherwise.
    assert published_forward(folder, torch.cat([ids[:-1], ids[-1:] ^ 1]), taps) != expected
    assert published_forward(folder, ids, taps.flip(1)) != expected


@pytest.mark.parametrize("own", [*NORMS, "has_embedding"])
def test_each_norm_and_an_own_embedding_are_where_the_configuration_and_the_weights_have_them(
    own: str, tmp_path: Path
) -> None:
    ids, taps = history()[:20], taps_of(20)
    folder, plain = made(tmp_path / "own", NESTED, **{own: True}), made(tmp_path / "plain", NESTED)
    drafter = drafter_of(folder)
    memory = opened(drafter)
    drafter.observe([seen(memory, ids, taps, 0, 19)])
    expected = published_forward(folder, ids, taps)
    assert drafts(drafter, [wanted(memory, ids, 5)]) == [expected]
    assert expected != published_forward(plain, ids, taps)


def test_sessions_of_any_length_and_temperature_are_drafted_for_together(tmp_path: Path) -> None:
    folder = made(tmp_path / "drafter", FLAT)
    drafter, place = drafter_of(folder), context()
    sampled: list[dict[str, Any]] = [{}, {"temperature": 2.0, "seed": 3}, {}, {"temperature": 0.5, "seed": 2**64 - 1}]
    texts = [history(seed, length) for seed, length in enumerate((LENGTH, 9, 2, 40))]
    taps = [taps_of(len(ids)) for ids in texts]
    memories = [drafter.open(place) for _ in texts]
    drafter.observe(
        [seen(one, ids, own, 0, len(ids) - 1) for one, ids, own in zip(memories, texts, taps, strict=True) if one]
    )
    asked = [wanted(one, ids, 4, **how) for one, ids, how in zip(memories, texts, sampled, strict=True) if one]
    together = drafts(drafter, asked)
    alone = [published_forward(folder, ids, own, 4, **how) for ids, own, how in zip(texts, taps, sampled, strict=True)]
    assert together == alone
    assert together[1] != published_forward(folder, texts[1], taps[1], 4)


@pytest.mark.parametrize("gap", [range(10, 20), range(3, 50)], ids=str)
def test_positions_that_were_not_observed_are_not_seen(gap: range, tmp_path: Path) -> None:
    folder, ids, taps = made(tmp_path / "drafter", FLAT), history(), taps_of()
    drafter = drafter_of(folder)
    memory = opened(drafter)
    for first, end in ((0, gap.start), (gap.stop, LENGTH - 1)):
        drafter.observe([seen(memory, ids, taps, first, end)])
    # The entry before the gap would have needed the token in it.
    expected = published_forward(folder, ids, taps, missing=range(gap.start - 1, gap.stop))
    assert drafts(drafter, [wanted(memory, ids, 5)]) == [expected]
    assert drafts(drafter, [wanted(memory, torch.cat([ids, ids[:3]]))]) == [[]]  # its last tokens were not observed


def test_memory_is_bounded_counted_and_given_back(tmp_path: Path) -> None:
    drafter, place, ids, taps = drafter_of(made(tmp_path / "drafter", FLAT)), context(), history(), taps_of()
    memory, neighbour = drafter.open(place), drafter.open(place)
    assert memory is not None and neighbour is not None
    entry, carried = 2 * 2 * 16 * place.geometry.itemsize, 64 * place.geometry.itemsize
    assert memory.held_bytes() == 0
    drafter.observe([seen(memory, ids, taps, 0, 1)])
    assert memory.held_bytes() == carried  # the first entry needs the second token
    drafter.observe([seen(memory, ids, taps, 1, 6)])
    assert memory.held_bytes() == 8 * entry + carried  # five entries in two pages
    drafter.observe([seen(neighbour, ids, taps, 0, LENGTH - 1)])
    before = drafts(drafter, [wanted(neighbour, ids, 5)])
    drafter.observe([seen(memory, ids, taps, 6, LENGTH - 1)])
    assert memory.held_bytes() == WINDOW * entry + carried <= place.pool.reserved_bytes // 2
    assert drafts(drafter, [wanted(one, ids, 5) for one in (memory, neighbour)]) == [*before, *before]
    memory.clear()
    assert memory.held_bytes() == 0 and drafts(drafter, [wanted(memory, ids)]) == [[]]
    for one in (memory, neighbour):
        one.release()
    assert place.pool.reserved_bytes == 0


# -- from a folder to a session ---------------------------------------------------------------------------------------


def test_a_published_drafter_drafts_for_a_model_and_changes_no_token(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    folder = made(tmp_path / "drafter", NESTED)
    own = ModelConfig(model=str(tmp_path / "model"), cache_dir=str(tmp_path), drafter=str(folder), backend="torch")
    forward, said = open_backend(own), []
    for model in (own, replace(own, drafter="none")):
        config = EngineConfig(kv_bytes=2**24, segment_tokens=16, page_tokens=4, draft_tokens=3)
        with Engine(forward, config, drafter=find_drafter(model, forward)) as engine:
            session = engine.create_session().session_id
            engine.append(session, text(70))
            said.append(tokens(drain(engine.generate(session, GenerateParams(max_tokens=30)))))
            info = engine.session_info(session)
            assert info.kv_live_bytes <= info.bound.sustained_bytes
            assert (info.drafted_tokens > 30) == (model is own)
    assert said[0] == said[1]
    with pytest.raises(ModelError, match="is a drafter, and no model: name its target"):
        open_backend(replace(own, model=str(made(tmp_path / "flat", FLAT))))
    native = replace(own, backend="native")
    with pytest.raises(DrafterError, match="EAGLE-3 drafters run on torch; start with --backend torch"):
        find_drafter(native, open_backend(native))


def edited(folder: Path, *, within: str = "", **changes: object) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text())
    (content[within] if within else content).update(changes)
    path.write_text(json.dumps(content))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 2}, "num_hidden_layers is 2, only 1"),
    ({"model_type": "qwen3"}, "model_type is 'qwen3', only 'llama'"),
    ({"architectures": ["PEagleDraftModel", "LlamaForCausalLMEagle3"]}, "architectures is .*PEagle"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type is 'llama3'"),
    ({"fc_norm": True}, "fc_norm is True"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
    ({"eagle_config": None}, "a target of 3 layers is too shallow"),
    ({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "what the first layer reads"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 1, 0]}}, "tap_layers cannot be .2, 1, 0."),
    ({"draft_vocab_size": 200}, "cannot draft 200 of 128 ids"),
    ({"hidden_size": 32}, "fc.weight is .64, 192., config.json makes it .32, 96."),
    ({"norm_before_fc": True}, "missing, first input_norm.weight"),
    ({"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash', only 'eagle3'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_run_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "drafter", FLAT)
    edited(folder, **changes)
    with pytest.raises(DrafterError, match=message):
        load_published(folder, target_layers=3)


ODD: list[object] = [None, True, -1, 0, 1.5, 10**30, "x", [], ["x"], [None, -1], {}, {"x": 1}]


@pytest.mark.parametrize("kind", [FLAT, NESTED, "DFlash"])
def test_whatever_a_field_holds_a_folder_is_taken_or_refused(kind: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "drafter", FLAT if kind == "DFlash" else kind)
    path = folder / "config.json"
    whole = json.loads(path.read_text()) if kind != "DFlash" else deepcopy(DFLASH_8B)
    places = [(whole, name) for name in whole]
    places += [(inner, name) for inner in whole.values() if isinstance(inner, dict) for name in inner]
    outcomes = Counter[bool]()
    for content, name in places:
        before = content[name]
        for odd in ODD:
            content[name] = odd
            path.write_text(json.dumps(whole))
            try:
                is_published_drafter(folder)
                check_published(folder, has_weights=False)
                outcomes[True] += 1
            except DrafterError:
                outcomes[False] += 1
        content[name] = before
    assert min(outcomes[True], outcomes[False]) > 50


def without(*names: str) -> Callable[[Weights], object]:
    return lambda weights: [weights.pop(name) for name in names]


DAMAGED: list[tuple[Callable[[Weights], object], str]] = [
    (without("midlayer.hidden_norm.weight"), "1 weights are missing, first layers.0.hidden_norm.weight"),
    (without("d2t"), "no d2t, and 48 of 128 ids"),
    (lambda weights: weights.update(d2t=weights["d2t"][1:].clone()), "d2t is torch.int64 .47., not 48 ids"),
    (lambda weights: weights["d2t"].sub_(10), "d2t gives no ascending ids below 128"),
    (lambda weights: weights["t2d"].logical_not_(), "t2d has other ids than d2t"),
    (lambda weights: weights["lm_head.weight"].view(-1)[0].fill_(torch.nan), "lm_head.weight holds NaN"),
    (lambda weights: weights.update({"extra.weight": torch.zeros(2)}), "unknown, first extra.weight"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGED, ids=[message for _, message in DAMAGED])
def test_weights_are_taken_whole_or_not_at_all(
    damage: Callable[[Weights], object], message: str, tmp_path: Path
) -> None:
    folder = made(tmp_path / "drafter", FLAT)
    weights = load_file(folder / "model.safetensors")
    damage(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(DrafterError, match=message):
        load_published(folder, target_layers=3)


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    network = tiny_eagle3()
    with pytest.raises(DrafterError, match="hidden states of 64 numbers, the target's have 32"):
        Eagle3Drafter(network, embeddings(), target_hidden=32)
    with pytest.raises(DrafterError, match="made for 128 ids, the target has 100"):
        Eagle3Drafter(network, embeddings()[:100], target_hidden=64)
    with pytest.raises(DrafterError, match="embeddings of 64 numbers and has none of its own"):
        Eagle3Drafter(network, embeddings()[:, :32], target_hidden=64)


def test_a_field_that_is_not_known_is_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = made(tmp_path / "drafter", NESTED)
    load_published(folder)
    assert not caplog.records
    edited(folder, resolution_scale=1.0)
    edited(folder, within="transformer_layer_config", moonlight=True)
    load_published(folder)
    assert "fields that are not known: moonlight, resolution_scale" in caplog.text


def test_which_layers_are_read_follows_from_the_format(tmp_path: Path) -> None:
    """A list in eagle_config names outputs, one beside it inputs of layers; without one, it is the usual three."""
    folder = made(tmp_path / "drafter", FLAT)

    def taps(layers: int) -> tuple[int, ...]:
        return load_published(folder, target_layers=layers).config.tap_layers

    assert taps(36) == (0, 1, 2)
    edited(folder, eagle_config=None, eagle_aux_hidden_state_layer_ids=[2, 18, 33])
    assert taps(36) == (1, 17, 32)
    edited(folder, eagle_aux_hidden_state_layer_ids=None)
    assert taps(36) == (1, 17, 32) and taps(32) == (1, 15, 28)


# -- exact names and shapes --------------------------------------------------------------------------------------------

_LAYER = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu"}
QWEN3_4B = {**_LAYER, "hidden_size": 2560, "intermediate_size": 9728, "vocab_size": 151936, "rms_norm_eps": 1e-6}
QWEN3_8B = {**_LAYER, "hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936, "rms_norm_eps": 1e-6}
LLAMA_8B = {**_LAYER, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "rms_norm_eps": 1e-5}
# z-lab/Qwen3-8B-DFlash-b16
DFLASH_8B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], **QWEN3_8B, "num_hidden_layers": 5, "model_type": "qwen3",
    "block_size": 16, "num_target_layers": 36, "rope_theta": 1e6, "rope_scaling": None, "attention_bias": False,
    "attention_dropout": 0.0, "layer_types": ["full_attention"] * 5, "max_window_layers": 5, "dtype": "bfloat16",
    "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False, "use_cache": True,
    "bos_token_id": 151643, "eos_token_id": 151645, "initializer_range": 0.02, "max_position_embeddings": 40960,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "transformers_version": "4.57.3",
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}  # fmt: skip
EAGLE = {"num_hidden_layers": 1, "model_type": "llama", "draft_vocab_size": 32000}


@pytest.mark.parametrize(
    ("content", "hidden", "inner", "layers"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"], **QWEN3_4B, **EAGLE, "rope_theta": 1e6}, 2560, 9728, 36),
        ({"architectures": ["Eagle3LlamaForCausalLM"], **QWEN3_8B, **EAGLE, "rope_theta": 1e6}, 4096, 12288, 36),
        ({"architectures": ["LlamaForCausalLM"], **LLAMA_8B, **EAGLE}, 4096, 14336, 32),
        (
            {
                "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 32000,
                "norm_before_residual": True, "transformer_layer_config": {**LLAMA_8B, **EAGLE, "rope_theta": 1e4},
            },
            4096, 14336, 32,
        ),
    ],
    ids=["AngelSlim/Qwen3-4B", "AngelSlim/Qwen3-8B", "yuhuili/LLaMA3.1-8B", "RedHatAI/Llama-3.1-8B"],
)  # fmt: skip
def test_eagle3_checkpoints_have_these_names_and_shapes(
    content: dict[str, Any], hidden: int, inner: int, layers: int
) -> None:
    config = eagle3.read_config(
        content, Path("config.json"), context_window=2048, target_layers=layers, has_embedding=False
    )
    with torch.device("meta"):
        found = {name: tuple(one.shape) for name, one in Eagle3Network(config).state_dict().items()}
    assert found == {
        "fc.weight": (hidden, 3 * hidden),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.hidden_norm.weight": (hidden,),
        "layers.0.self_attn.q_proj.weight": (4096, 2 * hidden),
        "layers.0.self_attn.k_proj.weight": (1024, 2 * hidden),
        "layers.0.self_attn.v_proj.weight": (1024, 2 * hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, 4096),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (32000, hidden),
    }
    assert config.tap_layers == (1, layers // 2 - 1, layers - 4)


def test_dflash_checkpoints_have_these_names_and_shapes(caplog: pytest.LogCaptureFixture) -> None:
    config = dflash.read_config(DFLASH_8B, Path("config.json"), context_window=2048, target_layers=36)
    with torch.device("meta"):
        found = {name: tuple(one.shape) for name, one in DFlashNetwork(config).state_dict().items()}
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (4096,), "post_attention_layernorm": (4096,),
        "self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (1024, 4096), "self_attn.v_proj": (1024, 4096),
        "self_attn.o_proj": (4096, 4096), "self_attn.q_norm": (128,), "self_attn.k_norm": (128,),
        "mlp.gate_proj": (12288, 4096), "mlp.up_proj": (12288, 4096), "mlp.down_proj": (4096, 12288),
    }  # fmt: skip
    expected = {f"layers.{n}.{name}.weight": shape for n in range(5) for name, shape in shapes.items()}
    assert found == {
        **expected, "fc.weight": (4096, 5 * 4096), "hidden_norm.weight": (4096,), "norm.weight": (4096,),
    }  # fmt: skip
    assert not caplog.records
    with pytest.raises(DrafterError, match="num_target_layers is 36, this model has 32"):
        dflash.read_config(DFLASH_8B, Path("config.json"), context_window=2048, target_layers=32)


@pytest.mark.parametrize("kind", [FLAT, NESTED])
def test_a_folder_is_checked_by_its_configuration_and_then_by_its_headers(kind: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "drafter", kind, has_embedding=True)
    assert is_published_drafter(folder)
    check_published(folder, has_weights=True)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    check_published(folder, has_weights=False)
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        check_published(folder, has_weights=True)
    (folder / "model.safetensors").write_bytes(whole)
    edited(folder, draft_vocab_size=40)
    with pytest.raises(DrafterError, match=r"lm_head\.weight is .48, 64., config.json makes it .40, 64."):
        check_published(folder, has_weights=True)
    tiny_model().save_pretrained(tmp_path / "model")
    assert not is_published_drafter(tmp_path / "model")
