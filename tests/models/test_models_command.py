"""`kakeya models` prints facts, and one line and a status when something is wrong."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from inference_engine.cli import models as command
from tests.further import further_test
from tests.models.odd_models import ODD
from tests.models.tiny_gguf import tiny_model, write_gguf


def kakeya_models(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="kakeya")
    command.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["models", *arguments])
    status: int = args.run(args)
    return status


def unwrapped(capsys: pytest.CaptureFixture[str]) -> str:
    """What a table has printed, without its lines."""
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_show_prints_what_a_token_costs(folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kakeya_models("show", str(folder), "--cache-dir", str(cache)) == 0
    printed = capsys.readouterr().out
    # K and V of 2 layers, 2 heads of 8 values, 4 bytes each.
    assert "128 bytes in 16 bits, 256 in float32" in printed
    assert "these files cannot be verified" in printed


@further_test
def test_show_compares_the_tokenizer_of_a_file_with_the_file_and_names_the_ends_of_a_turn(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spelled = {0: ("<｜begin｜>", 3), 1: ("<｜end｜>", 3)}
    write_gguf(tiny_model("llama"), tmp_path / "m.gguf", spelled=spelled, ids={"eot": 2})
    assert kakeya_models("show", str(tmp_path / "m.gguf"), "--cache-dir", str(cache)) == 0
    assert "rows of the model; ends of a turn, by the files: 1, 2" in unwrapped(capsys)
    write_gguf(tiny_model("llama"), tmp_path / "n.gguf", spelled={5: ("<｜end｜>", 3), 6: ("<｜end｜>", 3)})
    assert kakeya_models("show", str(tmp_path / "n.gguf"), "--cache-dir", str(cache)) == 0
    assert "the tokens 5 and 6 are both" in unwrapped(capsys)


def test_show_says_what_its_files_contradict(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ODD["tied, another head"].make(tmp_path / "model")
    assert kakeya_models("show", str(tmp_path / "model"), "--cache-dir", str(cache)) == 0
    printed = capsys.readouterr().out
    assert "remarks" in printed and "lm_head.weight is another matrix than" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "smollm2-135m"), "kakeya models fetch smollm2-135m"),
        (("show", "no-such-model"), "no-such-model"),
        (("fetch", "no-such-model"), "known are"),
    ],
)
def test_a_model_at_fault_is_one_line_and_status_1(
    cache: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert kakeya_models(*arguments, "--cache-dir", str(cache)) == 1
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1
