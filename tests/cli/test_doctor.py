"""`kakeya doctor` finds what is wrong, says what to do, and passes what works."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from inference_engine.cli.doctor import CHECKS
from inference_engine.cli.main import main


def lines(printed: str) -> dict[str, tuple[str, str]]:
    """Level and text by check."""
    return {line[6:15].strip(): (line[:4].strip(), line[16:]) for line in printed.splitlines()}


def doctor(*arguments: str | Path) -> int:
    return main(("doctor", "--kv-bytes=64MiB", "--bind=127.0.0.1:0", *map(str, arguments)))


def test_what_works_passes_down_to_a_token(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--model", tiny_folder) == 0
    found = lines(capsys.readouterr().out)
    assert list(found) == list(CHECKS)
    levels = {name: level for name, (level, _) in found.items() if level != "ok"}
    # Nothing vouches for a folder that somebody made.
    assert levels == {"model": "warn"}
    assert "after 1, 2, 3" in found["self test"][1]


def test_a_model_that_is_not_here_fails_with_the_way_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor("--cache-dir", tmp_path) == 1
    found = lines(capsys.readouterr().out)
    assert {name: level for name, (level, _) in found.items() if level != "ok"} == {
        "family": "fail",
        "model": "fail",
        "tokenizer": "warn",
        "self test": "fail",
    }
    assert "kakeya models fetch smollm2-135m" in found["model"][1]


def test_a_port_in_use_is_a_warning(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        assert doctor("--model", tiny_folder, "--bind", bind) == 0
    assert lines(capsys.readouterr().out)["port"] == (
        "warn",
        f"{bind} is in use; a server may be running, or choose another --bind",
    )


def test_a_device_that_is_not_there_fails(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--model", tiny_folder, "--device", "no-such-device") == 1
    level, text = lines(capsys.readouterr().out)["device"]
    assert level == "fail"
    assert text.startswith("no-such-device cannot be used: ")


@pytest.mark.real_model
def test_the_real_model_passes_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor() == 0
    assert {level for level, _ in lines(capsys.readouterr().out).values()} == {"ok"}
