"""Where a model's drafter is kept, and how a server finds it."""

from __future__ import annotations

from inference_engine.config import ModelConfig
from inference_engine.decode.drafting import Drafter
from inference_engine.errors import ConfigError
from kv_cache_proposer.ngram import NgramDrafter


def find_drafter(model: ModelConfig) -> Drafter | None:
    """The drafter that `model.drafter` asks for, on the model's device."""
    if model.drafter == "none":
        return None
    if model.drafter in ("auto", "ngram"):
        return NgramDrafter()
    raise ConfigError(f"drafter must be auto, none or ngram, got {model.drafter!r}")
