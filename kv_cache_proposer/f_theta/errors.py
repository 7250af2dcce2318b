"""What can be wrong with a latent: with the rows that go in, or with a stored codec."""

from __future__ import annotations

from inference_engine.errors import ModelError


class LatentError(ModelError):
    """A latent codec cannot be made, stored, read or used as asked."""


class ForeignLatent(LatentError):
    """A stored codec was calibrated for another model."""


class NonFiniteRows(LatentError):
    """Rows to be encoded hold NaN or infinity. `layer` and `part` ("keys" or "values") say where."""

    def __init__(self, layer: int, part: str) -> None:
        super().__init__(
            f"layer {layer}: {part} to be encoded hold NaN or infinity; the model overflowed, these rows cannot be kept"
        )
        self.layer = layer
        self.part = part
