"""`kernels/fused.py` in Triton."""

from __future__ import annotations

from inference_engine.kernels.fused import Fused
from inference_engine.kernels.triton.experts import MixtureOfExperts
from inference_engine.kernels.triton.heads import place_heads
from inference_engine.kernels.triton.latent_heads import head_products, place_latent
from inference_engine.kernels.triton.products import Products
from inference_engine.kernels.triton.row_norm import gated_norm, norm_of, sigmoid_gate
from inference_engine.kernels.triton.state_rules import TritonStates


def open_fused() -> Fused:
    """The operations for one user: a thread, and a stream of its device."""
    return _opened(is_invariant=False)


def open_invariant() -> Fused:
    """As `open_fused`, and no token changes the bits of another."""
    return _opened(is_invariant=True)


def _opened(*, is_invariant: bool) -> Fused:
    products = Products(is_invariant=is_invariant)
    return Fused(
        product=products,
        place_heads=place_heads,
        place_latent=place_latent,
        head_products=head_products,
        norm=norm_of,
        gated_norm=gated_norm,
        sigmoid_gate=sigmoid_gate,
        mix_experts=MixtureOfExperts(products, is_invariant=is_invariant),
        states=TritonStates(is_invariant=is_invariant),
    )
