"""`kakeya train latent` from end to end, on TinyModel's folder; then sessions are restored from what it made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inference_engine.cli.main import main
from inference_engine.compose import find_latent, open_backend
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.errors import ModelError
from inference_engine.kv.strategies import make_strategy
from inference_engine.types import GenerateParams
from tests.further import further_test
from tests.laws.variants import drain, text, tokens

BYTES = 120


@pytest.fixture(scope="module")
def latent(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latent")
    words = ("train", "latent", "--model", str(tiny_folder), "--tokens", "3072", "--sensitivity-sequences", "1")
    own = tmp_path_factory.mktemp("text") / "own.txt"
    own.write_text("The quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    assert main([*words, "--bytes-per-token", str(BYTES), "--text", str(own), "--out", str(folder)]) == 0
    return folder


@further_test
def test_what_train_made_restores_sessions_of_the_same_model(tiny_folder: Path, latent: Path) -> None:
    model = ModelConfig(model=str(tiny_folder), latent=str(latent))
    config = EngineConfig(kv_bytes=2**24, segment_tokens=16, page_tokens=4)
    with Engine(open_backend(model), config, latent=find_latent(model)) as engine:
        strategy = make_strategy("restored", sink=4, window=16, source="latent", bytes_per_token=BYTES)
        session = engine.create_session(strategy=strategy).session_id
        engine.append(session, text(100))
        assert len(tokens(drain(engine.generate(session, GenerateParams(max_tokens=5))))) == 5
        held = engine.session_info(session).kv_live_bytes
        full = engine.create_session().session_id
        engine.append(full, text(100))
        drain(engine.generate(full, GenerateParams(max_tokens=5)))
        assert held < engine.session_info(full).kv_live_bytes


def test_a_text_that_cannot_be_read_is_refused_before_anything_is_loaded(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "latent", "--quick", "--model", str(tiny_folder), "--text", str(tmp_path / "absent"))
    assert main((*words, "--out", str(tmp_path / "out"))) == 1
    said = capsys.readouterr().err
    assert "absent: cannot be read" in said and "a latent for" not in said


@further_test
def test_a_codec_of_other_weights_is_refused(tiny_folder: Path, latent: Path, tmp_path: Path) -> None:
    manifest = (latent / "latent.json").read_text(encoding="utf-8")
    for file in latent.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    digest = manifest.split('"target_digest": "')[1][:64]
    (tmp_path / "latent.json").write_text(manifest.replace(digest, "0" * 64), encoding="utf-8")
    model = ModelConfig(model=str(tiny_folder), latent=str(tmp_path))
    with pytest.raises(ModelError, match="calibrated for the model"):
        find_latent(model)
    with pytest.raises(ModelError, match="no latent"):
        find_latent(replace(model, latent=str(tmp_path / "nowhere")))
    assert find_latent(replace(model, latent="none")) is None
