"""`kakeya train corpus` and `train drafter` from end to end, on TinyModel's folder; then a session is drafted for."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from inference_engine.backends.base import Forward
from inference_engine.cli.main import main
from inference_engine.compose import drafter_folder, find_drafter, open_backend
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.errors import ModelError
from inference_engine.types import GenerateParams
from laboratory.evaluation import record
from tests.laws.variants import drain, text, tokens
from tests.tiny_native import library


@pytest.fixture(scope="module")
def made(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds a drafter of the model's."""
    cache = tmp_path_factory.mktemp("cache")
    shared = ("--model", str(tiny_folder), "--cache-dir", str(cache))
    own = cache / "own.txt"
    own.write_text("The quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    few = ("--tokens", "3000", "--texts-at-once", "50", "--length", "160", "--text", str(own))
    assert main(["train", "corpus", *shared, *few]) == 0
    small = ("--layers", "1", "--taps", "2", "--block-size", "4", "--batch", "4", "--anchors", "8", "--steps", "12")
    quick = ("--measured-texts", "1", "--mask-token-id", "127", "--commit", "0123abc")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "commit", lambda: "none")
        assert main(["train", "drafter", *shared, *small, *quick]) == 0
    return cache


def opened(tiny_folder: Path, cache: Path, drafter: str, backend: str = "torch") -> tuple[ModelConfig, Forward]:
    model = ModelConfig(model=str(tiny_folder), cache_dir=str(cache), drafter=drafter, backend=backend)
    return model, open_backend(model)


def said(forward: Forward, model: ModelConfig) -> tuple[list[int], int]:
    """A session's greedy tokens, and how many draft tokens it was given."""
    config = EngineConfig(kv_bytes=2**24, segment_tokens=16, page_tokens=4, draft_tokens=3)
    with Engine(forward, config, drafter=find_drafter(model, forward)) as engine:
        session = engine.create_session().session_id
        engine.append(session, text(70))
        answer = tokens(drain(engine.generate(session, GenerateParams(max_tokens=30))))
        info = engine.session_info(session)
        assert info.kv_live_bytes <= info.bound.sustained_bytes
        return [token for token, _ in answer], info.drafted_tokens


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_what_was_trained_drafts_for_its_model_and_changes_no_token(
    tiny_folder: Path, made: Path, backend: str
) -> None:
    if backend == "native":
        library()
    model, forward = opened(tiny_folder, made, "trained", backend)
    drafter = find_drafter(model, forward)
    assert drafter is not None and drafter.name == "hybrid" and drafter.tap_layers
    drafted, draft_tokens = said(forward, model)
    plain, none = said(forward, replace(model, drafter="none"))
    assert drafted == plain
    assert draft_tokens > 0 and none == 0


def test_a_trained_drafter_says_how_it_was_made_and_what_it_is_worth(tiny_folder: Path, made: Path) -> None:
    folder = drafter_folder(tiny_folder.name, made)
    manifest = json.loads((folder / "drafter.json").read_text())
    assert manifest["recipe"]["steps"] == 12 and manifest["commit"] == "0123abc"
    assert set(manifest["seeds"]) == {"training", "corpus"}
    assert any(name.startswith("acceptance_length_") for name in manifest["metrics"])
    assert all(value >= 1 for value in manifest["metrics"].values())


def test_a_training_can_begin_with_a_drafter_of_this_model_that_has_no_more_layers(
    tiny_folder: Path,
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record, "commit", lambda: "none")
    folder = drafter_folder(tiny_folder.name, made)
    further = ("--model", str(tiny_folder), "--cache-dir", str(made), "--out", str(tmp_path), "--begin", str(folder))
    shape = ("--taps", "2", "--block-size", "4", "--batch", "4", "--anchors", "8", "--steps", "2")
    small = (*shape, "--commit", "0123abc")
    for layers in (1, 2):
        deep = ("--layers", str(layers), "--out", str(tmp_path / str(layers)), "--mask-token-id", "127")
        assert main(["train", "drafter", *further, *small, *deep]) == 0
        manifest = json.loads((tmp_path / str(layers) / "drafter.json").read_text())
        assert manifest["recipe"]["begin"] == json.loads((folder / "drafter.json").read_text())["tensors_sha256"]
        assert manifest["network"]["layers"] == layers
    capsys.readouterr()
    further = (*further[:-1], str(tmp_path / "2"))
    assert main(["train", "drafter", *further, *small, "--layers", "1", "--mask-token-id", "126"]) == 1
    reported = capsys.readouterr().err
    assert "layers is 2, asked for is 1" in reported and "mask_token_id is 127, asked for is 126" in reported


def test_a_folder_that_is_asked_for_must_hold_a_drafter_of_this_model(
    tiny_folder: Path, made: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "drafter"
    shutil.copytree(drafter_folder(tiny_folder.name, made), folder)
    found = find_drafter(*opened(tiny_folder, tmp_path, str(folder)))
    assert found is not None and found.name == "dflash"
    manifest = json.loads((folder / "drafter.json").read_text())
    (folder / "drafter.json").write_text(json.dumps({**manifest, "target_digest": "0" * 64}))
    with pytest.raises(ModelError, match="trained for the model"):
        find_drafter(*opened(tiny_folder, tmp_path, str(folder)))
    with pytest.raises(ModelError, match="no drafter here"):
        find_drafter(*opened(tiny_folder, tmp_path, str(tmp_path / "nowhere")))
