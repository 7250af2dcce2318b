"""The page of tensor types: how each executor reads what a GGUF file may hold."""

from __future__ import annotations

from collections.abc import Iterator

from inference_engine.models.encodings import ENCODINGS, UNREAD
from scripts.reference.markdown import code, page, table

INTRODUCTION = """
    Every tensor of a GGUF file has a type, and a file may mix them. The native backend holds the same numbers in every
    case: as the file's own blocks, or as bytes with a scale for every 16, and the log warns with the memory that takes.
    torch and MLX have no products of these blocks, and unpack them to their dtype. Norms and biases are F32, F16 or
    BF16.
"""
HEADER = ("type", "number in the file", "bits a number", "native", "torch and MLX")


def render() -> str:
    unread = ", ".join(f"{name} ({number})" for number, name in UNREAD.items())
    return page(
        "Tensor types of GGUF files",
        "inference_engine/models/encodings.py",
        INTRODUCTION,
        table(HEADER, _rows()),
        f"Refused by their names: {unread}.",
    )


def _rows() -> Iterator[tuple[str, str, str, str, str]]:
    for number, kind in ENCODINGS.items():
        native = "as bytes, 10 bits a number" if kind.levels else "as it is"
        others = "in `dtype`" if kind.is_float else "unpacked to `dtype`"
        yield code(kind.name), str(number), f"{8 * kind.size_bytes / kind.numbers:g}", native, others
