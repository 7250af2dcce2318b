"""The seam gives the model's own answers: against transformers' eager attention, for several families."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    GlmConfig,
    GlmForCausalLM,
    GotOcr2Config,
    GotOcr2ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from inference_engine.backends import twin
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.backends.twin import admit_config, shrunken
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument, ModelError
from inference_engine.kv.geometry import IMMOVABLE, UNROTATED, LayerTraits
from inference_engine.kv.strategies import parse_strategy, strategy_names
from inference_engine.kv.strategies.full import Full
from inference_engine.models.layer_traits import find_traits
from inference_engine.models.seam import ATTENTION, Seam, TokenRotary
from inference_engine.types import Mode, ModelFacts
from tests.admissions import admitted_once, traits_of
from tests.further import further
from tests.laws.variants import each_mode, generate, text
from tests.tiny import SMALL, tiny_engine, tiny_model

# Of the families of which test_families.py serves whole folders, admission is a further case.
SERVED: list[Any] = [
    (LlamaForCausalLM, LlamaConfig(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4})),
    further(Qwen3ForCausalLM, Qwen3Config(use_sliding_window=True, sliding_window=64, max_window_layers=14)),
    further(Gemma3ForCausalLM, Gemma3TextConfig()),  # two rotary tables, five windows to one
    (GlmForCausalLM, GlmConfig()),  # half of each head rotated, interleaved
    further(LlamaForCausalLM, LlamaConfig(num_key_value_heads=8)),
    further(Gemma2ForCausalLM, Gemma2Config()),  # soft-capped scores, alternating windows
    further(SmolLM3ForCausalLM, SmolLM3Config()),  # every fourth layer without rotation
    further(GptOssForCausalLM, GptOssConfig()),  # a learned sink in each head's softmax
    further(Cohere2ForCausalLM, Cohere2Config()),  # full layers without rotation
    further(Exaone4ForCausalLM, Exaone4Config()),  # the same, and windows in the others alone
    further(PhiForCausalLM, PhiConfig()),  # heads cut apart before a part of each is rotated
    further(HunYuanDenseV1ForCausalLM, HunYuanDenseV1Config()),  # keys normed after they were rotated
    further(GPTNeoXForCausalLM, GPTNeoXConfig()),  # queries, keys and values in one projection
    further(StableLmForCausalLM, StableLmConfig()),  # attention gets no keywords of the model's
    further(NemotronForCausalLM, NemotronConfig()),
    # Heads of a size by layer, inputs for each layer, and in half of the layers the entries of earlier ones.
    (Gemma4ForCausalLM, Gemma4TextConfig(num_hidden_layers=24, num_kv_shared_layers=12)),
    # The same attention, in models that also have parts for pictures and sound.
    further(Gemma4UnifiedForConditionalGeneration, Gemma4UnifiedConfig()),
    further(Gemma3nForCausalLM, Gemma3nTextConfig()),
    (DeepseekV3ForCausalLM, DeepseekV3Config()),  # keys and values of one vector, experts behind three dense layers
    (DeepseekV32ForCausalLM, DeepseekV32Config()),  # and an indexer that chooses what is read
]
REFUSED: list[tuple[type[PreTrainedModel], PretrainedConfig, str]] = [
    (BloomForCausalLM, BloomConfig(), "rotate"),
    (MambaForCausalLM, MambaConfig(), "num_attention_heads"),
    (
        LlamaForCausalLM,
        LlamaConfig(
            rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [1.0]}
        ),
        "short_factor of 1 numbers",
    ),
    (GPTJForCausalLM, GPTJConfig(), "does not run with another attention function"),
    (FalconForCausalLM, FalconConfig(), "does not run with another attention function"),
    (Llama4ForCausalLM, Llama4TextConfig(), "chunked_attention"),
    (BartForCausalLM, BartConfig(), "encoder"),
    (GPT2LMHeadModel, GPT2Config(), "in 0 of them"),
    (
        GotOcr2ForConditionalGeneration,
        GotOcr2Config(
            vision_config={"num_hidden_layers": 1, "hidden_size": 32, "mlp_dim": 32, "global_attn_indexes": [0]}
        ),
        "passes logits_to_keep to attention",
    ),
]


@pytest.mark.parametrize(("kind", "config"), SERVED, ids=lambda value: getattr(value, "__name__", ""))
def test_an_architecture_that_is_served_rightly_is_admitted(
    kind: type[PreTrainedModel], config: PretrainedConfig
) -> None:
    admit_config(config, kind)


@pytest.mark.parametrize(("kind", "config", "why"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_an_architecture_that_is_not_is_refused_with_the_reason(
    kind: type[PreTrainedModel], config: PretrainedConfig, why: str
) -> None:
    with pytest.raises(ModelError, match=why) as refusal:
        admit_config(config, kind)
    # In words, about the model as it is: no knowledge of what the library raised is needed.
    for internal in ("Error", "kakeya", "NoneType", "tensor", " 2 layers"):
        assert internal not in str(refusal.value)


@pytest.mark.parametrize(
    ("config", "unrotated"),
    [
        (SmolLM3Config(num_hidden_layers=8), (3, 7)),
        (Cohere2Config(num_hidden_layers=8), (3, 7)),
        (LlamaConfig(num_hidden_layers=3), ()),
    ],
    ids=["smollm3", "cohere2", "llama"],
)
def test_layers_that_do_not_rotate_their_keys_are_known(config: PretrainedConfig, unrotated: tuple[int, ...]) -> None:
    traits = traits_of(config)
    assert tuple(index for index, trait in enumerate(traits) if trait.rotary == UNROTATED) == unrotated
    assert not any(trait.rotary == IMMOVABLE for trait in traits)


@pytest.mark.parametrize(
    "config", [SmolLM3Config(), further(Cohere2Config()), further(HunYuanDenseV1Config())], ids=lambda c: c.model_type
)
def test_strategies_that_would_move_keys_wrongly_are_refused_by_name(
    config: PretrainedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial of strategies can fail: here every layer is believed to rotate as its configuration says."""

    def believed(seam: Seam) -> tuple[LayerTraits, ...]:
        return tuple(
            replace(trait, rotary=layer.rotary) for trait, layer in zip(find_traits(seam), seam.layers, strict=True)
        )

    monkeypatch.setattr(twin, "find_traits", believed)
    refused = dict(admit_config(config).refused)
    assert "sink_window" in refused and "full" not in refused
    assert "differ" in refused["sink_window"]


