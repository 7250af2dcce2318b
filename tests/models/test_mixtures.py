"""Folders of mixtures of experts are served natively, by the names that their families store tensors under."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_engine.compose import open_backend
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.types import Mode
from tests.laws.variants import generate, same, text
from tests.models.odd_models import configured
from tests.models.tiny_gguf import tiny_model, write_gguf
from tests.tiny import SMALL

pytestmark = pytest.mark.usefixtures("trying_no_strategies")

SHARED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTURES = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {"num_experts": 4, "shared_expert_intermediate_size": 32, **SHARED},
    "Glm4Moe": {"n_routed_experts": 4, "n_shared_experts": 1, "head_dim": 16, **SHARED},
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_generates_natively_what_torch_generates(kind: str, tmp_path: Path) -> None:
    configured(kind, **MIXTURES[kind])().save_pretrained(tmp_path / "model")
    generates_natively_what_torch_generates(tmp_path / "model")


@pytest.mark.parametrize("family", ["mixtral", "qwen2moe", "glm4moe"])
def test_a_mixture_in_gguf_does_too(family: str, tmp_path: Path) -> None:
    write_gguf(tiny_model(family), tmp_path / "model.gguf", "Q8_0")
    generates_natively_what_torch_generates(tmp_path / "model.gguf")


def generates_natively_what_torch_generates(path: Path) -> None:
    found = []
    for backend in ("native", "torch"):
        kept = {"kv_dtype": "float32"} if backend == "native" else {}
        cache = str(path.parent / "cache")
        model = ModelConfig(model=str(path), cache_dir=cache, device="cpu", backend=backend, threads=1, **kept)
        with Engine(open_backend(model), EngineConfig(**SMALL)) as engine:
            session = engine.create_session().session_id
            engine.append(session, text(40))
            found.append(generate(engine, session, 12))
    assert same(found[0], found[1], Mode.BATCHED)
