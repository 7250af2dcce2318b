"""Products of few tokens on a GPU at the tiles that `kernels/triton/tiles.py` chooses, beside other tiles and torch's.

Matrices have the shapes of real models, with random numbers. A graph multiplies by as many of one shape as do not fit
the device's cache, with the norm, the activation or the sum that the model has there. Every tile is timed once; then
the chosen one, the fastest other one and torch's product, of bfloat16 and nothing else, take turns. The floor is the
time in which the bytes of a matrix can be read.

Kernels are compiled by several processes first. Without a GPU, and with TRITON_INTERPRET=1, a tiny shape is tried.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from inference_engine.errors import ConfigError
from inference_engine.kernels.fused import RowNorm
from inference_engine.kernels.quantised import Matrix, QuantisedMatrix, quantise
from inference_engine.kernels.triton import products, tiles
from inference_engine.kernels.triton.tiles import Tile
from laboratory.bench.experiments import Save
from laboratory.bench.shared import device_name
from laboratory.evaluation import record
from laboratory.evaluation.on_gpu import Ceilings, Timed, in_turns, measure_ceilings

SEED = 1
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
PLAIN, BLOCKS = "bfloat16", "fp8/128"
FORMATS = (PLAIN, "fp8", BLOCKS, "int4")
GROUP, ROWS = 128, 16
AT_LEAST = 2 * 10**8 if HAS_GPU else 1  # bytes of all matrices of a graph, more than a cache holds
MOST_COPIES = 256
SHARED = 220 * 1024  # bytes that a program's tiles may take
ROUNDS = 9
CHOSEN, OTHER, LIBRARY = "chosen", "fastest other", "torch"


class Shape(NamedTuple):
    """Sizes of a model: of its states, of queries, keys and values together, of what attention gives, and so on.

    inner: 0 where experts are in its place, of which one product is measured here: the one that chooses. vocabulary: 0,
    if its product with the states is one of a model that is named already.
    """

    hidden: int
    qkv: int
    attended: int
    inner: int
    vocabulary: int
    experts: int = 0


MODELS = {
    "qwen2.5-7b": Shape(3584, 4608, 3584, 18944, 152064),
    "llama-3.1-8b": Shape(4096, 6144, 4096, 14336, 128256),
    "llama-3.2-1b": Shape(2048, 3072, 2048, 8192, 128256),
    "qwen2.5-0.5b": Shape(896, 1152, 896, 4864, 0),
    "qwen2.5-1.5b": Shape(1536, 2048, 1536, 8960, 0),
    "qwen3-4b": Shape(2560, 6144, 4096, 9728, 0),
    "qwen2.5-14b": Shape(5120, 7168, 5120, 13824, 152064),
    "qwen2.5-32b": Shape(5120, 0, 0, 27648, 0),
    "qwen3-30b-a3b": Shape(2048, 5120, 4096, 0, 151936, 128),
    "smollm2-135m": Shape(576, 960, 576, 1536, 49152),
    "gemma3-270m": Shape(640, 1536, 1024, 2048, 262144),
}
if not HAS_GPU:
    MODELS = {"tiny": Shape(256, 32, 0, 0, 0)}


class Product(NamedTuple):
    """One of a model's products with what is done beside it. rows: of the matrix, of both halves if gated."""

    model: str
    name: str
    rows: int
    inputs: int
    normed: bool = False
    gated: bool = False
    summed: bool = False
    format: str = PLAIN
    tokens: int = 1

    @property
    def outputs(self) -> int:
        return self.rows // 2 if self.gated else self.rows

    @property
    def rule(self) -> str:
        """The function of `tiles.py` that chooses."""
        if self.tokens > 1:
            return "tile_of_some" if self.format == PLAIN else "tile_of_quantised"
        return {PLAIN: "tile_of_one", "fp8": "tile_of_bytes"}.get(self.format, "tile_of_groups")


class Found(NamedTuple):
    """samples: µs of each side, taken in turns. other: the fastest of those tried, which the rule did not choose."""

    samples: dict[str, list[float]]
    tile: Tile
    other: Tile | None
    tried: list[tuple[float, Tile]]

    def ratio(self, name: str) -> float:
        """Of the chosen tile to that side, each round for itself."""
        return statistics.median(
            own / other for own, other in zip(self.samples[CHOSEN], self.samples[name], strict=True)
        )


def products_of(model: str, formats: Sequence[str], counts: Sequence[int]) -> Iterator[Product]:
    shape = MODELS[model]
    found = [
        Product(model, "queries, keys, values", shape.qkv, shape.hidden, normed=True),
        Product(model, "attended", shape.hidden if shape.attended else 0, shape.attended, summed=True),
        Product(model, "gate and up", 2 * shape.inner, shape.hidden, normed=True, gated=True),
        Product(model, "down", shape.hidden if shape.inner else 0, shape.inner, summed=True),
        Product(model, "router", shape.experts, shape.hidden, normed=True),
        Product(model, "lm_head", shape.vocabulary, shape.hidden, normed=True),
    ]
    for product in found:
        for format_name in formats if product.rows else ():
            if format_name == PLAIN or product.name not in {"lm_head", "router"}:  # which are in fewer bits nowhere
                for tokens in counts:
                    yield product._replace(format=format_name, tokens=tokens)


