"""What sessions live in: the pool of their K/V, the device's operations, and what may be beside the model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from inference_engine.kernels.ops import REFERENCE, DeviceOps
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.memory.pool import Demand, Pool
from inference_engine.kv.memory.tier import NoTier, Tier
from inference_engine.kv.part import Held, Part
from inference_engine.kv.views import OnChoice

# rotate(keys [H, n, D], shifts [n], on the host, rotary name): the keys as they would be so many positions later
# (negative: before)
Rotate = Callable[[Tensor, Tensor, str], Tensor]

# What a computation makes of tensors that are all [n, ...]: others that are, row by row, and good until the next one.
BatchFunction = Callable[[Sequence[Tensor]], Sequence[Tensor]]
# compute(name, of_rows, tensors): of_rows(tensors). Whatever has the same name does the same to tensors of the same
# shapes but for n; it neither waits for the device nor looks at values.
Compute = Callable[[Hashable, BatchFunction, Sequence[Tensor]], Sequence[Tensor]]


def compute_plainly(_name: Hashable, function: BatchFunction, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """As any `Compute`, with nothing remembered."""
    return function(tensors)


class TokenCodec(Protocol):
    """Calibrated for one model. Rows are unrotated; a row's code depends on that row alone, up to rounding.

    Coding neither waits for the device nor looks at values: whether rows are finite is the caller's to ask.
    """

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose rows are in the code, ascending."""

    @property
    def bytes_per_token(self) -> int: ...

    @property
    def least_bytes_per_token(self) -> int:
        """The fewest that `at` can give."""

    def at(self, bytes_per_token: int) -> TokenCodec:
        """The same codec with fewer bytes per token."""

    def encode(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """K and V of each of `layers`, [n, Hkv, D] in any float dtype -> uint8 [n, bytes_per_token]."""

    def decode(self, codes: Tensor, layers: Sequence[int] | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """K and V, float32 [n, Hkv, D], of each layer asked for (None: all), in that order."""


class DraftMemory(Part):
    """What a drafter remembers of one session, reserved for the session's life. It is not copied: forks begin empty."""

    @abstractmethod
    def clear(self) -> None:
        """Go back to an empty history."""

    def forget(self, floor: int, length: int) -> None:
        self.clear()

    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes in use, at most what was demanded."""

    def add_footprint(self, held: Held, length: int, end: int) -> None:
        held.add(draft=self.held_bytes())


class DraftMemories(Protocol):
    """Where sessions get theirs: bytes of the pool like everything else a session holds, told and counted."""

    def demands(self, geometry: Geometry) -> tuple[Demand, ...]:
        """What one session's memory takes of the pool; () if nothing is remembered."""

    def open(self, context: KVContext) -> DraftMemory | None:
        """Reserve one session's memory; None, and nothing taken, if there is no room.

        Not called if nothing is demanded.
        """


class NoDraftMemories:
    """Those of an engine whose drafter remembers nothing, or that has none."""

    def demands(self, geometry: Geometry) -> tuple[Demand, ...]:
        return ()

    def open(self, context: KVContext) -> DraftMemory | None:
        raise AssertionError("nothing is demanded")


@dataclass(frozen=True, kw_only=True, slots=True)
class KVContext:
    """What sessions share: the model's geometry, the pool, the model's own rotation.

    ops: the device's array operations.
    compute: the device's way to do the same to other rows again and again.
    most_tokens_at_once: rows of the longest step that runs at its best here, if it is nothing but regions: longer ones
    are sooner done in pieces. None: it does not matter. on_choice: who is told which blocks generated rows read, where
    they are chosen by plain operations. Beside the model there may be a latent codec, a drafter that remembers
    sessions, and a second tier for rows.
    """

    geometry: Geometry
    pool: Pool
    rotate: Rotate
    device: torch.device
    ops: DeviceOps = REFERENCE
    compute: Compute = compute_plainly
    most_tokens_at_once: int | None = None
    on_choice: OnChoice | None = None
    latent: TokenCodec | None = None
    draft_memories: DraftMemories = field(default_factory=NoDraftMemories)
    tier: Tier = field(default_factory=NoTier)
