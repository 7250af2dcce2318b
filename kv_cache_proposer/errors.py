"""What can be wrong with a drafter: with a stored one, or with what it is trained on."""

from __future__ import annotations

from inference_engine.errors import ModelError


class DrafterError(ModelError):
    """A drafter cannot be made, stored, read or used as asked."""


class ForeignDrafter(DrafterError):
    """A stored drafter, or a corpus to train one, was made for another model."""
