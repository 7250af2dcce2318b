"""What a latent codec offers the engine: a token's rows of many layers as a few bytes, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


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
