"""Operations of a decode step on a GPU beside the best kernels that are installed: attention, and exact Top-K.

Attention is one query for each session over all entries, in the shape of Qwen2.5-7B: 28 query heads on 4 KV heads of
128. A graph runs it over as many caches as the model has layers, each of its own, so that nothing is left in the
device's cache from one to the next. All contenders read the same entries, are compared with a reference in float32,
and take turns. FA3 joins if the package `fa3_fwd` can be imported, FlashInfer if `flashinfer` can: it compiles its
kernels at their first call, which takes minutes and needs nvcc. What is not there is named in the record.

Exact Top-K takes 2,048 of float32 scores, beside torch.topk, which orders them by value and equals arbitrarily,
FlashInfer, which takes the lowest index among equals if it is asked to, and two kernels of vLLM, which take any of
them. Of vLLM a folder with its library of operations is enough, if `vllm` is found there: nothing of it is imported.

The record is written anew after every case: a run that is cut off keeps what it has.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from inference_engine.errors import ConfigError, KakeyaError
from inference_engine.kernels import reads as fields
from inference_engine.kernels.ops import DeviceOps, open_ops
from inference_engine.kernels.reads import AttentionCall
from inference_engine.kernels.topk import topk_by_sorting
from laboratory.bench.experiments import Save
from laboratory.bench.shared import LeftOut, add_device, device_name, release
from laboratory.evaluation import record
from laboratory.evaluation.on_gpu import Ceilings, Timed, in_turns, measure_ceilings

SEED = 1
QUERY_HEADS, KV_HEADS, HEAD_DIM, LAYERS, KEPT = 28, 4, 128, 28, 2048
PAGE = 16  # tokens of a page, for kernels that read pages
WORKSPACE = 128 * 2**20  # bytes, as FlashInfer recommends
LOWEST_AMONG_EQUALS = 1  # its `tie_break`
VLLM_LIBRARY = "_C_stable_libtorch.abi3.so"
VLLM_WORKSPACE = 2**20  # bytes, as vLLM's indexer gives its kernels
OURS = "ours"
WORST = 2e-2  # of an output in 16 bits, as a share of its largest number

Row = dict[str, Any]
# Samples in µs of each contender, what was left out and why, and the bytes that the operation reads.
Measured = tuple[dict[str, list[float]], dict[str, str], int]
Measure = Callable[[], Measured]


class Contenders:
    """Operations over the same inputs: those that cannot be had, or are wrong, are named with the reason."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.timed: dict[str, Timed] = {}
        self.left_out: dict[str, str] = {}

    def add(self, name: str, run: Callable[[int], Any], copies: int, check: Callable[[Any], str]) -> None:
        """check: of what `run(0)` returns, what is wrong with it; nothing: it is right."""
        self.add_made(name, lambda: run, copies, check)

    def add_made(
        self, name: str, make: Callable[[], Callable[[int], Any]], copies: int, check: Callable[[Any], str]
    ) -> None:
        """Like `add`, of an operation that has to be made first, which may fail like its calls."""
        try:
            run = make()
            if wrong := check(run(0)):
                self.left_out[name] = wrong
                return
            self.timed[name] = Timed(run, copies, self.device)
        except (RuntimeError, ImportError, OSError, ValueError, TypeError, AttributeError) as error:
            if name == OURS:
                raise
            says = error.strerror if isinstance(error, OSError) and error.strerror else str(error)  # names no file
            said = re.sub(r"(?:/[\w.+-]+)+/([\w.+-]+)", r"\1", says.splitlines()[0])  # folders are no reason
            self.left_out[name] = f"{type(error).__name__}: {said[:200]}"


def fa3() -> Callable[..., Tensor] | None:
    try:
        found: Callable[..., Tensor] = import_module("fa3_fwd_interface").flash_attn_with_kvcache
    except (ImportError, OSError):
        return None
    return found


def paged(cache: Tensor) -> Tensor:
    """A cache [sessions, Hkv, length, D] as pages [P, Hkv, PAGE, D] over the same memory; `page_ids` says whose.

    Raises ValueError if a session's last page would not be full.
    """
    sessions, heads, length, dim = cache.shape
    if length % PAGE:
        raise ValueError(f"{length} tokens are not whole pages of {PAGE}")
    pages = ((sessions - 1) * heads + 1) * length // PAGE
    return cache.as_strided((pages, heads, PAGE, dim), (PAGE * dim, length * dim, dim, 1))


