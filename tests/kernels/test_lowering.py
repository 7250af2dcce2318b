"""Kernels that choose, read and restore entries are Triton for a GPU: where there is none, they are only translated.

The interpreter takes programs that a compiler does not: names of two types, values that are None.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from inference_engine.kernels.components import IndexShape
from inference_engine.kernels.latents import AnalysedLayer, Analysis, CodeTables, MadeLayer, Synthesis
from inference_engine.kernels.reads import FIELDS, BlockRead, OffloadedBlockRead, StagedRead, TokenRead
from inference_engine.kernels.trellis import BitPlaces, make_levels
from tests.further import further

HKV, GROUP, D, TOKENS = 2, 3, 64, 200
DTYPES = [torch.float32, torch.bfloat16]
TRANSLATED = set[tuple[Any, str]]()  # programs, by all that distinguishes them


def each_dtype_with(name: str, *values: Any) -> pytest.MarkDecorator:
    """Each dtype with a value of its own; with others they are further cases."""
    cases = [
        (dtype, value) if place == at else further(dtype, value)
        for place, value in enumerate(values)
        for at, dtype in enumerate(DTYPES)
    ]
    return pytest.mark.parametrize(("dtype", name), cases, ids=str)


def translate(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """What a launch compiles, as far as Triton's own language goes, for a Hopper GPU."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import mangle_type

    given = dict(zip(function.arg_names, arguments, strict=False)) | options
    constants = {each.name: given[each.name] for each in function.params if each.is_constexpr and each.name in given}
    signature = {
        each.name: "constexpr" if each.is_constexpr else mangle_type(given[each.name]) for each in function.params
    }
    key = (function, repr((constants, signature, options)))
    if key in TRANSLATED:
        return
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    asked = backend.parse_options({"num_warps": options["num_warps"], "num_stages": options.get("num_stages", 3)})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(function, signature, constants)
    source.make_ir(target, asked, backend.get_codegen_implementation(asked), backend.get_module_map(), context)
    TRANSLATED.add(key)


