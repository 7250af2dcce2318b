"""Kernels of recurrent states give what a history computed token by token gives, however its tokens came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.kernels.fused import gated_norm, sigmoid_gate
from inference_engine.kernels.states import (
    CHUNK,
    ROOM,
    STATE_FIELDS,
    StateKernels,
    StateLayer,
    by_delta_rule,
    by_scan,
    convolved,
    enter_span,
)
from inference_engine.models.operations import StateSizes
from tests.further import interpreted
from tests.kernels.own_process import run_with_triton

# Key heads, value heads, numbers of a key and of a value, taps.
SIZES = [(1, 2, 16, 16, 4), (2, 2, 48, 80, 3)]
LARGE = [(2, 4, 128, 128, 4), (1, 3, 128, 64, 6)]
COUNT = 100
LEAST = 0.25  # of steps of a scan, of which it makes some longer
FLOAT32, HALF = 2e-5, 2e-2  # of the largest number: sums in another order; numbers that are rounded once


@dataclass
class Made:
    """A layer, what its tokens have, and its weights."""

    layer: StateLayer
    room: int
    inputs: Tensor
    gates: Tensor
    weights: Tensor
    numbers: tuple[Tensor, Tensor, Tensor]
    corrects: bool

    def expected(self) -> Tensor:
        """All tokens, in float64."""
        inputs = convolved(self.inputs.double(), self.weights.double(), None, activates=True)
        rates, bias, skips = (each.double() for each in self.numbers)
        if self.corrects:
            return by_delta_rule(inputs, self.gates.double(), self.layer, rates=rates, bias=bias, doubles=True)
        return by_scan(inputs, self.gates.double(), self.layer, rates=rates, bias=bias, skips=skips, least=LEAST)

    def run(self, kernels: StateKernels, table: Tensor, some: Tensor) -> Tensor:
        inputs = kernels.convolve(self.inputs[some], table, self.layer, weights=self.weights, bias=None, activates=True)
        rates, bias, skips = self.numbers
        if self.corrects:
            return kernels.delta_rule(inputs, self.gates[some], table, self.layer, rates=rates, bias=bias, doubles=True)
        return kernels.scan(
            inputs, self.gates[some], table, self.layer, rates=rates, bias=bias, skips=skips, least=LEAST
        )


def made(size: Sequence[int], dtype: torch.dtype, device: str, *, corrects: bool, seed: int = 0) -> Made:
    key_heads, heads, keys, values, taps = size
    channels = 2 * key_heads * keys + heads * values
    sizes = {
        "channels": channels,
        "taps": taps,
        "key_heads": key_heads,
        "value_heads": heads,
        "key_dim": keys,
        "value_dim": values,
    }
    layer = StateLayer(**sizes, offset=32)
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return Made(
        layer=layer,
        room=32 + StateSizes(layer=0, **sizes).numbers(ROOM),
        inputs=numbers(COUNT, channels).to(device, dtype),
        gates=numbers(COUNT, 2 * heads if corrects else heads).to(device, dtype),
        weights=numbers(taps, channels).to(device) * 0.5,
        numbers=(-numbers(heads).exp().to(device), numbers(heads).to(device), numbers(heads).to(device)),
        corrects=corrects,
    )


class History:
    """A session's states, step by step, as its part of a session keeps them."""

    def __init__(self, kernels: StateKernels, own: Made) -> None:
        self.kernels, self.own = kernels, own
        self.memory = torch.zeros(own.room, dtype=torch.float32, device=own.inputs.device)
        self.position = 0

    def after(self, count: int) -> Tensor | None:
        return None if self.position % CHUNK + count <= ROOM else torch.zeros_like(self.memory)

    def commit(self, count: int, kept: int, after: Tensor | None) -> None:
        held = self.position % CHUNK
        if after is not None:
            assert kept == count
            self.memory = after
        elif kept < count or held + kept >= CHUNK:
            self.kernels.settle(self.memory.view(torch.uint8), (self.own.layer,), held, kept, count)
        self.position += kept


def step(
    histories: Sequence[History], counts: Sequence[int], padding: int = 0, kept: int | None = None
) -> list[Tensor]:
    """What the next tokens of each give, in one step."""
    own, total = histories[0].own, sum(counts)
    table = np.zeros((total + padding, STATE_FIELDS), np.int64)
    first, rows, afters = 0, list[int](), []
    for line, (each, count) in enumerate(zip(histories, counts, strict=True)):
        after, own_tokens = each.after(count), slice(first, first + count)
        before, address = each.memory.data_ptr(), 0 if after is None else after.data_ptr()
        enter_span(table, line, len(counts), own_tokens, each.position, before, address)
        rows += range(each.position, each.position + count)
        afters.append(after)
        first += count
    device = own.inputs.device
    some = torch.tensor([*rows, *[0] * padding], device=device)
    out = own.run(histories[0].kernels, torch.from_numpy(table).to(device), some)
    assert not out[total:].any(), "padding is not left as it was"
    for each, count, after in zip(histories, counts, afters, strict=True):
        each.commit(count, count if kept is None else kept, after)
    return list(torch.split(out[:total], list(counts)))


