"""The memory that sessions live in: the pool of K/V on the device and the second tier, as large as the settings say."""

from __future__ import annotations

import logging
from dataclasses import replace

from inference_engine.backends.base import Forward
from inference_engine.config import EngineConfig
from inference_engine.decode.drafting import Drafter
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.session_kv import bound_of
from inference_engine.kv.strategy import KVStrategy
from inference_engine.kv.tier import open_tier
from inference_engine.kv.token_codec import TokenCodec
from inference_engine.metrics import EngineMetrics

logger = logging.getLogger(__name__)

_SHARE = 4  # of what is free, one part in this many is taken unless the settings say


def open_memory(
    forward: Forward,
    geometry: Geometry,
    config: EngineConfig,
    metrics: EngineMetrics,
    *,
    latent: TokenCodec | None,
    drafter: Drafter | None,
) -> KVContext:
    """Allocate it, and let the drafter know. Raises ConfigError or BackendError for what cannot be had."""
    tap_layers = () if drafter is None else drafter.tap_layers
    opened = forward.open(geometry, config.kv_bytes or forward.free_bytes() // _SHARE, tap_layers=tap_layers)
    tier = open_tier(
        forward.device,
        capacity_bytes=config.tier_bytes,
        share=_SHARE,
        folder=config.tier_dir,
        count=metrics.count_transfer,
    )
    context = replace(opened, latent=latent, draft_memories=drafter, tier=tier)
    if drafter is not None:
        drafter.prepare(context)
    return context


def warn_if_too_small(strategy: KVStrategy, context: KVContext) -> None:
    """Say in the log if not one session of the strategy, which is the default, fits."""
    longest = strategy.length_limit(context.geometry)
    needed = bound_of(strategy, context, longest).peak_bytes
    if needed > context.pool.capacity_bytes:
        logger.warning(
            "a session of the default strategy %s needs %d bytes of K/V and there are %d in all: sessions must ask "
            "for a smaller limit_tokens, or the server be given more kv_bytes",
            strategy,
            needed,
            context.pool.capacity_bytes,
        )