def launches_of(monkeypatch: pytest.MonkeyPatch, *chained: Any) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Nothing is launched from now on, but noted: what would be. chained: modules whose kernels wait for each other."""
    from triton.runtime.jit import JITFunction

    launched: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def launcher(function: Any, _grid: Any) -> Any:
        return lambda *arguments, **options: launched.append((function, arguments, {"num_warps": 4, **options}))

    monkeypatch.setattr(JITFunction, "__getitem__", launcher)
    for module in chained:
        monkeypatch.setattr(module, "chained", lambda _: {"CHAINED": True, "launch_pdl": True})
    return launched


@each_dtype_with("shape", IndexShape(rank=16, bits=3, run=4), IndexShape(rank=9, bits=6, run=1))
def test_every_kernel_of_a_choice_is_a_program_for_a_gpu(
    shape: IndexShape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inference_engine.kernels.triton import components
    from inference_engine.kernels.triton.component_index import key_indexes

    launched = launches_of(monkeypatch, components)
    keys = torch.zeros(HKV * TOKENS, D, dtype=dtype)
    queries = torch.zeros(2, HKV * GROUP, D, dtype=dtype)
    regions = torch.zeros(2, FIELDS, dtype=torch.int64)
    for softcap, restored in ((None, 40), (4.0, 0)):
        record = TokenRead(shape=shape, restored=restored, numbers=64 if restored else 0)
        components.attend_choosing(
            queries,
            keys,
            keys,
            regions,
            torch.empty_like(queries),
            kv_heads=HKV,
            scaling=0.1,
            softcap=softcap,
            read=StagedRead(record, upto=2, tokens=TOKENS),
            serves_all=restored == 0,
        )
    table: Tensor = torch.zeros(1, 2, dtype=torch.int64)
    key_indexes.write_tiles(keys, table, kv_heads=HKV, region=TOKENS, first=0, end=1, shape=shape)

    for launch in launched:
        translate(*launch)

    assert len(launched) == 8 + 6 + 1


@pytest.mark.parametrize("dtype", [further(torch.float32), torch.bfloat16], ids=str)
def test_every_kernel_of_few_queries_is_a_program_for_a_gpu(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inference_engine.kernels.triton import few_queries

    launched = launches_of(monkeypatch, few_queries)
    keys = torch.zeros(HKV * TOKENS, D, dtype=dtype)
    for count, softcap, lists in ((1, None, False), (1, 4.0, True), (5, 4.0, False), (5, None, True)):
        few_queries.attend_few(
            torch.zeros(count, HKV * GROUP, D, dtype=dtype),
            keys,
            keys,
            torch.zeros(count, FIELDS, dtype=torch.int64),
            torch.empty(count, HKV * GROUP, D, dtype=dtype),
            kv_heads=HKV,
            scaling=0.1,
            softcap=softcap,
            listed=torch.zeros(count, HKV, 40, dtype=torch.int32) if lists else None,
        )

    for launch in launched:
        translate(*launch)

    assert len(launched) == 4 * 2


@each_dtype_with("offloaded", False, True)
def test_every_kernel_of_selected_blocks_is_a_program_for_a_gpu(
    dtype: torch.dtype, offloaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inference_engine.kernels.triton import block_places, block_selection, gather

    launched = launches_of(monkeypatch, block_places, block_selection, gather)
    keys, queries = torch.zeros(HKV * TOKENS, D, dtype=dtype), torch.zeros(2, HKV * GROUP, D, dtype=dtype)
    for softcap, serves_all, blocks in ((None, True, 40), (4.0, False, 5000)):
        gather.attend_selecting(
            queries,
            keys,
            keys,
            torch.zeros(2, FIELDS, dtype=torch.int64),
            torch.empty_like(queries),
            kv_heads=HKV,
            scaling=0.1,
            softcap=softcap,
            read=StagedRead((OffloadedBlockRead if offloaded else BlockRead)(blocks=blocks), upto=2, tokens=TOKENS),
            serves_all=serves_all,
        )

    for launch in launched:
        translate(*launch)

    assert len(launched) == 2 * (5 if offloaded else 4)


def test_every_kernel_of_codes_along_a_trellis_is_a_program_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from inference_engine.kernels.triton import trellis

    launched = launches_of(monkeypatch)
    count, width = 70, 3
    levels = make_levels(count * [torch.linspace(-1, 1, 2 ** (width + 1))], torch.ones(count))
    packed = torch.zeros(TOKENS, 1 + -(-count * width // 8), dtype=torch.uint8)
    bits = torch.zeros(8 * packed.shape[1] - 8, dtype=torch.int32)
    codes = trellis.choose(trellis.scale(torch.zeros(TOKENS, count + 3)[:, :count], packed[:, :1]), levels)
    trellis.pack(codes, BitPlaces(bits, bits), packed[:, 1:])
    trellis.levels_of(codes, levels)

    for launch in launched:
        translate(*launch)

    assert len(launched) == 5


@each_dtype_with("turns", False, True)
def test_every_kernel_of_latents_is_a_program_for_a_gpu(
    dtype: torch.dtype, turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inference_engine.kernels.triton import latents

    launched = launches_of(monkeypatch)
    count = 70
    tables = CodeTables.of(
        torch.full((count,), 3),
        torch.zeros(count, dtype=torch.int32),
        torch.zeros(32),
        torch.zeros(256),
        chains=4,
        first_byte=0,
    )
    codes = torch.zeros(TOKENS, 20, dtype=torch.uint8)
    synthesis = Synthesis.of(torch.zeros(HKV, 2 * D, count), torch.zeros(HKV, 2 * D), dtype)
    units = latents.units(codes, codes, tables, synthesis.matrix.dtype)
    keys, turn = torch.zeros(HKV, TOKENS, D, dtype=dtype), torch.zeros(TOKENS, D // 2)
    found = torch.zeros(2)
    latents.entries(units, 2 * [MadeLayer(synthesis, keys, keys, found)], turn=(turn, turn) if turns else None)
    (analysis,) = Analysis.of([torch.zeros(HKV, 2 * D, count)], [torch.zeros(HKV, 2 * D)], dtype)
    latents.analyse(2 * [AnalysedLayer(analysis, keys, keys, found)], turn=(turn, turn) if turns else None)

    for launch in launched:
        translate(*launch)

    assert len(launched) == 3