def far(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


def kernels_of(*, is_invariant: bool) -> StateKernels:
    from inference_engine.kernels.triton.state_rules import TritonStates

    return TritonStates(is_invariant=is_invariant)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


CUTS = [(1, 1, 6, 9, 16, 3, 40, 1, 1, 7, 8, 7), (COUNT,), (60, 1, 39), (5, 70, 25)]


def compare_histories() -> None:
    """In steps of any sizes, token by token and in pieces; interpreted, of the smallest states."""
    is_fast = torch.cuda.is_available()
    for size in [*SIZES, *LARGE] if is_fast else SIZES[:1]:
        for corrects in (True, False):
            for dtype, is_invariant, most in (
                (torch.float32, False, FLOAT32),
                (torch.bfloat16, False, HALF),
                (torch.float32, True, FLOAT32),
            ):
                own = made(size, dtype, device(), corrects=corrects)
                expected, kernels = own.expected(), kernels_of(is_invariant=is_invariant)
                for cuts in CUTS if is_fast else [(1, 6, 40, 3)]:
                    history = History(kernels, own)
                    found = torch.cat([step([history], [count])[0] for count in cuts])
                    difference = far(found, expected[: len(found)])
                    assert difference < most, (size, corrects, dtype, is_invariant, cuts, difference)


def compare_neighbours() -> None:
    """Several sessions in a step, with padding behind them; no bit of one depends on another where that is promised."""
    own = made(SIZES[0], torch.float32, device(), corrects=True)
    expected = own.expected()
    for is_invariant in (False, True):
        kernels = kernels_of(is_invariant=is_invariant)
        histories = [History(kernels, own) for _ in range(4)]
        found: list[list[Tensor]] = [[] for _ in histories]
        for counts in ((1, 17, 6, 40), (1, 1, 1, 1), (30, 2, 9, 1), (20, 20, 20, 20)):
            for out, more in zip(found, step(histories, counts, padding=3), strict=True):
                out.append(more)
        for out in found:
            assert far(torch.cat(out), expected[: sum(map(len, out))]) < FLOAT32
        if is_invariant:
            alone = History(kernels, own)
            bits = torch.cat([step([alone], [1])[0] for _ in range(max(len(torch.cat(out)) for out in found))])
            for history, out in zip(histories, found, strict=True):
                assert torch.equal(torch.cat(out), bits[: history.position])


def compare_rejected() -> None:
    """Drafts that are rejected leave no trace: neither in what follows nor in memory."""
    own = made(SIZES[1], torch.float32, device(), corrects=True)
    for is_invariant in (False, True):
        kernels = kernels_of(is_invariant=is_invariant)
        drafted, plain = History(kernels, own), History(kernels, own)
        for each in (drafted, plain):
            step([each], [21])
        for kept in (0, 3, 9, 1, 5):
            step([drafted], [9], kept=kept)
            for _ in range(kept):
                step([plain], [1])
            assert drafted.position == plain.position
            assert far(drafted.memory, plain.memory.double()) < FLOAT32
            assert torch.equal(drafted.memory == 0, plain.memory == 0)
            if is_invariant:
                assert torch.equal(drafted.memory, plain.memory)


def compare_gates() -> None:
    from inference_engine.kernels.triton.row_norm import sigmoid_gate as opened

    for width, gates in ((80, 80), (1500, 1), (1, 1)):
        states, gate = (torch.linspace(-3, 3, 7 * size, device=device()).view(7, size) for size in (width, gates))
        assert far(opened(states, gate), sigmoid_gate(states, gate).double()) < FLOAT32
    compare_gated_norms()


def compare_gated_norms() -> None:
    from inference_engine.kernels.triton.row_norm import gated_norm as kernel

    for width, heads, first in ((16, 3, False), (80, 2, True), (300, 1, True)):
        for dtype, most in ((torch.float32, FLOAT32), (torch.bfloat16, HALF)):
            generator = torch.Generator().manual_seed(width)
            states, gate = (torch.randn(5, heads * width, generator=generator).to(device(), dtype) for _ in range(2))
            weights = torch.randn(heads * width if first else width, generator=generator).to(device(), dtype)
            given: dict[str, Any] = {"epsilon": 1e-5, "width": width, "heads": heads, "first": first}
            found, expected = kernel(states, gate, weights, **given), gated_norm(states, gate, weights, **given)
            assert far(found, expected.double()) < most


@pytest.mark.parametrize(
    "compare", [compare_histories, *map(interpreted, (compare_neighbours, compare_rejected)), compare_gates]
)
def test_kernels_of_states_equal_their_references(compare: Callable[[], None]) -> None:
    run_with_triton(compare)
