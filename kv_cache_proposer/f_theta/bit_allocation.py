"""Bit allocation, how many bits each component gets: every next bit goes where it removes the most error.

A component of variance v coded with b bits leaves an error v · D(b). D falls ever more slowly, so taking the largest
falls over all components, until the budget is used, is optimal (Fox, Operations Research 14(2), 1966).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kv_cache_proposer.f_theta.codec_errors import LatentError


def allocate(variances: Tensor, bits: int, distortions: Sequence[float]) -> Tensor:
    """Allocate exactly `bits` bits. variances [C]; distortions: D(0), D(1), … for variance 1. Returns int64 [C].

    Ties go to the component that comes first. Raises LatentError if the components cannot hold that many.
    """
    most = len(distortions) - 1
    varying = int((variances > 0).sum())
    if bits > most * varying:
        raise LatentError(f"{bits} bits are more than {varying} components that vary can hold, at {most} bits each")
    table = torch.tensor(distortions, dtype=torch.float64)
    # On the CPU, so that every machine allocates alike.
    gains = variances.double().cpu()[:, None] * (table[:-1] - table[1:])
    order = gains.flatten().sort(descending=True, stable=True).indices[:bits]
    return torch.bincount(order // most, minlength=len(variances))


def allocate_bytes(variances: Sequence[Tensor], total_bytes: int, distortions: Sequence[float]) -> list[Tensor]:
    """Allocate `total_bytes` to groups of components, whole bytes to each group. Raises LatentError as `allocate`.

    Groups are compared bit by bit first; what they would get is then rounded to bytes. There must be as many bytes as
    groups.
    """
    joint = allocate(torch.cat(list(variances)), 8 * total_bytes, distortions)
    whole = _whole_bytes(joint, [len(group) for group in variances], total_bytes)
    return [allocate(group, 8 * share, distortions) for group, share in zip(variances, whole, strict=True)]


def _whole_bytes(joint: Tensor, sizes: Sequence[int], total_bytes: int) -> list[int]:
    """The groups' bits as bytes, `total_bytes` in all: the largest remainders are rounded up.

    No group stays empty: it gets a byte of the group that has most.
    """
    shares = [int(part.sum()) for part in torch.split(joint, list(sizes))]
    whole = [share // 8 for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: -(shares[index] % 8))
    for index in by_remainder[: total_bytes - sum(whole)]:
        whole[index] += 1
    while 0 in whole:
        whole[whole.index(max(whole))] -= 1
        whole[whole.index(0)] += 1
    return whole
