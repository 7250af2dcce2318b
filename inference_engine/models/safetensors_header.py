"""Check that a file is a complete safetensors file: its header against its size, without reading weights.

    8 bytes            N bytes                                            the tensors, back to back
    N, little-endian   {"name": {"dtype", "shape", "data_offsets"}, …}    ends where the file ends

Mapping a truncated file would kill the process at the first access to a missing page, so this check comes first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inference_engine.errors import ModelError

# The format's own limit.
MAX_HEADER_BYTES = 100_000_000

# First bytes of other formats.
_FOREIGN = {
    b"PK\x03\x04": "a zip archive, as torch.save writes",
    b"\x80": "a pickle",
    b"GGUF": "a GGUF file",
    b"version https://git-lfs": "a pointer of git-lfs; run `git lfs pull`",
}


def check_safetensors(path: Path) -> dict[str, Any]:
    """The header's tensors by name. Raises ModelError, saying which, if the file is foreign, truncated or overlong."""
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
        tensors: dict[str, Any] = json.loads(header)
        if not all(isinstance(text, str) for text in tensors.pop("__metadata__", {}).values()):
            raise ValueError("__metadata__ has values that are no texts")
        end = 0
        places = [(int(one["data_offsets"][0]), int(one["data_offsets"][1]), name) for name, one in tensors.items()]
        for place, stop, name in sorted(places):
            if place != end or stop < place:
                raise ValueError(f"{name} is at bytes {place} to {stop}, and what is before it ends at {end}")
            end = stop
    except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: the safetensors header is damaged: {error}") from error
    expected = 8 + header_bytes + end
    if size != expected:
        kind = "truncated" if size < expected else "overlong"
        raise ModelError(f"{path}: {kind}: expected {expected} bytes, got {size}; copy or fetch it again")
    return tensors
