"""`kakeya train corpus` and `train drafter` from end to end, on TinyModel's folder; then a session is drafted for."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from inference_engine import compose
from inference_engine.backends.base import Forward
from inference_engine.cli.main import main
from inference_engine.compose import drafter_folder, drafter_identity, find_drafter, open_backend
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.errors import ModelError
from inference_engine.models import check_model
from inference_engine.types import GenerateParams
from laboratory.commands.train_corpus import corpus_folder
from laboratory.evaluation import record
from laboratory.training import corpus_prompts
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


def test_a_trained_drafter_is_reported_from_others_by_its_digest(tiny_folder: Path, made: Path, tmp_path: Path) -> None:
    folder = drafter_folder(tiny_folder.name, made)
    manifest = json.loads((folder / "drafter.json").read_text())
    for named in ("auto", str(folder)):
        reported = drafter_identity(*opened(tiny_folder, made, named))
        assert reported["tensors_sha256"] == manifest["tensors_sha256"]
        assert ("copies" in reported) == (named == "auto")
    for setting in ("auto", "ngram"):
        assert drafter_identity(*opened(tiny_folder, tmp_path, setting))["max_ngram"] == 8
    assert drafter_identity(*opened(tiny_folder, tmp_path, "none")) == {}


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


def test_a_training_reads_all_corpora_it_is_given(
    tiny_folder: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "commit", lambda: "none")
    monkeypatch.setattr(corpus_prompts, "QUESTIONS", 100)
    shared = ("--model", str(tiny_folder), "--cache-dir", str(made))
    first, second = corpus_folder(tiny_folder.name, made), tmp_path / "corpus"
    few = (
        "--tokens",
        "1000",
        "--texts-at-once",
        "10",
        "--length",
        "160",
        "--seed",
        "5",
        "--text",
        str(made / "own.txt"),
    )
    assert main(["train", "corpus", *shared, *few, "--out", str(second)]) == 0
    shape = ("--layers", "1", "--taps", "2", "--block-size", "4", "--batch", "4", "--anchors", "8", "--steps", "2")
    both = ("--corpus", str(first), str(second), "--out", str(tmp_path / "drafter"), "--commit", "0123abc")
    assert main(["train", "drafter", *shared, *shape, "--mask-token-id", "127", *both]) == 0
    manifest = json.loads((tmp_path / "drafter" / "drafter.json").read_text())
    written = [json.loads((folder / "corpus.json").read_text())["files"] for folder in (first, second)]
    assert manifest["recipe"]["corpus_tokens"] == sum(tokens for files in written for _, tokens in files)
    assert manifest["seeds"] == {"training": 0, "corpus": 0, "corpus 2": 5}


def test_without_a_trained_drafter_there_is_prompt_lookup(tiny_folder: Path, tmp_path: Path) -> None:
    for setting, name in (("auto", "ngram"), ("ngram", "ngram"), ("none", None)):
        found = find_drafter(*opened(tiny_folder, tmp_path, setting))
        assert (found and found.name) == name
    with pytest.raises(ModelError, match="has no trained drafter"):
        find_drafter(*opened(tiny_folder, tmp_path, "trained"))


def test_a_network_is_not_chosen_for_a_native_model_unless_it_is_asked_for(tiny_folder: Path, made: Path) -> None:
    library()
    for setting, name in (("auto", "ngram"), ("trained", "hybrid")):
        model, forward = opened(tiny_folder, made, setting, "native")
        found = find_drafter(model, forward)
        assert found is not None and found.name == name
        assert ("recipe" in drafter_identity(model, forward)) == (setting == "trained")


def test_a_drafter_that_comes_with_the_package_is_found_by_its_target(
    tiny_folder: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "checkpoints" / "whatever"
    shutil.copytree(drafter_folder(tiny_folder.name, made), shipped)
    monkeypatch.setattr(compose, "SHIPPED", shipped.parent)
    found = find_drafter(*opened(tiny_folder, tmp_path / "empty", "auto"))
    assert found is not None and found.name == "hybrid"
    manifest = json.loads((shipped / "drafter.json").read_text())
    (shipped / "drafter.json").write_text(json.dumps({**manifest, "target_digest": "0" * 64}))
    found = find_drafter(*opened(tiny_folder, tmp_path / "empty", "auto"))
    assert found is not None and found.name == "ngram"


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


@pytest.mark.parametrize(
    "words",
    [
        ("corpus", "--length", "10"),
        ("corpus", "--texts-at-once", "0"),
        ("drafter", "--block-size", "1"),
        ("drafter", "--teacher-share", "2"),
        ("drafter", "--chain", "-1"),
        ("drafter", "--decay", "0"),
        ("drafter", "--corpus", "nowhere"),
        ("drafter", "--corpus", "twice", "twice"),
        ("drafter", "--commit", "later"),
        ("latent", "--refine-steps", "-1"),
        ("latent", "--group-layers", "0"),
        ("latent", "--bytes-per-token", "-5"),
    ],
    ids=" ".join,
)
def test_settings_that_make_no_sense_are_refused_by_name(
    tiny_folder: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words, "--model", str(tiny_folder)]) == 1
    assert words[-2].strip("-") in capsys.readouterr().err


def test_a_drafters_contexts_are_compared_with_a_control_that_gains_nothing(
    tiny_folder: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scripts import compare_draft_contexts as script

    monkeypatch.setattr(record, "commit", lambda: "none")
    shared = ("--model", str(tiny_folder), "--cache-dir", str(made), "--commit", "0123abc")
    few = ("--tokens", "2048", "--sensitivity-sequences", "1", "--text", str(made / "own.txt"))
    assert main(["train", "latent", "--quick", *shared, *few]) == 0
    model_id = check_model(str(tiny_folder), cache=made).model_id
    typed = [*shared, "--corpus", str(corpus_folder(model_id, made)), "--windows", "8", "--texts", "2"]
    script.main([*typed, "--fitted-on", "8", "--train-seconds", "0.5", "--results", str(tmp_path)])
    (path,) = tmp_path.rglob("record.json")
    found = record.load(path)
    lengths = {(row["context"], row["kind"]): row["tokens a step"] for row in found["tables"]["tokens a step"]}
    contexts = {context for context, _ in lengths}
    assert {"taps", "taps, window 8", "nothing", "taps, trained further"} <= contexts
    assert sum(context.startswith("latent") and "from 8 on" in context for context in contexts) == 2
    assert all(length >= 1 for length in lengths.values())
