"""Kernels in a chain (programmatic dependent launch): each is started while the one before it is at its end.

A kernel that is launched with `chained(device)` waits with `gdc_wait` before it writes anything, and before it reads
what the one before it wrote; then it lets the next one start. As each waits first, what the ones before the last wrote
is there from the start.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def chained(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch. The constant CHAINED: whether the kernel must wait; the interpreter cannot."""
    is_able = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"CHAINED": True, "launch_pdl": True} if is_able else {"CHAINED": False}
