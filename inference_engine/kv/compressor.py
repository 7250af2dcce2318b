"""The compressor interface (KV cache quantisation): a vector becomes bytes, and comes back nearly as it was.

A vector is one head's K or V of one position, the last dimension of a tensor. Each is coded by itself: its bytes depend
on no other vector and not on the batch size, so entries can be coded, moved and read back one by one.

Laws, tested over every registered compressor: `vector_bytes` are the bytes `encode` makes, vectors are independent to
the bit, the error stays within `error_bound`.

Arithmetic is in float32. A vector with NaN or infinity in it, or with a magnitude above 1e38, decodes to anything,
NaN and infinity included, and affects no other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from inference_engine.errors import InvalidArgument

LARGEST_HEAD = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Coding:
    """What a kernel has to know to code vectors as a `KVCompressor` does, to the bit.

        numbers    dtype, and nothing else
        levels     scale × groups (2 bytes each) | centre × groups (2 each), if there are | codes of `bits` bits, packed

    Groups are `group` channels each; None: the whole vector. An element is (level + centre/16 − middle) · scale with
    centres, otherwise level · scale, and is_rotated: the Hadamard rotation of that. levels: by code; None: the code
    itself. nearest: of a rotated vector, the code of the level nearest to each cell of the line. Scales to try are the
    mean magnitude times `spread` and the largest one times `outermost`.
    """

    dtype: torch.dtype | None = None
    bits: int = 0
    group: int | None = None
    levels: tuple[float, ...] | None = None
    has_centres: bool = False
    middle: float = 0.0
    is_rotated: bool = False
    nearest: bytes | None = None
    spread: float = 0.0
    outermost: float = 0.0

    def __post_init__(self) -> None:
        if self.is_rotated and (self.levels is None or self.nearest is None):
            raise ValueError("kernels code rotated vectors by levels and the nearest of them; give both, or no coding")


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCompressor(ABC):
    """A spec without state. `name` is its name in the registry.

    Nothing here waits for the device: the host never looks at a result.
    """

    @property
    @abstractmethod
    def name(self) -> str: ...

    def check(self, head_dim: int) -> None:
        """Raise InvalidArgument for `codec`, with value and limits, if heads of this size cannot be coded."""
        require_head(1 <= head_dim <= LARGEST_HEAD, self.name, f"from 1 to {LARGEST_HEAD}", head_dim)

    @abstractmethod
    def vector_bytes(self, head_dim: int) -> int:
        """Bytes one vector takes, scales included."""

    @abstractmethod
    def encode(self, vectors: Tensor) -> Tensor:
        """[..., D] of any float dtype -> uint8 [..., vector_bytes(D)] on the same device. Raises as `check` does."""

    @abstractmethod
    def decode(self, codes: Tensor, head_dim: int) -> Tensor:
        """uint8 [..., vector_bytes(D)], as `encode` made them -> float32 [..., D]."""

    @property
    def coding(self) -> Coding | None:
        """How kernels code; None: not at all."""
        return None

    @abstractmethod
    def error_bound(self, vectors: Tensor) -> Tensor:
        """[..., D] -> float32 [...]: an upper bound of the length of decode(encode(v)) − v.

        It follows from the vector and the geometry of the code, without coding it. For a vector that is not finite it
        has no meaning.
        """

    def __str__(self) -> str:
        return self.name


def require_head(fits: bool, name: str, sizes: str, head_dim: int) -> None:
    """Raise InvalidArgument for `codec` unless a head of `head_dim` fits `name`, which takes sizes as in `sizes`."""
    if not fits:
        raise InvalidArgument(
            "codec",
            f"{name} takes head sizes {sizes}, this model has {head_dim}; int8, int4 and bfloat16 take any",
            codec=name,
            head_dim=head_dim,
        )
