"""On the real model, the engine's greedy output is transformers' own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import AutoTokenizer

from inference_engine.compose import open_backend
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.models import load_model, tokenizer_folder
from scripts.evaluate_greedy import NEAR_TIE, compare, prompts

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(open_backend(ModelConfig()), EngineConfig(kv_bytes=2**28, share_prefixes="off")) as engine:
        yield engine


def test_greedy_output_equals_transformers_generate_on_the_real_model(engine: Engine) -> None:
    config = ModelConfig()
    theirs = load_model(config.model, cache=config.cache_path, attention="sdpa").model
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(config.model, config.cache_path))
    for prompt in prompts(tokenizer, 2):
        comparison = compare(engine, theirs, prompt, 16)
        # Two tokens that rounding may swap are no difference of ours; anything else is.
        assert comparison.is_equal or (comparison.margin or 0) < NEAR_TIE, comparison