def tries_of(product: Product) -> list[Tile]:
    """Other tiles; of more tokens those that leave the order of a sum, and its bits, what they are."""
    if product.tokens > 1 and product.format != PLAIN:
        # Of a small tile any number of warps multiplies by the same instruction.
        some_warps = (1, 2, 4) if product.tokens <= 32 else (4, 8)
        return [Tile(0, 0, warps, stages) for warps in some_warps for stages in (2, 3, 4, 5, 6)]
    if product.tokens > 1:
        bytes_of = 2 * ((2 if product.gated else 1) * 64 + max(16, product.tokens))
        some = [Tile(64, width, warps, count) for width in (64, 128, 256) for warps in (4, 8) for count in (3, 4, 5, 8)]
        return [tile for tile in some if bytes_of * tile.width * tile.stages <= SHARED]
    widest = max(256, 1 << (product.inputs - 1).bit_length())
    least, most = {PLAIN: (16, 64), "fp8": (16, 128)}.get(product.format, (8, 64))
    narrow = {PLAIN: 256, "fp8": 256}.get(product.format, GROUP)
    found = []
    for width in (128, 256, 512, 1024, 2048, 4096):
        for rows in (1, 2, 4, 8):
            for warps in (2, 4, 8):
                each = rows * width // (32 * warps) * (2 if product.gated else 1)  # numbers of a thread
                if narrow <= width <= widest and least <= each <= most:
                    found.append(Tile(rows, width, warps))
    return found


@contextmanager
def asked(product: Product, tile: Tile | None) -> Iterator[list[Tile]]:
    """Within it the rule of a product answers with `tile`, or as it does; what it answered is in the list."""
    rule = getattr(tiles, product.rule)
    answers: list[Tile] = []

    def answer(*given: Any, **named: Any) -> Tile:
        answers.append(with_parts(rule(*given, **named), tile))
        return answers[-1]

    with patch.object(products, product.rule, answer):
        yield answers


def with_parts(own: Tile, tile: Tile | None) -> Tile:
    """Another tile, of which rows of 0 mean: other warps and stages alone."""
    if tile is None:
        return own
    return tile if tile.rows else own._replace(warps=tile.warps, stages=tile.stages)


