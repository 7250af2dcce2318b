"""Check that a file is a complete safetensors file: its header against its size, without reading weights.

    8 bytes            N bytes                                            the tensors, back to back
    N, little-endian   {"name": {"dtype", "shape", "data_offsets"}, …}    ends where the file ends

What the format's own reader takes is taken here, but for names that are there twice; so `__metadata__` may be null.

Mapping a truncated file would kill the process at the first access to a missing page, so this check comes first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from inference_engine.errors import ModelError

# The format's own limit.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 8

_BY_BITS = {
    4: ("F4",),
    6: ("F6_E2M3", "F6_E3M2"),
    8: ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"),
    16: ("I16", "U16", "F16", "BF16"),
    32: ("I32", "U32", "F32"),
    64: ("C64", "F64", "I64", "U64"),
}
# Of a number of each type that the format has.
BITS: Mapping[str, int] = MappingProxyType({name: bits for bits, names in _BY_BITS.items() for name in names})

# First bytes of other formats.
_FOREIGN = {
    b"PK\x03\x04": "a zip archive, as torch.save writes",
    b"\x80": "a pickle",
    b"GGUF": "a GGUF file",
    b"version https://git-lfs": "a pointer of git-lfs; run `git lfs pull`",
}


def check_safetensors(path: Path) -> dict[str, Any]:
    """The header's tensors by name, each of a type and a shape that its bytes can hold.

    Raises ModelError, saying which, if the file is foreign, truncated or overlong, and if a tensor has no such type.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(32)
        header_bytes = int.from_bytes(start[:8], "little")
        for signature, kind in _FOREIGN.items():
            # A valid header may have a length that begins with a pickle's first byte; the brace after it distinguishes
            # the two.
            if start.startswith(signature) and start[8:9] != b"{":
                raise ModelError(f"{path}: not a safetensors file but {kind}")
        if header_bytes > MAX_HEADER_BYTES or start[8:9] != b"{":
            raise ModelError(f"{path}: not a safetensors file")
        if 8 + header_bytes > size:
            raise ModelError(f"{path}: truncated: {size} bytes, the header alone has {8 + header_bytes}; copy it again")
        file.seek(8)
        header = file.read(header_bytes)
    try:
        tensors: dict[str, Any] = json.loads(header, object_pairs_hook=_each_once, parse_constant=_no_number)
        metadata = tensors.pop("__metadata__", None)
        if metadata is not None and not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("__metadata__ has values that are no texts")
        end = 0
        places = [(int(one["data_offsets"][0]), int(one["data_offsets"][1]), name) for name, one in tensors.items()]
        for place, stop, name in sorted(places):
            if place != end or stop < place:
                raise ValueError(f"{name} is at bytes {place} to {stop}, and what is before it ends at {end}")
            end = stop
        for name, one in tensors.items():
            name.encode()  # half a character can be written in JSON, and cannot be printed
            start, stop = one["data_offsets"]
            dtype, shape = one["dtype"], one["shape"]
            whole = all(type(number) is int and number >= 0 for number in (*shape, start, stop))
            if not isinstance(dtype, str) or not whole or len(shape) > MAX_DIMENSIONS:
                raise ValueError(f"{name} is {dtype!r} of the shape {shape!r}, at {start!r} to {stop!r}")
            if (bits := BITS.get(dtype)) is None:
                raise ModelError(
                    f"{path}: {name} is stored as {dtype!r}, which is no type of safetensors ({', '.join(BITS)}); get "
                    "the file again"
                )
            if math.prod(shape) * bits != 8 * (stop - start):
                raise ValueError(f"{name}: {stop - start} bytes cannot hold {tuple(shape)} numbers of {dtype}")
    except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: the safetensors header is damaged: {error}") from error
    expected = 8 + header_bytes + end
    if size != expected:
        kind = "truncated" if size < expected else "overlong"
        raise ModelError(f"{path}: {kind}: expected {expected} bytes, got {size}; copy or fetch it again")
    return tensors


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")