@pytest.mark.parametrize(
    "config",
    [SmolLM3Config(num_hidden_layers=4), further(PhiConfig(num_hidden_layers=2))],
    ids=lambda config: config.model_type,
)
def test_every_strategy_runs_far_past_its_window(config: PretrainedConfig) -> None:
    """Phi's keys are rotated in part, by a function that gets that part alone: they could not be moved once."""
    history = text(150)
    with family_engine(config) as engine:
        assert set(engine.info().strategies) == set(strategy_names())
        for strategy in (
            "sink_window:sink=2,window=20",
            "layer_window:sink=2,window=20,full_layers=0",
            "full:codec=int8,exact_window=20",
            "gather:block=4,sink=4,window=16,budget=48",
        ):
            session = engine.create_session(strategy=parse_strategy(strategy)).session_id
            engine.append(session, history)
            assert len(generate(engine, session, 24)) == 24, strategy


def test_a_model_whose_keys_cannot_be_moved_refuses_what_moves_them_by_name() -> None:
    with family_engine(HunYuanDenseV1Config(num_hidden_layers=2)) as engine:
        for strategy in (
            "sink_window:sink=2,window=20",
            "layer_window:sink=2,window=20,full_layers=0",
            "full:codec=int8,exact_window=20",
        ):
            with pytest.raises(InvalidArgument, match="changes its keys after they are rotated") as refusal:
                engine.create_session(strategy=parse_strategy(strategy))
            assert parse_strategy(strategy).name in str(refusal.value)
        for strategy in ("full", "sink_window:sink=0,window=20", "restored:sink=0,window=20"):
            session = engine.create_session(strategy=parse_strategy(strategy)).session_id
            engine.append(session, text(100))
            assert len(generate(engine, session, 20)) == 20


def family_engine(config: PretrainedConfig) -> Engine:
    """An engine on a small random model of this family, admitted as one from a folder is."""
    small = shrunken(config, layers=range(config.num_hidden_layers))
    small.max_position_embeddings, small.vocab_size = 512, 128
    small._attn_implementation = ATTENTION
    admitted = admitted_once(small)
    seam = Seam(twin.model_class(small)(small).eval(), admitted.traits)
    facts = ModelFacts(
        model_id="family",
        vocab_size=128,
        trained_positions=512,
        device="cpu",
        dtype="float32",
        refused_strategies=admitted.refused,
    )
    return Engine(TorchForward(seam, facts, torch.device("cpu")), EngineConfig(**SMALL))


def test_a_model_whose_attention_differs_from_its_geometry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The admission test can fail: here the seam forgets the windows."""
    monkeypatch.setattr(
        twin, "find_traits", lambda seam: tuple(replace(trait, is_windowed=False) for trait in find_traits(seam))
    )
    with pytest.raises(ModelError):
        admit_config(Gemma3TextConfig())


@each_mode
@pytest.mark.parametrize("windowed", [True, False])
@pytest.mark.parametrize("seed", [0, further(1), further(2)])
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


def representative(config: PretrainedConfig) -> list[int]:
    types = getattr(config, "layer_types", None) or ["full_attention"]
    return sorted({types.index(kind) for kind in types})


def rotary(config: PretrainedConfig, kind: type[PreTrainedModel]) -> tuple[Seam, TokenRotary]:
    small = shrunken(config, layers=representative(config))
    small._attn_implementation = ATTENTION
    seam = Seam(kind(copy.deepcopy(small)).eval())
    found = [module for module in seam.model.modules() if isinstance(module, TokenRotary)]
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
            assert seam._apply is not None
            return seam._apply(raw[None], cos, sin)[0]

        torch.testing.assert_close(seam.rotate(at(0), torch.full((5,), 77), layer.rotary), at(77), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "glm"])
def test_angles_past_the_trained_positions_are_exact(kind: str) -> None:
    """In float32 the fastest channel's angle at a million positions is wrong in the second digit."""
    _, module = rotary(*((LlamaConfig(), LlamaForCausalLM) if kind == "llama" else (GlmConfig(), GlmForCausalLM)))
    near, far = torch.tensor([[5]]), torch.tensor([[10_000_019]])
    x = torch.empty(0)
    module._now.is_beyond_trained = True
    cos, _ = module(x, torch.cat([near, far], dim=1))
    module._now.is_beyond_trained = False
    own, _ = module(x, near)
    assert torch.equal(cos[:, :1], own)
    frequencies = cast("Tensor", module.original.inv_freq).double()
    expected = (far.double() * frequencies).cos().sort().values
    distinct = cos[0, 1].double().sort().values[::2]
    torch.testing.assert_close(distinct, expected.flatten(), atol=1e-6, rtol=0)
