"""What sessions live in: the pool of their K/V, and the device's operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from inference_engine.kernels.lane_attention import LaneAttention
from inference_engine.kernels.noise import NoiseOfAll, noise_of_all
from inference_engine.kv.draft_memory import DraftMemories
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.pool import Pool
from inference_engine.kv.tier import Tier
from inference_engine.kv.token_codec import TokenCodec

# rotate(keys [H, n, D], shifts [n], on the host, rotary name): the keys as they would be so many positions later
# (negative: before)
Rotate = Callable[[Tensor, Tensor, str], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class KVContext:
    """What sessions share: the model's geometry, the pool, the model's own rotation.

    lane_attention: the device's operation over lanes; None: sessions are attended to one by one.
    noise_of_all: the device's operation for what sampled tokens are drawn with.
    most_rows_at_once: rows of the longest step that runs at its best here, if it is nothing but lanes: longer ones are
    sooner done in pieces. None: it does not matter.
    Beside the model there may be a latent codec, a drafter that remembers sessions, and a second tier for rows.
    """

    geometry: Geometry
    pool: Pool
    rotate: Rotate
    device: torch.device
    lane_attention: LaneAttention | None = None
    noise_of_all: NoiseOfAll = noise_of_all
    most_rows_at_once: int | None = None
    latent: TokenCodec | None = None
    draft_memories: DraftMemories | None = None
    tier: Tier | None = None
