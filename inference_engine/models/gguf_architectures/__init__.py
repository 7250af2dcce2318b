"""The architectures of GGUF files that are read, one file for those that are alike; by llama.cpp's names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from inference_engine.models.gguf_architectures import convolutions, delta, dense, gemmas, mamba, mla, routed
from inference_engine.models.gguf_architectures.architecture import Architecture, Made, MovedBlocks, TensorLayout
from inference_engine.models.gguf_architectures.header_keys import Keys

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        name: each
        for module in (dense, routed, gemmas, delta, mamba, convolutions, mla)
        for name, each in module.ARCHITECTURES.items()
    }
)

__all__ = ["ARCHITECTURES", "Architecture", "Keys", "Made", "MovedBlocks", "TensorLayout"]
