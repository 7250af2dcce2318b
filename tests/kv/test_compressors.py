"""The laws of compressors, over every registered one: honest bytes, independent vectors, errors within the bound."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_engine.errors import InvalidArgument
from inference_engine.kv.compressor import KVCompressor
from inference_engine.kv.compressors import make_compressor
from tests.further import further_test
from tests.kv.codec_cases import (
    COMPRESSORS,
    DEVICES,
    KINDS,
    each_compressor,
    gaussian,
    head_sizes,
    lengths,
    vectors_of,
)


@each_compressor
def test_bytes_reported_are_bytes_made(compressor: KVCompressor) -> None:
    shapes: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (2, 0), (2, 3, 5))
    for head_dim, shape in product(head_sizes(compressor), shapes):
        codes = compressor.encode(gaussian(*shape, head_dim))
        assert codes.dtype == torch.uint8
        assert codes.shape == (*shape, compressor.vector_bytes(head_dim))
        decoded = compressor.decode(codes, head_dim)
        assert decoded.dtype == torch.float32
        assert decoded.shape == (*shape, head_dim)
        assert compressor.error_bound(decoded).shape == shape


@each_compressor
def test_a_vector_has_the_same_code_in_any_company(compressor: KVCompressor) -> None:
    for head_dim in head_sizes(compressor):
        count = 70 if head_dim == 64 else 9  # once more than is worked on at once
        vectors = torch.cat([vectors_of(kind, count, head_dim, seed=1) for kind in KINDS] * 2)
        codes = compressor.encode(vectors)
        decoded = compressor.decode(codes, head_dim)
        order = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(2))
        assert torch.equal(compressor.encode(vectors[order]), codes[order])
        assert torch.equal(compressor.decode(codes[order], head_dim), decoded[order])
        for some in (slice(0, 1), slice(5, 8), slice(60, 97), slice(1000, None)):
            assert torch.equal(compressor.encode(vectors[some]), codes[some])
            assert torch.equal(compressor.decode(codes[some], head_dim), decoded[some])


def test_a_vector_that_is_not_finite_harms_no_other(subtests: pytest.Subtests) -> None:
    for compressor in COMPRESSORS:
        with subtests.test(str(compressor)):
            head_dim = 64
            vectors = gaussian(6, head_dim)
            codes = compressor.encode(vectors)
            for place, value in ((0, torch.nan), (2, torch.inf), (3, -torch.inf), (5, 3e38)):
                vectors[place, place] = value
            spoilt = compressor.encode(vectors)
            assert torch.equal(spoilt[[1, 4]], codes[[1, 4]])
            assert compressor.decode(spoilt, head_dim)[[1, 4]].isfinite().all()
            compressor.error_bound(vectors)


@each_compressor
@given(
    kind=st.sampled_from(KINDS),
    exponent=st.integers(-110, 110),
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(0, 20),
)
@settings(max_examples=12)
def test_the_error_is_within_the_bound(
    compressor: KVCompressor, kind: str, exponent: int, seed: int, size: int
) -> None:
    sizes = head_sizes(compressor)
    head_dim = sizes[size % len(sizes)]
    vectors = vectors_of(kind, 50, head_dim, seed) * 2.0**exponent
    decoded = compressor.decode(compressor.encode(vectors), head_dim)
    bound = compressor.error_bound(vectors)
    assert bound.isfinite().all()
    assert (lengths(decoded - vectors) <= bound.double()).all()


def test_vectors_and_codes_may_be_anywhere_in_memory(subtests: pytest.Subtests) -> None:
    for compressor in COMPRESSORS:
        with subtests.test(str(compressor)):
            vectors = gaussian(64, 3, 5).permute(2, 1, 0)
            codes = compressor.encode(vectors)
            assert torch.equal(codes, compressor.encode(vectors.contiguous()))
            apart = torch.stack((codes, codes), dim=-1)[..., 0]
            assert torch.equal(compressor.decode(apart, 64), compressor.decode(codes, 64))


@further_test
@each_compressor
def test_codes_are_the_same_on_every_device(compressor: KVCompressor, subtests: pytest.Subtests) -> None:
    for device in DEVICES:
        with subtests.test(device):
            for head_dim in head_sizes(compressor):
                vectors = torch.cat([vectors_of(kind, 40, head_dim, seed=3) for kind in KINDS])
                codes = compressor.encode(vectors)
                there = compressor.encode(vectors.to(device))
                assert there.device.type == device
                assert torch.equal(there.cpu(), codes)
                assert torch.equal(compressor.decode(there, head_dim).cpu(), compressor.decode(codes, head_dim))


def test_the_host_never_looks_at_a_result(subtests: pytest.Subtests) -> None:
    for compressor in COMPRESSORS:
        with subtests.test(str(compressor)):
            # Tensors on this device have shapes and no numbers: asking for one would raise.
            vectors = torch.empty(4, 64, device="meta")
            codes = compressor.encode(vectors)
            assert compressor.decode(codes, 64).shape == (4, 64)
            assert compressor.error_bound(vectors).shape == (4,)


@pytest.mark.parametrize("name", ["identity", "bfloat16"])
def test_coding_a_decoded_vector_again_gives_the_same_bytes(name: str) -> None:
    compressor = make_compressor(name)
    for head_dim in head_sizes(compressor):
        codes = compressor.encode(torch.cat([vectors_of(kind, 50, head_dim, seed=4) for kind in KINDS]))
        again = compressor.encode(compressor.decode(codes, head_dim))
        assert torch.equal(compressor.decode(again, head_dim), compressor.decode(codes, head_dim))


def test_a_head_that_cannot_be_rotated_is_refused_by_name_before_it_is_coded(subtests: pytest.Subtests) -> None:
    for name in ("lloyd3", "lloyd4"):
        with subtests.test(name):
            with pytest.raises(
                InvalidArgument, match=f"{name} takes head sizes that are powers of two .* has 80"
            ) as refusal:
                make_compressor(name).encode(torch.zeros(2, 80))
            assert refusal.value.field == "codec"
