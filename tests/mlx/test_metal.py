"""The kernel in Metal beside its reference: on a Mac's GPU, and elsewhere its text on a CPU (`metal_kernels.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from inference_engine.backends.base import Forward
from inference_engine.backends.mlx import loading
from inference_engine.backends.mlx.bridge import MLX_DTYPES
from inference_engine.backends.mlx.trial import try_list
from inference_engine.backends.twin import text_generator
from inference_engine.compose import open_backend
from inference_engine.kernels.mlx import ragged_attention
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import GenerateParams, Mode
from tests import tiny
from tests.admissions import traits_of
from tests.further import further, further_test, off_metal, off_metal_test
from tests.laws.drafters import Knowing
from tests.laws.variants import drain, engine_for, generate, same, text
from tests.mlx.attention_steps import SHAPES, TOLERANCES, attention_step
from tests.mlx.metal_kernels import RecordedKernel, needs_a_kernel, needs_emulation, recorded_kernel
from tests.mlx.test_loading import DENSE, IDS, config_of, saved
from tests.mlx.tiny import tiny_mlx
from tests.native.test_forward import FAMILIES, Sessions
from tests.tiny_native import run_on


@pytest.fixture
def kernel() -> Iterator[RecordedKernel]:
    with recorded_kernel() as found:
        yield found


HALVES = [(SHAPES[0], torch.bfloat16), off_metal(SHAPES[1], torch.float16)]
HALVES += [further(SHAPES[0], torch.float16), further(SHAPES[1], torch.bfloat16)]


@needs_a_kernel
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((SHAPES[number], torch.float32) for number in (0, -1)),
        *(off_metal(shape, torch.float32) for shape in SHAPES[1:-1]),
        *HALVES,
    ],
    ids=str,
)
def test_the_kernel_gives_what_the_reference_gives(
    shape: tuple[int, int, int], dtype: torch.dtype, kernel: RecordedKernel
) -> None:
    """Memory is NaN but for what is to be read, and outputs begin as NaN."""
    given = attention_step(shape, dtype)
    assert float((given.found() - given.expected()).abs().max()) < TOLERANCES[dtype]
    (launch,) = kernel.launches
    assert launch["output_dtypes"][0] == MLX_DTYPES[dtype], "a query of one part is rounded once"


@off_metal_test
@needs_a_kernel
def test_the_order_of_threads_changes_no_bit(kernel: RecordedKernel) -> None:
    given = attention_step(SHAPES[1], torch.float32)
    found = []
    for kernel.order in (0, 1, 2):
        found.append(given.found())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@further_test
@needs_emulation
@pytest.mark.parametrize("barrier", [0, 1], ids=["before the sums are read", "before they are written over"])
def test_a_missing_barrier_would_be_seen(barrier: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the test above shows."""
    line = "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);"
    texts = ragged_attention._SOURCE.split(line)
    assert len(texts) == 3
    kept = texts[0] + (line if barrier else "") + texts[1] + ("" if barrier else line) + texts[2]
    monkeypatch.setattr(ragged_attention, "_SOURCE", kept)
    given = attention_step(SHAPES[1], torch.float32)
    with recorded_kernel() as kernel:
        kernel.order = 1
        assert not torch.allclose(given.found(), given.expected(), atol=1e-3)


@needs_a_kernel
@pytest.mark.parametrize("family", ["gemma2", off_metal("qwen3")])
def test_a_model_is_admitted_by_a_twin_that_the_kernel_serves(family: str, kernel: RecordedKernel) -> None:
    """Alone and beside others, with a softcap, windows, and heads of another size than the twins of other tests."""
    config, kind = text_generator(FAMILIES[family])
    traits = traits_of(config, kind)
    assert try_list(kind, config, traits, seed=1, uses_metal=True) < 2e-4
    assert kernel.launches


@needs_a_kernel
@pytest.mark.parametrize("strategy", [off_metal(Full()), SinkWindow(sink=3, window=40)], ids=str)
def test_tokens_with_the_kernel_are_those_of_torch(
    strategy: KVStrategy, kernel: RecordedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session beside others, with drafts and after a fork: prefills are MLX's, few tokens the kernel's."""
    found: list[list[tuple[int, float | None]]] = []
    for make in (tiny.tiny_forward, partial(tiny_mlx, uses_metal=True)):
        run_on(make, monkeypatch)
        drafter = Knowing(text=[*text(), *(token for token, _ in (found[0] if found else []))], errs=3)
        with engine_for(Mode.BATCHED, drafter=drafter if found else None, draft_tokens=3) as engine:
            session, neighbour = (engine.create_session(strategy=strategy).session_id for _ in range(2))
            engine.append(session, text())
            engine.append(neighbour, text(90, seed=8))
            running = engine.generate(neighbour, GenerateParams(max_tokens=12))
            said = generate(engine, session, 12)
            drain(running)
            fork = engine.fork_session(session).session_id
            engine.append(fork, text(20, seed=3))
            found.append(said + generate(engine, fork, 6))
    assert kernel.launches
    assert same(found[0], found[1], Mode.BATCHED)


@off_metal_test
@needs_a_kernel
def test_the_setting_chooses_the_kernel_and_a_start_says_so(
    tmp_path: Path, kernel: RecordedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "runs_metal", lambda: True)
    folder = saved(DENSE, tmp_path / "model")
    plain = open_backend(config_of(folder))
    assert not kernel.launches
    own = open_backend(config_of(folder, kernels="metal"))
    assert kernel.launches, "the verdict without it is not believed: the twin is tried again"
    assert own.facts.numerics == f"{plain.facts.numerics}, kernels of our own"
    tried = len(kernel.launches)
    assert torch.allclose(logits_one_by_one(own), logits_one_by_one(plain), atol=1e-4)
    assert len(kernel.launches) > tried


def logits_one_by_one(forward: Forward) -> torch.Tensor:
    """A prefill, and three tokens by themselves."""
    return Sessions(forward, Full()).logits(0, IDS[:20], [16, 17, 18, 19])
