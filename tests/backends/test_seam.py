"""The seam gives the model's own answers: against transformers' eager attention, for several families."""

from __future__ import annotations

import copy
from typing import cast

import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from inference_engine.backends.admission import admit, shrunken
from inference_engine.errors import ModelError
from inference_engine.kv.strategies.full import Full
from inference_engine.models.seam import ATTENTION, RowRotary, Seam
from inference_engine.types import Mode
from tests.laws.variants import each_mode, generate, text
from tests.tiny import tiny_engine, tiny_model

SERVED: list[tuple[type[PreTrainedModel], PretrainedConfig]] = [
    (LlamaForCausalLM, LlamaConfig(num_key_value_heads=8)),
    (LlamaForCausalLM, LlamaConfig(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4})),
    (Qwen3ForCausalLM, Qwen3Config(use_sliding_window=True, sliding_window=64, max_window_layers=14)),
    (Gemma2ForCausalLM, Gemma2Config()),  # soft-capped scores, alternating windows
    (Gemma3ForCausalLM, Gemma3TextConfig()),  # two rotary tables, five windows to one
    (GlmForCausalLM, GlmConfig()),  # half of each head rotated, interleaved
    (SmolLM3ForCausalLM, SmolLM3Config()),  # every fourth layer without rotation
    (GptOssForCausalLM, GptOssConfig()),  # a learned sink in each head's softmax
]
REFUSED: list[tuple[type[PreTrainedModel], PretrainedConfig, str]] = [
    (BloomForCausalLM, BloomConfig(), "rotate"),
    (MambaForCausalLM, MambaConfig(), "twin"),
    (
        LlamaForCausalLM,
        LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "dynamic",
    ),
]


def shell(kind: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Something of the class and config, without the weights of its real size: admission asks no more."""
    model = object.__new__(kind)
    object.__setattr__(model, "config", config)
    return model


@pytest.mark.parametrize(("kind", "config"), SERVED, ids=lambda value: getattr(value, "__name__", ""))
def test_an_architecture_that_is_served_rightly_is_admitted(
    kind: type[PreTrainedModel], config: PretrainedConfig
) -> None:
    admit(shell(kind, config))


@pytest.mark.parametrize(("kind", "config", "why"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_an_architecture_that_is_not_is_refused_with_the_reason(
    kind: type[PreTrainedModel], config: PretrainedConfig, why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        admit(shell(kind, config))


def test_a_model_that_attends_otherwise_than_its_geometry_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The admission test can fail: here the seam forgets the windows."""
    monkeypatch.setattr("inference_engine.models.seam._native_window", lambda *_: None)
    with pytest.raises(ModelError):
        admit(shell(Gemma3ForCausalLM, Gemma3TextConfig()))


def test_the_twin_is_small_and_its_windows_bite() -> None:
    small = shrunken(Gemma3TextConfig())
    assert small.num_hidden_layers <= 4
    assert small.sliding_window == 8
    assert set(small.layer_types) == {"full_attention", "sliding_attention"}
    assert Gemma3TextConfig().sliding_window > 8


@each_mode
@pytest.mark.parametrize("windowed", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_greedy_output_equals_transformers_generate(mode: Mode, windowed: bool, seed: int) -> None:
    history = text(130, seed=seed)
    own = tiny_model(windowed=windowed).generate(torch.tensor([history]), max_new_tokens=40, do_sample=False)
    with tiny_engine(windowed=windowed, mode=mode) as engine:
        session = engine.create_session(strategy=Full()).session_id
        engine.append(session, history)
        ours = [token for token, _ in generate(engine, session, 40)]
    assert ours == own[0, len(history) :].tolist()


def test_logprobs_are_the_models_own() -> None:
    history = text(60)
    own = tiny_model()
    with tiny_engine() as engine:
        session = engine.create_session().session_id
        engine.append(session, history)
        run = generate(engine, session, 10)
    with torch.inference_mode():
        whole = torch.tensor([history + [token for token, _ in run]])
        expected = own(input_ids=whole).logits[0].log_softmax(-1)
    for place, (token, logprob) in enumerate(run):
        assert logprob == pytest.approx(float(expected[len(history) - 1 + place, token]), abs=1e-4)


# -- rotation ----------------------------------------------------------------------------------------------------------


def rotary(config: PretrainedConfig, kind: type[PreTrainedModel]) -> tuple[Seam, RowRotary]:
    small = shrunken(config)
    small._attn_implementation = ATTENTION
    seam = Seam(kind(copy.deepcopy(small)).eval())
    found = [module for module in seam.model.modules() if isinstance(module, RowRotary)]
    return seam, found[0]


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (LlamaForCausalLM, LlamaConfig()),
        (LlamaForCausalLM, LlamaConfig(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4})),
        (Gemma3ForCausalLM, Gemma3TextConfig()),
        (GlmForCausalLM, GlmConfig()),
    ],
    ids=["llama", "yarn", "gemma3", "glm"],
)
def test_moving_keys_equals_rotating_them_at_the_later_positions(
    kind: type[PreTrainedModel], config: PretrainedConfig
) -> None:
    seam, module = rotary(config, kind)
    raw = torch.randn(2, 5, seam.layers[0].head_dim, generator=torch.Generator().manual_seed(0))
    for layer in seam.layers:
        name = None if layer.rotary == "default" else layer.rotary

        def at(first: int, name: str | None = name) -> Tensor:
            cos, sin = module(raw, torch.arange(first, first + 5)[None], name)
            return seam._apply(raw[None], raw[None], cos, sin)[1][0]

        torch.testing.assert_close(seam.rotate(at(0), torch.full((5,), 77), layer.rotary), at(77), atol=1e-5, rtol=0)


