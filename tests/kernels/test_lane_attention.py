"""One operation over many lanes gives what attending to each by itself gives, in the reference and in the kernel."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.config import child_environment
from inference_engine.kernels.attention import attend
from inference_engine.kernels.lane_attention import FIELDS, attend_lanes
from inference_engine.kv.geometry import Geometry, LayerGeometry
from inference_engine.kv.lane_rows import lane_numbers
from inference_engine.kv.layout import LayerRule, Layout

SEGMENT = 16
SHAPES = [(3, 3, 64), (9, 3, 64), (4, 1, 24), (2, 2, 16), (8, 1, 256)]


def geometry(native: int | None, kv_heads: int, query_heads: int, head_dim: int) -> Geometry:
    layer = LayerGeometry(
        query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim, native_window=native, rotary="default"
    )
    return Geometry(
        layers=(layer,),
        itemsize=4,
        trained_positions=4096,
        page_tokens=4,
        segment_tokens=SEGMENT,
        row_quantum=1,
        key_quantum=1,
    )


RULES = {
    "full": (LayerRule(), None),
    "native": (LayerRule(), 24),
    "sink-window": (LayerRule(sink=4, window=20), None),
    "sink-window-native": (LayerRule(sink=4, window=10), 12),
    "no-sink": (LayerRule(window=16), None),
    "one-row": (LayerRule(window=0), None),
}
LENGTHS = [1, 5, 16, 17, 40, 63, 64, 65, 200]


def layouts() -> list[tuple[str, Layout]]:
    return [
        (f"{name}-{limit}", Layout.of(rule, geometry(native, 1, 1, 16), native, limit))
        for name, (rule, native) in RULES.items()
        for limit in (256, 40)
    ]


def held(layout: Layout, length: int) -> np.ndarray:
    """Which position each slot holds once a history has this length, by the layout's own words."""
    slots = np.full(layout.capacity, -1, dtype=np.int64)
    positions = np.arange(length)
    start = layout.segment_start(length - 1)
    stays = (positions < layout.sink) | (positions >= layout.horizon(start))
    slots[layout.slots(positions[stays])] = positions[stays]
    return slots


@pytest.mark.parametrize(("name", "layout"), layouts(), ids=lambda value: value if isinstance(value, str) else "")
def test_the_numbers_of_a_row_let_it_see_what_its_layout_lets_it_see(name: str, layout: Layout) -> None:
    from inference_engine.kernels.lane_attention import seen

    for length in (length for length in LENGTHS if layout.window is not None or length <= layout.capacity):
        for first in {length - 1, max(layout.segment_start(length - 1), length - 3)}:
            queries = np.arange(first, length)
            own = held(layout, length)
            numbers = lane_numbers(layout, queries, last=length - 1, count=layout.capacity)
            expected = layout.visible(queries, own)
            for row, line in enumerate(numbers):
                found = seen(torch.arange(layout.capacity), [0, 0, *line.tolist()])
                assert found.tolist() == expected[row].tolist(), (length, int(queries[row]))


def case(
    shape: tuple[int, int, int], dtype: torch.dtype, *, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Rows of sessions of all kinds and lengths, and what each gives by itself."""
    query_heads, kv_heads, dim = shape
    torch.manual_seed(seed)
    keys, values = (torch.randn(60_000 // kv_heads, dim).to(dtype) for _ in range(2))
    lines, alone, asked, start = [], [], [], 1
    for _, layout in layouts():
        for length in (length for length in LENGTHS if layout.window is not None or length <= layout.capacity):
            own = held(layout, length)
            query = torch.randn(1, query_heads, dim).to(dtype)
            numbers = lane_numbers(layout, np.array([length - 1]), last=length - 1, count=layout.capacity)
            lines.append([start, layout.lane, *numbers[0].tolist()])
            index = start + torch.arange(kv_heads)[:, None] * layout.lane + torch.arange(layout.capacity)
            mask = torch.zeros(1, layout.capacity)
            mask[0, ~torch.from_numpy(layout.visible(np.array([length - 1]), own)[0])] = float("-inf")
            alone.append(attend(query.float(), keys[index].float(), values[index].float(), mask, scaling=dim**-0.5))
            asked.append(query)
            start = (start + 7) % 100 + 1
    lines.append([0] * FIELDS)
    asked.append(torch.randn(1, query_heads, dim).to(dtype))
    alone.append(torch.zeros(1, query_heads, dim))
    return torch.cat(asked), keys, values, torch.tensor(lines), alone


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_gives_each_row_what_it_gets_by_itself(shape: tuple[int, int, int]) -> None:
    queries, keys, values, lanes, alone = case(shape, torch.float32)

    out = attend_lanes(queries, keys, values, lanes, kv_heads=shape[1], scaling=shape[2] ** -0.5)

    assert torch.allclose(out, torch.cat(alone), atol=1e-5)


class _IsInt(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, int)


class _IntOfArray(metaclass=_IsInt):
    """int() as Triton's interpreter calls it: of arrays of one number too, which numpy no longer allows."""

    def __new__(cls, number: object) -> int:  # type: ignore[misc]
        return int(np.asarray(number).reshape(()))


def compare_kernel() -> None:
    """What the child process below runs: the kernel against the reference, interpreted where there is no GPU."""
    if not torch.cuda.is_available():
        from triton.runtime import interpreter

        interpreter.int = _IntOfArray
    from inference_engine.kernels.triton.lane_attention import attend_lanes as kernel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter has no bfloat16
    for shape in SHAPES:
        for dtype, tolerance in ((torch.float32, 2e-5), (half, 2e-2)):
            given = case(shape, dtype)[:4]
            count = len(given[3])
            # All sessions' rows together, and a few by themselves: these are split into more parts.
            for rows in (slice(0, count), slice(count - 3, count)) if dtype is torch.float32 else (slice(0, 9),):
                for softcap in (None, 3.0) if rows.start else (None,):
                    queries, keys, values, lanes = (given[0][rows], *given[1:3], given[3][rows])
                    heads, scaling = shape[1], shape[2] ** -0.5
                    expected = attend_lanes(
                        queries, keys, values, lanes, kv_heads=heads, scaling=scaling, softcap=softcap
                    )
                    moved = [part.to(device) for part in (queries, keys, values, lanes)]
                    out = kernel(*moved, kv_heads=heads, scaling=scaling, softcap=softcap).cpu()
                    assert out.dtype == dtype
                    worst = (out.float() - expected.float()).abs().max().item()
                    assert worst < tolerance, (shape, dtype, softcap, worst)


def test_the_kernel_gives_what_the_reference_gives() -> None:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    environment = child_environment(OMP_NUM_THREADS="1", **interpreted)
    code = "import tests.kernels.test_lane_attention as test; test.compare_kernel()"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
