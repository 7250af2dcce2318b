"""Packed matrices: what they hold, what their products are, and that a token's bits depend on nothing else."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from inference_engine.backends.native.packed_weights import pairs_of
from inference_engine.models.encodings import BY_NAME
from inference_engine.native import build
from inference_engine.native.library import Format, NativeMatrix, PackError, ProductIdentity, Source, why_missing
from tests.further import FURTHER
from tests.models.tiny_gguf import random_blocks

LEVELS = ("plain", "neon", "i8mm", "avx2", "avxvnni", "avx512")
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


# Formats that floats are packed into; the others hold llama.cpp's blocks of the same name.
OF_FLOATS = tuple(form for form in Format if form <= Format.INT4_WIDE)
# Blocks that become what another product reads: one of each such product here, the rest is alike.
ALIKE = (Format.Q6_K, Format.Q5_1, Format.Q5_K, Format.IQ4_NL, Format.IQ4_XS, Format.MXFP4)
PRODUCTS = [
    pytest.param(form, identity, marks=FURTHER if form in ALIKE else ())
    for form in Format
    for identity in ProductIdentity
    if identity is ProductIdentity.EXACT or form.is_quantised
]


class Native:
    def __init__(self) -> None:
        self.lib = ctypes.CDLL(str(build.LIBRARY))
        self.lib.kakeya_kernels.restype = ctypes.c_void_p
        self.lib.kakeya_open_threads.restype = ctypes.c_void_p
        self.lib.kakeya_packed_bytes.restype = ctypes.c_int64
        self.kernels = {
            level: found for level in LEVELS if (found := self.lib.kakeya_kernels(level.encode())) is not None
        }
        self.threads = {n: ctypes.c_void_p(self.lib.kakeya_open_threads(n)) for n in (1, 2, 3)}

    def close(self) -> None:
        for threads in self.threads.values():
            self.lib.kakeya_close_threads(threads)

    @property
    def best(self) -> str:
        return list(self.kernels)[-1]


class Packed:
    """A packed matrix, in memory of its own that begins at a multiple of 64."""

    def __init__(self, native: Native, form: Format, outputs: int, inputs: int) -> None:
        self.native, self.outputs, self.inputs = native, outputs, inputs
        size = native.lib.kakeya_packed_bytes(form, ctypes.c_int64(outputs), ctypes.c_int64(inputs))
        self.memory = np.full(size + 64, 0xEE, np.uint8)
        self.tiles = self.memory.ctypes.data + 63 & ~63
        self.matrix = NativeMatrix(form, outputs, inputs, 0, self.tiles)

    def pack(self, source: Source, data: Bytes, order: NDArray[np.int64] | None = None) -> int:
        where = ctypes.c_void_p(None if order is None else order.ctypes.data)
        shape = ctypes.c_int64(self.outputs), ctypes.c_int64(self.inputs)
        values = np.ascontiguousarray(data)
        code: int = self.native.lib.kakeya_pack(
            self.matrix.format, source, ctypes.c_void_p(values.ctypes.data), *shape, where, ctypes.c_void_p(self.tiles)
        )
        return code

    def numbers(self, level: str | None = None) -> Floats:
        out = np.empty((self.outputs, self.inputs), np.float32)
        kernels = ctypes.c_void_p(self.native.kernels[level or self.native.best])
        for output in range(self.outputs):
            where = ctypes.c_void_p(out[output].ctypes.data)
            self.native.lib.kakeya_row(kernels, ctypes.byref(self.matrix), ctypes.c_int64(output), where)
        return out

    def product(self, x: Floats, identity: ProductIdentity, level: str | None = None, threads: int = 1) -> Floats:
        guard = 16
        # What lies around the tokens must neither be read into the result nor be written.
        around = np.full(x.size + 2 * guard, np.nan, np.float32)
        around[guard:-guard] = x.ravel()
        out = np.full(len(x) * self.outputs + guard, 7.0, np.float32)
        self.native.lib.kakeya_linear(
            ctypes.c_void_p(self.native.kernels[level or self.native.best]),
            self.native.threads[threads],
            ctypes.byref(self.matrix),
            identity,
            ctypes.c_void_p(around[guard:].ctypes.data),
            ctypes.c_int64(len(x)),
            ctypes.c_void_p(out.ctypes.data),
        )
        assert (out[-guard:] == 7.0).all()
        return out[:-guard].reshape(len(x), self.outputs)


@pytest.fixture(scope="module")
def native() -> Iterator[Native]:
    if reason := why_missing():
        pytest.skip(reason)
    library = Native()
    yield library
    library.close()


def as_bytes(values: NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8)


def of_floats(native: Native, form: Format, weights: Floats) -> Packed:
    packed = Packed(native, form, *weights.shape)
    assert packed.pack(Source.F32, as_bytes(weights)) == 0
    return packed


def random_matrix(native: Native, form: Format, outputs: int, inputs: int, seed: int = 0) -> Packed:
    """Of blocks, as many whole ones as have these inputs at least."""
    if form not in OF_FLOATS:
        numbers = BY_NAME[form.name].numbers
        packed = Packed(native, form, outputs, -(-inputs // numbers) * numbers)
        assert packed.pack(Source[form.name], random_blocks(form.name, outputs, packed.inputs, seed, spread=0.3)) == 0
        return packed
    weights = np.random.default_rng(seed).normal(size=(outputs, inputs)).astype(np.float32)
    return of_floats(native, form, weights)


def tokens(count: int, inputs: int, seed: int = 1) -> Floats:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(count, inputs)) * rng.exponential(size=(count, 1))).astype(np.float32)


def quantised(x: Floats) -> NDArray[np.float64]:
    """The activations as bytes and scales say them."""
    count, inputs = x.shape
    blocks = np.zeros((count, -(-inputs // 32), 32), np.float32)
    blocks.reshape(count, -1)[:, :inputs] = x
    most = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.where(most > 0, np.float32(127) / np.where(most > 0, most, 1), 0).astype(np.float32)
    numbers = np.rint(blocks * inverse).astype(np.float64) * (most / np.float32(127)).astype(np.float64)
    result: NDArray[np.float64] = numbers.reshape(count, -1)[:, :inputs]
    return result


def test_levels_are_what_the_processor_has(native: Native) -> None:
    assert "plain" in native.kernels


@pytest.mark.parametrize(("form", "identity"), PRODUCTS)
def test_products_are_those_of_the_numbers(
    native: Native, form: Format, identity: ProductIdentity, subtests: pytest.Subtests
) -> None:
    for shape in [(1, 1), (17, 33), (48, 64), (70, 100), (131, 320)]:
        with subtests.test(str(shape)):
            packed = random_matrix(native, form, *shape)
            weights = packed.numbers().astype(np.float64)
            for count in (1, 3, 11, 21):
                x = tokens(count, packed.inputs)
                x[0, :32] = 0
                exact = quantised(x) if identity is ProductIdentity.QUANTISED else x.astype(np.float64)
                got = packed.product(x, identity)
                bound = 2e-6 * (np.abs(exact) @ np.abs(weights).T) + 1e-6
                assert (np.abs(got - exact @ weights.T) <= bound).all()


@pytest.mark.parametrize(("form", "identity"), PRODUCTS)
def test_the_bits_of_a_token_depend_on_nothing_else(native: Native, form: Format, identity: ProductIdentity) -> None:
    packed = random_matrix(native, form, 37, 160)
    x = tokens(40, packed.inputs)
    one_by_one = np.concatenate([packed.product(x[i : i + 1], identity) for i in range(40)])
    for level in native.kernels:
        counts = (1, 2, 3, 5, 40) if level == "plain" else range(1, 41)
        for threads in native.threads:
            for count in counts:
                first = (count * 7 + threads) % (41 - count)
                got = packed.product(x[first : first + count], identity, level, threads)
                assert got.tobytes() == one_by_one[first : first + count].tobytes(), (level, threads, count)


@pytest.mark.parametrize(("form", "identity"), PRODUCTS)
def test_every_level_of_instructions_has_the_bits_of_plain_code_on_odd_sizes(
    native: Native, form: Format, identity: ProductIdentity, subtests: pytest.Subtests
) -> None:
    for shape in [(1, 1), (17, 33), (70, 100), (131, 320)]:
        packed = random_matrix(native, form, *shape)
        x = tokens(21, packed.inputs)
        expected = packed.product(x, identity, "plain").tobytes()
        for level in native.kernels:
            with subtests.test(f"{level}, {shape}"):
                assert packed.product(x, identity, level).tobytes() == expected
                assert packed.numbers(level).tobytes() == packed.numbers("plain").tobytes()


@pytest.mark.parametrize(("form", "identity"), PRODUCTS)
def test_many_threads_and_slices_of_tokens_change_nothing(
    native: Native, form: Format, identity: ProductIdentity
) -> None:
    packed = random_matrix(native, form, 20, 36)
    x = tokens(530, packed.inputs)
    whole = packed.product(x, identity, threads=3)
    assert whole.tobytes() == packed.product(x, identity).tobytes()
    assert whole[520:].tobytes() == packed.product(x[520:], identity).tobytes()


@pytest.mark.parametrize(("form", "identity"), PRODUCTS)
def test_what_is_not_finite_stays_with_its_token(native: Native, form: Format, identity: ProductIdentity) -> None:
    packed = random_matrix(native, form, 19, 70)
    for count in (1, 2, 7, 20):
        x = tokens(count, packed.inputs)
        clean = packed.product(x, identity)
        for level in native.kernels:
            for bad, where in ((np.nan, 0), (np.inf, 31), (-np.inf, 69), (np.nan, 40)):
                x_bad = x.copy()
                x_bad[count // 2, where] = bad
                got = packed.product(x_bad, identity, level)
                assert not np.isfinite(got[count // 2]).any()
                others = np.arange(count) != count // 2
                assert got[others].tobytes() == clean[others].tobytes()


# -- packing ----------------------------------------------------------------------------------------------------------

EXACT_FORMATS = {
    Source.Q4_0: (Format.INT4, Format.INT4_WIDE),
    Source.Q4_1: (Format.INT4, Format.INT4_WIDE),
    Source.Q8_0: (Format.INT8, Format.INT8_PAIR),
    Source.Q4_K: (Format.INT4_WIDE,),
    **{Source[form.name]: (form,) for form in Format if form not in OF_FLOATS},
}


@pytest.mark.parametrize(("source", "form"), [(s, f) for s, forms in EXACT_FORMATS.items() for f in forms])
def test_blocks_have_the_numbers_of_the_reference_reader(native: Native, source: Source, form: Format) -> None:
    data = random_blocks(source.name, 19, 1024, odd_scales=True)
    packed = Packed(native, form, 19, 1024)
    assert packed.pack(source, data) == 0
    expected = dequantize(data, GGMLQuantizationType[source.name])
    for level in native.kernels:
        assert (packed.numbers(level) == expected).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.3])
def test_numbers_that_are_no_multiples_of_a_scale_do_not_become_bytes(bad: float) -> None:
    numbers = np.array([[1, -3] * 16], np.float32)
    assert pairs_of(numbers, (3, 1)) is not None
    numbers[0, 20] = bad
    assert pairs_of(numbers, (3, 1)) is None


def test_compact_tiles_take_little_more_than_the_file(native: Native, subtests: pytest.Subtests) -> None:
    for form in Format:
        if form in OF_FLOATS:
            continue
        with subtests.test(form.name):
            size = native.lib.kakeya_packed_bytes(form, ctypes.c_int64(16), ctypes.c_int64(256))
            assert size <= 1.34 * 16 * BY_NAME[form.name].bytes_of(256)


@pytest.mark.parametrize("form", [form for form in Format if form not in OF_FLOATS])
def test_numbers_that_are_not_finite_are_refused(native: Native, form: Format) -> None:
    data = np.full((1, BY_NAME[form.name].bytes_of(256)), 0xFF, np.uint8)
    assert Packed(native, form, 1, 256).pack(Source[form.name], data) == PackError.TOO_LARGE


@pytest.mark.parametrize(
    ("form", "steps"), [(Format.INT8, 254), (Format.INT8_PAIR, 254), (Format.INT4, 15), (Format.INT4_WIDE, 15)]
)
def test_floats_are_quantised_by_blocks(native: Native, form: Format, steps: int) -> None:
    weights = np.random.default_rng(8).normal(size=(20, 96)).astype(np.float32)
    weights[0] = 0
    weights[1] = 3
    weights[2, :32] = 1e-9
    numbers = of_floats(native, form, weights).numbers()
    blocks = weights.reshape(20, 3, 32)
    span = blocks.max(-1) - blocks.min(-1) if steps == 15 else 2 * np.abs(blocks).max(-1)
    error = np.abs(numbers.reshape(20, 3, 32) - blocks).max(-1)
    assert (error <= 0.51 * span / steps + 2e-3 * np.abs(blocks).max(-1) / (1 if steps == 15 else 1e9) + 1e-8).all()
    assert (numbers[0] == 0).all()