def page_ids(cache: Tensor) -> Tensor:
    """int32 [sessions, length / PAGE]: between two sessions lie the pages that would begin in another head."""
    sessions, heads, length, _ = cache.shape
    own = torch.arange(length // PAGE, dtype=torch.int32)
    return torch.arange(sessions, dtype=torch.int32)[:, None] * (heads * length // PAGE) + own


def flashinfer_decode(
    keys: Tensor, values: Tensor, queries: Tensor, scaling: float, *, tensor_cores: bool
) -> Callable[[int], Tensor]:
    """FlashInfer's decode attention. Keys, values [copies, sessions, Hkv, length, D]; queries [sessions, H, D].

    Raises ImportError, or RuntimeError if its kernels cannot be compiled.
    """
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=keys.device)
    wrapper = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
        workspace, "HND", use_tensor_cores=tensor_cores
    )
    ids = page_ids(keys[0]).to(keys.device)
    sessions, count = ids.shape
    wrapper.plan(
        torch.arange(sessions + 1, dtype=torch.int32, device=keys.device) * count,
        ids.flatten(),
        torch.full((sessions,), PAGE, dtype=torch.int32, device=keys.device),
        QUERY_HEADS,
        KV_HEADS,
        HEAD_DIM,
        PAGE,
        q_data_type=keys.dtype,
        kv_data_type=keys.dtype,
        sm_scale=scaling,
    )
    return lambda copy: wrapper.run(queries, (paged(keys[copy]), paged(values[copy])))


def regions_of(copies: int, sessions: int, length: int, device: torch.device) -> Tensor:
    """[copies, sessions, FIELDS], one behind the other."""
    regions = torch.zeros(copies, sessions, fields.FIELDS, dtype=torch.int64)
    regions[..., fields.START] = torch.arange(copies * sessions).view(copies, sessions) * KV_HEADS * length
    regions[..., fields.HEAD_SLOTS] = regions[..., fields.COUNT] = length
    regions[..., fields.LAST] = regions[..., fields.UPTO] = length - 1
    return regions.to(device)


def differs(found: Tensor, expected: Tensor) -> str:
    worst = float((found.float() - expected).abs().max() / expected.abs().max())
    return "" if worst < WORST else f"differs from the reference by {worst:.3g} of its largest number"


