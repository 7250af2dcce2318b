"""A basis's components, stored as float32, float16, or int8 with a scale per head.

Entries are at most 1, so float16 loses 4e-8 of the energy (measured on SmolLM2). int8 needs a scale for each head and
component: components concentrate on few heads, and one scale for all of a component loses ten times as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}

_INT8_MOST = 127


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Components:
    """entries [W, C], one vector [C] per number of a token vector; head_sizes: how many of the W each head has, in
    order.

    scales [heads, C] float32: factors of int8 entries; None for the other precisions.
    """

    entries: Tensor
    head_sizes: tuple[int, ...]
    scales: Tensor | None = None

    @property
    def count(self) -> int:
        return self.entries.shape[1]

    @property
    def precision(self) -> str:
        """One of PRECISIONS."""
        return next(name for name, dtype in PRECISIONS.items() if dtype == self.entries.dtype)

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def heads(self, first: int, last: int) -> Tensor:
        """The vectors of heads first … last − 1 as float32."""
        start, stop = sum(self.head_sizes[:first]), sum(self.head_sizes[:last])
        entries = self.entries[start:stop].float()
        if self.scales is None:
            return entries
        return entries * _per_element(self.scales[first:last], self.head_sizes[first:last])

    def whole(self) -> Tensor:
        """All vectors as float32 [W, C]."""
        return self.heads(0, len(self.head_sizes))

    def truncated(self, count: int) -> Components:
        """The first `count` components, in the same memory: each rate that a session requests is such a part."""
        return replace(
            self,
            entries=self.entries[:, :count],
            scales=None if self.scales is None else self.scales[:, :count],
        )

    def at_precision(self, precision: str) -> Components:
        """The same components, rounded to one of PRECISIONS."""
        plain, dtype = self.whole(), PRECISIONS[precision]
        if dtype != torch.int8:
            return Components(entries=plain.to(dtype), head_sizes=self.head_sizes)
        largest = torch.stack([head.abs().amax(0) for head in torch.split(plain, list(self.head_sizes))])
        scales = (largest / _INT8_MOST).clamp_min(torch.finfo(torch.float32).tiny)
        entries = (plain / _per_element(scales, self.head_sizes)).round().to(torch.int8)
        return Components(entries=entries, head_sizes=self.head_sizes, scales=scales)

    def to(self, device: torch.device | str) -> Components:
        return replace(
            self, entries=self.entries.to(device), scales=None if self.scales is None else self.scales.to(device)
        )


def _per_element(scales: Tensor, head_sizes: Sequence[int]) -> Tensor:
    if len(set(head_sizes)) == 1:
        return scales.repeat_interleave(head_sizes[0], dim=0)
    # Sizes in a tensor would have to travel to the device.
    return torch.cat([scale.expand(size, -1) for scale, size in zip(scales.unbind(), head_sizes, strict=True)])
