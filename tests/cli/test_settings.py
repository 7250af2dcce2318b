"""Every setting has a flag; a flag beats the environment, which beats the file, which beats the default."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from inference_engine.cli.main import parser
from inference_engine.cli.settings import HELP, Config, as_flags, settings
from inference_engine.config import (
    OLD_NAMES,
    EngineConfig,
    ModelConfig,
    ServerConfig,
    _say_once,
    misspelled_variables,
    resolve,
)
from inference_engine.errors import ConfigError

KINDS = (ModelConfig, EngineConfig, ServerConfig)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kakeya.toml"
    path.write_text('bind = "127.0.0.1:3"\nkv_bytes = "3MiB"\nthreads = 3\n')
    return path


def test_every_setting_is_a_flag_of_serve_and_nothing_else_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["serve", "--help"])
    shown = capsys.readouterr().out
    names = {field.name for kind in KINDS for field in fields(kind)}
    assert {name for name in names if f"--{name.replace('_', '-')} " not in shown} == set()
    assert set(HELP) <= names


def test_flags_beat_the_environment_which_beats_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_BIND", "127.0.0.1:2")
    monkeypatch.setenv("KAKEYA_KV_BYTES", "2MiB")
    args = parser().parse_args(["serve", "--config", str(file), "--bind", "127.0.0.1:1"])
    assert settings(args, ServerConfig).bind == "127.0.0.1:1"
    assert settings(args, EngineConfig).kv_bytes == 2 * 2**20
    assert settings(args, ModelConfig).threads == 3
    assert settings(args, ModelConfig).dtype == "float32"


def test_a_misspelled_setting_is_shown_with_the_one_it_reads_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kakeya.toml"
    path.write_text('modle = "x"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"unknown settings modle \(did you mean model\?\)$"):
        resolve(ModelConfig, file=str(path))
    path.write_text('[server]\nkv_bytes = "1GiB"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"kakeya.toml: it has tables \(\[server\]\); the file is flat"):
        resolve(ModelConfig, file=str(path))
    for name in ("KAKEYA_MODLE", "KAKEYA_MODEL", "KAKEYA_CONFIG", "KAKEYA_PYTHON", "KAKEYA_TARGET", "KAKEYA_TOKENIZER"):
        monkeypatch.setenv(name, "x")
    assert misspelled_variables() == ("KAKEYA_MODLE (did you mean KAKEYA_MODEL?)",)


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(model="some folder", determinism="batch-invariant", threads=3, cache_dir="~/elsewhere"),
        EngineConfig(kv_bytes=12345, session_idle_ttl_seconds=0.25),
        ServerConfig(bind="[::1]:0", metrics_bind="127.0.0.1:0", drain_seconds=1.5),
    ],
    ids=lambda config: type(config).__name__,
)
def test_settings_written_as_flags_are_read_back_whatever_the_environment_says(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    for field in fields(config):
        monkeypatch.setenv(f"KAKEYA_{field.name.upper()}", "nonsense")
    args = parser().parse_args(["serve", *as_flags(config)])
    assert settings(args, type(config)) == config


def test_old_names_say_what_they_are_now_and_keep_their_meaning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    path = tmp_path / "kakeya.toml"
    for (name, value), (now, meant) in OLD_NAMES.items():
        for source in ("flag", "variable", "file"):
            with subtests.test(f"{name}={value}", source=source), monkeypatch.context() as patch:
                _say_once.cache_clear()
                caplog.clear()
                path.write_text(f'{name} = "{value}"\n' if source == "file" else "", encoding="utf-8")
                typed = ["serve", "--config", str(path)]
                if source == "flag":
                    typed.append(f"--{name}={value}")
                if source == "variable":
                    patch.setenv(f"KAKEYA_{name.upper()}", value)
                args = parser().parse_args(typed)
                expected: Any = {now: meant}
                for _ in range(2):  # said once
                    assert settings(args, ModelConfig) == ModelConfig(**expected)
                assert caplog.messages == [f"{name}={value} is called {now}={meant} now, and read until 0.2.0 only"]


OUT_OF_BOUNDS: list[tuple[type[Config], str, object, str]] = [
    (EngineConfig, "kv_bytes", -5, "kv_bytes must be at least 0, got -5"),
    (EngineConfig, "kv_bytes", 2**60, f"kv_bytes must be at most 1024TiB, got {2**60}"),
    (EngineConfig, "max_running", 2**60, f"max_running must be at most 1125899906842624, got {2**60}"),
    (EngineConfig, "session_idle_ttl_seconds", 0.0, "session_idle_ttl_seconds must be at least 0.001, got 0.0"),
    (EngineConfig, "stall_seconds", 1e9, "stall_seconds must be at most 315360000, got 1000000000.0"),
    (EngineConfig, "stall_seconds", float("nan"), "stall_seconds must be at least 2, got nan"),
    (ServerConfig, "max_message_bytes", 3, "max_message_bytes must be at least 1KiB, got 3"),
]


def test_bounds_are_said_as_they_would_be_typed(subtests: pytest.Subtests) -> None:
    for kind, name, value, said in OUT_OF_BOUNDS:
        with subtests.test(said):
            with pytest.raises(ConfigError) as refused:
                resolve(kind, {name: value})
            assert str(refused.value) == said


YES_AND_NO: list[tuple[object, bool]] = [("true", True), ("False", False), (True, True), (False, False)]


def test_yes_and_no_are_true_and_false_as_text_and_as_they_are(subtests: pytest.Subtests) -> None:
    for given, meant in YES_AND_NO:
        with subtests.test(str(given)):
            assert resolve(ServerConfig, {"allow_plaintext": given}).allow_plaintext is meant
