"""TinyModel: a three-layer random model with grouped queries and one windowed layer, and engines around it.

Made from a seed, so no test needs a download. Its weights are large enough that greedy tokens are far apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from inference_engine.backends.base import Forward, Step
from inference_engine.backends.op_list_executor import OpListExecutor
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.kernels.components import ModelComponents
from inference_engine.kernels.ops import REFERENCE, DeviceOps
from inference_engine.kv.archives.latent import latent_layers
from inference_engine.models.seam import ATTENTION, Seam
from inference_engine.types import Mode, ModelFacts
from kv_cache_proposer.f_theta.codec import LatentCodec
from kv_cache_proposer.f_theta.tap_codec import DrafterLatent
from laboratory.training.components import fit_components
from laboratory.training.f_theta import calibrate_taps
from laboratory.training.latent import calibrate
from tests.facade import WatchedForward, in_mode

VOCABULARY = 128
TRAINED_POSITIONS = 512
NATIVE_WINDOW = 24
EXTRAS = (
    "clock",
    "journal",
    "metrics",
    "latent",
    "codec_digest",
    "f_theta",
    "why_no_f_theta",
    "components",
    "drafter",
    "end_ids",
    "read_tokens",
    "tracing",
)
TINY_TAPS = (0, 2)  # of the drafters of tests, too
LATENT_BYTES = 160  # of at most 192: 128 numbers in 12 bits each
PAGES = {"page_tokens": 4, "segment_tokens": 16}
# Small units, so that windows wrap and segments end within a short test.
SMALL: dict[str, Any] = {
    **PAGES,
    "step_tokens": 64,
    "kv_bytes": 64 * 2**20,
    "tier_bytes": 2**24,
    # Mostly one session says what another one with an equal history has to say, which it has to compute.
    "share_prefixes": "off",
}


def tiny_config(*, windowed: bool = True) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=TRAINED_POSITIONS,
        use_sliding_window=windowed,
        sliding_window=NATIVE_WINDOW if windowed else None,
        layer_types=["sliding_attention" if windowed else "full_attention", "full_attention", "full_attention"],
        initializer_range=0.3,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


FULL, LINEAR = "full_attention", "linear_attention"


def mamba_config() -> GraniteMoeHybridConfig:
    """As `tiny_config`, with recurrent states behind layers of the same numbers; no layer has a window of its own."""
    return GraniteMoeHybridConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_local_experts=0,
        shared_intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_chunk_size=16,
        max_position_embeddings=TRAINED_POSITIONS,
        position_embedding_type="rope",
        layer_types=[FULL, FULL, FULL, LINEAR],
        initializer_range=0.3,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def delta_config() -> Qwen3_5TextConfig:
    """The same with the gated delta rule, which the native backend has kernels for."""
    return Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=TRAINED_POSITIONS,
        layer_types=[FULL, FULL, FULL, LINEAR],
        initializer_range=0.3,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


# Hybrids by the kind of their states; "" is TinyModel itself.
MAMBA, DELTA = "mamba", "delta"
_HYBRIDS: dict[str, tuple[type[PreTrainedModel], Callable[[], PretrainedConfig]]] = {
    MAMBA: (GraniteMoeHybridForCausalLM, mamba_config),
    DELTA: (Qwen3_5ForCausalLM, delta_config),
}


def tiny_model(*, seed: int = 0, windowed: bool = True, hybrid: str = "", attention: str = "eager") -> PreTrainedModel:
    """The model as transformers runs it (`attention="eager"`), or ready for the seam."""
    kind, config_of = _HYBRIDS.get(hybrid, (Qwen3ForCausalLM, lambda: tiny_config(windowed=windowed)))
    config: Any = config_of()
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = kind(config).eval()
    return model


@lru_cache(maxsize=8)
def tiny_forward(*, seed: int = 0, windowed: bool = True) -> TorchForward:
    return tiny_forward_on("cpu", seed=seed, windowed=windowed)


@lru_cache(maxsize=8)
def tiny_hybrid(*, seed: int = 0, windowed: bool = True) -> TorchForward:
    """windowed: without effect."""
    return tiny_forward_on("cpu", seed=seed, hybrid=MAMBA)


def tiny_forward_on(
    device: str,
    *,
    seed: int = 0,
    windowed: bool = True,
    ops: DeviceOps = REFERENCE,
    records_graphs: bool = False,
    is_listed: bool = False,
    is_invariant: bool = False,
    hybrid: str = "",
) -> TorchForward:
    """A model of its own, with what its device may have; see TorchForward. is_listed: steps are lists of operations.

    is_invariant: and no token changes the bits of another.
    """
    if is_invariant:
        ops = replace(ops, attend_ragged=ops.attend_invariant, attends_in_one_order=True)
    model = tiny_model(seed=seed, windowed=windowed, hybrid=hybrid, attention=ATTENTION)
    seam = Seam(model.to(torch.device(device)))
    facts = ModelFacts(
        model_id="tiny",
        vocab_size=VOCABULARY,
        trained_positions=TRAINED_POSITIONS,
        device=device,
        dtype="float32",
        layers=seam.model.config.num_hidden_layers,
        hidden_size=seam.model.config.hidden_size,
    )
    listed = OpListExecutor(seam, ops.open_fused()) if is_listed else None
    listed = OpListExecutor(seam, ops.open_invariant()) if is_invariant else listed
    return TorchForward(seam, facts, torch.device(device), ops=ops, records_graphs=records_graphs, listed=listed)


@lru_cache(maxsize=8)
def tiny_latent(*, seed: int = 0, windowed: bool = True, hybrid: str = "") -> LatentCodec:
    """A latent codec for TinyModel, calibrated on random ids, fine enough that restoring differs little from full."""
    tokens = torch.randint(0, VOCABULARY, (8, 256), generator=torch.Generator().manual_seed(1))
    return calibrate(
        tiny_model(seed=seed, windowed=windowed, hybrid=hybrid),
        torch.split(tokens, 4),
        layers=latent_layers(_forward(seed, windowed, hybrid).geometry(**PAGES)),
        bytes_per_token=LATENT_BYTES,
        group_layers=2,
    )


@lru_cache(maxsize=8)
def tiny_f_theta(*, seed: int = 0, windowed: bool = True, hybrid: str = "") -> DrafterLatent:
    """f_theta of two layers of TinyModel, fitted on random ids."""
    tokens = torch.randint(0, VOCABULARY, (8, 256), generator=torch.Generator().manual_seed(1))
    return calibrate_taps(
        tiny_model(seed=seed, windowed=windowed, hybrid=hybrid),
        torch.split(tokens, 4),
        tap_layers=TINY_TAPS,
        layers=latent_layers(_forward(seed, windowed, hybrid).geometry(**PAGES)),
        bytes_per_token=LATENT_BYTES,
        group_layers=2,
    )


@lru_cache(maxsize=8)
def tiny_components(*, seed: int = 0, windowed: bool = True, hybrid: str = "") -> ModelComponents:
    """Components of TinyModel's keys, calibrated on random ids."""
    tokens = torch.randint(0, VOCABULARY, (4, 128), generator=torch.Generator().manual_seed(1))
    return fit_components(_forward(seed, windowed, hybrid), tokens)


