"""The gated delta rule by how many tokens are folded into its state together: the open chunk of ADR 0043.

Layers of Qwen3.5-0.8B's sizes with random inputs, without the products beside them: their convolution and their rule
alone. Each round decodes and prefills with every chunk, in turns. Behind a chunk is room for 8 draft tokens and one.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from inference_engine.backends.native.program import OPEN_CHUNK, Program
from inference_engine.backends.native.trial import LoadedTensors
from inference_engine.kv.geometry import OpenChunk
from inference_engine.models.operations import Convolve, DeltaRule, Given, Operation, Slice, StateSizes, StepList
from inference_engine.native import library as native_library
from inference_engine.native.library import NativeStep, ProductIdentity, StateSpan
from laboratory.bench.decode import SEED
from laboratory.bench.experiments import Save
from laboratory.bench.shared import device_name
from laboratory.evaluation import record

HEADS, DIM, TAPS = 16, 128, 4
CHANNELS = 3 * HEADS * DIM
CHUNKS = (4, 8, 16, 32)
TOKENS, PROMPT = 64, 512  # decoded in a round: whole chunks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--layers", type=int, default=18, metavar="N")
    parser.add_argument("--threads", type=int, default=2, metavar="N")


def main(arguments: argparse.Namespace, _save: Save) -> dict[str, Any]:
    if arguments.rounds < 1 or arguments.layers < 1:
        raise SystemExit(f"--rounds and --layers must be at least 1, got {arguments.rounds} and {arguments.layers}")
    if (library := native_library.load()) is None:
        raise SystemExit(f"no native library: {native_library.why_missing()}")
    random = np.random.default_rng(SEED)
    given = random.standard_normal((PROMPT, CHANNELS + 2 * HEADS)).astype(np.float32)
    tensors = {"taps": (CHANNELS, 1, TAPS), "decay": (HEADS,), "bias": (HEADS,)}
    weights = {
        name: torch.from_numpy(random.standard_normal(shape).astype(np.float32)) for name, shape in tensors.items()
    }
    chunks = {tokens: OpenChunk(tokens=tokens, room=tokens + OPEN_CHUNK.room - OPEN_CHUNK.tokens) for tokens in CHUNKS}
    sessions = {
        tokens: _Session(
            Program(
                library,
                steps_of(arguments.layers),
                LoadedTensors(weights),
                {},
                trained_positions=1,
                identity=ProductIdentity.EXACT,
                threads=arguments.threads,
                open_chunk=chunk,
            ),
            chunk,
            arguments.layers,
        )
        for tokens, chunk in chunks.items()
    }
    taken: dict[str, dict[int, list[float]]] = {"a token": {}, f"a prefill of {PROMPT}": {}}
    for _ in range(arguments.rounds + 1):
        for tokens, session in sessions.items():
            session.clear()
            began = time.perf_counter()
            session.step(given)
            prefilled = time.perf_counter()
            for token in range(TOKENS):
                session.step(given[token : token + 1])
            for what, seconds in zip(
                taken, ((time.perf_counter() - prefilled) / TOKENS, prefilled - began), strict=True
            ):
                taken[what].setdefault(tokens, []).append(seconds)
    own = OPEN_CHUNK.tokens
    values: dict[str, Any] = {}
    for what, by_chunk in taken.items():
        for tokens in CHUNKS:
            pairs = zip(by_chunk[tokens][1:], by_chunk[own][1:], strict=True)  # the first round warms up
            name = f"time of {what}, chunks of {tokens} ÷ of {own}"
            values[name] = record.summarize([one / two for one, two in pairs], "ratio")
    for tokens, session in sessions.items():
        values[f"bytes, chunks of {tokens} ÷ of the state alone"] = record.exact(
            session.memory.nbytes / (4 * arguments.layers * HEADS * DIM * DIM), "ratio"
        )
        session.program.close()
    return {
        "experiment": "open_chunk_cpu",
        "what": "Layers of the gated delta rule of Qwen3.5-0.8B's sizes, by the tokens that are folded together.",
        "config": {"device": device_name("cpu"), **vars_of(arguments)},
        "seeds": [SEED],
        "values": values,
        "headlines": [f"time of a token, chunks of {tokens} ÷ of {own}" for tokens in (4, 16)],
        "baseline": f"chunks of {own} tokens, same process, in turns",
    }


def vars_of(arguments: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(arguments, name) for name in ("layers", "threads", "rounds")}


def steps_of(layers: int) -> StepList:
    operations: list[Operation] = [Given(output="given")]
    widths = {"given": CHANNELS + 2 * HEADS, "in": CHANNELS, "conv": CHANNELS, "gates": 2 * HEADS, "out": HEADS * DIM}
    for state in range(layers):
        parts = (("in", 0), ("gates", CHANNELS))
        operations += [
            *(
                Slice(input="given", output=name, heads=1, width=widths["given"], first=first, count=widths[name])
                for name, first in parts
            ),
            Convolve(input="in", output="conv", weights=("taps",), state=state, activation="silu"),
            DeltaRule(input="conv", gate="gates", output="out", decay="decay", bias="bias", state=state),
        ]
    sizes = {"key_heads": HEADS, "value_heads": HEADS, "key_dim": DIM, "value_dim": DIM}
    states = tuple(StateSizes(layer=layer, channels=CHANNELS, taps=TAPS, **sizes) for layer in range(layers))
    return StepList(operations=tuple(operations), widths=widths, layers=(), hidden=1, vocabulary=1, states=states)


class _Session:
    """The states of a session, which steps go on from."""

    def __init__(self, program: Program, chunk: OpenChunk, layers: int) -> None:
        self.program, self._chunk = program, chunk
        states = program.states(layers)
        self.memory, self._other = (
            np.zeros(sum(state.nbytes for state in states if state is not None) // 4, np.float32) for _ in range(2)
        )
        self._position = 0

    def clear(self) -> None:
        self.memory.fill(0)
        self._position = 0

    def step(self, given: NDArray[np.float32]) -> None:
        held = self._position - self._chunk.begin(self._position)
        is_short = held + len(given) <= self._chunk.room
        after = None if is_short else self._other.ctypes.data
        span = StateSpan(0, len(given), self._position, self.memory.ctypes.data, after)
        step = NativeStep(
            given=given.ctypes.data, tokens=len(given), spans=ctypes.addressof(span), span_count=1, vocabulary=1
        )
        self.program.run(step)
        if is_short:
            self.program.settle(self.memory.ctypes.data, held, len(given), len(given))
        else:
            self.memory, self._other = self._other, self.memory
        self._position += len(given)
