"""A recording gives what running without it gives, and recordings are few. CUDA's own are tried on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_engine.backends.recorded_compute import RecordedCompute, Shapes
from inference_engine.backends.recording import GraphMemory
from inference_engine.kv.compressor import KVCompressor
from inference_engine.kv.context import BatchFunction, KVContext
from inference_engine.kv.geometry import SEGMENTS_IN_A_CHUNK
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies import make_strategy
from kv_cache_proposer.f_theta.components import PRECISIONS
from tests.kv.codec_cases import each_compressor, gaussian, head_sizes
from tests.kv_cache_proposer.correlated import make_codec
from tests.laws.test_session_kv_laws import SEGMENT, Entries, context, feed
from tests.tiny import LATENT_BYTES

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are a GPU's")


class Overwriting:
    """A recording as a GPU makes them: each run spoils what any other has given."""

    made: list[Shapes]
    given: list[Tensor]

    def __init__(self, shapes: Shapes, device: torch.device, function: BatchFunction) -> None:
        self._inputs = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        self._function = function
        self.made.append(shapes)

    def run(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        for mine, given in zip(self._inputs, tensors, strict=True):
            mine[: len(given)].copy_(given)
        for part in self.given:
            part.fill_(99)
        self.given[:] = [part.clone() for part in self._function(self._inputs)]
        return self.given


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Shapes]:
    found: list[Shapes] = []
    monkeypatch.setattr(Overwriting, "made", found, raising=False)
    monkeypatch.setattr(Overwriting, "given", [], raising=False)
    return found


def recorder(*sizes: int, record: Any = Overwriting) -> RecordedCompute:
    return RecordedCompute(sizes, GraphMemory(), record)


def doubled(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [2 * part for part in tensors]


def check(compute: RecordedCompute, entries: Tensor) -> None:
    assert torch.equal(compute("double", doubled, [entries])[0], 2 * entries)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 32, 33, 100])
def test_a_recording_of_any_number_of_vectors_gives_what_running_without_it_gives(
    made: list[Shapes], count: int
) -> None:
    compute = recorder(8, 32)
    for seed in range(3):
        entries = [gaussian(count, 3, 4, seed=seed), gaussian(count, 5, seed=seed)]
        for one, other in zip(compute("double", doubled, entries), doubled(entries), strict=True):
            assert torch.equal(one, other)
    assert len(made) == (0 < count <= 32)


def test_what_cannot_be_recorded_is_tried_once_and_computed_without_a_recording() -> None:
    tried: list[Shapes] = []

    def refuse(shapes: Shapes, *_: object) -> Any:
        tried.append(shapes)
        raise RuntimeError("operation not permitted when stream is capturing")

    compute = recorder(8, 32, record=refuse)
    for count in (5, 20) * 3:
        check(compute, gaussian(count, 3))
    assert [shapes[0][0] for shapes in tried] == [(8, 3), (32, 3)]


RESTORED = [
    make_strategy("restored", sink=3, window=13, source="latent", bytes_per_token=LATENT_BYTES),
    make_strategy("restored", sink=3, window=13, source="latent", bytes_per_token=LATENT_BYTES, mode="stream"),
    make_strategy("full", codec="int8", exact_window=13),
    make_strategy("sink_window", sink=3, window=40, codec="int8", exact_window=13),
]


@pytest.mark.parametrize("strategy", RESTORED, ids=str)
def test_a_session_reads_the_same_whether_its_compression_is_recorded_or_not(strategy: Any, made: list[Shapes]) -> None:
    def read(ctx: KVContext) -> list[Tensor]:
        kv, entries = SessionKV(strategy, ctx, 200), Entries(200)
        assert kv.wake(200)
        found = feed(kv, entries, 90)
        kv.idle()
        assert kv.wake(200)
        return [*found, *feed(kv, entries, 100)]

    compute = recorder(SEGMENT, SEGMENTS_IN_A_CHUNK * SEGMENT)
    plain, recorded = read(context()), read(replace(context(), compute=compute))
    assert made
    for one, other in zip(plain, recorded, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)


@needs_gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # of one that reads the same bytes as another type
@each_compressor
def test_a_gpu_records_every_compressor(compressor: KVCompressor) -> None:
    compute = RecordedCompute((64,), GraphMemory())
    for head_dim in head_sizes(compressor):
        for seed, count in enumerate((64, 64, 11)):
            entries = [gaussian(count, 3, head_dim, seed=seed).cuda()]

            def encode(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
                return [compressor.encode(part) for part in tensors]

            def decode(tensors: Sequence[Tensor], head_dim: int = head_dim) -> Sequence[Tensor]:
                return [compressor.decode(part, head_dim) for part in tensors]

            codes = encode(entries)
            assert torch.equal(compute(("encode", head_dim), encode, entries)[0], codes[0])
            assert torch.equal(compute(("decode", head_dim), decode, codes)[0], decode(codes)[0])
    assert all(key in compute._recorded for key in compute._known)


@needs_gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gpu_records_every_latent(precision: str) -> None:
    codec = make_codec(24, precision=precision, group_layers=3).to("cuda")
    compute = RecordedCompute((64,), GraphMemory())
    half = len(codec.layers)

    def encode(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [codec.encode(tensors[:half], tensors[half:])]

    def decode(tensors: Sequence[Tensor], layers: Sequence[int] | None = None) -> Sequence[Tensor]:
        keys, values = codec.decode(tensors[0], layers)
        return [*keys, *values]

    for seed in range(3):
        entries = [
            gaussian(64, shape.kv_heads, shape.head_dim, seed=seed).cuda() for _ in range(2) for shape in codec.shapes
        ]
        codes = encode(entries)
        assert torch.equal(compute("encode", encode, entries)[0], codes[0])
        for layers in (None, codec.layers[:1]):
            function = partial(decode, layers=layers)
            for one, other in zip(compute(("decode", layers), function, codes), function(codes), strict=True):
                assert torch.equal(one, other)
    assert all(key in compute._recorded for key in compute._known)
