"""`kakeya evaluate` leaves a record that its own command makes again, and nothing where a run is refused or void."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from inference_engine.cli.main import main
from inference_engine.models import check_model, weights_digest
from inference_engine.models.checksums import sha256_of
from kv_cache_proposer.f_theta.codec_files import TENSORS, save_codec
from kv_cache_proposer.stored import CalibrationManifest
from laboratory.evaluation import fidelity
from laboratory.evaluation.record import load
from tests.further import further_test
from tests.tiny import LATENT_BYTES, tiny_latent

SMALL = ("--segment-tokens=16", "--page-tokens=4", "--kv-bytes=64MiB", "--threads=1")
NEEDLE = ("--kinds", "looped", "--trials=2", "--control=sink_window:sink=4,window=16")


def needle(folder: Path, results: Path, *typed: str) -> int:
    common = ("--model", str(folder), "--results", str(results), *SMALL, *NEEDLE)
    return main(("evaluate", "needle", *common, *typed))


def only_record(results: Path) -> dict[str, Any]:
    (path,) = results.glob("*/*/record.json")
    return load(path)


def test_a_run_leaves_a_record_and_a_plot(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert needle(tiny_folder, tmp_path, "--strategies", "sink_window:window=64", "--lengths", "337") == 0
    found = only_record(tmp_path)
    assert found["experiment"] == "needle_tiny"
    assert "sink_window:sink=4,window=64: single, looped at 337" in found["values"]
    assert found["config"]["segment_tokens"] == 16
    assert list(tmp_path.glob("needle_tiny/*/recall_single_looped.svg"))
    printed = capsys.readouterr().out.splitlines()
    assert "full: single, looped at 337: 0 of 2" in printed
    assert printed[-1].endswith("record.json")


def test_a_run_says_what_was_found_and_not_that_each_generate_ended(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # as in a process of its own
    level = logging.root.level
    try:
        assert needle(tiny_folder, tmp_path, "--strategies", "sink_window:window=64", "--lengths", "337") == 0
    finally:
        logging.root.setLevel(level)
    said = capsys.readouterr().err
    assert "laboratory.evaluation.needle: single, looped at 337" in said
    assert "a Generate ended" not in said


@further_test
def test_the_recorded_command_runs_and_gives_the_same_values(tiny_folder: Path, tmp_path: Path) -> None:
    assert needle(tiny_folder, tmp_path / "first", "--lengths", "337", "--seed=5", "--name=again") == 0
    first = only_record(tmp_path / "first")
    words = first["command"].split()
    assert words[:5] == ["kakeya", "evaluate", "needle", "--model", "tiny"]
    assert str(tmp_path) not in first["command"]
    typed = [str(tiny_folder) if word == "tiny" else word for word in words[1:]]
    assert main((*typed, "--results", str(tmp_path / "second"))) == 0
    second = only_record(tmp_path / "second")
    assert second["experiment"] == "again"
    assert second["values"] == first["values"]
    assert second["config"] == first["config"]


def save_tiny_latent(model: Path, folder: Path) -> Path:
    kept = folder / "latent"
    manifest = CalibrationManifest(
        target_digest=weights_digest(check_model(str(model), cache=folder)),
        calibration_tokens=2048,
        recipe={"basis": "fitted", "tokens": {"files": 2048}},
    )
    save_codec(tiny_latent(), kept, manifest)
    return kept


@further_test
def test_a_record_says_which_latent_it_measured(tiny_folder: Path, tmp_path: Path) -> None:
    kept = save_tiny_latent(tiny_folder, tmp_path)
    assert needle(tiny_folder, tmp_path / "with", "--lengths=337", "--latent", str(kept)) == 0
    found = only_record(tmp_path / "with")["config"]["latent"]
    assert found == {
        "tensors_sha256": sha256_of(kept / TENSORS),
        "bytes_per_token": LATENT_BYTES,
        "calibration_tokens": 2048,
        "seeds": {},
        "recipe": {"basis": "fitted"},
    }
    assert needle(tiny_folder, tmp_path / "without", "--lengths=337", "--latent=none") == 0
    assert "latent" not in only_record(tmp_path / "without")["config"]


@further_test
def test_a_length_that_is_done_is_on_disk_whatever_becomes_of_the_next(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is taken away gives no notice."""
    measure = fidelity.measure

    def measured(engine: Any, strategies: Any, passages: Any, **options: Any) -> Any:
        if len(passages[0].prefix) == 150:
            raise SystemExit("the machine is gone")
        return measure(engine, strategies, passages, **options)

    monkeypatch.setattr(fidelity, "measure", measured)
    kept = save_tiny_latent(tiny_folder, tmp_path)
    words = ("--lengths", "130", "150", "--kinds=code", "--rates=120", "--window=16", "--count=5", "--texts=1")
    few = ("--trials=0", "--families=window", "--latent", str(kept), "--results", str(tmp_path / "results"))
    with pytest.raises(SystemExit, match="the machine is gone"):
        main(("evaluate", "restoration", "--model", str(tiny_folder), *SMALL, *words, *few))
    found = only_record(tmp_path / "results")
    assert found["config"]["lengths"] == [130]
    assert [(line["length"], line["reason"]) for line in found["tables"]["left out"]] == [
        (150, "ended before they were done")
    ]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("--control=full",), "control: must be a sink_window, got full"),
        (("--control=sink_window:window=330", "--lengths=337"), "nothing must miss"),
        (("--lengths=600",), "limit_tokens: must be at least 1 and at most 512 with full"),
        (("--model=no-such-model",), "neither a known model"),
        (("--commit=later",), "--commit must be a commit's hash"),
        (("--name=a/b",), "--name must be the name of a folder"),
    ],
)
def test_what_is_refused_or_void_is_one_line_and_leaves_no_record(
    tiny_folder: Path, tmp_path: Path, typed: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert needle(tiny_folder, tmp_path, *typed) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("kakeya evaluate: ")
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert not list(tmp_path.iterdir())


def test_report_makes_the_index(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert needle(tiny_folder, tmp_path, "--lengths", "337") == 0
    assert main(("evaluate", "report", "--results", str(tmp_path))) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "README.md")
    assert "needle_tiny/" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_report_shows_records_and_leaves_the_index(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert needle(tiny_folder, tmp_path, "--lengths", "337") == 0
    capsys.readouterr()
    for named in (("needle_tiny",), ()):
        assert main(("evaluate", "report", "--results", str(tmp_path), "--show", *named)) == 0
        assert "kakeya evaluate needle" in capsys.readouterr().out
    assert not (tmp_path / "README.md").exists()
    assert main(("evaluate", "report", "--results", str(tmp_path), "--show", "cost")) == 1
    said = capsys.readouterr().err
    assert "no record of an experiment 'cost'" in said and "a list of all 1 to" in said


def test_report_refuses_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("evaluate", "report", "--results", str(tmp_path / "nowhere"))) == 1
    assert "no such folder" in capsys.readouterr().err
