"""What old entries are restored and chosen by is made on either executor and serves both, in MLX's layout, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from inference_engine.backends.base import Forward
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.cli.main import main
from inference_engine.compose import find_components, find_latent, open_backend
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.kv.strategies import make_strategy
from inference_engine.models import load_model
from inference_engine.models.seam import ATTENTION, Seam
from inference_engine.types import Mode
from tests.further import further_test, off_metal
from tests.laws.variants import generate, same, text
from tests.mlx.test_loading import DENSE, MIXED, config_of, logits_of, published
from tests.tiny_folder import tiny_tokenizer

BYTES = 120
ANOTHER_LEVEL = 3e-2  # of a log-probability, where a number of a code of so few bytes is one level higher; 1e-6 without
HOLDS = make_strategy("restored", sink=2, window=16, source="latent", bytes_per_token=BYTES)
CHOOSES = make_strategy(
    "restored", sink=2, window=16, source="latent", bytes_per_token=BYTES, mode="select", budget=52, rank=5, run=1
)


def on_torch(config: ModelConfig, facts_of: Forward) -> TorchForward:
    """The same model with its groups unpacked: what calibration reads."""
    model = load_model(config.model, cache=config.cache_path, attention=ATTENTION, unpacks_groups=True).model
    facts = replace(facts_of.facts, device="cpu", backend="torch")
    return TorchForward(Seam(model), facts, torch.device("cpu"))


@pytest.mark.parametrize(("config", "bits"), [off_metal(DENSE, 3), (MIXED, 4)], ids=["3 bits", "experts in 4"])
def test_unpacked_groups_give_the_logits_of_mlx(config: PretrainedConfig, bits: int, tmp_path: Path) -> None:
    model = config_of(published(config, tmp_path, bits=bits))
    forward = open_backend(model)
    found, expected = logits_of(on_torch(model, forward)), logits_of(forward)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


@further_test
def test_calibrations_of_a_model_in_the_layout_of_mlx_serve_both_executors(tmp_path: Path) -> None:
    model = config_of(published(DENSE, tmp_path, bits=4))
    tiny_tokenizer().save_pretrained(model.model)
    own = tmp_path / "own.txt"
    own.write_text("The quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    words = ("--model", model.model, "--cache-dir", model.cache_dir, "--device", "mlx", "--text", str(own))
    latent = ("--quick", "--importance", "none", "--bytes-per-token", str(BYTES), "--dtype", "float16")
    assert main(["train", "latent", *words, *latent, "--tokens", "2048"]) == 0
    assert main(["train", "components", *words, "--tokens", "2048"]) == 0

    said, forward = [], open_backend(model)
    for own_forward in (forward, on_torch(model, forward)):
        settings = EngineConfig(kv_bytes=2**23, segment_tokens=16, page_tokens=4, share_prefixes="off")
        with Engine(own_forward, settings, latent=find_latent(model), components=find_components(model)) as engine:
            sessions = [engine.create_session(strategy=strategy).session_id for strategy in (HOLDS, CHOOSES)]
            for session in sessions:
                engine.append(session, text(100))
            said.append([generate(engine, session) for session in sessions])
    (held, chosen), (other_held, other_chosen) = said
    # Of two levels, or two tokens by their scores, that are as near but for rounding, the executors may take another.
    assert same(held, other_held, Mode.BATCHED, within=ANOTHER_LEVEL)
    assert same(chosen, other_chosen, Mode.BATCHED, within=ANOTHER_LEVEL)
    assert not same(chosen, held, Mode.BATCHED, within=ANOTHER_LEVEL)