def test_rows_turned_alike_have_their_angles_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was turned in between, and however much of it: equal shifts give equal bits."""
    seam, module = rotary(LlamaConfig(), LlamaForCausalLM)
    asked: list[int] = []
    own = module._own

    def noted(x: torch.Tensor, position_ids: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(position_ids.shape[1])
        return own(x, position_ids, name)

    keys = torch.randn(3, 5, seam.layers[0].head_dim, generator=torch.Generator().manual_seed(0))
    shifts = [torch.arange(first, first + 5) for first in range(-20, 20)]
    fresh = [rotary(LlamaConfig(), LlamaForCausalLM)[0].rotate(keys, shift, "default") for shift in shifts]
    monkeypatch.setattr(module, "_own", noted)
    seam.rotate(keys, shifts[0], "default")
    del asked[:]
    for _ in range(30):
        assert torch.equal(seam.rotate(keys, shifts[7], "default"), fresh[7])
        torch.testing.assert_close(seam.rotate(keys.double(), shifts[7], "default"), fresh[7].double())
    assert asked == [5, 5]
    for _ in range(2):
        for shift, expected in zip(shifts, fresh, strict=True):
            assert torch.equal(seam.rotate(keys, shift, "default"), expected)


@pytest.mark.parametrize("kind", ["llama", "glm"])
def test_angles_past_the_trained_positions_are_exact(kind: str) -> None:
    """In float32 the fastest channel's angle at a million positions is wrong in the second digit."""
    _, module = rotary(*((LlamaConfig(), LlamaForCausalLM) if kind == "llama" else (GlmConfig(), GlmForCausalLM)))
    near, far = torch.tensor([[5]]), torch.tensor([[10_000_019]])
    x = torch.empty(0)
    module.is_beyond_trained = True
    cos, _ = module(x, torch.cat([near, far], dim=1))
    module.is_beyond_trained = False
    own, _ = module(x, near)
    assert torch.equal(cos[:, :1], own)
    frequencies = cast("Tensor", module.original.inv_freq).double()
    expected = (far.double() * frequencies).cos().sort().values
    distinct = cos[0, 1].double().sort().values[::2]
    torch.testing.assert_close(distinct, expected.flatten(), atol=1e-6, rtol=0)


def test_the_position_of_a_neighbour_never_moves_the_angles() -> None:
    _, module = rotary(LlamaConfig(), LlamaForCausalLM)
    x = torch.empty(0)
    alone = module(x, torch.tensor([[3]]))[0]
    together = module(x, torch.tensor([[3, 150]]))[0]
    assert torch.equal(alone[0, 0], together[0, 0])
