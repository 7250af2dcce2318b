"""The types that tensors of a GGUF file are stored in, and how each executor reads them.

    native     the tile that holds the same numbers (`native/src/types.h`): of the file's own bits, or, for types that
               have `levels`, of bytes with a scale for every 16, ten bits a number
    torch      unpacked to its dtype: two or four bytes a number
    MLX        as torch

Sizes and names are those of ggml's `ggml.h` and of the gguf package, which unpacks what no tile holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """How numbers are stored: blocks of `numbers` in `size_bytes` each. tile: native's `Format`.

    levels: of blocks that no tile has the bits of, the magnitudes that a number may have, times a scale of 16 numbers.
    """

    name: str
    numbers: int
    size_bytes: int
    tile: str
    levels: tuple[int, ...] = ()

    def bytes_of(self, count: int) -> int:
        return count // self.numbers * self.size_bytes

    @property
    def is_float(self) -> bool:
        """Whether each number is stored alone."""
        return self.numbers == 1


def _encoding(name: str, numbers: int, size_bytes: int, tile: str) -> Encoding:
    return Encoding(name=name, numbers=numbers, size_bytes=size_bytes, tile=tile)


def _levelled(name: str, numbers: int, size_bytes: int, *levels: int) -> Encoding:
    return Encoding(name=name, numbers=numbers, size_bytes=size_bytes, tile="INT8_PAIR", levels=levels)


# By their number in the file.
ENCODINGS: Mapping[int, Encoding] = MappingProxyType(
    {
        0: _encoding("F32", 1, 4, "FLOAT32"),
        1: _encoding("F16", 1, 2, "FLOAT16"),
        2: _encoding("Q4_0", 32, 18, "INT4"),
        3: _encoding("Q4_1", 32, 20, "INT4"),
        6: _encoding("Q5_0", 32, 22, "Q5_0"),
        7: _encoding("Q5_1", 32, 24, "Q5_1"),
        8: _encoding("Q8_0", 32, 34, "INT8"),
        10: _encoding("Q2_K", 256, 84, "Q2_K"),
        11: _encoding("Q3_K", 256, 110, "Q3_K"),
        12: _encoding("Q4_K", 256, 144, "INT4_WIDE"),
        13: _encoding("Q5_K", 256, 176, "Q5_K"),
        14: _encoding("Q6_K", 256, 210, "Q6_K"),
        16: _levelled("IQ2_XXS", 256, 66, 43, 25, 8),
        17: _levelled("IQ2_XS", 256, 74, 43, 25, 8),
        18: _levelled("IQ3_XXS", 256, 98, 62, 52, 44, 36, 28, 20, 12, 4),
        19: _levelled("IQ1_S", 256, 50, 9, 7, 1),
        20: _encoding("IQ4_NL", 32, 18, "IQ4_NL"),
        21: _levelled("IQ3_S", 256, 110, 15, 13, 11, 9, 7, 5, 3, 1),
        22: _levelled("IQ2_S", 256, 82, 43, 25, 8),
        23: _encoding("IQ4_XS", 256, 136, "IQ4_XS"),
        29: _levelled("IQ1_M", 256, 56, 9, 7, 1),
        30: _encoding("BF16", 1, 2, "BFLOAT16"),
        34: _levelled("TQ1_0", 256, 54, 1),
        35: _levelled("TQ2_0", 256, 66, 2, 1),
        39: _encoding("MXFP4", 32, 17, "MXFP4"),
        40: _levelled("NVFP4", 64, 36, 12, 8, 6, 4, 3, 2, 1),
    }
)
BY_NAME: Mapping[str, Encoding] = MappingProxyType({encoding.name: encoding for encoding in ENCODINGS.values()})

# Types that a file may name and nothing here reads: whole numbers, activations, what the format has given up.
UNREAD: Mapping[int, str] = MappingProxyType(
    {
        4: "Q4_2",
        5: "Q4_3",
        9: "Q8_1",
        15: "Q8_K",
        24: "I8",
        25: "I16",
        26: "I32",
        27: "I64",
        28: "F64",
        31: "Q4_0_4_4",
        32: "Q4_0_4_8",
        33: "Q4_0_8_8",
        36: "IQ4_NL_4_4",
        37: "IQ4_NL_4_8",
        38: "IQ4_NL_8_8",
        41: "Q1_0",
    }
)


def type_name(kind: int) -> str:
    """What a type of tensor is called, read or not; its number if it is not known."""
    if kind in ENCODINGS:
        return ENCODINGS[kind].name
    return UNREAD.get(kind, f"number {kind}, which is not known")
