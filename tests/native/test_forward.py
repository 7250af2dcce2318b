"""The native backend gives transformers' logits, and a token's logits do not depend on what else is in the step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import CohereConfig, Gemma2Config, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.bamba import BambaConfig
from transformers.models.falcon_h1 import FalconH1Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.gemma4 import Gemma4TextConfig
from transformers.models.gemma4_unified import Gemma4UnifiedTextConfig
from transformers.models.glm4_moe import Glm4MoeConfig
from transformers.models.granitemoehybrid import GraniteMoeHybridConfig
from transformers.models.lfm2 import Lfm2Config
from transformers.models.lfm2_moe import Lfm2MoeConfig
from transformers.models.mistral import MistralConfig
from transformers.models.mixtral import MixtralConfig
from transformers.models.nemotron_h import NemotronHConfig
from transformers.models.olmo_hybrid import OlmoHybridConfig
from transformers.models.phi3 import Phi3Config
from transformers.models.qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_next import Qwen3NextConfig
from transformers.models.smollm3 import SmolLM3Config

from inference_engine.backends.base import Forward, Result, Step
from inference_engine.backends.native.trial import try_list
from inference_engine.backends.twin import TwinSizes, text_generator
from inference_engine.kv.plan import StepPlan
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.layer_window import LayerWindow
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy
from inference_engine.models.operations import NoStepListError
from inference_engine.native.library import KVType, ProductIdentity
from inference_engine.types import Mode
from tests.admissions import traits_of
from tests.facade import in_mode
from tests.further import each_pair, further
from tests.tiny import PAGES, TRAINED_POSITIONS, VOCABULARY, tiny_forward
from tests.tiny_native import library, tiny_native

FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(num_hidden_layers=4, num_key_value_heads=8, attention_bias=True),
    "mistral": MistralConfig(num_hidden_layers=4),
    "qwen2": Qwen2Config(num_hidden_layers=4, num_attention_heads=28, num_key_value_heads=4, hidden_size=3584),
    "qwen3": Qwen3Config(num_hidden_layers=4, tie_word_embeddings=True),
    "smollm3": SmolLM3Config(num_hidden_layers=8),
    "gemma2": Gemma2Config(num_hidden_layers=4),
    "gemma3": Gemma3TextConfig(num_hidden_layers=7),
    # Values that are keys, with layers that read them and without; experts; inputs of layers.
    "gemma4": Gemma4TextConfig(
        num_hidden_layers=6, hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=2
    ),
    "gemma4 with experts": Gemma4TextConfig(
        num_hidden_layers=6,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=64,
    ),
    "gemma4 with inputs by layer": Gemma4TextConfig(
        num_hidden_layers=12, num_kv_shared_layers=6, use_double_wide_mlp=True
    ),
    "gemma4 unified": Gemma4UnifiedTextConfig(num_hidden_layers=6),
    "gemma4 with layers that read keys as values": Gemma4TextConfig(
        num_hidden_layers=12, num_kv_shared_layers=6, attention_k_eq_v=True
    ),
    "phi3": Phi3Config(num_hidden_layers=2, pad_token_id=None),
    "longrope": Phi3Config(
        num_hidden_layers=2,
        pad_token_id=None,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "longrope",
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0 + 0.01 * pair for pair in range(36)],
            "long_factor": [1.0 + pair for pair in range(36)],
        },
    ),
    "qwen3_moe": Qwen3MoeConfig(num_hidden_layers=4, mlp_only_layers=[1], norm_topk_prob=True),
    "qwen2_moe": Qwen2MoeConfig(num_hidden_layers=2),
    "mixtral": MixtralConfig(num_hidden_layers=2),
    "glm4_moe": Glm4MoeConfig(num_hidden_layers=3, routed_scaling_factor=1.5, use_qk_norm=True),
    "qwen3_5": Qwen3_5TextConfig(num_hidden_layers=4),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(num_hidden_layers=4),
    "qwen3_next": Qwen3NextConfig(num_hidden_layers=4, norm_topk_prob=False),
    "lfm2": Lfm2Config(num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "conv"]),
    "lfm2_moe": Lfm2MoeConfig(
        num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "conv"], num_dense_layers=1
    ),
    "granitemoehybrid": GraniteMoeHybridConfig(
        num_hidden_layers=4,
        mamba_n_groups=2,
        embedding_multiplier=12.0,
        residual_multiplier=0.3,
        logits_scaling=4.0,
        layer_types=["linear_attention", "full_attention"] * 2,
    ),
    "bamba": BambaConfig(num_hidden_layers=4, attn_layer_indices=[1], mamba_proj_bias=True),
    "falcon_h1": FalconH1Config(
        num_hidden_layers=2,
        mamba_proj_bias=True,
        mamba_n_groups=2,
        embedding_multiplier=2.0,
        key_multiplier=0.5,
        lm_head_multiplier=0.25,
        attention_in_multiplier=0.5,
        attention_out_multiplier=1.5,
        ssm_in_multiplier=1.25,
        ssm_out_multiplier=0.75,
        mlp_multipliers=[0.8, 1.2],
        ssm_multipliers=[0.5, 1.5, 0.75, 1.25, 0.9],
    ),
    "falcon_h1 with a norm": FalconH1Config(
        num_hidden_layers=2, mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_n_groups=2
    ),
    "falcon_h1 with a gate behind its norm": FalconH1Config(num_hidden_layers=2, mamba_rms_norm=True),
    "nemotron_h": NemotronHConfig(
        layers_block_type=["mamba", "moe", "attention", "mlp", "mamba"], routed_scaling_factor=2.5
    ),
    "nemotron_h with short experts": NemotronHConfig(
        layers_block_type=["mamba", "attention", "moe"], moe_latent_size=32
    ),
    "olmo_hybrid": OlmoHybridConfig(num_hidden_layers=4, linear_allow_neg_eigval=True),
}
KINDS = [
    (ProductIdentity.EXACT, "auto"),
    (ProductIdentity.EXACT, "int4"),
    (ProductIdentity.QUANTISED, "int8"),
    (ProductIdentity.QUANTISED, "int4"),
]
SIZES = (TwinSizes(), TwinSizes(head_dim=32, kv_heads=1), TwinSizes(hidden=80, head_dim=48))
each_kind = pytest.mark.parametrize(
    ("identity", "weights"), KINDS, ids=lambda value: str(getattr(value, "name", value))
)
each_kv_type = pytest.mark.parametrize("kv_type", KVType, ids=lambda kv_type: kv_type.name)


@pytest.mark.parametrize(
    ("sizes", "family"),
    [
        (sizes, family) if place % len(SIZES) == number else further(sizes, family)
        for number, sizes in enumerate(SIZES)
        for place, family in enumerate(FAMILIES)
    ],
)
def test_a_list_gives_the_logits_of_transformers(family: str, sizes: TwinSizes) -> None:
    config, kind = text_generator(FAMILIES[family])
    traits = traits_of(config, kind)  # which do not depend on sizes

    assert try_list(library(), kind, config, traits, seed=1, sizes=sizes) < 2e-4


def test_a_family_without_a_list_is_named() -> None:
    config, kind = text_generator(CohereConfig(num_hidden_layers=2))
    traits = traits_of(config, kind)

    with pytest.raises(NoStepListError, match="cohere"):
        try_list(library(), kind, config, traits)


class Sessions:
    """Sessions of one forward, stepped by hand."""

    def __init__(
        self, forward: Forward, *strategies: KVStrategy, mode: Mode = Mode.BATCHED, limit: int | None = 256
    ) -> None:
        self.forward = forward = in_mode(forward, mode)
        self.context = forward.open(forward.geometry(**PAGES), 2**24)
        self.sessions = [SessionKV(strategy, self.context, limit) for strategy in strategies]

    def step(self, *staged: tuple[int, Sequence[int]], taps: tuple[int, ...] = ()) -> tuple[Result, list[slice]]:
        """Stage and commit ids of some sessions. Their logits, and which of them are whose."""
        for index, ids in staged:
            self.sessions[index].stage(len(ids))
        context = self.context
        plan = StepPlan(
            [self.sessions[index] for index, _ in staged],
            context.geometry,
            context.pool,
            mask_dtype=torch.float32,
            ops=context.ops,
        )
        packed = np.zeros(plan.query_count, np.int64)
        for span, (_, ids) in zip(plan.spans, staged, strict=True):
            packed[span.real] = ids
        queries = [query for span in plan.spans for query in range(span.real.start, span.real.stop)]
        self.last, self.tokens = plan.spans[-1].real, plan.query_count  # padding included
        result = self.forward.run(Step(packed, plan, queries, tap_layers=taps))
        for index, ids in staged:
            session = self.sessions[index]
            session.commit(session.length + len(ids))
        ends = np.cumsum([0, *(len(ids) for _, ids in staged)]).tolist()
        return result, [slice(first, end) for first, end in pairwise(ends)]

    def logits(self, index: int, ids: Sequence[int], cuts: Sequence[int]) -> Tensor:
        """Of one session alone, its ids cut into steps."""
        pieces = np.split(np.array(ids), cuts)
        return torch.cat([self.step((index, piece.tolist()))[0].logits for piece in pieces])


def ids_of(count: int, seed: int = 0) -> list[int]:
    found: NDArray[np.int64] = np.random.default_rng(seed).integers(1, VOCABULARY, count)
    return [int(token) for token in found]


STRATEGIES = (Full(), SinkWindow(sink=2, window=24))


@each_pair(strategy=STRATEGIES, kv_type=KVType, kind=KINDS)
def test_logits_are_equal_to_the_bit_however_tokens_are_cut_and_beside_others(
    strategy: KVStrategy, kv_type: KVType, kind: tuple[ProductIdentity, str]
) -> None:
    forward = tiny_native(identity=kind[0], weights=kind[1], kv_type=kv_type)
    ids = ids_of(96)
    segments = list(range(16, 96, 16))
    expected = Sessions(forward, strategy).logits(0, ids, segments)

    one_by_one = Sessions(forward, strategy).logits(0, ids, range(1, 96))
    assert torch.equal(one_by_one, expected)

    crowd = Sessions(forward, Full(), strategy, SinkWindow(sink=1, window=20))
    found = []
    for first in range(0, 96, 16):
        others = [(0, ids_of(8, first)), (2, ids_of(2, first + 1))]
        result, parts = crowd.step(others[0], (1, ids[first : first + 16]), others[1])
        found.append(result.logits[parts[1]])
    assert torch.equal(torch.cat(found), expected)


COMPRESSED = (
    *(Full(codec=codec, exact_window=9) for codec in ("lloyd4", "int8")),
    SinkWindow(sink=2, window=44, codec="lloyd6", exact_window=9),
    LayerWindow(sink=20, window=40, full_layers=(2,), codec="int4", exact_window=5),
)


@pytest.mark.parametrize("strategy", COMPRESSED, ids=str)
def test_logits_over_compressed_entries_are_equal_to_the_bit_however_tokens_are_cut(strategy: KVStrategy) -> None:
    """Beside other sessions, with other threads and levels, and where the session was idle in between."""
    ids, cuts = ids_of(112), range(16, 112, 16)

    def woken(forward: Forward) -> Sessions:
        sessions = Sessions(forward, Full(), strategy)
        assert sessions.sessions[1].wake(256)
        return sessions

    forward = tiny_native(kv_type=KVType.FLOAT16)
    expected = woken(forward).logits(1, ids, cuts)

    one_by_one = woken(tiny_native(kv_type=KVType.FLOAT16, threads=3, level="plain")).logits(1, ids, range(1, 112))
    assert torch.equal(one_by_one, expected)

    found, crowd = [], woken(forward)
    for first in range(0, 112, 8):
        result, parts = crowd.step((0, ids_of(4, first)), (1, ids[first : first + 8]))
        found.append(result.logits[parts[1]])
        crowd.sessions[1].idle()
        assert crowd.sessions[1].wake(256)
    assert torch.equal(torch.cat(found), expected)


@each_kind
@each_kv_type
def test_levels_and_threads_give_equal_bits(kv_type: KVType, identity: ProductIdentity, weights: str) -> None:
    ids = ids_of(60)
    alone = tiny_native(identity=identity, weights=weights, kv_type=kv_type)
    expected = Sessions(alone, Full()).logits(0, ids, [16, 32, 33, 48])

    for level in library().levels():
        for threads in (1, 3):
            forward = tiny_native(identity=identity, weights=weights, kv_type=kv_type, level=level, threads=threads)
            assert torch.equal(Sessions(forward, Full()).logits(0, ids, [16, 32, 33, 48]), expected), (level, threads)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_logits_and_hidden_states_are_those_of_torch(strategy: KVStrategy, mode: Mode) -> None:
    ids, found = ids_of(50), []
    for forward in (tiny_native(), tiny_forward()):
        sessions = Sessions(forward, strategy, Full(), mode=mode)
        sessions.step((1, ids_of(9, 5)))
        results = [
            sessions.step((0, ids[:16]), (1, [3]), taps=(0, 2)),
            sessions.step((1, [5]), (0, ids[16:30]), taps=(0, 2)),
        ]
        taps = results[1][0].taps
        assert taps is not None
        own = [results[0][0].logits[results[0][1][0]], results[1][0].logits[results[1][1][1]]]
        found.append([*own, taps[sessions.last]])

    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs, atol=2e-4, rtol=2e-4)


def test_positions_past_the_trained_ones_give_the_logits_of_torch() -> None:
    strategy, ids = SinkWindow(sink=0, window=16), ids_of(TRAINED_POSITIONS + 64)
    cuts = range(16, len(ids), 16)
    ours, torchs = (
        Sessions(forward(windowed=False), strategy, limit=None).logits(0, ids, cuts)[-64:]
        for forward in (tiny_native, tiny_forward)
    )
    torch.testing.assert_close(ours, torchs, atol=5e-4, rtol=5e-4)


# How far the logits of TinyModel move when K and V are rounded to 16 bits.
KV_ROUNDING = {KVType.FLOAT32: 0.0, KVType.FLOAT16: 0.03, KVType.BFLOAT16: 0.25}


@each_kv_type
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_entries_take_the_bytes_of_their_dtype_and_change_logits_by_its_rounding(
    strategy: KVStrategy, kv_type: KVType
) -> None:
    ids, cuts = ids_of(96), range(16, 96, 16)
    exact, rounded = Sessions(tiny_native(), strategy), Sessions(tiny_native(kv_type=kv_type), strategy)

    difference = (exact.logits(0, ids, cuts) - rounded.logits(0, ids, cuts)).abs().max()

    assert difference <= KV_ROUNDING[kv_type] and bool(difference) == (kv_type is not KVType.FLOAT32)
    share = 1 if kv_type is KVType.FLOAT32 else 2
    assert rounded.context.geometry.entry_bytes * share == exact.context.geometry.entry_bytes
    bytes_of = [sessions.sessions[0].footprint().by_kind["entries"] for sessions in (exact, rounded)]
    assert bytes_of[1] * share == bytes_of[0]


@pytest.mark.parametrize("attends_together", [True, False])
@pytest.mark.parametrize("part", ["k_norm", "v_proj"])
def test_an_entry_too_large_for_16_bits_makes_what_reads_it_not_a_number(part: str, attends_together: bool) -> None:
    """It is never left out: an infinite key would be, where its score is the smallest."""
    kept = tiny_native(kv_type=KVType.FLOAT16, attends_together=attends_together, enlarged=part)
    logits = Sessions(kept, Full()).logits(0, ids_of(40), [16, 32])
    assert logits.isnan().all()

    wider = tiny_native(kv_type=KVType.BFLOAT16, attends_together=attends_together, enlarged=part)
    assert Sessions(wider, Full()).logits(0, ids_of(40), [16, 32]).isfinite().all()
