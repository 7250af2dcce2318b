"""The null compressors: a vector kept as float32, to the bit, or as bfloat16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inference_engine.kv.compressor import Coding, KVCompressor


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity(KVCompressor):
    """Four bytes an element, no error."""

    @property
    def name(self) -> str:
        return "identity"

    @property
    def coding(self) -> Coding:
        return Coding(dtype=torch.float32)

    def vector_bytes(self, head_dim: int) -> int:
        return 4 * head_dim

    def encode(self, vectors: Tensor) -> Tensor:
        self.check(vectors.shape[-1])
        return _as_bytes(vectors.float())

    def decode(self, codes: Tensor, head_dim: int) -> Tensor:
        return codes.contiguous().view(torch.float32)

    def error_bound(self, vectors: Tensor) -> Tensor:
        return vectors.new_zeros(vectors.shape[:-1], dtype=torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class BFloat16(KVCompressor):
    """Two bytes an element: eight leading bits of each number."""

    @property
    def name(self) -> str:
        return "bfloat16"

    @property
    def coding(self) -> Coding:
        return Coding(dtype=torch.bfloat16)

    def vector_bytes(self, head_dim: int) -> int:
        return 2 * head_dim

    def encode(self, vectors: Tensor) -> Tensor:
        self.check(vectors.shape[-1])
        return _as_bytes(vectors.float().bfloat16())

    def decode(self, codes: Tensor, head_dim: int) -> Tensor:
        return codes.contiguous().view(torch.bfloat16).float()

    def error_bound(self, vectors: Tensor) -> Tensor:
        # Half of the last of eight bits of each element, and the smallest float. In float64, where squares of large
        # numbers do not overflow.
        bounds: Tensor = vectors.double().norm(dim=-1) * 2.0**-8 + 1e-30
        return bounds.float()


def _as_bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)
