"""The operation of a device that chooses tokens by their components reads what the reference reads, and indexes keys as
the reference does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.kernels.components import (
    IndexShape,
    KeyComponents,
    component_scores,
    encode,
    pack,
    token_weights,
)
from inference_engine.kernels.gather import always_read, attend_entries, gather_attend, gather_vectors, select
from inference_engine.kernels.latents import PLAIN, CodeTables, MadeLayer, Synthesis
from inference_engine.kernels.ragged_attention import attend_ragged as attend_by_reference
from inference_engine.kernels.reads import (
    COUNT,
    FIELDS,
    FLOOR,
    HEAD_SLOTS,
    KIND,
    LAST,
    RING,
    SINK,
    START,
    UPTO,
    AttentionCall,
    StagedRead,
    TokenRead,
)
from inference_engine.kv.parts.component_index import TokenSelector
from tests.further import interpreted
from tests.kernels.own_process import run_with_triton
from tests.kernels.poisoned import poison
from tests.kernels.rows import in_rows
from tests.kernels.test_ragged_attention import device_of_kernels


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a layer. turned: channels of a head that are rotated."""

    kv_heads: int
    group: int
    head_dim: int
    turned: int
    base: float = 1000.0

    @property
    def frequencies(self) -> Tensor:
        half = self.turned // 2
        return self.base ** -(torch.arange(half, dtype=torch.float64) / half)

    @property
    def scaling(self) -> float:
        return float(self.head_dim**-0.5)

    def rotate(self, vectors: Tensor, shifts: Tensor) -> Tensor:
        half = self.turned // 2
        angles = (shifts[:, None].double() * self.frequencies).to(vectors.dtype).to(vectors.device)
        left, right, rest = torch.split(vectors, [half, half, self.head_dim - self.turned], dim=-1)
        turned = (left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin(), rest)
        return torch.cat(turned, dim=-1)

    def components(self, rank: int) -> KeyComponents:
        generator = torch.Generator().manual_seed(5)
        size = (self.kv_heads, self.head_dim, self.head_dim)
        basis = torch.linalg.qr(torch.randn(size, generator=generator)).Q[..., :rank]
        mean = torch.randn(self.kv_heads, self.head_dim, generator=generator)
        return KeyComponents(mean=mean, basis=basis, deviations=torch.ones(self.kv_heads, rank))


@dataclass(kw_only=True)
class History:
    """One session's entries and index in a buffer of many. Its bytes in K and V may be used before they are written."""

    model: Model
    shape: IndexShape
    sink: int
    window: int
    kept: int
    length: int
    start: int
    keys: Tensor  # [Hkv, length, D], views of the buffer
    values: Tensor
    halves: tuple[Tensor, Tensor]
    numbers: Tensor = field(default_factory=lambda: torch.zeros(0))
    alive: tuple[Any, ...] = ()

    @property
    def selector(self) -> TokenSelector:
        return TokenSelector(shape=self.shape, sink=self.sink, window=self.window, count=self.kept)

    @property
    def tiles(self) -> int:
        return self.length // self.shape.tile

    def codes(self) -> Tensor:
        """Of all whole tiles, by the reference: [Hkv, n, r]."""
        count = self.tiles * self.shape.tile
        keys = self.model.rotate(self.keys[:, :count].float(), -torch.arange(count))
        components = self.model.components(self.shape.rank).to(keys.device)
        return encode(keys, components, self.shape)

    def write(self, codes: Tensor) -> None:
        """Write tiles of these codes into the index."""
        words = pack(codes.view(len(codes), self.tiles, self.shape.tile, -1).transpose(0, 1), self.shape)
        stored = words.reshape(self.tiles, len(codes), -1).view(torch.uint8).view(self.tiles, len(codes), -1)
        for number, half in enumerate(self.halves):
            half[: len(stored[number::2])] = stored[number::2]

    def line(self, position: int) -> list[int]:
        numbers = dict.fromkeys(range(FIELDS), 0)
        local = int(self.selector.local_starts(np.array([position]))[0])
        numbers |= {START: self.start, HEAD_SLOTS: self.length, COUNT: self.length, LAST: self.length - 1}
        numbers |= {SINK: self.sink, UPTO: position}
        row = np.array([numbers[number] for number in range(FIELDS)])
        index, shape = self.numbers.data_ptr(), self.shape
        TokenRead(shape=shape).fill(row, kept=self.kept, local=local, shape=shape.number, index=index)
        found: list[int] = row.tolist()
        return found

    def expected(self, query: Tensor, position: int, codes: Tensor, softcap: float | None = None) -> Tensor:
        """[1, Hq, D]: the reference's attention over what it chooses."""
        positions, heads, scaling = np.array([position]), self.model.kv_heads, self.model.scaling
        starts = self.selector.local_starts(positions)
        always = always_read(positions, starts, sink=self.sink, device=query.device)
        rows = self.model.components(self.shape.rank).rows(self.shape).to(query.device)
        count = int(starts[0])
        scores = component_scores(query, codes[:, :count], rows, self.shape, self.model.rotate, scaling)
        places = torch.arange(count, device=query.device)[None]
        candidates = places >= self.sink
        near = always.positions[:, None].expand(-1, heads, -1)
        read = partial(gather_vectors, indices=near.clamp(min=0))
        keys, values = self.keys.float(), self.values.float()
        _, lse = attend_entries(query, read(keys), read(values), near >= 0, scaling, softcap)
        weights = token_weights(scores, candidates, lse, heads, softcap)
        chosen = select(weights, candidates, self.kept)
        out, _ = gather_attend(query, keys, values, chosen, always, block=1, scaling=scaling, softcap=softcap)
        return out


