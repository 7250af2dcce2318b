"""Kernels in Metal: watched on a GPU, and where there is none, run on a CPU from the text that MLX would compile.

MLX writes the function around a kernel's text also where it has no GPU, when a graph is exported: with the arguments,
their types and address spaces that it would have on a Mac. That text is compiled, but for two things: pointers know
their length, and a threadgroup's memory is asked for. Not shown: that Apple's compiler takes it, and how fast it is.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import torch

from inference_engine.backends.mlx.bridge import MLX_DTYPES, as_mlx, as_torch
from inference_engine.backends.mlx.device import runs_metal
from inference_engine.kernels.mlx import ragged_attention
from inference_engine.native.build import NoCompiler, find_compiler

TORCH_DTYPES = {own: other for other, own in MLX_DTYPES.items()}
HEADER = Path(__file__).with_suffix(".h")
# A number of 64 bits is no number of Metal's: no literal may be one, and nothing may become one.
FLAGS = ("-std=c++17", "-O1", "-g0", "-fPIC", "-shared", "-Wdouble-promotion", "-Werror=double-promotion")

_SIGNATURE = re.compile(r"\[\[kernel\]\] void (\w+)\((.*?)\) \{\n", re.DOTALL)
_POINTER = re.compile(r"(const )?(?:device|constant) (\w+)\* (\w+) \[\[buffer\(\d+\)\]\]")
_ATTRIBUTE = re.compile(r"uint3? (\w+) \[\[\1\]\]")
_SHARED = re.compile(r"threadgroup (\w+) (\w+)\[(.*?)\];")
_INSTANCE = re.compile(r"decltype\((\w+<.*?>)\)")


@cache
def compiler() -> tuple[str, ...]:
    """The command of one; () if none works here."""
    try:
        return tuple(find_compiler())
    except NoCompiler:
        return ()


class RecordedKernel:
    """Takes the place of what `mx.fast.metal_kernel` gives. On a GPU; outputs begin as NaN."""

    order = 0  # in which threads run, if it can be chosen; 0: by their index

    def __init__(self, metal_kernel: Callable[..., Any], **words: Any) -> None:
        """metal_kernel: MLX's own. words: its arguments."""
        self.launches: list[dict[str, Any]] = []
        self._kernel = metal_kernel(**words)

    def __call__(self, **words: Any) -> list[mx.array]:
        self.launches.append(words)
        found: list[mx.array] = self._kernel(**words, init_value=float("nan"))
        return found


class EmulatedKernel(RecordedKernel):
    """On a CPU, at once."""

    def __init__(self, metal_kernel: Callable[..., Any], **words: Any) -> None:
        super().__init__(metal_kernel, **words)
        self._runs: dict[Any, Callable[..., bytes | None]] = {}

    def __call__(self, **words: Any) -> list[mx.array]:
        self.launches.append(words)
        inputs = words["inputs"]
        key = str(words["template"]), tuple((one.dtype, one.size < 8, one.ndim == 0) for one in inputs)
        if (run := self._runs.get(key)) is None:
            run = self._runs[key] = _compiled(self.generated(**words))
        inputs = [mx.contiguous(one) for one in inputs]
        mx.eval(inputs)
        outputs = [
            torch.full(shape, float("nan"), dtype=TORCH_DTYPES[dtype])
            for shape, dtype in zip(words["output_shapes"], words["output_dtypes"], strict=True)
        ]
        memory = [*map(as_torch, inputs), *outputs]
        pointers = (ctypes.c_void_p * len(memory))(*(one.data_ptr() for one in memory))
        counts = (ctypes.c_int64 * len(memory))(*(one.numel() for one in memory))
        grid, threads = ((ctypes.c_uint32 * 3)(*words[name]) for name in ("grid", "threadgroup"))
        if error := run(pointers, counts, grid, threads, ctypes.c_uint32(self.order)):
            raise AssertionError(error.decode())
        return [as_mlx(one) for one in outputs]

    def generated(self, *, inputs: Sequence[mx.array], **words: Any) -> str:
        """What MLX would have Apple's compiler compile."""
        with tempfile.TemporaryDirectory() as folder:
            said = Path(folder, "said")
            before = os.dup(1)
            with said.open("wb") as file:
                os.dup2(file.fileno(), 1)
            try:
                mx.export_function(
                    str(Path(folder, "graph")),
                    lambda *given: self._kernel(inputs=list(given), verbose=True, **words),
                    *(mx.zeros(one.shape, dtype=one.dtype) for one in inputs),
                )
            finally:
                os.dup2(before, 1)
                os.close(before)
            return said.read_text().split("```")[1]


