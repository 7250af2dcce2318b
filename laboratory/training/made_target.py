"""A target with random weights, with all that strategies need: components of its keys, and a latent codec."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from inference_engine.backends.torch_forward import TorchForward
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.errors import ConfigError
from inference_engine.kernels.components import KeyComponents
from inference_engine.kv.strategy import COMPONENTS, LATENT, KVStrategy
from laboratory.evaluation.made_models import SEED, MadeTarget, made_codec, made_forward
from laboratory.training.components import fit_components

_CALIBRATED = (4, 512)  # sequences of random ids, and their tokens


def components_of_random_ids(forward: TorchForward) -> dict[int, KeyComponents]:
    """As of a text, for times that do not depend on it. Not while an engine works on `forward`."""
    generator = torch.Generator().manual_seed(SEED)
    return fit_components(forward, torch.randint(5, forward.facts.vocab_size - 5, _CALIBRATED, generator=generator))


def calibrated(
    shape: str, forward: TorchForward, strategies: Sequence[KVStrategy], *, page_tokens: int, segment_tokens: int
) -> dict[str, Any]:
    """The `components` and `latent` of an Engine, as far as the strategies need them, of a model made in that shape."""
    needed = [strategy.calibrated for strategy in strategies]
    found: dict[str, Any] = {}
    if any(COMPONENTS in one for one in needed):
        found["components"] = components_of_random_ids(forward)
    if any(LATENT in one for one in needed):
        geometry = forward.geometry(page_tokens=page_tokens, segment_tokens=segment_tokens)
        found["latent"] = made_codec(shape, geometry, forward.device)
    return found


@contextmanager
def open_made_target(
    shape: str, model: ModelConfig, engine: EngineConfig, strategies: Sequence[KVStrategy]
) -> Iterator[MadeTarget]:
    """Make a model of that shape and what the strategies need beside it, and start an engine.

    Raises ConfigError or BackendError for settings that such a model has nothing to do with.
    """
    if model.backend == "native" or model.device == "mlx":
        raise ConfigError("random weights are made in memory, for torch: leave backend out, with device cpu or cuda")
    forward = made_forward(shape, model)
    made = calibrated(shape, forward, strategies, page_tokens=engine.page_tokens, segment_tokens=engine.segment_tokens)
    coded = {
        **({"components": "calibrated on random ids"} if "components" in made else {}),
        **({"latent": f"random bases, {made['latent'].bytes_per_token} bytes a token"} if "latent" in made else {}),
    }
    with Engine(forward, engine, **made) as running:
        yield MadeTarget(engine=running, forward=forward, model=model, coded=coded)
