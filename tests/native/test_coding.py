"""The kernels that code entries in regions give the bits of compressors, the model's rotation and rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.backends.native.entry_coder import NativeCoder
from inference_engine.backends.native.forward import KV_DTYPES
from inference_engine.errors import RestorationFailed
from inference_engine.kernels.kv_dtype import as_kept
from inference_engine.kv.compressor import KVCompressor
from inference_engine.kv.compressors import compressor_names, make_compressor
from inference_engine.kv.context import CodedPlaces, NoCoder
from inference_engine.kv.layout import Positions
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.restored import Restored
from inference_engine.kv.strategy import KVStrategy
from inference_engine.native.library import CodedEntries, Kernels, KVType, ProductIdentity, RestoredRun, Threads
from tests.native.test_forward import Sessions, ids_of
from tests.tiny import LATENT_BYTES, tiny_latent
from tests.tiny_native import library, tiny_native

CODED = [name for name in compressor_names() if make_compressor(name).coding is not None]
LAYERS, HEADS, COUNT = 3, 2, 37
# The second is no power of two, and has a shorter last group: only for compressors that do not rotate.
HEAD_DIMS = (16, 48, 64, 128)

each_compressor = pytest.mark.parametrize("name", CODED)


def turn(keys: Tensor, shifts: Tensor, _: str) -> Tensor:
    """A rotation of all but the last 8 numbers of a head."""
    half = keys.shape[-1] // 2 - 4
    angles = shifts[:, None] / 10000.0 ** (torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    left, right, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], dim=-1)


def turned(entries: Tensor, shifts: Positions | None) -> Tensor:
    """[layers, n, Hkv, D]"""
    if shifts is None:
        return entries
    layers = [turn(layer.transpose(0, 1), torch.from_numpy(shifts), "").transpose(0, 1) for layer in entries]
    return torch.stack(layers)


def cases(compressor: KVCompressor) -> Iterator[tuple[int, Positions | None]]:
    """Head sizes and shifts."""
    assert compressor.coding is not None
    sizes = [size for size in HEAD_DIMS if size != 48 or not compressor.coding.is_rotated]
    return product(sizes, (np.arange(COUNT, dtype=np.int64) * -11, None))


def coders(kv_type: KVType, head_dim: int) -> Iterator[NativeCoder]:
    for level in library().levels():
        with library().open_threads(2) as threads:
            yield NativeCoder(
                kernels=library().kernels(level),
                threads=threads,
                kv_type=kv_type,
                rotate=turn,
                identity=ProductIdentity.EXACT,
                turned={"all": head_dim - 8},
                turns={},
            )


def vectors(head_dim: int, count: int) -> Tensor:
    """[layers, n, Hkv, D], some of them very small, large or with an outlier."""
    found = torch.randn((LAYERS, count, HEADS, head_dim), generator=torch.Generator().manual_seed(head_dim)) * 3
    found[0, :4, 0] *= torch.tensor([1e-6, 1e3, 0.0, 1e-30])[:, None]
    found[1, ::3, 1, 5] *= 100
    return found


@each_compressor
def test_decompressed_entries_are_equal_to_the_bit(name: str, subtests: pytest.Subtests) -> None:
    for kv_type in KVType:
        with subtests.test(kv_type.name):
            check_decompressed_entries(name, kv_type)


def check_decompressed_entries(name: str, kv_type: KVType) -> None:
    compressor, dtype, rng = make_compressor(name), KV_DTYPES[kv_type], np.random.default_rng(1)
    for head_dim, shifts in cases(compressor):
        given = vectors(head_dim, COUNT + 5)
        given[2, 7] *= 1e5  # too large for float16
        codes, means = compressor.encode(given), torch.randn(LAYERS, HEADS, head_dim).to(dtype)
        code_slots, slots = rng.permutation(COUNT + 5)[:COUNT], rng.permutation(COUNT + 20)[:COUNT]
        entries = turned(compressor.decode(codes[:, code_slots], head_dim) + means.float()[:, None], shifts)
        expected = torch.zeros((LAYERS, HEADS, COUNT + 20, head_dim), dtype=dtype)
        expected[:, :, slots] = as_kept(entries, dtype).to(dtype).transpose(1, 2)

        for coder in coders(kv_type, head_dim):
            found = torch.zeros_like(expected)
            places = CodedPlaces(
                codes=list(codes),
                code_slots=code_slots,
                means=list(means),
                regions=list(found),
                slots=slots,
                shifts=shifts,
                rotary="all",
            )
            coder.decompress(compressor, places)
            assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)), (coder.kernels.level, head_dim)
            assert torch.equal(found.isnan(), expected.isnan())


@each_compressor
def test_compressed_entries_are_equal_to_the_bit(name: str, subtests: pytest.Subtests) -> None:
    for kv_type in KVType:
        with subtests.test(kv_type.name):
            check_compressed_entries(name, kv_type)


def check_compressed_entries(name: str, kv_type: KVType) -> None:
    compressor, dtype, rng = make_compressor(name), KV_DTYPES[kv_type], np.random.default_rng(1)
    for head_dim, shifts in cases(compressor):
        regions = vectors(head_dim, COUNT + 20).transpose(1, 2).to(dtype).contiguous()
        means = torch.randn(LAYERS, HEADS, head_dim).to(dtype)
        means[0, 0] = 0
        code_slots, slots = rng.permutation(COUNT + 5)[:COUNT], rng.permutation(COUNT + 20)[:COUNT]
        entries = turned(regions[:, :, slots].transpose(1, 2).float(), shifts) - means.float()[:, None]
        expected = torch.full((LAYERS, COUNT + 5, HEADS, compressor.vector_bytes(head_dim)), 99, dtype=torch.uint8)
        expected[:, code_slots] = compressor.encode(entries)

        for coder in coders(kv_type, head_dim):
            found = torch.full_like(expected, 99)
            places = CodedPlaces(
                codes=list(found),
                code_slots=code_slots,
                means=list(means),
                regions=list(regions),
                slots=slots,
                shifts=shifts,
                rotary="all",
            )
            assert coder.compress(compressor, places)
            assert torch.equal(found, expected), (coder.kernels.level, head_dim)

            broken = regions.clone()
            broken[1, 0, slots[20], 3] = torch.nan
            assert not coder.compress(compressor, replace(places, regions=list(broken), codes=list(found.clone())))


RESTORED = [
    *(Full(codec=codec, exact_window=9) for codec in ("lloyd4", "int8", "bfloat16")),
    Restored(sink=2, window=13, source="latent", bytes_per_token=LATENT_BYTES),
]


@pytest.mark.parametrize("strategy", RESTORED, ids=str)
def test_sessions_give_the_logits_that_they_give_without_it(
    strategy: KVStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries that leave the exact window as the history grows, and all of them again when the session wakes.

    To the bit from codes of entries; from a latent up to rounding.
    """
    decompressed: list[int] = []
    name = "restore" if isinstance(strategy, Restored) else "decompress"
    run = getattr(Kernels, name)

    def counted(kernels: Kernels, threads: Threads, entries: CodedEntries | RestoredRun) -> Any:
        decompressed.append(entries.count)
        return run(kernels, threads, entries)

    monkeypatch.setattr(Kernels, name, counted)
    found, by_coder = [], 0
    for coder in (None, NoCoder()):
        sessions = Sessions(tiny_native(kv_type=KVType.FLOAT16))
        context = replace(sessions.context, latent=tiny_latent())
        if coder is not None:
            by_coder, context = len(decompressed), replace(context, coder=coder)
        sessions.sessions.append(SessionKV(strategy, context, 256))
        for first in (0, 60):
            assert sessions.sessions[0].wake(256)
            found.append(sessions.logits(0, ids_of(60, seed=first), range(4, 60, 4)))
            sessions.sessions[0].idle()
    atol = 2e-3 if isinstance(strategy, Restored) else 0.0
    torch.testing.assert_close(found[:2], found[2:], atol=atol, rtol=0.0)
    assert 0 < by_coder == len(decompressed)


def test_an_entry_that_is_not_finite_is_named_when_it_would_be_compressed() -> None:
    sessions = Sessions(tiny_native(kv_type=KVType.FLOAT16, enlarged="v_proj"))
    sessions.sessions.append(SessionKV(Full(codec="lloyd4", exact_window=9), sessions.context, 256))
    assert sessions.sessions[0].wake(256)

    with pytest.raises(RestorationFailed, match="layer 2"):
        sessions.logits(0, ids_of(60), range(4, 60, 4))
