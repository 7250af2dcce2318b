"""What admission found is kept: a later start imports no transformers, and nothing that could change it is believed."""

from __future__ import annotations

import importlib.metadata
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from inference_engine.backends import read_model_spec as reading
from inference_engine.backends import twin, verdicts
from inference_engine.backends.native.forward import NativeForward
from inference_engine.backends.read_model_spec import read_model_spec
from inference_engine.backends.twin import text_generator
from inference_engine.backends.verdicts import BROUGHT, brought_key
from inference_engine.compose import admit, forget_admission, open_backend, try_out
from inference_engine.config import ModelConfig, has_mlx, resolve
from inference_engine.models import fetch
from inference_engine.models.folder import GGUF
from inference_engine.models.seam import Seam
from scripts.generate_verdicts import tried
from tests.admissions import admitted_once
from tests.further import further, off_metal
from tests.models.tiny_gguf import FAMILIES, tiny_model
from tests.processes import run
from tests.tiny_native import library

HEAVY = ("transformers", "triton", "sympy", "torch._dynamo", "accelerate", "huggingface_hub", "PIL")
SERVED = f"""
import sys
import inference_engine.cli.main, inference_engine.cli.serve
from inference_engine.compose import admit, open_parts
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.types import GenerateParams
import inference_engine.server.run
model = ModelConfig(model=sys.argv[1], cache_dir=sys.argv[2], device=sys.argv[3])
parts = open_parts(model, admit(model))
with parts.engine(EngineConfig(kv_bytes=2**24, segment_tokens=16, strategy="sink_window:window=16")) as engine:
    session = engine.create_session()
    engine.append(session.session_id, [1, 2, 3] * 200)
    events = list(engine.generate(session.session_id, GenerateParams(max_tokens=3)))
print(parts.forward.facts.backend, events[-1], sorted(set({HEAVY!r}) & sys.modules.keys()))
"""


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    return ModelConfig(model=str(tmp_path / "model"), cache_dir=str(tmp_path / "cache"))


def kept(model: ModelConfig, name: str) -> Path:
    (found,) = (model.cache_path / "admitted").glob(f"*.{name}.json")
    return found


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was tried, of `admitted` and `native`. A configuration's trial is counted each time and run once."""
    tried: list[str] = []

    def watch(name: str, module: ModuleType, function: str, own: Callable[..., object]) -> None:
        def watched(*arguments: object) -> object:
            tried.append(name)
            return own(*arguments)

        monkeypatch.setattr(module, function, watched)

    watch("admitted", twin, "admit_config", own=admitted_once)
    watch("native", reading, "read_model_spec", own=read_model_spec)
    return tried


@pytest.mark.parametrize(
    ("find_out", "device", "backend"),
    [(open_backend, "cpu", "native"), further(try_out, "cpu", "native"), off_metal(open_backend, "mlx", "mlx")],
)
def test_a_server_with_kept_verdicts_imports_no_transformers(
    model: ModelConfig, find_out: Callable[[ModelConfig], object], device: str, backend: str, tmp_path: Path
) -> None:
    """Neither what serves, which a forked process has imported already, nor what it does then."""
    if backend == "mlx" and not has_mlx():
        pytest.skip("the package mlx is not installed")
    library()
    find_out(replace(model, device=device))
    program = tmp_path / "served.py"
    program.write_text(SERVED, encoding="utf-8")

    done = run(str(program), model.model, model.cache_dir, device)

    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-1]

    assert said.startswith(f"{backend} ") and said.endswith(" []"), said


def test_a_second_start_gives_what_the_first_gave_and_tries_nothing(model: ModelConfig, trials: list[str]) -> None:
    library()
    first, second = ((admitted := admit(model), open_backend(model, admitted)) for _ in range(2))

    assert first[0] == second[0]
    assert first[1].facts == second[1].facts
    assert isinstance(first[1], NativeForward) and isinstance(second[1], NativeForward)
    assert first[1].spec == second[1].spec
    assert trials == ["admitted", "native"]


