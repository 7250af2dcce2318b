"""What sessions live in: the pool of their K/V, and the device's operations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
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

# What a computation makes of tensors that are all [n, ...]: others that are, row by row, and good until the next one.
OfRows = Callable[[Sequence[Tensor]], Sequence[Tensor]]
# compute(name, of_rows, tensors): of_rows(tensors). Whatever has the same name does the same to tensors of the same
# shapes but for n; it neither waits for the device nor looks at values.
Compute = Callable[[Hashable, OfRows, Sequence[Tensor]], Sequence[Tensor]]

# on_choice(layer, scores [T, Hkv, B], candidates [T, B], chosen [T, Hkv, K]): told of every keep-set, as it is chosen.
OnChoice = Callable[[int, Tensor, Tensor, Tensor], None]


def compute_plainly(_name: Hashable, of_rows: OfRows, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """As any `Compute`, with nothing remembered."""
    return of_rows(tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVContext:
    """What sessions share: the model's geometry, the pool, the model's own rotation.

    lane_attention: the device's operation over lanes; None: sessions are attended to one by one.
    noise_of_all: the device's operation for what sampled tokens are drawn with.
    compute: the device's way to do the same to other rows again and again.
    most_rows_at_once: rows of the longest step that runs at its best here, if it is nothing but lanes: longer ones are
    sooner done in pieces. None: it does not matter.
    on_choice: who is told which blocks generated rows read, where they are chosen by plain operations.
    Beside the model there may be a latent codec, a drafter that remembers sessions, and a second tier for rows.
    """

    geometry: Geometry
    pool: Pool
    rotate: Rotate
    device: torch.device
    lane_attention: LaneAttention | None = None
    noise_of_all: NoiseOfAll = noise_of_all
    compute: Compute = compute_plainly
    most_rows_at_once: int | None = None
    on_choice: OnChoice | None = None
    latent: TokenCodec | None = None
    draft_memories: DraftMemories | None = None
    tier: Tier | None = None
