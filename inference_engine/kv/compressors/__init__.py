"""The compressors by name. A new one is a line here, and its file if it is of a new family.

    identity  bfloat16                 nothing, or half of float32, is saved: the null variants
    int8  int4  int8g32  int4g32       equal steps between the extremes of a head, or of each 32 elements of it
    had4 … had8                        equal steps after a Hadamard rotation
    lloyd3  lloyd4  lloyd6             steps for Gaussian numbers after a Hadamard rotation, the scale fitted
    d4q… e8q…                          points of the lattices D4 and E8 after a Hadamard rotation

What each costs and loses on real keys and values is in the records of `scripts/bench_codecs.py`.
"""

from __future__ import annotations

from inference_engine.errors import InvalidArgument
from inference_engine.kv.compressor import KVCompressor
from inference_engine.kv.compressors.identity import BFloat16, Identity
from inference_engine.kv.compressors.integer import Integer
from inference_engine.kv.compressors.lattice import D4, E8
from inference_engine.kv.compressors.rotated import Lloyd, RotatedInteger

_COMPRESSORS: dict[str, KVCompressor] = {
    compressor.name: compressor
    for compressor in (
        Identity(),
        BFloat16(),
        *(Integer(bits=bits, group=group) for bits in (8, 4) for group in (None, 32)),
        *(RotatedInteger(bits=bits) for bits in (4, 6, 8)),
        RotatedInteger(bits=4, is_fitted=True),
        *(Lloyd(bits=bits) for bits in (3, 4, 6)),
        *(D4(reach=reach) for reach in (4, 9, 37, 75, 151)),
        D4(reach=9, is_fitted=True),
        *(E8(reach=reach) for reach in (7, 9, 31, 37, 75, 127, 151)),
        E8(reach=7, is_fitted=True),
    )
}


def compressor_names() -> tuple[str, ...]:
    return tuple(_COMPRESSORS)


def make_compressor(name: str) -> KVCompressor:
    """The compressor of that name. Raises InvalidArgument for `codec`."""
    compressor = _COMPRESSORS.get(name)
    if compressor is None:
        raise InvalidArgument("codec", f"there is no codec {name!r}; there are {', '.join(_COMPRESSORS)}")
    return compressor
