"""Codes hold unrotated keys; restored keys are rotated at their own positions, with their own layer's table.

Gemma 3 has two tables: layers with a window turn faster than those without. A codec that loses nothing shows the rest:
a session whose entries were evicted and restored says what one that kept them says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference_engine.backends.torch_forward import TorchForward
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.kv.context import WholeTokens
from inference_engine.kv.strategies import make_strategy
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategy import KVStrategy
from inference_engine.models.seam import ATTENTION, Seam
from inference_engine.types import Mode, ModelFacts
from laboratory.training.capture import capture
from tests.kv_cache_proposer.small_models import HEADS, SIZES, gemma3, gemma4
from tests.laws.variants import generate, same
from tests.tiny import SMALL

FULL_LAYERS = (1, 2)
SHAPE = (HEADS, SIZES["head_dim"])
SINK, WINDOW = 2, 9
TURNS, COUNT = 3, 7  # tokens are generated in turns, between which entries are evicted and restored
OTHER = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}


class Lossless(WholeTokens):
    """A codec that keeps the numbers as they are, and notes the keys it was given."""

    layers = FULL_LAYERS
    bytes_per_token = least_bytes_per_token = 2 * len(FULL_LAYERS) * HEADS * SIZES["head_dim"] * 4

    def __init__(self) -> None:
        self.keys: list[Tensor] = []  # [layers, n, Hkv, D]

    def encode(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        self.keys.append(torch.stack(list(keys)))
        return torch.cat([entries.float().flatten(1) for entries in (*keys, *values)], dim=1).view(torch.uint8)

    def decode(self, codes: Tensor, layers: Sequence[int] | None = None) -> tuple[list[Tensor], list[Tensor]]:
        entries = codes.contiguous().view(torch.float32).view(len(codes), 2, len(self.layers), *SHAPE)
        places = [self.layers.index(layer) for layer in (self.layers if layers is None else layers)]
        return [entries[:, 0, place] for place in places], [entries[:, 1, place] for place in places]


def restored(mode: str) -> KVStrategy:
    options = {"sink": SINK, "window": WINDOW, "source": "latent", "bytes_per_token": Lossless.bytes_per_token}
    return make_strategy("restored", **options, mode=mode)


def gemma_engine(codec: Lossless, make: Callable[..., PreTrainedModel] = gemma3) -> Engine:
    facts = ModelFacts(
        model_id="gemma3",
        vocab_size=SIZES["vocab_size"],
        trained_positions=SIZES["max_position_embeddings"],
        device="cpu",
        dtype="float32",
    )
    seam = Seam(make(attention=ATTENTION))
    assert [layer.rotary for layer in seam.layers] == ["sliding_attention", "full_attention", "full_attention"]
    forward = TorchForward(seam, facts, torch.device("cpu"))
    return Engine(forward, EngineConfig(**SMALL), latent=codec)


def reported(engine: Engine, strategy: KVStrategy) -> tuple[list[int], list[tuple[int, float | None]]]:
    """The history after some turns, and what was generated in them."""
    session = engine.create_session(strategy=strategy).session_id
    history: list[int] = []
    run: list[tuple[int, float | None]] = []
    for turn in range(TURNS):
        appended = np.random.default_rng(turn).integers(1, SIZES["vocab_size"], 30).tolist()
        engine.append(session, appended)
        generated = generate(engine, session, COUNT)
        run += generated
        history += [*appended, *(token for token, _ in generated)]
    return history, run


@pytest.mark.parametrize("make", [gemma3, gemma4])
@pytest.mark.parametrize("mode", ["hold", "stream"])
def test_entries_that_came_back_are_read_as_if_they_had_never_left(
    mode: str, make: Callable[..., PreTrainedModel]
) -> None:
    with gemma_engine(codec := Lossless(), make) as engine:
        assert same(reported(engine, restored(mode))[1], reported(engine, Full())[1], Mode.BATCHED)
    assert sum(entries.shape[1] for entries in codec.keys) > 3 * WINDOW


@pytest.mark.parametrize("mode", ["hold", "stream"])
def test_entries_that_come_back_with_another_layers_table_are_not_what_they_were(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail."""
    own = Seam.rotate

    def rotate(self: Seam, keys: Tensor, shifts: Tensor, name: str) -> Tensor:
        return own(self, keys, shifts, OTHER[name] if bool((shifts > 0).any()) else name)

    monkeypatch.setattr(Seam, "rotate", rotate)
    with gemma_engine(Lossless()) as engine:
        assert not same(reported(engine, restored(mode))[1], reported(engine, Full())[1], Mode.BATCHED)


@pytest.mark.parametrize("make", [gemma3, gemma4])
def test_what_is_coded_are_the_models_own_unrotated_keys(make: Callable[..., PreTrainedModel]) -> None:
    """A wrong table there and back again would not show in what is read; a calibrated codec would code it badly."""
    with gemma_engine(codec := Lossless(), make) as engine:
        history, _ = reported(engine, restored("hold"))
    coded = torch.cat(codec.keys, dim=1)
    [entries] = capture(make(), [torch.tensor([history])], layers=FULL_LAYERS)
    for ours, layer in zip(coded, entries, strict=True):
        # Turned away and back, after other sums: float32.
        torch.testing.assert_close(ours, layer.keys[SINK : SINK + coded.shape[1]], atol=1e-4, rtol=0)
