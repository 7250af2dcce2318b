"""Every side answers the same turns, and only what has rooms holds more than its bound between them."""

from __future__ import annotations

from pathlib import Path

from inference_engine.config import EngineConfig, ModelConfig
from laboratory.evaluation.models import open_target
from laboratory.evaluation.restore_cache import BOUND, FULL, GATHER, ONE, add_arguments, main
from tests.laboratory.typed import typed_for
from tests.tiny import SMALL, tiny_components, tiny_latent
from tests.tiny_folder import save_tiny_chat_model
from tests.tiny_native import library

SELECT = "restored:source=latent,bytes_per_token=160,mode=select,sink=2,window=17,budget=63,rank=5,bits=3,run=1"


def test_rooms_are_beside_full_gather_and_a_cache_without_them(tmp_path: Path) -> None:
    library()
    typed = ("--restored", SELECT, "--length=150", "--rounds=2", "--tokens=18", "--appended=5", "--choices", "3")
    model = ModelConfig(model=str(save_tiny_chat_model(tmp_path)), threads=1)
    with open_target(model, EngineConfig(**SMALL), latent=tiny_latent(), components=tiny_components()) as target:
        values = main(typed_for(add_arguments, *typed), target)["values"]

    for name in (GATHER, ONE, BOUND, "3 choices"):
        assert values[f"decode speed ÷ full, {name}"]["count"] == 2
    assert values[f"K/V at most ÷ full, {ONE}"]["median"] < values[f"K/V at most ÷ full, {BOUND}"]["median"]
    spare = {name: values[f"K/V beyond the bound, {name}"]["median"] for name in (FULL, ONE, BOUND, "3 choices")}
    assert spare.pop("3 choices") > 0 and not any(spare.values())