DAMAGE: dict[str, Callable[[str], str]] = {
    "cut off": lambda text: text[: len(text) // 2],
    "empty": lambda _: "",
    "another key": lambda text: json.dumps(json.loads(text) | {"key": "0" * 64}),
    "a field too few": lambda text: text.replace('"refused"', '"other"').replace('"rotaries"', '"other"'),
    "a text for a number": lambda text: text.replace("16,", '"16",', 1).replace("0.", '"0.', 1),
    "not a number": lambda text: text.replace("true", "NaN").replace("false", "NaN").replace("1.0", "NaN"),
    "no object": lambda _: "[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_verdict_is_tried_again(damage: str, model: ModelConfig, trials: list[str]) -> None:
    library()
    expected = admit(model)
    open_backend(model, expected)
    for name in ("admitted", "native"):
        path = kept(model, name)
        path.write_text(DAMAGE[damage](path.read_text()))
    trials.clear()

    found = admit(model)
    open_backend(model, found)

    assert found == expected
    assert trials == ["admitted", "native"]


def test_an_installed_package_whose_kernels_transformers_takes_leads_to_new_trials(
    model: ModelConfig, trials: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    admit(model)
    distribution = importlib.metadata.distribution

    def installed(name: str) -> Any:
        return SimpleNamespace(read_text=lambda _: name) if name == "mamba-ssm" else distribution(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "distribution", installed)
        verdicts._installed.cache_clear()
        admit(model)
    verdicts._installed.cache_clear()
    assert trials == ["admitted"] * 2


def test_a_changed_configuration_a_file_of_others_and_doctor_lead_to_new_trials(
    model: ModelConfig, trials: list[str]
) -> None:
    admit(model)
    kept(model, "admitted").chmod(0o666)
    admit(model)
    path = Path(model.model) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-4}))
    admit(model)
    forget_admission(model)
    admit(model)
    admit(model)

    assert trials == ["admitted"] * 4


def test_a_cache_that_cannot_be_written_only_costs_the_trial(
    model: ModelConfig, trials: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model.cache_path.write_text("a file")
    with caplog.at_level(logging.INFO):
        assert admit(model) == admit(model)
    assert "cannot be kept" in caplog.text
    assert trials == ["admitted"] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_are_moved_to_the_bit_as_the_models_own_rotation_moves_them(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twin, "strategy_kinds", dict)  # traits come before any is tried
    config, kind = text_generator(FAMILIES[family]())
    spec = read_model_spec(config, kind, twin.admit_config(config, kind).traits)
    seam = Seam(kind(config).eval())
    for name in spec.rotaries:
        keys = torch.randn(2, 4, spec.layers[0].head_dim)
        for sign in (1, -1):
            shifts = sign * torch.tensor([0, 1, 300, spec.trained_positions + 5])
            assert torch.equal(spec.rotate(keys, shifts, name), seam.rotate(keys, shifts, name))


@pytest.fixture(scope="module")
def known_gguf() -> Path:
    return fetch("smollm2-135m", resolve(ModelConfig).cache_path) / GGUF


@pytest.mark.real_model
def test_what_the_package_brings_is_what_admission_finds_now(known_gguf: Path) -> None:
    """Takes seconds: it is the trial that starts are spared, and the one thing that says that the file is not stale."""
    library()
    brought = json.loads(BROUGHT.read_bytes())["verdicts"].get(brought_key(known_gguf))
    assert brought is not None, "libraries, strategies or the reading of configurations have changed: make verdicts"
    found = tried(known_gguf)
    # What rounding decides, which processors do in ways of their own.
    for each in (brought, found):
        differences = dict(each["admitted"]["differences"])
        assert all(difference <= twin.TOLERANCE for difference in differences.values())
        each["admitted"]["differences"] = sorted(differences)
    angles = [each["native"]["rotaries"]["default"].pop("angles") for each in (brought, found)]
    assert angles[0] == pytest.approx(angles[1], rel=1e-6), "make verdicts"
    assert brought == found, "make verdicts"


@pytest.mark.real_model
def test_the_first_start_of_a_known_model_imports_no_transformers(known_gguf: Path, tmp_path: Path) -> None:
    library()
    program = tmp_path / "served.py"
    program.write_text(SERVED, encoding="utf-8")

    done = run(str(program), str(known_gguf), str(tmp_path / "cache"), "cpu")

    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-1]
    assert said.startswith("native ") and said.endswith(" []"), said
