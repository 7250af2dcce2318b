"""What an entropy coder would save: bits of the codes against the shortest they could be coded in.

Each component has a table of how often each of its codes came in the calibration text. With it an ideal coder spends
−log2 p(code) on a code of another text. Codes would then be of other lengths from token to token, which a declared
number of bytes per token is not: a saving is a reason only where it is large.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kv_cache_proposer.f_theta.codec import SCALE_BYTES, LatentCodec
from kv_cache_proposer.f_theta.codec_errors import LatentError
from laboratory.training.capture import capture


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeLength:
    """Bits per token, on average: as packed now, the scales among them, and as an ideal coder would need them."""

    packed: float
    ideal: float

    @property
    def saving(self) -> float:
        return 1.0 - self.ideal / self.packed


def code_length(
    model: nn.Module, codec: LatentCodec, calibration: Iterable[Tensor], text: Iterable[Tensor]
) -> CodeLength:
    """Over token ids [sequences, T]: tables from `calibration`, lengths on `text`."""
    tables = [
        [torch.ones(run.count, 2**run.width, dtype=torch.float64, device=codec.device) for run in part.packing.runs]
        for part in codec.coders
    ]
    for codes in _codes(model, codec, calibration):
        for table, part in zip(_flat(tables), codes, strict=True):
            table.scatter_add_(1, part, torch.ones_like(part, dtype=torch.float64))
    costs = [-(table / table.sum(1, keepdim=True)).log2() for table in _flat(tables)]
    tokens, bits = 0, 0.0
    for codes in _codes(model, codec, text):
        tokens += codes[0].shape[1]
        bits += sum(float(cost.gather(1, part).sum()) for cost, part in zip(costs, codes, strict=True))
    if not tokens:
        raise LatentError("there is no text to measure on; give at least one batch of token ids")
    scales = 8.0 * SCALE_BYTES * len(codec.coders)
    return CodeLength(packed=8.0 * codec.bytes_per_token, ideal=bits / tokens + scales)


def _flat(tables: list[list[Tensor]]) -> list[Tensor]:
    return [table for part in tables for table in part]


def _codes(model: nn.Module, codec: LatentCodec, batches: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """For each batch, the codes of each run of each group: int64 [components, n]."""
    for states in capture(model, batches, layers=codec.layers):
        packed = codec.encode([one.keys for one in states], [one.values for one in states])
        parts = torch.split(packed, [part.packed_bytes for part in codec.coders], dim=1)
        yield [
            codes.long().T.contiguous()
            for coder, own in zip(codec.coders, parts, strict=True)
            for codes in torch.split(
                coder.packing.unpack(own[:, SCALE_BYTES:]), [run.count for run in coder.packing.runs], dim=1
            )
        ]