def _forward(seed: int, windowed: bool, hybrid: str) -> TorchForward:
    return tiny_forward_on("cpu", seed=seed, hybrid=hybrid) if hybrid else tiny_forward(seed=seed, windowed=windowed)


def tiny_engine(
    *,
    seed: int = 0,
    windowed: bool = True,
    make: Callable[..., Forward] | None = None,
    on_step: Callable[[Step], object] | None = None,
    mode: Mode = Mode.BATCHED,
    **settings: Any,
) -> Engine:
    """An engine on TinyModel, a latent codec and components of its keys loaded.

    `settings` change EngineConfig; those of EXTRAS go to the engine. make: of TinyModel on an executor (default: on
    torch). mode: what equal histories promise. on_step: receives each step before it runs, and fails it by raising.
    """
    forward = in_mode((make or tiny_forward)(seed=seed, windowed=windowed), mode)
    if on_step is not None:
        forward = WatchedForward(forward, on_step)
    geometry = forward.geometry(**PAGES)
    hybrid = "" if not geometry.states else MAMBA if geometry.open_chunk is None else DELTA
    extras: dict[str, Any] = {
        "latent": tiny_latent(seed=seed, windowed=windowed, hybrid=hybrid),
        "f_theta": tiny_f_theta(seed=seed, windowed=windowed, hybrid=hybrid),
        "components": tiny_components(seed=seed, windowed=windowed, hybrid=hybrid),
    }
    extras |= {name: settings.pop(name) for name in EXTRAS if name in settings}
    config = EngineConfig(**{**SMALL, **settings})
    return Engine(forward, config, **extras)
