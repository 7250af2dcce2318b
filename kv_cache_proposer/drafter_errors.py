"""Errors of drafters: of a stored one, or of what one is trained on."""

from __future__ import annotations

from inference_engine.errors import ModelError


class DrafterError(ModelError):
    """A drafter cannot be made, stored, read or used as asked."""


class ForeignDrafter(DrafterError):
    """A stored drafter, or a corpus to train one, was made for another model."""
