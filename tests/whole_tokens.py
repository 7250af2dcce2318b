"""The base of a test's own token codecs: one layer's numbers are not known apart, and any number of bytes will do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from torch import Tensor

from inference_engine.kernels.trellis import Trellis


class WholeTokens:
    """What a `TokenCodec` has beside `layers`, sizes, `encode` and `decode`."""

    def using(self, trellis: Trellis) -> Self:
        return self

    def has(self, bytes_per_token: int) -> bool:
        return True

    def at(self, bytes_per_token: int) -> Self:
        return self

    def analysers(self) -> None:
        return None

    def encode_numbers(self, numbers: Sequence[Tensor]) -> Tensor:
        raise AssertionError("it has no analysers")

    def decoder(self, layer: int) -> None:
        return None
