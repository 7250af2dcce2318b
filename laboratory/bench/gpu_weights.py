"""Decode steps with weights in bfloat16, fp8 and int4, on a GPU; and what fewer bits do to a real model's predictions.

The models of the speed have shapes of real ones and random weights, made in memory: nothing is downloaded. Each engine
has weights of its own format, made from the same numbers, and launches its steps ahead. They take turns in every round,
and ratios are taken within a round. Bytes are those that a step of one token reads.

The predictions are of texts whose first part is appended and whose second is forced, token by token and by steps of
several: products of one token and of many both count. What bfloat16 itself differs by is beside it: the same weights by
torch's modules.

With `--device cpu --dtype float32 --shapes tiny --kv-bytes 64MiB` everything runs by the references: a trial of this
script, no measurement of anything.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inference_engine.backends.base import Admitted
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.backends.torch_loading import serve_loaded
from inference_engine.backends.twin import admit_config
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.errors import BackendError, InvalidArgument, NoCapacity
from inference_engine.kernels.ops import open_ops
from inference_engine.kernels.quantised import GROUP, QuantisedMatrix
from inference_engine.kv.strategies.full import Full
from inference_engine.models import LoadedModel, load_model, tokenizer_folder
from inference_engine.models.quantised_linear import QuantisedLinear
from inference_engine.models.seam import ATTENTION
from laboratory.bench.experiments import Save
from laboratory.bench.shared import LeftOut, add_made, check_rounds, device_name, named, release
from laboratory.evaluation import record
from laboratory.evaluation.haystack import Texts
from laboratory.evaluation.made_models import SEED, SHAPES, made_model
from laboratory.evaluation.models import load_tokenizer
from laboratory.evaluation.passages import Passage, force, text_passage
from laboratory.evaluation.sessions import opened
from laboratory.evaluation.timing import decode_milliseconds, in_turns, prefill_rates

PLAIN, BLOCKS, MODULES = "bfloat16", "fp8/128", "bfloat16 by torch's modules"
WEIGHTS = (PLAIN, "fp8", BLOCKS, "int4")
KINDS = ("prose", "code", "polish")


@dataclass(slots=True)
class Cell:
    """What one length and number of sessions gave, by weights. prefill: tokens a second, of each session."""

    step_ms: dict[str, list[float]] = field(default_factory=dict)
    prefill: dict[str, list[float]] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Measured:
    """Everything that becomes a record."""

    left_out: LeftOut
    values: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    divergences: list[dict[str, Any]] = field(default_factory=list)


def served(loaded: LoadedModel, weights: str, arguments: argparse.Namespace, admitted: Admitted) -> TorchForward:
    """The model with its matrices in that format. `fp8/128`: fp8 with a scale for each 128 inputs, as in blocks."""
    asked = {PLAIN: "auto", BLOCKS: "fp8"}.get(weights, weights)
    config = ModelConfig(device=arguments.device, dtype=arguments.dtype, linear="plain", weights=asked)
    # As on a GPU, wherever this runs: otherwise there would be no list on a CPU.
    ops = replace(open_ops("auto", torch.device(arguments.device)), attends_together=True)
    if weights == BLOCKS:
        from inference_engine.models.quantised_linear import quantise_linears

        quantise_linears(loaded.model, "fp8", head=loaded.model.get_output_embeddings())
        for module in loaded.model.modules():
            if isinstance(module, QuantisedLinear):
                module.matrix, module.group = in_blocks(module.matrix), GROUP
        config = replace(config, weights="auto")
    forward = serve_loaded(loaded, config, admitted, ops=ops)
    if forward.listed is None:
        raise BackendError(f"steps of {loaded.model_id} are not listed on {arguments.device}: nothing to compare")
    return forward


def in_blocks(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """The same numbers, with a scale for each group of inputs."""
    groups = -(-matrix.inputs // GROUP)
    return QuantisedMatrix(
        codes=matrix.codes,
        scales=matrix.scales.expand(-1, groups).contiguous(),
        zeros=None,
        inputs=matrix.inputs,
        group=GROUP,
    )


def weight_bytes(forward: TorchForward) -> int:
    """What a step of one token reads: every matrix but the embedding, unless that is the head, too."""
    model = forward.seam.model
    own = 0
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for module in model.modules():
        if isinstance(module, QuantisedLinear):
            own += module.matrix.nbytes
    parts = [part for part in model.parameters() if part is not embedding or head is embedding]
    return own + sum(int(part.nbytes) for part in parts)


@contextmanager
def engines_of(forwards: dict[str, TorchForward], arguments: argparse.Namespace) -> Iterator[dict[str, Engine]]:
    settings = EngineConfig(
        kv_bytes=arguments.kv_bytes, max_batch=max(arguments.sessions), overlap="on", share_prefixes="off"
    )
    with ExitStack() as stack:
        yield {name: stack.enter_context(Engine(forward, settings)) for name, forward in forwards.items()}


def measure(engines: dict[str, Engine], prompts: Sequence[list[int]], arguments: argparse.Namespace) -> Cell:
    """Raises InvalidArgument or NoCapacity for what does not fit."""
    cell = Cell()
    limit = len(prompts[0]) + 2 + (arguments.rounds + 1) * arguments.tokens
    with ExitStack() as stack:
        sessions = {
            name: [stack.enter_context(opened(engine, Full(), limit)) for _ in prompts]
            for name, engine in engines.items()
        }
        cell.prefill = prefill_rates(engines, sessions, prompts)
        sides = {
            name: partial(decode_milliseconds, engine, sessions[name], arguments.tokens)
            for name, engine in engines.items()
        }
        cell.step_ms = in_turns(sides, arguments.rounds)
    return cell


def note_cell(where: str, cell: Cell, found: Measured) -> None:
    row: dict[str, Any] = {"cell": where}
    for name, steps in cell.step_ms.items():
        found.values[f"decode step, {name}, {where}"] = record.summarize(steps, "ms")
        found.values[f"prefill, {name}, {where}"] = record.summarize(cell.prefill[name], "tokens a second")
        row[name] = round(statistics.median(steps), 4)
        if name != PLAIN:
            ratios = [ours / theirs for ours, theirs in zip(steps, cell.step_ms[PLAIN], strict=True)]
            found.values[f"time of a step, {name} ÷ {PLAIN}, {where}"] = record.summarize(ratios, "ratio")
            row[f"{name} ÷ {PLAIN}"] = round(statistics.median(ratios), 4)
    found.rows.append(row)
    print(row, {name: round(statistics.median(each)) for name, each in cell.prefill.items()}, flush=True)


def measure_speed(arguments: argparse.Namespace, found: Measured, save: Save) -> None:
    generator = torch.Generator().manual_seed(SEED)
    sizes = sorted(((n, count) for n in arguments.lengths for count in arguments.sessions), key=lambda s: s[0] * s[1])
    for shape in arguments.shapes:
        admitted = admit_config(SHAPES[shape]())
        forwards = {}
        for name in arguments.weights:
            loaded = made_model(shape, arguments.device, arguments.dtype)
            forwards[name] = served(loaded, name, arguments, admitted)
            found.values[f"bytes of weights that a step reads, {name}, {shape}"] = record.exact(
                weight_bytes(forwards[name]) / 1e9, "GB"
            )
            del loaded
            release(arguments.device)
        vocabulary = forwards[PLAIN].facts.vocab_size
        with engines_of(forwards, arguments) as engines:
            for length, count in sizes:
                where = f"{shape}, {count} at {length}"
                if found.left_out.is_late(where):
                    continue
                prompts = torch.randint(5, vocabulary - 5, (count, length), generator=generator).tolist()
                try:
                    note_cell(where, measure(engines, prompts, arguments), found)
                except (InvalidArgument, NoCapacity) as refusal:
                    found.left_out.refuse(where, refusal)
                    continue
                save(payload_of(found, arguments))
        del forwards, engines
        release(arguments.device)


# -- what fewer bits do to predictions --------------------------------------------------------------------------------


def log_probabilities(
    forward: TorchForward, passages: Sequence[Passage], arguments: argparse.Namespace
) -> list[Tensor]:
    """Of the forced tokens of each passage, float32 [n, V] on the device."""
    collected: list[Tensor] = []
    with Engine(forward, EngineConfig(kv_bytes=arguments.kv_bytes, overlap="off", share_prefixes="off")) as engine:
        for passage in passages:
            parts: list[Tensor] = []

            def collect(_position: int, logits: Tensor, parts: list[Tensor] = parts) -> None:
                with torch.inference_mode():
                    parts.append(torch.log_softmax(logits.float(), dim=-1))

            force(engine, Full(), passage, collect)
            collected.append(torch.cat(parts))
    return collected


def measure_predictions(arguments: argparse.Namespace, found: Measured, save: Save) -> None:
    def loaded() -> LoadedModel:
        config = ModelConfig(model=arguments.model)
        return load_model(
            arguments.model,
            cache=config.cache_path,
            device=arguments.device,
            dtype=arguments.dtype,
            attention=ATTENTION,
        )

    tokenizer = load_tokenizer(tokenizer_folder(arguments.model, ModelConfig().cache_path))
    texts = Texts(tokenizer)
    passages = [
        text_passage(texts, kind, arguments.prefix, arguments.forced, f"weights/{number}")
        for kind in arguments.kinds
        for number in range(arguments.passages)
    ]
    first = loaded()
    admitted = admit_config(first.model.config)
    forward = served(first, PLAIN, arguments, admitted)
    exact = log_probabilities(forward, passages, arguments)
    modules = TorchForward(
        forward.seam,
        replace(forward.facts, numerics="torch"),
        forward.device,
        ops=replace(open_ops("auto", forward.device), attends_together=True),
    )
    compared: list[tuple[str, list[Tensor]]] = [(MODULES, log_probabilities(modules, passages, arguments))]
    del first, forward, modules
    release(arguments.device)
    for name in arguments.weights:
        if name not in (PLAIN, BLOCKS):
            compared.append((name, log_probabilities(served(loaded(), name, arguments, admitted), passages, arguments)))
            release(arguments.device)
    for name, ours in compared:
        for kind in arguments.kinds:
            chosen = [place for place, passage in enumerate(passages) if passage.kind == kind]
            note_divergence(name, kind, [exact[place] for place in chosen], [ours[place] for place in chosen], found)
    save(payload_of(found, arguments))


def note_divergence(name: str, kind: str, exact: Sequence[Tensor], ours: Sequence[Tensor], found: Measured) -> None:
    theirs, own = torch.cat(list(exact)), torch.cat(list(ours))
    divergence = (theirs.exp() * (theirs - own)).sum(dim=-1, dtype=torch.float64)
    agreement = float((theirs.argmax(dim=-1) == own.argmax(dim=-1)).double().mean())
    mean = float(divergence.mean())
    row = {
        "weights": name,
        "text": kind,
        "tokens": len(divergence),
        "mean KL": mean,
        "p99 KL": float(divergence.quantile(0.99)),
        "same likeliest token": agreement,
    }
    found.divergences.append(row)
    found.values[f"mean KL to {PLAIN}, {name}, {kind}"] = record.exact(mean, "nats")
    found.values[f"same likeliest token as {PLAIN}, {name}, {kind}"] = record.exact(agreement, "share of tokens")
    print(row, flush=True)


def payload_of(found: Measured, arguments: argparse.Namespace) -> dict[str, Any]:
    what = "weights" if arguments.shapes else "weights_predictions"
    tables = {"ms of a step": found.rows, "predictions": found.divergences}
    return {
        "experiment": named(what, arguments),
        "config": {
            "shapes": arguments.shapes,
            "weights": arguments.weights,
            "numbers": "random, made in memory",
            "model of the predictions": Path(arguments.model).name,
            "device": device_name(arguments.device),
            "dtype": arguments.dtype,
            "rounds": arguments.rounds,
            "tokens": arguments.tokens,
            "passages": f"{arguments.passages} of {arguments.prefix} + {arguments.forced} tokens of each kind",
        },
        "seeds": [SEED],
        "values": found.values,
        "tables": {name: rows for name, rows in tables.items() if rows},
        "left_out": found.left_out,
        "baseline": "the same list of operations over weights in bfloat16 in the same process, in turns",
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_made(parser, shapes=("qwen2.5-7b",), kv_bytes=8 * 2**30)
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024], metavar="N")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 16, 64], metavar="N")
    parser.add_argument("--model", default="", help="a folder or GGUF file, for the predictions; empty: none")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), help="of text")
    parser.add_argument("--passages", type=int, default=2, metavar="N", help="of each kind")
    parser.add_argument("--prefix", type=int, default=512, metavar="N", help="tokens that are appended")
    parser.add_argument("--forced", type=int, default=512, metavar="N", help="tokens that are scored")


def main(arguments: argparse.Namespace, save: Save) -> dict[str, Any]:
    check_rounds(arguments)
    if PLAIN not in arguments.weights:
        arguments.weights = [PLAIN, *arguments.weights]
    found = Measured(left_out=LeftOut(arguments.seconds))
    if arguments.model:
        measure_predictions(arguments, found, save)
    measure_speed(arguments, found, save)
    return payload_of(found, arguments)