def copies_of(product: Product) -> int:
    """As many as there have to be matrices of their own in a graph."""
    return max(2, min(MOST_COPIES, -(-AT_LEAST // _bytes_of(product))))


def _bytes_of(product: Product) -> int:
    numbers = product.rows * product.inputs
    return int(numbers * {PLAIN: 2.0, "fp8": 1.0, BLOCKS: 1.0}.get(product.format, 0.5 + 3 / GROUP))


def _of_format(product: Product, drawn: Tensor) -> Matrix:
    """Numbers of all rows as they are, those of ROWS rows in the product's format and again and again."""
    if len(drawn) == product.rows:
        return drawn
    few = quantise(drawn, "int4" if product.format == "int4" else "fp8")
    times = product.rows // ROWS
    scales = few.scales
    if product.format == BLOCKS:
        scales = scales.expand(-1, -(-product.inputs // GROUP)).contiguous()
    return QuantisedMatrix(
        codes=few.codes.view(torch.uint8).repeat(times, 1).view(few.codes.dtype),
        scales=scales.repeat(times, 1),
        zeros=None if few.zeros is None else few.zeros.repeat(times, 1),
        inputs=product.inputs,
        group=GROUP if product.format == BLOCKS else few.group,
    )


def _made(product: Product, copies: int, *, by_library: bool = False) -> Callable[[int], Tensor]:
    """The product with the matrix of a number, as the engine calls it, or by torch."""
    torch.manual_seed(SEED)
    dtype = torch.bfloat16 if HAS_GPU else torch.float16
    given: dict[str, Any] = {"dtype": dtype, "device": DEVICE}
    states = torch.randn(product.tokens, product.inputs, **given)
    is_plain = by_library or product.format == PLAIN
    matrices = [
        _of_format(product, torch.empty(product.rows if is_plain else ROWS, product.inputs, **given).normal_())
        for _ in range(copies)
    ]
    if by_library:
        plain = [matrix for matrix in matrices if isinstance(matrix, Tensor)]
        return lambda copy: torch.nn.functional.linear(states, plain[copy])
    norm = RowNorm(weights=torch.ones(product.inputs, **given), epsilon=1e-6) if product.normed else None
    residual = torch.randn(product.tokens, product.rows, **given) if product.summed else None
    multiply = products.Products()
    activation = "silu" if product.gated else None

    def run(copy: int) -> Tensor:
        return multiply(states, matrices[copy], norm=norm, residual=residual, activation=activation)

    return run


@torch.inference_mode()
def compile_one(product: Product, tile: Tile | None) -> None:
    """So that another process finds the kernel; a tile that cannot be compiled is left to that one."""
    try:
        with asked(product, tile):
            _made(product, 1)(0)
    except RuntimeError:
        return


def compile_all(wanted: Sequence[tuple[Product, Tile | None]]) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), mp_context=context) as pool:
        list(pool.map(compile_one, *zip(*wanted, strict=True), chunksize=4))


def timed(product: Product, tile: Tile | None, *, by_library: bool = False) -> Timed | None:
    """None: the tile does not fit, or the kernel cannot be compiled for it."""
    try:
        with asked(product, tile):
            return Timed(_made(product, copies_of(product), by_library=by_library), copies_of(product), DEVICE)
    except RuntimeError as error:
        if tile is None:
            raise
        print(f"  {tuple(tile)} of {product.model}, {product.name}: {str(error).splitlines()[0][:120]}", flush=True)
        return None


def of_product(product: Product) -> Found:
    with asked(product, None) as answers:
        _made(product, 1)(0)
    own, found = answers[0], list[tuple[float, Tile]]()
    for tile in tries_of(product):
        if with_parts(own, tile) != own and (one := timed(product, tile)) is not None:
            found.append((statistics.median(one() for _ in range(3)), tile))
            del one
    sides = {CHOSEN: timed(product, None), LIBRARY: timed(product, None, by_library=True)}
    best = min(found)[1] if found else None
    if best is not None:
        sides[OTHER] = timed(product, best)
    samples = in_turns({name: side for name, side in sides.items() if side is not None}, ROUNDS)
    return Found(samples, own, None if best is None else with_parts(own, best), sorted(found))


def row_of(product: Product, found: Found, ceilings: Ceilings) -> dict[str, Any]:
    us = statistics.median(found.samples[CHOSEN])
    row: dict[str, Any] = {
        "matrix": f"{product.model}, {product.name}",
        "rows x inputs": f"{product.rows} x {product.inputs}",
        "format": product.format,
        "tokens": product.tokens,
        "us": round(us, 2),
        "floor ÷ us": round(1e6 * _bytes_of(product) / ceilings.bandwidth / us, 3),
        "tile": str(tuple(found.tile)),
    }
    for name in (LIBRARY, OTHER):
        if name in found.samples:
            row[f"÷ {name}"] = round(found.ratio(name), 3)
    return row if found.other is None else row | {"other": str(tuple(found.other))}


def payload_of(found: dict[Product, Found], ceilings: Ceilings) -> dict[str, Any]:
    values: dict[str, Any] = {**ceilings.values()}
    for kind in dict.fromkeys((product.format, product.tokens) for product in found):
        some = [each for product, each in found.items() if (product.format, product.tokens) == kind]
        for name in (OTHER, LIBRARY):
            if ratios := [each.ratio(name) for each in some if name in each.samples]:
                compared = f"time, chosen ÷ {name}, {kind[0]}, tokens: {kind[1]}"
                values[f"{compared}, of each matrix"] = record.summarize(ratios, "ratio")
                values[f"{compared}, where it is worst"] = record.exact(max(ratios), "ratio")
    return {
        "experiment": f"products_{DEVICE.type}_bfloat16",
        "config": {
            "device": device_name(DEVICE.type),
            "weights": "random, made in memory",
            "rounds": ROUNDS,
            "tiles tried": sum(1 + len(each.tried) for each in found.values()),
        },
        "seeds": [SEED],
        "values": values,
        "tables": {"a product": [row_of(product, each, ceilings) for product, each in found.items()]},
        "left_out": {},
        "baseline": "torch's product of the matrix in bfloat16, and the fastest other tile, in the same rounds",
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[PLAIN])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1], help="2 to 64, or 1, which has rules of its own")
    parser.add_argument("--tries", type=Path, default=None, help="a file for what every tile took, as JSON")


def main(arguments: argparse.Namespace, _save: Save) -> dict[str, Any]:
    if unserved := [count for count in arguments.tokens if not 1 <= count <= products.FEW]:
        raise ConfigError(f"--tokens: {unserved[0]} tokens; 1 to {products.FEW} are multiplied by these kernels")
    began = time.perf_counter()
    wanted = [
        product for model in arguments.models for product in products_of(model, arguments.formats, arguments.tokens)
    ]
    if HAS_GPU:
        compile_all([(product, tile) for product in wanted for tile in (None, *tries_of(product))])
        print(f"{len(wanted)} products, compiled in {time.perf_counter() - began:.0f} s", flush=True)
    ceilings = measure_ceilings(DEVICE)
    found: dict[Product, Found] = {}
    with torch.inference_mode():
        for product in wanted:
            found[product] = of_product(product)
            row = row_of(product, found[product], ceilings)
            print(*row.values(), f"{time.perf_counter() - began:.0f} s", flush=True)
            if arguments.tries:
                tried = [[*row_of(each, its, ceilings).values(), its.tried] for each, its in found.items()]
                arguments.tries.write_text(json.dumps(tried))
    return payload_of(found, ceilings)
