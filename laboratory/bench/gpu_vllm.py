"""This engine beside vLLM on one GPU: steps, prefills and turns, both alive at once, in turns.

Both have random weights of the same shape in the same dtype, take token ids and give token ids, greedily. vLLM runs in
a process of its own, under the Python that `--vllm` names (a script that sets its path will do), with its defaults but
for the cache, which has as many bytes as ours. A step of vLLM is the
difference between two `generate` of prompts in its prefix cache, a step of ours the time between tokens. vLLM is given
all ids at each call, this engine the new ones: that is what the two interfaces are.

    SxL          a decode step of S sessions with L tokens each
    SxL+N        a turn: N new tokens in each of S sessions, to the first token of the last answer
    SxL+N*T      agents: T such turns, one after another, with answers of `--answer` tokens
    SxL/H+N      a turn of N new tokens in a session of H, beside S sessions of L that decode

Rows whose ratio is below 1 are those in which this engine takes less time. With `--vllm PYTHON --device cpu --dtype
float32 --shape tiny` and a stand-in for vLLM everything runs on a CPU: a trial that measures nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.errors import BackendError, ConfigError, KakeyaError
from inference_engine.kv.strategies import parse_strategy
from laboratory.bench.experiments import Save
from laboratory.bench.shared import LeftOut, add_made, check_rounds, device_name, named
from laboratory.evaluation import record
from laboratory.evaluation.made_models import SEED, SHAPES, made_forward
from laboratory.evaluation.sessions import append_all, opened
from laboratory.evaluation.timing import decode_milliseconds, in_turns, prefill_rate, start

OURS, THEIRS = "Kakeya", "vLLM"
CELLS = (
    *("1x1024", "1x8192", "1x32768", "16x8192", "64x512", "1x8192+256", "1x32768+256", "1x8192+16", "8x8192+256"),
    *("8x8192/32768+256", "8x2048+200*40", "64x8192", "1x130000"),
)
_CELL = re.compile(r"(\d+)x(\d+)(?:/(\d+))?(?:\+(\d+)(?:\*(\d+))?)?")
# The first lets a function of `vllm_side` run in vLLM's own process.
_ENVIRONMENT = ("VLLM_ALLOW_INSECURE_SERIALIZATION=1", "VLLM_NO_USAGE_STATS=1", "HF_HUB_OFFLINE=1")
_MOST_BESIDE = 2048  # tokens that the others may decode meanwhile
_START_SECONDS = 300
_ANSWER_SECONDS = 240


@dataclass(frozen=True, slots=True)
class Cell:
    """sessions of `length` tokens. new: of a turn (0: decode steps). history: of the session whose turn it is, where
    the others decode. turns: one after another (0: a turn's first token is timed).
    """

    sessions: int
    length: int
    history: int
    new: int
    turns: int

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Raises ConfigError."""
        found = _CELL.fullmatch(text)
        if found is None or (found[3] and not found[4]):
            raise ConfigError(f"{text!r} is no cell: SxL, SxL+N, SxL+N*T or SxL/H+N, e.g. 1x8192+256")
        return cls(*(int(part or 0) for part in found.groups()))

    def __str__(self) -> str:
        sessions = f"{self.sessions} x {self.length}"
        if self.history:
            return f"turn of {self.new} new tokens on {self.history} beside {sessions} that decode"
        if self.turns:
            return f"{self.turns} turns of {self.new} new tokens, {sessions}"
        return f"turn of {self.new} new tokens, {sessions}" if self.new else f"decode step, {sessions}"

    @property
    def lengths(self) -> list[int]:
        return [*([self.history] if self.history else []), *[self.length] * self.sessions]

    def grown(self, arguments: argparse.Namespace) -> int:
        """Tokens that a session gets at most while it is measured."""
        rounds: int = arguments.rounds + 1
        answer: int = arguments.answer
        tokens: int = arguments.tokens
        if self.history:
            return rounds * (self.new + 1 + _MOST_BESIDE)
        if self.turns:
            return self.turns * (self.new + answer)
        return rounds * (self.new + 1 if self.new else tokens) + 2


class Ours:
    """The engine in this process, spoken to as vLLM is."""

    def __init__(self, engine: Engine, room: Callable[[], int]) -> None:
        self._engine, self._room = engine, room
        self._open = ExitStack()
        self._sessions: list[str] = []

    def open(self, prompts: Sequence[Sequence[int]]) -> None:
        full = parse_strategy("full")
        self._sessions = [
            self._open.enter_context(opened(self._engine, full, len(each) + self._room())) for each in prompts
        ]
        for session, prompt in zip(self._sessions, prompts, strict=True):
            prefill_rate(self._engine, session, prompt)

    def close(self) -> None:
        self._open.close()

    def decode(self, tokens: int) -> float:
        return decode_milliseconds(self._engine, self._sessions, tokens)

    def prefill(self, ids: Sequence[int]) -> float:
        with opened(self._engine, parse_strategy("full"), len(ids) + 2) as session:
            return self._first_token(session, ids)

    def turn(self, ids: Sequence[Sequence[int]], tokens: int) -> dict[str, float]:
        began = time.perf_counter()
        for session, new in zip(self._sessions, ids, strict=True):
            append_all(self._engine, session, new)
        watches = start(self._engine, self._sessions, tokens=tokens, reads_bytes=False)
        prefilled = [watch.wait().prefilled_tokens for watch in watches]
        ended = max(watch.token_times[-1] for watch in watches)
        return {"ms": 1e3 * (ended - began), "prefilled": statistics.mean(prefilled)}

    def beside(self, ids: Sequence[int], most: int) -> float:
        decoding = start(self._engine, self._sessions[1:], tokens=most, reads_bytes=False)
        while not all(watch.token_times for watch in decoding):
            time.sleep(1e-3)
        taken = self._first_token(self._sessions[0], ids)
        for watch in decoding:
            assert watch.generation is not None
            watch.generation.cancel()
            watch.wait()
        return 1e3 * taken

    def _first_token(self, session: str, ids: Sequence[int]) -> float:
        began = time.perf_counter()
        append_all(self._engine, session, ids)
        (watch,) = start(self._engine, [session], tokens=1, reads_bytes=False)
        watch.wait()
        return watch.token_times[0] - began


class Theirs:
    """vLLM in its process. Raises BackendError for what it refuses, or when it has ended."""

    def __init__(self, process: subprocess.Popen[str], settings: dict[str, Any]) -> None:
        self._process = process
        self._write(settings)

    def ready(self) -> dict[str, Any]:
        """Waits until it has started: the facts that it tells of itself."""
        found: dict[str, Any] = self._answer(_START_SECONDS)
        return found

    def open(self, prompts: Sequence[Sequence[int]]) -> None:
        self._asked({"do": "open", "prompts": prompts})

    def close(self) -> None:
        self._asked({"do": "close"})

    def decode(self, tokens: int) -> float:
        return float(self._asked({"do": "decode", "tokens": tokens}))

    def prefill(self, ids: Sequence[int]) -> float:
        return float(self._asked({"do": "prefill", "ids": ids}))

    def turn(self, ids: Sequence[Sequence[int]], tokens: int) -> dict[str, float]:
        found: dict[str, float] = self._asked({"do": "turn", "ids": ids, "tokens": tokens})
        return found

    def beside(self, ids: Sequence[int], most: int) -> float:
        return float(self._asked({"do": "beside", "ids": ids, "most": most}))

    def _asked(self, command: dict[str, Any]) -> Any:
        self._write(command)
        return self._answer(_ANSWER_SECONDS)

    def _write(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # then there is no answer
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def _answer(self, seconds: float) -> Any:
        assert self._process.stdout is not None
        ends = threading.Timer(seconds, self._process.kill)  # then there is no line
        ends.start()
        try:
            line = self._process.stdout.readline()
        finally:
            ends.cancel()
        if not line:
            raise BackendError(f"vLLM ended, or had no answer within {seconds:g} s; its log is the file of --log")
        found = json.loads(line)
        if "error" in found:
            raise BackendError(f"vLLM: {found['error']}")
        return found["answer"]


@contextmanager
def vllm_of(arguments: argparse.Namespace, longest: int) -> Iterator[Theirs]:
    """Raises BackendError if it does not start."""
    script = str(Path(__file__).with_name("vllm_side.py"))
    with tempfile.TemporaryDirectory() as folder, arguments.log.open("w", encoding="utf-8") as log:
        config = SHAPES[arguments.shape]()
        config.architectures = [architecture_of(config)]
        config.max_position_embeddings = max(config.max_position_embeddings, longest)
        config.bos_token_id, config.eos_token_id = 1, 2
        config.save_pretrained(folder)
        settings = {
            "model": folder,
            "dtype": arguments.dtype,
            "max_model_len": longest,
            "enable_prefix_caching": True,
            "gpu_memory_utilization": 0.5,  # is checked even where the cache has a size
            "kv_cache_memory_bytes": arguments.kv_bytes,
        }
        if arguments.weights == "fp8":
            settings["quantization"] = "fp8"
        with subprocess.Popen(
            ["env", *_ENVIRONMENT, *shlex.split(arguments.vllm), script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        ) as process:  # fmt: skip
            try:
                yield Theirs(process, settings)
            finally:
                process.terminate()


def architecture_of(config: Any) -> str:
    from transformers import AutoModelForCausalLM

    return str(AutoModelForCausalLM._model_mapping[type(config)].__name__)


def drawn(seed: int, count: int, vocabulary: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, vocabulary - 5, (count,), generator=generator).tolist()


class Outcome:
    """All that was measured so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self.left_out = LeftOut(arguments.seconds)
        self.theirs: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        self._rows: list[dict[str, Any]] = []

    def take(self, where: str, samples: dict[str, list[float]], more: Mapping[str, float] | None = None) -> None:
        row: dict[str, Any] = {"what": where, "unit": "ms"}
        for side, values in samples.items():
            self._values[f"{where}, {side}"] = summary = record.summarize(values, "ms")
            row[side] = round(summary["median"], 3)
        ratios = [ours / theirs for ours, theirs in zip(samples[OURS], samples[THEIRS], strict=True)]
        self._values[f"{where}, {OURS} ÷ {THEIRS}"] = summary = record.summarize(ratios, "ratio")
        row |= {f"÷ {THEIRS}": round(summary["median"], 3), **(more or {})}
        self._rows.append(row)
        print(row, flush=True)

    def payload(self) -> dict[str, Any]:
        arguments = self._arguments
        weights = "" if arguments.weights == "auto" else f"_{arguments.weights}"
        return {
            "experiment": named(f"vllm{weights}", arguments),
            "config": {
                "shape": arguments.shape,
                "weights": f"random, {arguments.dtype if arguments.weights == 'auto' else arguments.weights}",
                "device": device_name(arguments.device),
                "dtype": arguments.dtype,
                "rounds": arguments.rounds,
                "tokens": arguments.tokens,
                "answer": arguments.answer,
                "kv_bytes": arguments.kv_bytes,
                "vLLM": self.theirs,
            },
            "seeds": [SEED],
            "values": self._values,
            "headlines": [name for name in self._values if "÷" in name],
            "tables": {"both": self._rows},
            "left_out": self.left_out,
            "baseline": f"vLLM {self.theirs.get('version', '')} on the same GPU, both alive, in turns",
        }


def measure(cell: Cell, sides: dict[str, Any], arguments: argparse.Namespace, outcome: Outcome) -> None:
    vocabulary = SHAPES[arguments.shape]().vocab_size
    prompts = [drawn(1000 * length + each, length, vocabulary) for each, length in enumerate(cell.lengths)]
    for side in sides.values():
        side.open(prompts)
    seeds = iter(range(900_000, 1_000_000))
    turn_ids: dict[int, list[list[int]]] = {}

    def new_ids(number: int) -> list[list[int]]:
        """The same for both sides in each round."""
        if number not in turn_ids:
            turn_ids[number] = [drawn(next(seeds), cell.new, vocabulary) for _ in cell.lengths]
        return turn_ids[number]

    asked = dict.fromkeys(sides, 0)

    def once(name: str) -> float:
        number, side = asked[name], sides[name]
        asked[name] += 1
        if cell.history:
            return float(side.beside(new_ids(number)[0], _MOST_BESIDE))
        return float(side.turn(new_ids(number), 1)["ms"] if cell.new else side.decode(arguments.tokens))

    try:
        if cell.turns:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
            for number in range(cell.turns):
                for name in sorted(sides, reverse=bool(number % 2)):
                    found[name].append(sides[name].turn(new_ids(number), arguments.answer))
            kept = {name: turns[1:] for name, turns in found.items()}  # the first one warms up
            more = {
                f"prefilled a turn, {name}": round(statistics.mean(turn["prefilled"] for turn in turns), 1)
                for name, turns in kept.items()
            }
            outcome.take(str(cell), {name: [turn["ms"] for turn in turns] for name, turns in kept.items()}, more)
        else:
            outcome.take(str(cell), in_turns({name: partial(once, name) for name in sides}, arguments.rounds))
    finally:
        for side in sides.values():
            side.close()


def measure_prefill(length: int, sides: dict[str, Any], arguments: argparse.Namespace, outcome: Outcome) -> None:
    vocabulary = SHAPES[arguments.shape]().vocab_size
    asked = dict.fromkeys(sides, 0)

    def once(name: str) -> float:
        asked[name] += 1
        return 1e3 * float(sides[name].prefill(drawn(7 * asked[name] + length, length, vocabulary)))

    outcome.take(
        f"prefill of {length}, to its first token",
        in_turns({name: partial(once, name) for name in sides}, min(3, arguments.rounds)),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_made(parser, is_one=True, seconds=420.0, tokens=96, kv_bytes=40 * 2**30)
    parser.add_argument("--vllm", default=sys.executable, metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--log", type=Path, default=Path("vllm.log"), metavar="FILE", help="what vLLM prints")
    parser.add_argument("--cells", nargs="*", default=list(CELLS), metavar="CELL", help="see the top of the module")
    parser.add_argument("--prefill", type=int, nargs="*", default=[8192, 32768, 130_000], metavar="N")
    parser.add_argument("--answer", type=int, default=64, metavar="N", help="tokens of an agent's answer")
    parser.add_argument("--weights", choices=("auto", "fp8"), default="auto", help="auto: of the dtype")


def main(arguments: argparse.Namespace, save: Save) -> dict[str, Any]:
    check_rounds(arguments)
    cells = [Cell.parse(text) for text in arguments.cells]
    grown = {cell: cell.grown(arguments) for cell in cells}
    longest = max([*(max(cell.lengths) + grown[cell] for cell in cells), *arguments.prefill], default=1024) + 64
    outcome = Outcome(arguments)
    most = max((len(cell.lengths) for cell in cells), default=1)
    room = [0]
    with ExitStack() as stack:
        theirs = stack.enter_context(vllm_of(arguments, longest))
        config = ModelConfig(device=arguments.device, dtype=arguments.dtype, linear="plain", weights=arguments.weights)
        forward = made_forward(arguments.shape, config, positions=longest)
        settings = EngineConfig(
            kv_bytes=arguments.kv_bytes, max_batch=most, max_running=2 * most + 1, max_first_token_seconds=0,
            share_prefixes="off", stall_seconds=600,
        )  # fmt: skip
        engine = stack.enter_context(Engine(forward, settings))
        outcome.theirs = theirs.ready()  # both start at once
        sides = {OURS: Ours(engine, lambda: room[0] + 8), THEIRS: theirs}
        for work, where in (
            *((partial(measure, cell), str(cell)) for cell in cells),
            *((partial(measure_prefill, length), f"prefill of {length}") for length in arguments.prefill),
        ):
            if outcome.left_out.is_late(where):
                continue
            room[0] = max((grown[cell] for cell in cells if str(cell) == where), default=8)
            try:
                work(sides, arguments, outcome)
            except (KakeyaError, RuntimeError) as error:
                outcome.left_out.refuse(where, error)
                continue
            save(outcome.payload())
    return outcome.payload()
