"""`kernels/fused.py` in Triton."""

from __future__ import annotations

from inference_engine.kernels.fused import Fused
from inference_engine.kernels.triton.heads import place_heads
from inference_engine.kernels.triton.products import Products
from inference_engine.kernels.triton.row_norm import norm_of


def open_fused() -> Fused:
    """The operations for one user: a thread, and a stream of its device."""
    return Fused(product=Products(), place_heads=place_heads, norm=norm_of)


def open_invariant() -> Fused:
    """As `open_fused`, and no token changes the bits of another."""
    return Fused(product=Products(is_invariant=True), place_heads=place_heads, norm=norm_of)
