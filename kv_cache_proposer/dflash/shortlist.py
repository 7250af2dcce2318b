"""A few ids of each place among which its likeliest are, found with an int8 copy of the head: what a draft on a CPU
would read for longest, read in a quarter.

    states ── scaled row by row, 7 bits ── int8 head, a byte a weight ── rough scores ── ids of the largest

Rough scores choose ids and nothing else: the ids found are scored again by the head itself. A place's ids are its own
whatever stands beside it, since each row has its own scale and whole numbers add up alike in any order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_engine.backends.packed_linear import kernel_vectors
from kv_cache_proposer.dflash.target import TargetWords

# Of a place: rough scores mistake the order by a few places, so as many again as a draft token looks at.
SHORTLIST = 32
_WEIGHT_TOP = 127
# CPUs without VNNI add products in pairs of 16 bits: 2 × 127 × 127 fits, and a state's eighth bit would not.
_STATE_TOP, _STATE_ZERO = 63, 64
_PART_IDS = 4096
_TINIEST = 1e-30  # what a row of zeros is divided by


class Shortlist:
    """Takes memory of its own: a byte for each of the head's weights, and 4 for each id."""

    def __init__(self, head_weight: Tensor) -> None:
        """head_weight: [V, hidden], float32 on the CPU."""
        parts = torch.split(head_weight, _PART_IDS)  # what is rounded stays small
        self._scales = torch.cat([_scales(part, _WEIGHT_TOP) for part in parts])[:, 0]
        rounded = torch.cat([(part / _scales(part, _WEIGHT_TOP)).round_().to(torch.int8) for part in parts])
        self._packed: Tensor = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._zeros = torch.zeros(1, dtype=torch.int64)

    def __call__(self, states: Tensor) -> Tensor:
        """Ids [..., K], ascending, of states [..., hidden]; K is SHORTLIST, or the vocabulary if that is smaller."""
        rows = states.reshape(-1, states.shape[-1])
        rounded = ((rows / _scales(rows, _STATE_TOP)).round_() + _STATE_ZERO).to(torch.uint8)
        padded = F.pad(rounded, (0, 0, 0, kernel_vectors(len(rows)) - len(rows)))
        # The scale of a row changes no order within it: 1 will do.
        # fmt: off
        rough: Tensor = torch.ops.onednn.qlinear_pointwise(
            padded, 1.0, _STATE_ZERO, self._packed, self._scales, self._zeros,
            None, 1.0, 0, torch.float32, "none", [], "",
        )
        # fmt: on
        ids = rough[: len(rows)].topk(min(SHORTLIST, rough.shape[-1]), sorted=False).indices.sort().values
        return ids.view(*states.shape[:-1], -1)


def can_shortlist(words: TargetWords) -> bool:
    """Whether the head is a plain float32 matrix, on a CPU that oneDNN has fast int8 kernels for.

    Elsewhere it has some that take a hundred times as long.
    """
    rows = words.head_weight
    if rows is None or rows.device.type != "cpu" or rows.dtype != torch.float32:
        return False
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and torch.backends.cpu.get_cpu_capability().startswith("AVX")


def _scales(rows: Tensor, top: int) -> Tensor:
    return (rows.abs().amax(-1, keepdim=True) / top).clamp_min_(_TINIEST)
