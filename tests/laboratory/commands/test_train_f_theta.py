"""`kakeya train f-theta` from end to end, on TinyModel's folder; then sessions restore entries by what it made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from inference_engine.cli.main import main
from inference_engine.compose import drafter_folder, f_theta_folder, open_parts
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument
from inference_engine.kv.strategies import make_strategy
from inference_engine.models import check_model, weights_digest
from inference_engine.types import Finished, GenerateParams
from kv_cache_proposer.dflash.drafter_files import save_drafter
from kv_cache_proposer.f_theta.tap_codec_files import MANIFEST, TENSORS
from kv_cache_proposer.stored import StoredManifest
from laboratory.evaluation.models import open_target
from tests.kv_cache_proposer.drafter_cases import tiny_config, tiny_network
from tests.laws.variants import drain, text, tokens

BYTES = 160  # of 256 in bfloat16
STRATEGY = make_strategy("restored", source="drafter", sink=4, window=16, bytes_per_token=BYTES)


@pytest.fixture(scope="module")
def model(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    cache = tmp_path_factory.mktemp("cache")
    own = cache / "own.txt"
    own.write_text(Path(__file__).read_text(encoding="utf-8") * 3, encoding="utf-8")
    model = ModelConfig(model=str(tiny_folder), cache_dir=str(cache), drafter="trained", backend="torch")
    checked = check_model(model.model, cache=cache)
    made = StoredManifest(target_digest=weights_digest(checked))
    save_drafter(tiny_network(mask_token_id=1), drafter_folder(checked.model_id, cache), made)
    words = ("train", "f-theta", "--model", str(tiny_folder), "--tokens", "2048", "--text", str(own))
    few = ("--bytes-per-token", str(BYTES), "--sensitivity-sequences", "1")
    assert main([*words, *few, "--cache-dir", str(cache)]) == 0
    return model


def folder_of(model: ModelConfig) -> Path:
    return f_theta_folder(check_model(model.model, cache=model.cache_path).model_id, model.cache_path)


@contextmanager
def serving(model: ModelConfig) -> Iterator[Engine]:
    config = EngineConfig(kv_bytes=2**24, segment_tokens=16, page_tokens=4)
    with open_parts(model).engine(config) as engine:
        yield engine


def test_its_controls_miss(model: ModelConfig) -> None:
    """Entries that a text's own taps give are nearer than those of a random map, and of another text's taps."""
    stated = json.loads((folder_of(model) / MANIFEST).read_text(encoding="utf-8"))
    lost = stated["metrics"]
    own = lost[f"{BYTES} bytes a token"]
    assert stated["tap_layers"] == list(tiny_config().tap_layers)
    assert own < 0.1 * lost["nothing of it"]
    assert min(lost["a random f_theta"], lost["taps of another text"]) > 5 * own


def test_a_server_restores_by_it_and_rejected_drafts_leave_nothing(model: ModelConfig) -> None:
    with serving(model) as engine:
        answers = []
        for drafting in (True, False):
            opened = engine.create_session(strategy=STRATEGY)
            engine.append(opened.session_id, text(200))
            params = GenerateParams(max_tokens=40, drafting=drafting)
            events = drain(engine.generate(opened.session_id, params))
            done = events[-1]
            assert isinstance(done, Finished) and done.restored_positions > 150
            answers.append(tokens(events))
    assert answers[0] == answers[1] and len(answers[0]) == 40


def test_evaluations_have_it_beside_the_latent_and_say_whose_it_is(model: ModelConfig) -> None:
    config = EngineConfig(kv_bytes=2**24, segment_tokens=16, page_tokens=4)
    with open_target(replace(model, drafter="auto", backend="auto"), config) as target:
        target.engine.create_session(strategy=STRATEGY)
        identity = target.describe()["f_theta"]
    assert identity["drafter_sha256"] == target.drafter_identity("trained")["tensors_sha256"]
    assert identity["bytes_per_token"] == BYTES


def test_what_a_server_lacks_is_said_with_the_way_out(model: ModelConfig, tmp_path: Path) -> None:
    def refused(model: ModelConfig) -> str:
        with serving(model) as engine, pytest.raises(InvalidArgument) as refusal:
            engine.create_session(strategy=STRATEGY)
        assert refusal.value.field == "source"
        return str(refusal.value)

    assert "--drafter trained" in refused(replace(model, drafter="ngram"))
    folder = folder_of(model)
    manifest, tensors = folder / MANIFEST, folder / TENSORS
    stated, stored = manifest.read_text(encoding="utf-8"), tensors.read_bytes()
    digest = json.loads(stated)["drafter_digest"]
    try:
        manifest.write_text(stated.replace(digest, "0" * 64), encoding="utf-8")
        assert "digest 0000" in refused(model)
        manifest.write_text(stated, encoding="utf-8")
        tensors.write_bytes(stored[:-1] + bytes([stored[-1] ^ 1]))
        assert "kakeya train f-theta" in refused(model)
        folder.rename(folder.with_name("away"))
        assert "kakeya train f-theta" in refused(model)
        folder.with_name("away").rename(folder)
    finally:
        manifest.write_text(stated, encoding="utf-8")
        tensors.write_bytes(stored)
