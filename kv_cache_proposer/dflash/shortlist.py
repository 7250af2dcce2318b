"""A short list of ids that holds each place's likeliest, found with an int8 copy of the head: reading the head takes
most of a draft on a CPU, and int8 is a quarter of it.

    states ── scaled one by one, 7 bits ── int8 head, a byte a weight ── rough scores ── ids of the largest

Rough scores only choose ids: the chosen ids are scored again by the head itself. A place's ids do not depend on the
batch, since each state has its own scale and integer sums do not depend on their order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_engine.backends.packed_linear import kernel_vectors
from kv_cache_proposer.dflash.target import TargetWords

# Ids of a place: rough scores misplace ids by a few ranks, so twice as many as choosing draft tokens reads.
SHORTLIST = 32
_WEIGHT_TOP = 127
# CPUs without VNNI add products in pairs of 16 bits: 2 × 127 × 127 fits, and a state's eighth bit would not.
_STATE_TOP, _STATE_ZERO = 63, 64
_PART_IDS = 4096
_TINIEST = 1e-30  # divisor of a vector of zeros


class Shortlist:
    """Takes memory of its own: a byte for each of the head's weights, and 4 for each id."""

    def __init__(self, head_weight: Tensor) -> None:
        """head_weight: [V, hidden], float32 on the CPU."""
        parts = torch.split(head_weight, _PART_IDS)  # keeps temporaries small
        self._scales = torch.cat([_scales(part, _WEIGHT_TOP) for part in parts])[:, 0]
        rounded = torch.cat([(part / _scales(part, _WEIGHT_TOP)).round_().to(torch.int8) for part in parts])
        self._packed: Tensor = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._zeros = torch.zeros(1, dtype=torch.int64)

    def __call__(self, states: Tensor) -> Tensor:
        """Ids [..., K], ascending, of states [..., hidden]; K is SHORTLIST, or the vocabulary if that is smaller."""
        vectors = states.reshape(-1, states.shape[-1])
        rounded = ((vectors / _scales(vectors, _STATE_TOP)).round_() + _STATE_ZERO).to(torch.uint8)
        padded = F.pad(rounded, (0, 0, 0, kernel_vectors(len(vectors)) - len(vectors)))
        # A state's scale does not change the order of its scores, so 1 serves.
        # fmt: off
        rough: Tensor = torch.ops.onednn.qlinear_pointwise(
            padded, 1.0, _STATE_ZERO, self._packed, self._scales, self._zeros,
            None, 1.0, 0, torch.float32, "none", [], "",
        )
        # fmt: on
        ids = rough[: len(vectors)].topk(min(SHORTLIST, rough.shape[-1]), sorted=False).indices.sort().values
        return ids.view(*states.shape[:-1], -1)


def can_shortlist(words: TargetWords) -> bool:
    """Whether the head is a plain float32 matrix, on a CPU that oneDNN has fast int8 kernels for.

    On other CPUs its kernels are a hundred times slower.
    """
    weight = words.head_weight
    if weight is None or weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and torch.backends.cpu.get_cpu_capability().startswith("AVX")


def _scales(vectors: Tensor, top: int) -> Tensor:
    return (vectors.abs().amax(-1, keepdim=True) / top).clamp_min_(_TINIEST)