def attention_case(sessions: int, length: int, buffers: tuple[Tensor, Tensor], ops: DeviceOps, rounds: int) -> Measured:
    """Raises ValueError if not one cache fits."""
    keys, values = buffers
    device, scaling = keys.device, HEAD_DIM**-0.5
    vectors = sessions * KV_HEADS * length
    copies = min(LAYERS, len(keys) // vectors)
    if not copies:
        raise ValueError(f"{sessions} x {length}: {vectors} vectors do not fit into {len(keys)}")
    regions = regions_of(copies, sessions, length, device)
    queries = torch.randn(sessions, QUERY_HEADS, HEAD_DIM, device=device, dtype=keys.dtype)
    k, v = (each[: copies * vectors].view(copies, sessions, KV_HEADS, length, HEAD_DIM) for each in buffers)
    folded, grouped = queries.view(sessions, KV_HEADS, -1, HEAD_DIM), queries[:, :, None]
    expected = torch.stack([
        torch.cat([
            (q.float() @ head.float().T * scaling).softmax(-1) @ other.float()
            for q, head, other in zip(folded[session], k[0, session], v[0, session], strict=True)
        ])
        for session in range(sessions)
    ])  # fmt: skip

    def ours(copy: int) -> Tensor:
        return ops.attend_ragged(
            AttentionCall(queries, keys, values, regions[copy], kv_heads=KV_HEADS, scaling=scaling)
        )

    def dense(backend: SDPBackend, is_folded: bool, copy: int) -> Tensor:
        with sdpa_kernel(backend):
            if is_folded:
                return scaled_dot_product_attention(folded, k[copy], v[copy]).view(queries.shape)
            return scaled_dot_product_attention(grouped, k[copy], v[copy], enable_gqa=True)[:, :, 0]

    def flash_attention_3(attend: Callable[..., Tensor], packs: bool | None, copy: int) -> Tensor:
        given = (queries[:, None], k[copy].transpose(1, 2), v[copy].transpose(1, 2))
        return attend(*given, softmax_scale=scaling, pack_gqa=packs)[:, 0]

    contenders = Contenders(device)
    check = partial(differs, expected=expected)
    contenders.add(OURS, ours, copies, check)
    if device.type == "cuda":
        contenders.add("SDPA flash, heads folded", partial(dense, SDPBackend.FLASH_ATTENTION, True), copies, check)
        contenders.add("SDPA cuDNN, grouped", partial(dense, SDPBackend.CUDNN_ATTENTION, False), copies, check)
        if (attend := fa3()) is None:
            contenders.left_out["FA3"] = "the package fa3_fwd is not installed"
        else:
            contenders.add("FA3", partial(flash_attention_3, attend, None), copies, check)
            contenders.add("FA3, heads packed", partial(flash_attention_3, attend, True), copies, check)
        for name, packs in (("FlashInfer", False), ("FlashInfer, tensor cores", True)):
            make = partial(flashinfer_decode, k, v, queries, scaling, tensor_cores=packs)
            contenders.add_made(name, make, copies, check)
    else:
        contenders.add("SDPA", partial(dense, SDPBackend.MATH, True), copies, check)
    return in_turns(contenders.timed, rounds), contenders.left_out, 2 * vectors * HEAD_DIM * keys.itemsize


def flashinfer_topk(scores: Tensor, kept: int, ties: int) -> Callable[[int], Tensor]:
    """Indices in any order. Raises ImportError."""
    largest = import_module("flashinfer").top_k
    return lambda copy: largest(scores[copy], kept, tie_break=ties)[1]


def vllm_topk(scores: Tensor, kept: int, kernel: str) -> Callable[[int], Tensor]:
    """Indices in any order; kernel: `cooperative_topk`, a cluster of blocks for each row, or `persistent_topk`.

    Raises ImportError, or OSError if its library is for another torch.
    """
    if (found := find_spec("vllm")) is None or not found.submodule_search_locations:
        raise ImportError("the package vllm is not installed")
    library = Path(found.submodule_search_locations[0]) / VLLM_LIBRARY
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    largest = getattr(torch.ops._C, kernel)
    _, rows, count = scores.shape
    lengths = torch.full((rows,), count, dtype=torch.int32, device=scores.device)
    indices = torch.empty(rows, kept, dtype=torch.int32, device=scores.device)
    workspace = torch.zeros(VLLM_WORKSPACE, dtype=torch.uint8, device=scores.device)

    def run(copy: int) -> Tensor:
        largest(scores[copy], lengths, indices, workspace, kept, count)
        return indices

    return run


def topk_case(sessions: int, count: int, ops: DeviceOps, device: torch.device, rounds: int) -> Measured:
    kept = min(KEPT, count // 2)
    scores = torch.randn(LAYERS, sessions, count, device=device)
    expected = topk_by_sorting(scores[0], kept)

    def check(found: Tensor) -> str:
        return "" if torch.equal(found.long(), expected.long()) else "other indices than by sorting"

    contenders = Contenders(device)
    contenders.add(OURS, lambda copy: ops.largest(scores[copy], kept), LAYERS, check)
    contenders.add(
        "torch.topk",
        lambda copy: scores[copy].topk(kept, sorted=False).indices,
        LAYERS,
        lambda found: check(found.sort().values),
    )
    if device.type == "cuda":
        for name, ties in (("FlashInfer", LOWEST_AMONG_EQUALS), ("FlashInfer, any of equals", 0)):
            contenders.add_made(
                name, partial(flashinfer_topk, scores, kept, ties), LAYERS, lambda found: check(found.sort().values)
            )
        for name in ("cooperative", "persistent"):
            contenders.add_made(
                f"vLLM, {name}",
                partial(vllm_topk, scores, kept, f"{name}_topk"),
                LAYERS,
                lambda found: check(found.sort().values),
            )
    return in_turns(contenders.timed, rounds), contenders.left_out, sessions * (4 * count + 8 * kept)


def row_of(samples: dict[str, list[float]], bytes_read: int, ceilings: Ceilings) -> Row:
    """Medians in µs. Best: the fastest contender of the same kind that is not ours."""
    floor = 1e6 * bytes_read / ceilings.bandwidth
    row: Row = {name: round(statistics.median(each), 3) for name, each in samples.items()}
    others = {name: row[name] for name in samples if name != OURS}
    row |= {"floor by bytes": round(floor, 3), "ours ÷ floor": round(row[OURS] / floor, 3)}
    if others:
        best = min(others, key=lambda name: others[name])
        row |= {"best other": best, "ours ÷ best other": round(row[OURS] / others[best], 3)}
    return row


def payload_of(
    ceilings: Ceilings, cases: dict[str, tuple[dict[str, list[float]], Row]], left_out: dict[str, str],
    arguments: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    values = ceilings.values()
    for where, (samples, row) in cases.items():
        for name, each in samples.items():
            values[f"{where}, {name}"] = record.summarize(each, "µs")
        if "best other" in row:
            ratios = [a / b for a, b in zip(samples[OURS], samples[row["best other"]], strict=True)]
            values[f"{where}, ours ÷ {row['best other']}"] = record.summarize(ratios, "ratio")
    name = "ops_{}_bfloat16" if arguments.attention else "topk_{}_float32"
    return {
        "experiment": name.format(arguments.device.partition(":")[0]),
        "config": {
            "device": device_name(arguments.device),
            "heads": [QUERY_HEADS, KV_HEADS, HEAD_DIM],
            "caches": LAYERS,
            "rounds": arguments.rounds,
        },
        "seeds": [SEED],
        "values": values,
        "tables": {"µs of an operation": [{"case": where, **row} for where, (_, row) in cases.items()]},
        "left_out": left_out,
        "baseline": "the fastest other kernel over the same inputs in the same process, in turns",
    }


def sizes(text: str) -> tuple[int, int]:
    sessions, _, length = text.partition("x")
    return int(sessions), int(length)


def made_buffers(arguments: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor]:
    """K and V for as many layers of the largest case as fit."""
    most = max([sessions * length for sessions, length in arguments.attention], default=0)
    vectors = LAYERS * KV_HEADS * most
    if device.type == "cuda":
        fits = int(0.85 * torch.cuda.mem_get_info(device)[0]) // (2 * HEAD_DIM * 2)
        vectors = min(vectors, fits)
    # One after the other: random numbers of a whole buffer at once would need a few times its memory.
    made = [torch.empty(vectors, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in range(2)]
    for buffer in made:
        for first in range(0, vectors, 2**22):
            buffer[first : first + 2**22].normal_()
    return made[0], made[1]


def run_all(
    planned: Sequence[tuple[str, Measure]], ceilings: Ceilings,
    cases: dict[str, tuple[dict[str, list[float]], Row]], left_out: LeftOut, arguments: argparse.Namespace, save: Save,
) -> None:  # fmt: skip
    for where, measure in planned:
        if left_out.is_late(where):
            continue
        try:
            samples, missing, bytes_read = measure()
        except (ValueError, torch.OutOfMemoryError) as error:
            left_out.refuse(where, error)
            continue
        left_out.update({f"{where}, {name}": why for name, why in missing.items()})
        cases[where] = (samples, row_of(samples, bytes_read, ceilings))
        print(f"{left_out.passed:5.0f} s  {where}: {cases[where][1]}", flush=True)
        save(payload_of(ceilings, cases, left_out, arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_device(parser, seconds=400.0, rounds=9)
    parser.add_argument("--attention", type=sizes, nargs="*", metavar="SESSIONSxLENGTH",
                        default=[(1, 8192), (64, 8192), (1, 131072), (8, 131072), (1, 2**20)])  # fmt: skip
    parser.add_argument("--topk", type=sizes, nargs="*", metavar="ROWSxSCORES",
                        default=[(rows, count) for count in (8192, 131072, 2**20) for rows in (1, 8)])  # fmt: skip


def main(arguments: argparse.Namespace, save: Save) -> dict[str, Any]:
    if arguments.rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, got {arguments.rounds}")
    device = torch.device(arguments.device)
    torch.manual_seed(SEED)
    ops = open_ops("auto", device)
    cases: dict[str, tuple[dict[str, list[float]], Row]] = {}
    left_out = LeftOut(arguments.seconds)
    with torch.inference_mode():
        ceilings = measure_ceilings(device)
        release(arguments.device)
        buffers = made_buffers(arguments, device)
        planned: list[tuple[str, Measure]] = []
        for rows, count in arguments.topk:  # it is quick, so it comes first
            name = f"{rows} x {min(KEPT, count // 2)} of {count}"
            planned.append((name, partial(topk_case, rows, count, ops, device, arguments.rounds)))
        for sessions, length in arguments.attention:
            run = partial(attention_case, sessions, length, buffers, ops, arguments.rounds)
            planned.append((f"attention, {sessions} x {length}", run))
        run_all(planned, ceilings, cases, left_out, arguments, save)
    if not cases:
        raise KakeyaError("nothing was measured: " + "; ".join(left_out.values()))
    return payload_of(ceilings, cases, left_out, arguments)
