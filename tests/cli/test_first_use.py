"""A server makes what its strategy needs calibrated, once, and a server that needs nothing makes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
from filelock import FileLock

from inference_engine.cli import auto_calibration as first_use
from inference_engine.compose import DLMRestoredVerifier, open_parts
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.errors import BackendError
from tests.further import further_test
from tests.tiny_native import library

LATENT, GATHER = "restored:source=latent,window=64", "gather:scorer=components"


@pytest.fixture(scope="module")
def parts(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, DLMRestoredVerifier]:
    model = ModelConfig(model=str(tiny_folder), cache_dir=str(tmp_path_factory.mktemp("cache")))
    return model, open_parts(model)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the laboratory; nothing is made."""
    found: list[str] = []
    monkeypatch.setattr(first_use, "make", lambda _model, stage: found.append(stage))
    return found


@pytest.mark.parametrize(
    ("strategy", "calibrate", "expected"),
    [
        ("full", "auto", []),
        ("sink_window", "auto", []),
        ("restored", "auto", []),
        ("full:codec=lloyd4", "auto", []),
        (LATENT, "auto", ["latent"]),
        ("gather", "auto", ["components"]),
        (GATHER, "auto", ["components"]),
        ("gather:scorer=bounds", "auto", []),
        (LATENT, "never", []),
        ("full", "all", ["latent", "components"]),
    ],
)
def test_what_is_made_is_what_the_strategy_decides_by(
    strategy: str, calibrate: str, expected: list[str], parts: tuple[ModelConfig, DLMRestoredVerifier], made: list[str]
) -> None:
    model, composed = parts
    after = first_use.with_calibrations(composed, model, EngineConfig(strategy=strategy), calibrate)
    assert made == expected
    assert (after is composed) == (not expected)


def test_nothing_is_made_for_a_strategy_that_the_model_cannot_have(
    parts: tuple[ModelConfig, DLMRestoredVerifier], made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, composed = parts
    geometry = composed.forward.geometry(page_tokens=4, segment_tokens=16)
    latent = replace(
        geometry,
        layers=tuple(
            replace(layer, shared_dim=layer.head_dim, head_dim=2 * layer.head_dim, value_dim=layer.head_dim)
            for layer in geometry.layers
        ),
    )
    monkeypatch.setattr(type(composed.forward), "geometry", lambda _self, **_sizes: latent)
    first_use.with_calibrations(composed, model, EngineConfig(strategy=LATENT), "auto")
    assert made == []


def test_a_model_that_is_too_large_or_needs_nothing_is_not_loaded_for_that(
    parts: tuple[ModelConfig, DLMRestoredVerifier], made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference_engine.compose.open_parts", lambda _: pytest.fail("loaded"))
    for strategy in ("full", "sink_window", "layer_window:full_layers=0"):
        first_use.before_start(parts[0], EngineConfig(strategy=strategy))
    monkeypatch.setattr(first_use, "SMALL_BYTES", 1)
    first_use.before_start(parts[0], EngineConfig(strategy="gather"))
    assert made == []


def test_a_calibration_that_fails_says_what_else_to_do(tiny_folder: Path, tmp_path: Path) -> None:
    model = ModelConfig(model=str(tiny_folder / "nowhere"), cache_dir=str(tmp_path))
    with pytest.raises(BackendError, match="--calibrate never"):
        first_use.make(model, "components")


def test_a_start_that_waits_for_the_calibration_of_another_says_so(
    parts: tuple[ModelConfig, DLMRestoredVerifier], made: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    model, _ = parts
    model.cache_path.mkdir(parents=True, exist_ok=True)
    with FileLock(model.cache_path / "calibrating-latent.lock"):
        waiting = Thread(target=first_use.run, args=(model, ["latent"]))
        waiting.start()
        waiting.join(1.0)
        assert waiting.is_alive() and made == []
        assert "another process calibrates" in capfd.readouterr().err
    waiting.join(30.0)
    assert made == ["latent"]


@further_test
def test_components_are_made_once_and_the_next_start_finds_them(
    parts: tuple[ModelConfig, DLMRestoredVerifier], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model, composed = parts
    engine = EngineConfig(
        strategy="gather:sink=4,window=16,budget=180", kv_bytes=2**24, segment_tokens=16, page_tokens=4
    )
    assert composed.components is None
    after = first_use.with_calibrations(composed, model, engine, "auto")
    assert after.components is not None and after.latent is None
    assert capfd.readouterr().out == "", "a server's own output is one line"
    with after.engine(engine) as running:
        assert running.info().default_strategy.options()["scorer"] == "components"
    monkeypatch.setattr(first_use, "make", lambda *_: pytest.fail("made a second time"))
    found = open_parts(model)
    assert first_use.with_calibrations(found, model, engine, "auto") is found


def test_a_known_model_is_converted_before_a_server_that_runs_it_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take a child as long as starting on a slow machine may."""
    library()
    converted: list[str] = []
    monkeypatch.setattr("inference_engine.models.convert_for_torch", lambda name, _: converted.append(name))
    for model in (ModelConfig(), ModelConfig(backend="native"), ModelConfig(device="mlx")):
        first_use.before_start(model, EngineConfig())
    assert converted == []
    for model in (ModelConfig(backend="torch"), ModelConfig(dtype="bfloat16")):
        first_use.before_start(model, EngineConfig())
    assert converted == ["smollm2-135m"] * 2
