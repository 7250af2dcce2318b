"""On a Mac with Apple silicon: the real model on its GPU. `make test-mac` runs this, and all other tests of MLX."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from transformers import AutoTokenizer

from inference_engine.backends.base import Forward
from inference_engine.backends.mlx.device import MOST_CACHED_BYTES
from inference_engine.cli.main import main
from inference_engine.compose import open_backend
from inference_engine.config import EngineConfig, ModelConfig, default_device
from inference_engine.engine import Engine
from inference_engine.models import check_model, load_model, tokenizer_folder
from laboratory.evaluation.record import exact, summarize
from scripts.evaluate_greedy import NEAR_TIE, compare, prompts
from tests.mlx.measures import (
    active_bytes,
    long_session,
    memory_held,
    older_names,
    sessions_under_pressure,
    speeds,
)

pytestmark = [pytest.mark.apple, pytest.mark.real_model, pytest.mark.timeout(7200)]

Noted = Callable[[str, object], None]
CONFIG = ModelConfig(device="mlx")
TIGHT = 2**20  # bytes beside arrays that are counted


@pytest.fixture(scope="module")
def forward() -> Forward:
    return open_backend(CONFIG)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(CONFIG.model, CONFIG.cache_path))
    return list(prompts(tokenizer, 20))


def test_the_installation_is_complete_and_mlx_is_the_default() -> None:
    assert default_device() == "mlx"
    assert mx.default_device().type == mx.DeviceType.gpu
    assert main(["doctor", "--kv-bytes", "512MiB", "--bind", "127.0.0.1:0"]) == 0


def test_greedy_tokens_are_those_of_torch(forward: Forward, texts: Sequence[list[int]], record_property: Noted) -> None:
    theirs = load_model(CONFIG.model, cache=CONFIG.cache_path, attention="sdpa").model
    with Engine(forward, EngineConfig(kv_bytes=2**28, default_limit_tokens=1024, share_prefixes="off")) as engine:
        found = [compare(engine, theirs, prompt, 64) for prompt in texts]
    differing = [one for one in found if not one.is_equal]
    record_property("prompts with equal greedy tokens", exact(len(found) - len(differing), "prompts"))
    record_property("prompts that differ at a near-tie", exact(len(differing), "prompts"))
    assert all((one.margin or 0) < NEAR_TIE for one in differing), differing


def test_memory_is_the_weights_and_the_pool_and_limits_are_restored(record_property: Noted) -> None:
    own, recommended = 2**27, int(mx.device_info()["max_recommended_working_set_size"])
    active_bytes()  # models of tests before this one go
    before = mx.set_wired_limit(own)
    try:
        held = memory_held(lambda: open_backend(CONFIG), kv_bytes=2**28)
        active_bytes()
        assert mx.set_wired_limit(own) == own, "the limit of before is restored when the model goes"
        opened = open_backend(CONFIG)
        assert mx.set_wired_limit(recommended) == recommended, "set while a model is there"
        del opened
        active_bytes()
    finally:
        mx.set_wired_limit(before)
    record_property("weights", exact(held.weights, "bytes"))
    record_property("memory recommended for a GPU", exact(recommended, "bytes"))
    assert 2**28 <= held.pool <= 2**28 + 64 * TIGHT
    assert held.left < TIGHT


def test_under_pressure_a_session_is_refused_and_none_is_lost(forward: Forward) -> None:
    assert sessions_under_pressure(forward, tokens=2048) == 3


def test_a_long_session_keeps_its_memory(
    forward: Forward, request: pytest.FixtureRequest, record_property: Noted
) -> None:
    seconds = float(request.config.getoption("--seconds", 30.0))
    ran = long_session(forward, seconds=seconds, kv_bytes=2**28)
    record_property("tokens of a long session", exact(ran.tokens, "tokens"))
    record_property("memory that a long session gained", exact(ran.last_bytes - ran.first_bytes, "bytes"))
    record_property("freed buffers that MLX kept in a long session", exact(ran.cached_bytes, "bytes"))
    assert ran.last_bytes <= ran.first_bytes + 16 * TIGHT
    # The limit holds when the next buffer is asked for: the last step's are beyond it.
    assert ran.cached_bytes <= MOST_CACHED_BYTES + 64 * TIGHT


def test_speed_beside_mlx_lm_and_llama_cpp(
    forward: Forward, texts: Sequence[list[int]], tmp_path: Path, record_property: Noted
) -> None:
    """A record, no law: a test cannot assert how fast a Mac is."""
    checked = check_model(CONFIG.model, cache=CONFIG.cache_path)
    prompt = max(texts, key=len)
    for dtype in ("float32", "bfloat16"):
        own = forward if dtype == "float32" else open_backend(replace(CONFIG, dtype=dtype))
        found = speeds(own, checked.folder, prompt, tokens=128, rounds=7, gguf=checked.gguf)
        ratios = [one / other for one, other in zip(found.ours, found.theirs, strict=True)]
        record_property(f"decode in {dtype}", summarize(found.ours, "tokens/s"))
        record_property(f"decode in {dtype} by mlx-lm", summarize(found.theirs, "tokens/s"))
        record_property(f"ratio to mlx-lm in {dtype}", summarize(ratios, "ratio"))
        if found.llama_cpp:
            what = f"decode by llama.cpp of the GGUF file, from no history, between those in {dtype}"
            record_property(what, summarize(found.llama_cpp, "tokens/s"))
        assert statistics.median(found.ours) > 0
    assert older_names(json.loads((checked.folder / "config.json").read_text()))["rope_theta"]
