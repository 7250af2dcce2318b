"""The types that tensors of a GGUF file are stored in, and how each executor reads them.

    native     the tile that holds the same numbers (`native/src/types.h`). FLOAT32 for a type of blocks: the matrix
               alone is unpacked to float32, four bytes a number
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
    """How numbers are stored: blocks of `numbers` in `size_bytes` each. tile: native's `Format`."""

    name: str
    numbers: int
    size_bytes: int
    tile: str

    def bytes_of(self, count: int) -> int:
        return count // self.numbers * self.size_bytes

    @property
    def is_float(self) -> bool:
        """Whether each number is stored alone."""
        return self.numbers == 1

    @property
    def is_unpacked(self) -> bool:
        """Whether the native backend has no tile for these blocks."""
        return not self.is_float and self.tile == "FLOAT32"


def _encoding(name: str, numbers: int, size_bytes: int, tile: str) -> Encoding:
    return Encoding(name=name, numbers=numbers, size_bytes=size_bytes, tile=tile)


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
        16: _encoding("IQ2_XXS", 256, 66, "FLOAT32"),
        17: _encoding("IQ2_XS", 256, 74, "FLOAT32"),
        18: _encoding("IQ3_XXS", 256, 98, "FLOAT32"),
        19: _encoding("IQ1_S", 256, 50, "FLOAT32"),
        20: _encoding("IQ4_NL", 32, 18, "IQ4_NL"),
        21: _encoding("IQ3_S", 256, 110, "FLOAT32"),
        22: _encoding("IQ2_S", 256, 82, "FLOAT32"),
        23: _encoding("IQ4_XS", 256, 136, "IQ4_XS"),
        29: _encoding("IQ1_M", 256, 56, "FLOAT32"),
        30: _encoding("BF16", 1, 2, "BFLOAT16"),
        34: _encoding("TQ1_0", 256, 54, "FLOAT32"),
        35: _encoding("TQ2_0", 256, 66, "FLOAT32"),
        39: _encoding("MXFP4", 32, 17, "MXFP4"),
        40: _encoding("NVFP4", 64, 36, "FLOAT32"),
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
