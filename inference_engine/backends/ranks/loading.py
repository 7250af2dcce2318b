"""Opens a model whose heads and weights several ranks have a part of each, and refuses what they cannot do yet."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from inference_engine.backends.base import Admitted, use_threads
from inference_engine.backends.ranks.leader import Followers, Leader
from inference_engine.backends.ranks.parts import load_part
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.backends.torch_loading import MADE, serve_loaded
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.errors import BackendError, ConfigError
from inference_engine.kernels.ops import open_ops
from inference_engine.kv.strategies import strategy_names
from inference_engine.models import LoadedModel
from inference_engine.models.seam import ATTENTION

# Whose queries read plan numbers, and which write to the pool what a step writes, moves of it, or work of each rank.
STRATEGIES = ("full", "sink_window", "layer_window", "gather")


def open_ranks(config: ModelConfig, admitted: Admitted) -> TorchForward:
    """Start the other ranks and load the first one's part beside them. Raises ModelError or BackendError."""
    check_model_config(config)
    use_threads(config.threads)
    leader = Leader(config, admitted)
    try:
        loaded = load_rank(config, 0)
        leader.join(torch.device(loaded.device), getattr(torch, config.dtype))
        return serve_rank(loaded, config, admitted, leader)
    except BaseException:
        leader.close()
        raise


def load_rank(config: ModelConfig, rank: int) -> LoadedModel:
    """Raises ModelError or BackendError."""
    device = config.device if config.device == "cpu" else f"cuda:{rank}"
    return load_part(
        config.model,
        cache=Path(config.cache_path),
        device=device,
        dtype=config.dtype,
        attention=ATTENTION,
        rank=rank,
        ranks=config.tensor_parallel,
    )


def serve_rank(loaded: LoadedModel, config: ModelConfig, admitted: Admitted, followers: Followers) -> TorchForward:
    """A rank's part, ready to run beside the others, which do the same now. Raises BackendError."""
    why = f"not with tensor_parallel yet; choose one of {', '.join(STRATEGIES)}, or start with tensor_parallel=1"
    others = tuple((name, why) for name in strategy_names() if name not in STRATEGIES)
    own = replace(admitted, refused=(*others, *(each for each in admitted.refused if each[0] in STRATEGIES)))
    # As on a GPU, wherever this runs: queries of all sessions are attended to together, and there is a list.
    ops = replace(open_ops(config.kernels, torch.device(loaded.device)), attends_together=True)
    return serve_loaded(loaded, replace(config, linear="plain"), own, ops=ops, followers=followers)


def check_model_config(config: ModelConfig) -> None:
    """Raise BackendError for settings that ranks cannot follow yet, and for more ranks than there are GPUs."""
    ranks = f"tensor_parallel={config.tensor_parallel}"
    refused = (
        (config.backend == "native", "backend=native", "backend=auto"),
        (config.weights not in ("auto", *MADE), f"weights={config.weights}", "weights=auto"),
        (config.determinism != "off", f"determinism={config.determinism}", "determinism=off"),
        (config.numerics != "auto", f"numerics={config.numerics}", "numerics=auto"),
        (config.kv_dtype not in ("auto", config.dtype), f"kv_dtype={config.kv_dtype}", "kv_dtype=auto"),
        (config.linear == "packed", "linear=packed", "linear=auto"),
        (config.drafter not in ("auto", "ngram", "none"), f"drafter={config.drafter}", "drafter=ngram"),
        (config.latent not in ("auto", "none"), f"latent={config.latent}", "latent=none"),
        (config.device not in ("cpu", "cuda"), f"device={config.device}", "device=cuda, and CUDA_VISIBLE_DEVICES"),
        (not hasattr(os, "memfd_create"), "this system", "one of Linux"),
    )
    for is_asked, what, way_out in refused:
        if is_asked:
            raise BackendError(f"{ranks} does not go with {what} yet: start with {way_out}, or tensor_parallel=1")
    if config.device == "cuda" and config.tensor_parallel > (count := torch.cuda.device_count()):
        raise BackendError(f"{ranks} needs as many GPUs, there are {count}: start with tensor_parallel={max(1, count)}")


def check_engine_config(config: EngineConfig, ranks: int) -> None:
    """Raise ConfigError for what needs all of a session's K/V in one place."""
    if config.tier_bytes:
        raise ConfigError(
            f"tier_bytes={config.tier_bytes}: there is no second tier with tensor_parallel={ranks} yet; leave it at 0"
        )
