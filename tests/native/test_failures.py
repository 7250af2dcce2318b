"""Out of memory, numbers that are not finite, several engines, a fork: an error or the right answer, never a crash."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from inference_engine.backends.native.program import Program
from inference_engine.config import child_environment
from inference_engine.errors import BackendError, Overloaded
from inference_engine.kernels.routing import Router
from inference_engine.kv.strategies.full import Full
from inference_engine.models.operations import Embed, Experts, Product, Select, StepList
from inference_engine.native import build
from inference_engine.native.library import NativeMatrix, NativeStep, ProductIdentity
from inference_engine.scheduler.lifecycle import is_out_of_memory
from tests.native.test_forward import Sessions, ids_of
from tests.tiny_native import library, tiny_native


class _Float32:
    encoding, row_order, column_order = "F32", None, None

    def __init__(self, numbers: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
        self.numbers = numbers
        self.shape: tuple[int, ...] = numbers.shape
        self.data = numbers.view(np.uint8).reshape(-1)

    def as_float32(self) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return self.numbers


class _Tensors:
    def __init__(self, **tensors: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
        self._tensors = {name: _Float32(np.ascontiguousarray(numbers, np.float32)) for name, numbers in tensors.items()}

    def names(self) -> list[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> _Float32:
        return self._tensors[name]


def logits_of(
    steps: StepList, tensors: _Tensors, ids: list[int], *, threads: int = 1
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Of a program that has no attention."""
    program = Program(
        library(), steps, tensors, {}, trained_positions=8, identity=ProductIdentity.EXACT, threads=threads
    )
    tokens, asked = np.array(ids, np.int64), np.arange(len(ids))
    logits = np.empty((len(ids), steps.vocabulary), np.float32)
    step = NativeStep(
        ids=tokens.ctypes.data,
        positions=asked.ctypes.data,
        logit_queries=asked.ctypes.data,
        logits=logits.ctypes.data,
        tokens=len(ids),
        logit_count=len(ids),
        vocabulary=steps.vocabulary,
    )
    program.run(step)
    program.close()
    program.close()
    return logits


@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_a_router_that_is_not_a_number_gives_none(spoilt: float) -> None:
    rng = np.random.default_rng(0)
    words = rng.standard_normal((16, 16), np.float32)
    words[3] = spoilt
    tensors = {f"{part}{expert}": rng.standard_normal((16, 16), np.float32) for expert in range(3) for part in "gud"}
    operations = (
        Embed(output="hidden", matrix="words"),
        Product(input="hidden", output="router", matrices=("router",)),
        Experts(
            input="hidden",
            router="router",
            output="delta",
            matrices=tuple((f"g{expert}", f"u{expert}", f"d{expert}") for expert in range(3)),
            routing=Router(chosen=2, sums_to_one=True),
            activation="silu",
        ),
        Select(input="delta", output="last"),
        Product(input="last", output=None, matrices=("words",)),
    )
    widths = {"hidden": 16, "router": 3, "delta": 16, "last": 16}
    steps = StepList(operations=operations, widths=widths, layers=(), hidden=16, vocabulary=16)
    router = rng.standard_normal((3, 16), np.float32)
    clean = words.copy()
    clean[3] = 0
    found = logits_of(steps, _Tensors(words=words, router=router, **tensors), [1, 3, 2])
    expected = logits_of(steps, _Tensors(words=clean, router=router, **tensors), [1, 3, 2])

    assert np.isnan(found[1]).all()
    others = np.arange(16) != 3  # the head has the spoilt row, too
    np.testing.assert_array_equal(found[[0, 2]][:, others], expected[[0, 2]][:, others])


def test_a_step_without_memory_counts_as_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = tiny_native()
    monkeypatch.setattr(type(library()), "run", lambda *_: False)
    with pytest.raises(Overloaded, match="no memory is left for a step of 3 tokens") as caught:
        Sessions(forward, Full()).logits(0, [1, 2, 3], [])
    assert is_out_of_memory(caught.value)


def test_several_engines_may_run_one_model_at_once() -> None:
    forward = tiny_native(threads=2)
    ids, cuts = ids_of(64), list(range(4, 64, 4))
    expected = Sessions(forward, Full()).logits(0, ids, cuts)
    found: list[torch.Tensor] = []

    def work() -> None:
        found.extend(Sessions(forward, Full()).logits(0, ids, cuts) for _ in range(4))

    running = [threading.Thread(target=work) for _ in range(3)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()

    assert len(found) == 12
    assert all(torch.equal(one, expected) for one in found)


def test_a_forked_process_gets_an_error_because_it_has_no_threads() -> None:
    threads = library().open_threads(2)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            threads.lock  # noqa: B018  # a property that checks
            said = "nothing"
        except BackendError as error:
            said = str(error)
        threads.close()  # waits for no thread that is not there
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        assert f"the native threads of process {os.getpid()} are not in this one, {child}" in answer.read()
    assert os.waitpid(child, 0)[1] == 0
    threads.close()
    threads.close()


@pytest.mark.parametrize("count", [-1, 1, 64])
def test_any_number_of_threads_computes(count: int) -> None:
    kernels = library().kernels()
    numbers = np.ones((64, 64), np.float32)
    tensors = _Tensors(a=numbers)
    with library().open_threads(count) as threads:
        from inference_engine.backends.native.packed_weights import PackedWeights

        packed = PackedWeights(library(), tensors, "auto")
        with packed.packing(2):
            index = packed.add(["a"], (64, 64))
        matrix: NativeMatrix = packed.matrices[index]
        out = np.empty((40, 64), np.float32)
        for _ in range(20):
            kernels.linear(threads, matrix, ProductIdentity.EXACT, np.ones((40, 64), np.float32), out)
            assert (out == 64).all()
        assert threads.count == max(count, 1)


def test_the_process_ends_while_threads_sleep() -> None:
    library()
    script = (
        "import sys; from pathlib import Path; from inference_engine.native import build;"
        "build.LIBRARY = Path(sys.argv[1]);"
        "from inference_engine.native.library import load; threads = load().open_threads(3)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script, str(build.LIBRARY)], check=False, timeout=60, cwd=root, env=child_environment()
    )
    assert done.returncode == 0
