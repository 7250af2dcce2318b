"""The compressors by name. A new one is a line here, and its file if it is of a new family, or an installed package.

    identity  bfloat16           nothing, or half of float32, is saved: the null variants
    int8  int4  int8g32          equal steps between the extremes of a head, or of each 32 elements of it
    lloyd3  lloyd4  lloyd6       steps for Gaussian numbers after a Hadamard rotation, the scale fitted

What each costs and loses on real keys and values is in the records of `kakeya bench codecs`.
"""

from __future__ import annotations

from inference_engine.errors import InvalidArgument
from inference_engine.kv import installed
from inference_engine.kv.compressor import KVCompressor
from inference_engine.kv.compressors.identity import BFloat16, Identity
from inference_engine.kv.compressors.integer import Integer
from inference_engine.kv.compressors.rotated import Lloyd
from inference_engine.kv.installed import Registry

_OWN: tuple[KVCompressor, ...] = (
    Identity(),
    BFloat16(),
    Integer(bits=8),
    Integer(bits=4),
    Integer(bits=8, group=32),
    *(Lloyd(bits=bits) for bits in (3, 4, 6)),
)
COMPRESSORS: Registry[KVCompressor] = Registry(
    "codec",
    installed.COMPRESSORS,
    {compressor.name: compressor for compressor in _OWN},
    fits=lambda one: isinstance(one, KVCompressor),
)


def compressor_names() -> tuple[str, ...]:
    return tuple(COMPRESSORS.all())


def make_compressor(name: str) -> KVCompressor:
    """The compressor of that name. Raises InvalidArgument for `codec`."""
    compressor = COMPRESSORS.get(name)
    if compressor is None:
        raise InvalidArgument("codec", COMPRESSORS.unknown(name))
    return compressor
