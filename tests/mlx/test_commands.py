"""What commands say of MLX, and what long sessions on it need of the rest: a trained drafter, the audit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from inference_engine.cli.main import main
from inference_engine.compose import find_drafter, open_backend
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.types import Mode
from kv_cache_proposer.ngram import NgramDrafter
from laboratory.evaluation import record
from laboratory.training import corpus_prompts
from tests.further import further_test
from tests.laws.variants import generate, same, text
from tests.mlx.test_loading import DENSE, published
from tests.tiny_folder import save_tiny_chat_model

SMALL = ("--kv-bytes", "32MiB", "--bind", "127.0.0.1:0")


def lines(output: str) -> dict[str, tuple[str, str]]:
    """Level and text of each check of doctor."""
    found = re.findall(r"^(ok|warn|fail) +(self test|\w+) +(.*)$", output, re.MULTILINE)
    return {name: (level, words) for level, name, words in found}


def test_doctor_says_that_mlx_runs_the_model_and_generates_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_chat_model(tmp_path / "model")
    assert main(["doctor", "--model", str(folder), "--cache-dir", str(tmp_path), "--device", "mlx", *SMALL]) == 0
    found = lines(capsys.readouterr().out)
    assert found["executor"] == ("ok", "mlx: device is mlx, and its family has a list of operations")
    assert re.match(r"mlx [\d.]+ on the (cpu|gpu)", found["device"][1])
    assert found["self test"][0] == "ok"


def test_models_show_says_what_runs_a_model_in_the_layout_of_mlx(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = published(DENSE, tmp_path, bits=4)
    for device, runs in (("cpu", "nothing"), ("mlx", "mlx")):
        (tmp_path / "settings.toml").write_text(f'device = "{device}"\n')
        assert main(["models", "show", str(folder), "--config", str(tmp_path / "settings.toml")]) == 0
        shown = capsys.readouterr().out
        assert re.search(rf"runs on +│ {runs}: ", shown)
        assert "in 4 bits" in shown


@further_test
def test_a_drafter_is_trained_on_torch_where_mlx_is_the_device_and_drafts_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is trained asks torch for the CPU, as its own default on a Mac is MLX."""
    folder = save_tiny_chat_model(tmp_path / "model")
    own = tmp_path / "own.txt"
    own.write_text("The quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    shared = ("--model", str(folder), "--cache-dir", str(tmp_path), "--device", "mlx")
    monkeypatch.setattr(corpus_prompts, "QUESTIONS", 100)
    few = ("--tokens", "3000", "--texts-at-once", "25", "--length", "160", "--text", str(own))
    assert main(["train", "corpus", *shared, *few]) == 0
    small = ("--layers", "1", "--taps", "2", "--block-size", "4", "--batch", "4", "--anchors", "8", "--steps", "4")
    quick = ("--measured-texts", "1", "--mask-token-id", "127", "--commit", "0123abc")
    monkeypatch.setattr(record, "commit", lambda: "none")
    assert main(["train", "drafter", *shared, *small, *quick]) == 0

    model = ModelConfig(model=str(folder), cache_dir=str(tmp_path), device="mlx", drafter="trained")
    forward, streams, drafted = open_backend(model), [], 0
    for drafter in (None, find_drafter(model, forward), NgramDrafter()):
        settings = EngineConfig(kv_bytes=2**24, segment_tokens=16, page_tokens=4, draft_tokens=3, share_prefixes="off")
        with Engine(forward, settings, drafter=drafter) as engine:
            session = engine.create_session().session_id
            engine.append(session, [*text(40), *text(40)])
            streams.append(generate(engine, session, 24))
            drafted = engine.session_info(session).drafted_tokens
        assert bool(drafted) == (drafter is not None)
    assert same(streams[0], streams[1], Mode.BATCHED)
    assert same(streams[0], streams[2], Mode.BATCHED)


@pytest.mark.real_model
@pytest.mark.long
def test_greedy_tokens_of_the_real_model_are_those_of_torch() -> None:
    """But for near-ties. Prompts are short: products on a CPU are slow. The trained drafter drafts after the last."""
    from transformers import AutoTokenizer

    from inference_engine.compose import open_parts
    from inference_engine.models import load_model, tokenizer_folder
    from scripts.evaluate_greedy import NEAR_TIE, compare, prompts

    config = ModelConfig(device="mlx", drafter="none")
    theirs = load_model(config.model, cache=config.cache_path, attention="sdpa").model
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(config.model, config.cache_path))
    own = open_parts(config)
    drafting = replace(own, drafter=find_drafter(replace(config, drafter="trained"), own.forward))
    texts = [prompt[:40] for prompt in prompts(tokenizer, 20)]
    for parts, some in ((own, texts), (drafting, texts[-1:])):
        with parts.engine(EngineConfig(kv_bytes=2**28, default_limit_tokens=1024, share_prefixes="off")) as engine:
            for prompt in some:
                comparison = compare(engine, theirs, prompt, 24)
                assert comparison.is_equal or (comparison.margin or 0) < NEAR_TIE, comparison