def in_c(generated: str) -> str:
    """The text of MLX as C++ with a function `run` of plain arguments."""
    signature = _SIGNATURE.search(generated)
    instance = _INSTANCE.search(generated)
    assert signature is not None
    assert instance is not None, "a kernel with template arguments"
    parameters = signature[2]
    pointers, attributes = _POINTER.findall(parameters), _ATTRIBUTE.findall(parameters)
    assert len(pointers) + len(attributes) == parameters.count("[["), "a parameter that is not known here"
    given = [
        f'emulated::Checked<{const}{kind}>{{({const}{kind}*)pointers[{index}], counts[{index}], "{name}"}}'
        for index, (const, kind, name) in enumerate(pointers)
    ]
    given += [f"emulated::{name}()" for name in attributes]
    checked = _POINTER.sub(lambda one: f"emulated::Checked<{one[1] or ''}{one[2]}> {one[3]}", parameters)
    plain = _ATTRIBUTE.sub(lambda one: one[0].split(" [[")[0], checked)
    body = generated[signature.end() : generated.index("\ntemplate [[host_name(")]
    body = _SHARED.sub(r'const auto \2 = emulated::shared<\1>("\2", \3);', body)
    return f"""#include "{HEADER}"
{generated[: signature.start()]} void {signature[1]}({plain}) {{
{body}
extern "C" const char* run(
    void** pointers, const int64_t* counts, const uint* grid, const uint* threads, uint order) {{
  const auto body = [=] {{ {instance[1]}({", ".join(given)}); }};
  const auto call = [](const void* given) {{ (*(decltype(body)*)given)(); }};
  return emulated::run({{grid[0], grid[1], grid[2]}}, {{threads[0], threads[1], threads[2]}}, order, call, &body);
}}
"""


@cache
def _compiled(generated: str) -> Callable[..., bytes | None]:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        source.write_text(in_c(generated))
        ran = subprocess.run(
            [*compiler(), *FLAGS, str(source), "-o", str(library)], capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        run: Callable[..., bytes | None] = ctypes.CDLL(str(library)).run
    run.restype = ctypes.c_char_p  # type: ignore[attr-defined]
    return run


IS_EMULATED = not runs_metal()
# Fixtures of `conftest.py`: a compiler is looked for when a test needs it, and not by all that is collected.
needs_a_kernel = pytest.mark.usefixtures("a_kernel")
needs_emulation = pytest.mark.usefixtures("emulation")


@contextmanager
def recorded_kernel() -> Iterator[RecordedKernel]:
    """Meanwhile the kernel of attention writes over NaN, and where there is no Metal it is emulated."""
    made: list[RecordedKernel] = []
    metal_kernel = mx.fast.metal_kernel

    def make(**words: Any) -> RecordedKernel:
        made.append((EmulatedKernel if IS_EMULATED else RecordedKernel)(metal_kernel, **words))
        return made[-1]

    ragged_attention._kernel.cache_clear()
    setattr(mx.fast, "metal_kernel", make)  # noqa: B010 - a function of other words
    try:
        yield ragged_attention._kernel()
    finally:
        mx.fast.metal_kernel = metal_kernel
        ragged_attention._kernel.cache_clear()
    assert len(made) == 1, "it is made once, and used many times"
