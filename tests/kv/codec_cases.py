"""What the compressor tests share: every registered compressor, head sizes that fit it, and vectors of many kinds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from inference_engine.errors import InvalidArgument
from inference_engine.kv.compressor import KVCompressor
from inference_engine.kv.compressors import compressor_names, make_compressor

HEAD_SIZES = (1, 2, 3, 4, 8, 31, 64, 80, 96, 128, 256)
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
KINDS = ("gaussian", "heavy", "sparse", "one", "constant", "offset", "steps", "zero")


COMPRESSORS = [make_compressor(name) for name in compressor_names()]
each_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)


def fits(compressor: KVCompressor, head_dim: int) -> bool:
    try:
        compressor.check(head_dim)
    except InvalidArgument:
        return False
    return True


def head_sizes(compressor: KVCompressor) -> list[int]:
    return [head_dim for head_dim in HEAD_SIZES if fits(compressor, head_dim)]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def vectors_of(kind: str, count: int, head_dim: int, seed: int) -> Tensor:
    """[count, D] float32."""
    plain = gaussian(count, head_dim, seed=seed)
    uniform = torch.rand(count, head_dim, generator=torch.Generator().manual_seed(seed))
    return {
        "gaussian": plain,
        "heavy": torch.tan((uniform - 0.5) * (math.pi * 0.9999)),
        "sparse": plain * (uniform < 0.1),
        "one": torch.eye(head_dim)[torch.arange(count) % head_dim] * plain[:, :1],
        "constant": plain[:, :1].expand(count, head_dim),
        "offset": plain + 1000 * plain[:, :1],
        "steps": (plain * 4).round() / 2,
        "zero": torch.zeros(count, head_dim),
    }[kind]


def lengths(vectors: Tensor) -> Tensor:
    """In float64: an error's square may have no place in float32."""
    norms: Tensor = torch.linalg.vector_norm(vectors.double(), dim=-1)
    return norms
