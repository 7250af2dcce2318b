"""Errors of latent codecs: of the KV entries they encode, or of a stored codec."""

from __future__ import annotations

from inference_engine.errors import ModelError


class LatentError(ModelError):
    """A latent codec cannot be made, stored, read or used as asked."""


class ForeignLatent(LatentError):
    """A stored codec was calibrated for another model."""