def histories(
    model: Model, kinds: list[dict[str, Any]], dtype: torch.dtype, device: torch.device
) -> tuple[list[History], Tensor, Tensor]:
    """Sessions of these shapes, sinks, windows, numbers of chosen tokens and lengths, and the buffers they are in.

    Their indexes have addresses and no tile yet. `key` of a kind: keys are all that number before rotation.
    """
    from inference_engine.kernels.triton.index_tiles import key_indexes

    generator = torch.Generator().manual_seed(11)
    total = sum(kind["length"] for kind in kinds) * model.kv_heads + 3
    keys = torch.full((total, model.head_dim), float("nan"), dtype=dtype, device=device)
    values = torch.full_like(keys, float("nan"))
    found, start = [], 3
    for kind in kinds:
        options = {name: kind[name] for name in ("shape", "sink", "window", "kept", "length")}
        shape, length, size = options["shape"], options["length"], (model.kv_heads, kind["length"], model.head_dim)
        own = slice(start, start + model.kv_heads * length)
        unrotated = torch.randn(size, generator=generator) * 1.5
        if "key" in kind:
            unrotated[:] = kind["key"]
        keys[own] = model.rotate(unrotated, torch.arange(length)).view(-1, model.head_dim).to(device, dtype)
        values[own] = torch.randn(size, generator=generator).view(-1, model.head_dim).to(device, dtype)
        stored = (-(-(length // shape.tile) // 2), model.kv_heads, shape.tile_bytes)
        halves = (
            torch.zeros(stored, dtype=torch.uint8, device=device),
            torch.zeros(stored, dtype=torch.uint8).to(device),
        )
        rows = key_indexes.rows(model.components(shape.rank), shape, model.turned, device)
        turns = key_indexes.turns(model.frequencies, model.head_dim, shape, length + 500, device)
        one = History(
            model=model,
            start=start,
            keys=keys[own].view(size),
            values=values[own].view(size),
            halves=halves,
            numbers=key_indexes.numbers(halves, rows, turns),
            alive=(rows, turns),
            **options,
        )
        found.append(one)
        start += model.kv_heads * length
    return found, keys, values


KINDS: list[dict[str, Any]] = [
    {"shape": IndexShape(rank=5, bits=3, run=2), "sink": 70, "window": 40, "kept": 33, "length": 407},
    {"shape": IndexShape(rank=5, bits=3, run=2), "sink": 5, "window": 70, "kept": 0, "length": 300},
    {"shape": IndexShape(rank=9, bits=6, run=1), "sink": 0, "window": 30, "kept": 17, "length": 333},
    {"shape": IndexShape(rank=5, bits=3, run=2), "sink": 3, "window": 33, "kept": 400, "length": 500},
    {"shape": IndexShape(rank=5, bits=3, run=2), "sink": 3, "window": 33, "kept": 21, "length": 90},
]
MODELS = [
    Model(kv_heads=2, group=3, head_dim=24, turned=24),
    Model(kv_heads=1, group=7, head_dim=32, turned=16),
    Model(kv_heads=3, group=1, head_dim=64, turned=64),
]


def small_parts() -> torch.device:
    """The device of the kernels, with numbers that repeat; where it interprets, histories are cut into few parts. One
    program weighs spans that a device's many would.
    """
    from inference_engine.kernels.triton import components

    device = device_of_kernels()
    torch.manual_seed(1)
    components._WEIGHING = 1
    if device.type != "cuda":
        components._WEIGHING = 36  # two programs of each of 18 heads, or one for each span of a few
        components._PARTS, components._NEAR, components._CHOSEN = 4, 2, 2
        components._GATHERED, components._WEIGHED, components._FEW, components._MANY = 128, 256, 16, 32
    return device


def attended(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    regions: Tensor,
    reads: list[StagedRead],
    options: dict[str, Any],
    some: slice = slice(None),
    *,
    operation: Callable[..., Tensor] | None = None,
) -> Tensor:
    from inference_engine.kernels.triton.ragged_attention import attend_ragged

    operation = operation or attend_ragged
    return operation(AttentionCall(queries[some], *in_rows(keys, values), regions[some], reads=reads, **options))


def compare_choosing() -> None:
    """What a child process runs: sessions of several shapes and lengths in one step, over memory full of rubbish, one
    that reads all it sees and padding between them.
    """
    _compare_choosing(MODELS[:1])


def compare_models() -> None:
    """Likewise: heads that are rotated in part, scores that are capped; on a GPU larger heads, too."""
    _compare_choosing(MODELS[1:] if torch.cuda.is_available() else MODELS[1:2])


def _compare_choosing(models: Sequence[Model]) -> None:
    from inference_engine.kernels.triton import components
    from inference_engine.kernels.triton.ragged_attention import attend_invariant

    device = small_parts()
    poison(components)
    for model in models:
        number = MODELS.index(model)
        softcap = 4.0 if number == 1 else None
        own, keys, values = histories(model, KINDS, torch.float32, device)
        codes = [one.codes() for one in own]
        for one, its in zip(own, codes, strict=True):
            one.write(its)
        wanted = [(0, 406), (3, 499), (0, 300), (2, 332), (1, 299), (4, 89), (4, 30), (3, 211)]
        is_quick = device.type == "cuda"  # the interpreter takes its time
        if not is_quick:
            del wanted[4 if number else 7 :]
        lines = [own[index].line(position) for index, position in wanted]
        lines.insert(2, [0] * FIELDS)
        lines.insert(4, list(own[4].line(89)))
        lines[4][KIND:] = [0] * (FIELDS - KIND)
        regions = torch.tensor(lines, device=device)
        generator = torch.Generator().manual_seed(3)
        queries = torch.randn(len(lines), model.kv_heads * model.group, model.head_dim, generator=generator).to(device)
        shapes = dict.fromkeys(one.shape for one in own)
        room = 900 if is_quick else 520  # tokens; more than any session has
        reads = [StagedRead(TokenRead(shape=shape), upto=len(lines), tokens=room) for shape in shapes]

        options: dict[str, Any] = {"kv_heads": model.kv_heads, "scaling": model.scaling, "softcap": softcap}
        attend = partial(attended, queries, keys, values, regions, reads, options)
        expected = torch.zeros_like(queries)
        rows = [row for row in range(len(lines)) if row not in (2, 4)]
        for row, (index, position) in zip(rows, wanted, strict=True):
            expected[row] = own[index].expected(queries[row : row + 1], position, codes[index], softcap)[0]
        # On the CPU: where a mask has an odd width, torch's own kernel reads beside it.
        here = [each.cpu() for each in (queries[4:5], keys, values, regions[4:5])]
        expected[4] = attend_by_reference(AttentionCall(*here, **options))[0]
        together = attend()
        torch.testing.assert_close(together, expected, atol=2e-5, rtol=2e-5)
        if number == 0:
            for row in (0, 7) if is_quick else (7,):
                alone = attend(slice(row, row + 1))
                assert torch.equal(alone[0], together[row]), "a query's bits depend on what is beside it"
            some = slice(None) if is_quick else slice(1, 5)
            found = attend(some, operation=attend_invariant)
            torch.testing.assert_close(found, expected[some], atol=2e-5, rtol=2e-5)
            reads[:] = [StagedRead(TokenRead(shape=own[0].shape), upto=1, tokens=room)]
            assert torch.equal(attend(slice(0, 1))[0], together[0]), "one shape alone gives other bits"


def compare_equals() -> None:
    """What a child process runs: tokens of one weight, more of them than a program holds; the first ones are read."""

    device, model = small_parts(), MODELS[0]
    kind = {"shape": IndexShape(rank=5, bits=3, run=1), "sink": 6, "window": 33, "kept": 41, "length": 300}
    # Keys that are nothing, so that all weigh the same; and ones that weigh nothing beside the window.
    for key, first in ((0.0, None), (0.0, 4.0)):
        (own,), keys, values = histories(model, [{**kind, "key": key}], torch.float32, device)
        own.write(torch.full_like(own.codes(), 3))
        if first is not None:
            own.keys[:, 290:] = 100.0
        query = torch.zeros(1, model.kv_heads * model.group, model.head_dim, device=device)
        query += 0.0 if first is None else first
        line = torch.tensor([own.line(299)], device=device)
        read = StagedRead(TokenRead(shape=own.shape), upto=1, tokens=300)
        # The components' mean would make a difference.
        rows = own.alive[0]
        rows.rows.zero_()
        out = attended(query, keys, values, line, [read], {"kv_heads": model.kv_heads, "scaling": model.scaling})
        if first is None:
            places = [*range(own.sink + own.kept), *range(int(line[0, TokenRead.word("LOCAL")]), 300)]
            expected = own.values[:, places].mean(1)
        else:
            expected = own.values[:, 290:].mean(1)
        torch.testing.assert_close(out[0], expected.repeat_interleave(model.group, dim=0), atol=1e-5, rtol=1e-5)


def compare_rounded() -> None:
    """What a child process runs: 16-bit entries, whose scores are rounded: nearly what the reference reads.

    Two tokens of nearly one score may change places in a KV head, and the one that is not read can weigh much: that
    happens to one head in hundreds.
    """

    device, model = small_parts(), MODELS[0]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter has no bfloat16
    kind = {"shape": IndexShape(rank=8, bits=4, run=2), "sink": 6, "window": 33, "kept": 60, "length": 500}
    (own,), keys, values = histories(model, [kind], dtype, device)
    codes = own.codes()
    own.write(codes)
    positions = range(490, 496) if device.type == "cuda" else range(490, 493)
    queries = torch.randn(len(positions), model.kv_heads * model.group, model.head_dim).to(device, dtype)
    regions = torch.tensor([own.line(position) for position in positions], device=device)
    read = StagedRead(TokenRead(shape=own.shape), upto=len(positions), tokens=500)
    out = attended(queries, keys, values, regions, [read], {"kv_heads": model.kv_heads, "scaling": model.scaling})
    expected = torch.cat([own.expected(queries[row, None].float(), at, codes) for row, at in enumerate(positions)])
    errors = (out.float() - expected).abs().mean(-1)  # one token fewer or more is 2e-3 at the median
    assert errors.median() < (1e-3 if dtype == torch.float16 else 0.01), "other tokens are read"
    assert (errors >= 0.1).sum() <= 1, "many other tokens are read"


def compare_tiles() -> None:
    """What a child process runs: the tiles of several layers, at once and one by one."""
    from inference_engine.kernels.triton.index_tiles import key_indexes

    device = small_parts()
    shapes = [IndexShape(rank=5, bits=3, run=2), IndexShape(rank=16, bits=3, run=4), IndexShape(rank=3, bits=8, run=1)]
    for model, shape in zip(MODELS, shapes, strict=True):
        kind = {"shape": shape, "sink": 3, "window": 33, "kept": 9, "length": 5 * shape.tile + 7}
        own, keys, _ = histories(model, [kind, kind], torch.float32, device)
        keys[own[1].start + 9, 1] = float("nan")
        keys[own[1].start + 40, 2] = float("inf")
        table = torch.tensor([[one.numbers.data_ptr(), one.start] for one in own], device=device)

        region = own[0].length
        write = partial(key_indexes.write_tiles, keys, table, kv_heads=model.kv_heads, region=region, shape=shape)
        write(first=0, end=5)
        at_once = [half.clone() for one in own for half in one.halves]
        for one in own:
            found = [half.clone() for half in one.halves]
            one.write(one.codes())
            differs = [ours != theirs for ours, theirs in zip(found, one.halves, strict=True)]
            # A key between two codes may get either: sums are rounded in another order. NaN and infinity rotate alike.
            share = sum(int(part.sum()) for part in differs) / sum(part.numel() for part in differs)
            assert share < (0.002 if one is own[0] else 0.02), (shape, share)
            for half in one.halves:
                half.zero_()
        for tile in (3, 0, 4, 1, 2):
            write(first=tile, end=tile + 1)
        for half, whole in zip((half for one in own for half in one.halves), at_once, strict=True):
            assert torch.equal(half, whole), "a tile's bits depend on how tokens were grouped"


def compare_restoring() -> None:
    """What a child process runs: sessions whose old entries are codes, beside one that holds all of its own."""
    _compare_restoring(MODELS[0], 7)


def compare_long_codes() -> None:
    """Likewise: codes of three bytes, heads that are rotated in part."""
    _compare_restoring(MODELS[1], 14)


def _compare_restoring(model: Model, most_bits: int) -> None:
    from inference_engine.kernels.triton import components
    from inference_engine.kernels.triton.index_tiles import key_indexes

    device = small_parts()
    components._UNPACKED, components._THREADS, components._RESTORED = 16, 32, 16
    poison(components)
    shape, ring = IndexShape(rank=5, bits=3, run=1), 110
    kind: dict[str, Any] = {"shape": shape, "sink": 6, "window": 33, "kept": 41, "length": 300}
    own, keys, values = histories(model, [kind, kind], torch.float32, device)
    codes, all_keys, all_values = own[0].codes(), own[0].keys.clone(), own[0].values.clone()
    for one in own:
        one.write(one.codes())
    # Entries of the first session before `floor` are in its archive, the others wrap around.
    position, sink = 299, kind["sink"]
    floor = position + 1 - (ring - 17)
    tables, synthesis, low, high = made_archive(model, floor - sink, device, most_bits)
    units = PLAIN.units(low, high, tables, torch.float32)
    restored, other = (torch.empty(model.kv_heads, floor - sink, model.head_dim, device=device) for _ in range(2))
    PLAIN.entries(units, [MadeLayer(synthesis, restored, other, torch.zeros(2, device=device))], turn=None)
    own[0].keys[:, sink:floor] = model.rotate(restored, torch.arange(sink, floor))
    own[0].values[:, sink:floor] = other
    queries = torch.randn(2, model.kv_heads * model.group, model.head_dim).to(device)
    options: dict[str, Any] = {"kv_heads": model.kv_heads, "scaling": model.scaling}
    expected = [
        one.expected(queries[row : row + 1], position, codes if row == 0 else one.codes())[0]
        for row, one in enumerate(own)
    ]
    own[0].keys.fill_(float("nan"))
    own[0].values.fill_(float("nan"))
    kept = torch.tensor([*range(sink), *range(floor, position + 1)])
    slots = torch.where(kept < sink, kept, sink + (kept - sink) % ring)
    own[0].keys[:, slots], own[0].values[:, slots] = all_keys[:, kept], all_values[:, kept]
    found = torch.zeros(2, device=device)
    archive = key_indexes.archive((low, high), sink, tables, synthesis, found)
    key_indexes.name_archive(own[0].numbers, archive)
    lines = [own[0].line(position), own[1].line(position)]
    lines[0][RING], lines[0][FLOOR], lines[0][COUNT] = ring, floor, sink + ring
    regions = torch.tensor(lines, device=device)
    record = TokenRead(shape=shape, restored=kind["kept"], numbers=tables.padded + 64)
    read = StagedRead(record, upto=2, tokens=300)
    attend = partial(attended, queries, keys, values, regions, [read], options)
    out = attend()
    torch.testing.assert_close(out, torch.stack(expected), atol=2e-5, rtol=2e-5)
    assert not found.isnan().any()
    alone = attend(slice(1))
    assert torch.equal(alone[0], out[0]), "a query's bits depend on what is beside it"
    tables.scales.fill_(float("inf"))
    attend(slice(1))
    assert found.isnan().all(), "what is not finite is not found"


def made_archive(
    model: Model, tokens: int, device: torch.device, most_bits: int
) -> tuple[CodeTables, Synthesis, Tensor, Tensor]:
    """How codes are read and become entries, and codes of so many tokens."""
    count, generator = 150, torch.Generator().manual_seed(8)
    widths = torch.randint(1, most_bits + 1, (count,), generator=generator, dtype=torch.int32)
    sizes = 2 ** (widths + 1)
    tables = CodeTables.of(
        widths,
        (sizes.cumsum(0) - sizes).int().to(device),
        torch.randn(int(sizes.sum()), generator=generator),
        torch.rand(256, generator=generator) + 0.5,
        chains=9,
        first_byte=5,
    )
    matrix = torch.randn((model.kv_heads, 2 * model.head_dim, count), generator=generator) / count**0.5
    means = torch.randn((model.kv_heads, 2 * model.head_dim), generator=generator)
    half = -(-(6 + -(-int(widths.sum()) // 8)) // 2)
    codes = torch.randint(0, 256, (2, tokens, half), generator=generator).to(torch.uint8).to(device)
    return tables, Synthesis.of(matrix.to(device), means.to(device), torch.float32), codes[0], codes[1]


@pytest.mark.parametrize(
    "compare",
    [
        compare_restoring,
        *map(interpreted, (compare_choosing, compare_tiles, compare_models)),
        *map(interpreted, (compare_equals, compare_rounded, compare_long_codes)),
    ],
)
def test_the_kernels_do_what_the_references_do(compare: Callable[[], None]) -> None:
    run_with_triton(compare)
