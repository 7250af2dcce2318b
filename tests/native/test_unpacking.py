"""The kernel that decodes compressed entries gives the bits of compressors, the model's rotation and rounding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.backends.native.forward import KV_DTYPES
from inference_engine.backends.native.unpacking import NativeUnpacker
from inference_engine.kernels.kept import as_kept
from inference_engine.kv.compressors import compressor_names, make_compressor
from inference_engine.kv.context import NoUnpacker
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies.full import Full
from inference_engine.native.library import KVType
from tests.native.test_forward import Sessions, ids_of
from tests.tiny_native import library, tiny_native

READ = [name for name in compressor_names() if make_compressor(name).coding is not None]
LAYERS, HEADS, COUNT = 3, 2, 37
# Not a power of two, only for compressors that do not rotate; a group of 32 and a shorter one are 48 numbers.
HEAD_DIMS = (16, 48, 64, 128)


def turn(keys: Tensor, shifts: Tensor, _: str) -> Tensor:
    """A rotation of all but the last 8 numbers of a head."""
    half = keys.shape[-1] // 2 - 4
    angles = shifts[:, None] / 10000.0 ** (torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    left, right, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], dim=-1)


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("kv_type", KVType, ids=lambda kv_type: kv_type.name)
def test_decoded_entries_are_equal_to_the_bit(name: str, kv_type: KVType) -> None:
    compressor, dtype = make_compressor(name), KV_DTYPES[kv_type]
    generator = torch.Generator().manual_seed(1)
    rng = np.random.default_rng(1)
    for head_dim in HEAD_DIMS:
        if head_dim == 48 and compressor.coding is not None and compressor.coding.is_rotated:
            continue
        vectors = torch.randn((LAYERS, COUNT + 5, HEADS, head_dim), generator=generator) * 3
        vectors[0, :4, 0] *= torch.tensor([1e-6, 1e3, 0.0, 1e6])[:, None]  # the last one is too large for float16
        codes = compressor.encode(vectors)
        means = torch.randn((LAYERS, HEADS, head_dim), generator=generator).to(dtype)
        slots, targets = rng.permutation(COUNT + 5)[:COUNT], rng.permutation(COUNT + 20)[:COUNT]
        shifts = np.arange(COUNT, dtype=np.int64) * 11

        for rotated in (shifts, None):
            entries = compressor.decode(codes[:, slots], head_dim) + means.float()[:, None]
            entries = entries.transpose(1, 2)
            if rotated is not None:
                entries = torch.stack([turn(layer, torch.from_numpy(rotated), "") for layer in entries])
            expected = torch.zeros((LAYERS, HEADS, COUNT + 20, head_dim), dtype=dtype)
            expected[:, :, targets] = as_kept(entries, dtype).to(dtype)

            for level in library().levels():
                with library().open_threads(2) as threads:
                    found = torch.zeros_like(expected)
                    NativeUnpacker(
                        kernels=library().kernels(level),
                        threads=threads,
                        kv_type=kv_type,
                        rotate=turn,
                        turned={"all": head_dim - 8},
                    ).unpack(
                        compressor, list(codes), list(means), slots, list(found), targets, shifts=rotated, rotary="all"
                    )
                assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)), (level, head_dim)
                assert torch.equal(found.isnan(), expected.isnan())


@pytest.mark.parametrize("codec", ["lloyd4", "int8", "bfloat16"])
def test_sessions_give_the_logits_that_they_give_without_it(codec: str) -> None:
    """Entries that are compressed as the history grows, and all of them again when the session wakes."""
    found = []
    for is_plain in (False, True):
        sessions = Sessions(tiny_native(kv_type=KVType.FLOAT16))
        context = sessions.context
        assert context.unpacker.reads(make_compressor(codec), next(iter(context.pool.buffers)))
        if is_plain:
            context = replace(context, unpacker=NoUnpacker())
        kv = SessionKV(Full(codec=codec, exact_window=9), context, 256)
        sessions.sessions.append(kv)
        for first in (0, 60):
            assert kv.wake(256)
            found.append(sessions.logits(0, ids_of(60, seed=first), range(4, 60, 4)))
            kv.idle()
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
