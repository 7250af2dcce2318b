"""Attention to entries that are restored as they are read, by itself, with the tiles that it has and with others.

    python -m scripts.bench_archived_gpu        prints µs a layer; writes nothing

The layers of SmolLM2-135M's shape, of random codes and matrices, one query each; beside them attention over a region
that holds every entry. Each layer has matrices and entries of its own. Numbers of a group are unpacked in its first
layer. On a machine without a GPU one small size is run; it must be started with TRITON_INTERPRET=1 there.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from inference_engine.kernels import ragged_attention as fields
from inference_engine.kernels.archived import LayerArchive, ReadFrom, Unpacked, open_room
from inference_engine.kernels.latents import CodeTables, Synthesis, operand_dtype
from inference_engine.kernels.triton import archived
from inference_engine.kernels.triton.few_queries import attend_few
from laboratory.evaluation.on_gpu import Timed, in_turns
from tests.kernels import interpreter
from tests.kernels.test_ragged_attention import device_of_kernels

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    interpreter.prepare()
DEVICE = device_of_kernels()
DTYPE = torch.bfloat16 if HAS_GPU else torch.float16
LAYERS, GROUP_LAYERS, KV_HEADS, GROUP, HEAD_DIM = (30, 15, 3, 3, 64) if HAS_GPU else (2, 2, 2, 3, 32)
ROOM, NEAR, CHAINS = (8192, 2064, 64) if HAS_GPU else (200, 70, 5)
# Tokens of a tile, parts of what is in the archive, warps and stages.
TRIES = [
    (128, 64, 8, 4), (128, 64, 8, 3), (128, 64, 8, 5), (128, 32, 8, 4), (64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 8, 4),
] if HAS_GPU else [(32, 3, 4, 2)]  # fmt: skip


def made_layers(tokens: int, numbers: int) -> tuple[list[LayerArchive], ReadFrom]:
    generator = torch.Generator().manual_seed(1)
    widths = torch.full((numbers,), 3, dtype=torch.int32)
    tables = CodeTables.of(
        widths,
        torch.zeros(numbers, dtype=torch.int32, device=DEVICE),
        torch.randn(16, generator=generator),
        torch.rand(256, generator=generator) + 0.5,
        chains=CHAINS,
        first_byte=0,
    )
    half = -(-(1 + -(-3 * numbers // 8)) // 2)
    halves = torch.randint(0, 256, (2, tokens, half), generator=generator).to(torch.uint8).to(DEVICE)
    angles = torch.rand((ROOM, HEAD_DIM // 2), generator=generator).to(DEVICE)
    archives = []
    for _ in range(LAYERS):
        matrix = torch.randn((KV_HEADS, 2 * HEAD_DIM, numbers), generator=generator).to(DEVICE) / numbers**0.5
        means = torch.zeros((KV_HEADS, 2 * HEAD_DIM), device=DEVICE)
        archives.append(
            LayerArchive(
                halves=(halves[0], halves[1]),
                first=16,
                tables=tables,
                synthesis=Synthesis.of(matrix, means, DTYPE),
                turn=(angles.cos(), angles.sin()),
                found=torch.zeros(2, device=DEVICE),
            )
        )
    begins = tuple(range(0, LAYERS, GROUP_LAYERS))
    return archives, ReadFrom(numbers=tables.padded, tokens=ROOM, dtype=operand_dtype(DTYPE), begins=begins)


def lines_of(slots: int, *, position: int, floor: int, ring: int) -> Tensor:
    """[LAYERS, 1, FIELDS], one query of each layer over a region of so many slots."""
    lines = torch.zeros((LAYERS, 1, fields.FIELDS), dtype=torch.int64)
    lines[..., fields.START] = torch.arange(LAYERS)[:, None] * KV_HEADS * slots
    lines[..., fields.HEAD_SLOTS] = lines[..., fields.COUNT] = slots
    lines[..., fields.SINK], lines[..., fields.RING] = (16, slots - 16) if ring else (0, 0)
    lines[..., fields.LAST] = lines[..., fields.UPTO] = position
    lines[..., fields.FLOOR] = floor
    return lines


def timed(tokens: int, numbers: int) -> dict[str, Callable[[], float]]:
    """tokens: old entries, behind the sink; the newest ones are in the region."""
    archives, read = made_layers(tokens, numbers)
    known = archived.open_archives(archives)
    assert known is not None, "the device has too little shared memory"
    position = 16 + tokens + NEAR // 2
    queries = torch.randn((LAYERS, 1, KV_HEADS * GROUP, HEAD_DIM), device=DEVICE).to(DTYPE)
    slots = position + 1
    keys, values = (torch.randn((LAYERS * KV_HEADS * slots, HEAD_DIM), device=DEVICE).to(DTYPE) for _ in range(2))
    near = lines_of(NEAR, position=position, floor=16 + tokens, ring=NEAR)
    near[:, 0, fields.ARCHIVE] = torch.tensor(list(known.numbers))
    lines, whole = near.to(DEVICE), lines_of(slots, position=position, floor=0, ring=0).to(DEVICE)
    units = open_room(read, queries=1, device=DEVICE)
    out = torch.empty_like(queries)
    options: dict[str, Any] = {"kv_heads": KV_HEADS, "scaling": HEAD_DIM**-0.5}

    def restore(layer: int, *, is_first: bool | None = None) -> object:
        unpacked = Unpacked(units=units, is_first=layer in read.begins if is_first is None else is_first)
        archived.attend_archived(
            queries[layer], keys, values, lines[layer], out[layer], unpacked=unpacked, serves_all=True, **options
        )
        return known  # the lines name it

    def attend(layer: int) -> None:
        attend_few(queries[layer], keys, values, whole[layer], out[layer], **options)

    found: dict[str, Callable[[], float]] = {"every entry in a region": Timed(attend, LAYERS, DEVICE)}
    for tile, far, warps, stages in TRIES:
        with patch.multiple(archived, _TILE=tile, _FAR=far, _WARPS=warps, _STAGES=stages):
            try:
                found[f"tiles of {tile}, {far} parts, {warps} warps, {stages} stages"] = Timed(restore, LAYERS, DEVICE)
            except OutOfResources as error:
                print(f"{(tile, far, warps, stages)}: {error}", flush=True)
    found["as the first, without unpacking"] = Timed(partial(restore, is_first=False), LAYERS, DEVICE)
    found["as the first, unpacking in every layer"] = Timed(partial(restore, is_first=True), LAYERS, DEVICE)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention to entries that are restored as they are read.")
    parser.add_argument("--old", type=int, nargs="+", default=[3056, 6128] if HAS_GPU else [90])
    parser.add_argument("--numbers", type=int, nargs="+", default=[2880] if HAS_GPU else [70])
    arguments = parser.parse_args()
    for numbers in arguments.numbers:
        for tokens in arguments.old:
            samples = in_turns(timed(tokens, numbers), rounds=5 if HAS_GPU else 1)
            for name, own in samples.items():
                print(f"{numbers} numbers, {tokens} old entries, {name}: {statistics.median(own):.1f} µs a layer")


if __name__ == "__main__":
    main()
