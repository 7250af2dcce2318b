"""The array operations of a device, by name: a kernel where there is a faster one, otherwise the reference in plain
torch.

A new kernel is a file in `triton/` and a line in `_KERNELS`; it must equal its reference, which says what it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from inference_engine.errors import BackendError
from inference_engine.kernels.attention import CausalAttention, attend_causal
from inference_engine.kernels.components import KeyIndexes
from inference_engine.kernels.flash3 import FlashChunks
from inference_engine.kernels.fused import Fused
from inference_engine.kernels.graph_io import PLAIN_ENDS, StepEnds
from inference_engine.kernels.gumbel_noise import NoiseOfAll, noise_of_all
from inference_engine.kernels.latents import PLAIN as PLAIN_LATENTS
from inference_engine.kernels.latents import LatentOps
from inference_engine.kernels.merge import Merging, MergingStates, attend_causal_state
from inference_engine.kernels.prefill_attention import AttendEntries, MergeTwo, attend_piece, merge_two
from inference_engine.kernels.ragged_attention import attend_ragged
from inference_engine.kernels.reads import RaggedAttention
from inference_engine.kernels.topk import Largest, topk_by_sorting
from inference_engine.kernels.trellis import PLAIN, Trellis

# The operation, the module in `triton/` that has it, and its name there.
_KERNELS = {
    "attend_ragged": ("ragged_attention", "attend_ragged"),
    "attend_invariant": ("ragged_attention", "attend_invariant"),
    "key_indexes": ("index_tiles", "key_indexes"),
    "largest": ("topk", "largest"),
    "latents": ("latents", "latents"),
    "merge_two": ("merging", "merge_two"),
    "merging": ("merging", "MergingByKernel"),
    "noise_of_all": ("gumbel_noise", "noise_of_all"),
    "open_fused": ("fused", "open_fused"),
    "open_invariant": ("fused", "open_invariant"),
    "step_ends": ("graph_io", "step_ends"),
    "trellis": ("trellis", "trellis"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceOps:
    """What a device computes with. Without arguments: the references, which run anywhere.

    attend_ragged: attention of single queries, each over a region of its own. noise_of_all: what sampled tokens are
    drawn with. step_ends: what a recorded step begins and ends with. largest: how blocks are chosen that are not read
    by `attend_ragged`. key_indexes: by which queries of `attend_ragged` choose tokens; None: it knows none, and plain
    operations choose. trellis: the coder of latents. latents: between their numbers and entries. open_fused: makes what
    a step is made of, for one model. open_invariant: as that, so that no token's bits depend on the others;
    attend_invariant is its attention. attend_causal: of long chunks over all entries before them; attend_piece: over
    some of them, all of which are seen; attend_causal_state: over those at their end, each seen up to the query's own;
    merge_two: of two such states; merging: of many. attends_together: are the queries of all sessions of a step
    attended to in one `attend_ragged`? Otherwise each session is attended to by itself, which is better where there is
    no kernel. attends_in_one_order: does a query get the same bits from attend_ragged whatever other queries are given
    with it? long_reads: from how many reads of a chunk on, its queries by the entries that they see, attend_causal is
    faster than attend_ragged; None: never. attend_chunks: such chunks within recorded steps; None: between their
    graphs. has_causal_views_only: do all other queries read by numbers, however many
    they are? attend_generated: an attend_ragged for generated queries of a session whose others read by views; None:
    these, too, read by views.
    """

    attend_ragged: RaggedAttention = attend_ragged
    attend_invariant: RaggedAttention = attend_ragged
    noise_of_all: NoiseOfAll = noise_of_all
    largest: Largest = topk_by_sorting
    key_indexes: KeyIndexes | None = None
    trellis: Trellis = PLAIN
    step_ends: StepEnds = PLAIN_ENDS
    latents: LatentOps = PLAIN_LATENTS
    open_fused: Callable[[], Fused] = Fused
    open_invariant: Callable[[], Fused] = Fused
    attend_causal: CausalAttention = attend_causal
    attend_piece: AttendEntries = attend_piece
    attend_causal_state: AttendEntries = attend_causal_state
    merge_two: MergeTwo = merge_two
    merging: type[MergingStates] = Merging
    attends_together: bool = False
    attends_in_one_order: bool = False
    long_reads: int | None = None
    attend_chunks: type[FlashChunks] | None = None
    has_causal_views_only: bool = False
    attend_generated: RaggedAttention | None = None


REFERENCE = DeviceOps()


def _interprets() -> bool:
    """Are Triton's kernels interpreted in this process, as tests without a GPU have it?"""
    try:
        return bool(import_module("triton").knobs.runtime.interpret)
    except ImportError:
        return True  # which is said below


def open_ops(choice: str, device: torch.device) -> DeviceOps:
    """The operations of `device`. choice: `auto`, kernels on a GPU; `plain`, the references; `triton`, kernels.

    Raises BackendError if kernels are wanted and cannot be had.
    """
    if choice == "plain" or (choice == "auto" and device.type != "cuda"):
        return REFERENCE
    if device.type != "cuda" and not _interprets():
        raise BackendError(f"kernels=triton needs a GPU, and device is {device}; start with kernels=auto")
    kernels: dict[str, Any] = {}
    for name, (module, own_name) in _KERNELS.items():
        try:
            kernels[name] = getattr(import_module(f"inference_engine.kernels.triton.{module}"), own_name)
        except ImportError as error:
            raise BackendError(
                f"kernels={choice} on {device} needs the package triton, which cannot be imported ({error}); "
                "install it, or start with kernels=plain"
            ) from error
    return replace(REFERENCE, **kernels, attends_together=True)
