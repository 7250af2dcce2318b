"""`kakeya doctor` finds what is wrong, says what to do, and passes what works."""

from __future__ import annotations

import errno
import json
import shutil
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest

from inference_engine.cli.doctor import CHECKS
from inference_engine.cli.main import main
from inference_engine.errors import BackendError
from inference_engine.models import gguf_model
from inference_engine.native import build
from inference_engine.native.library import why_missing
from tests.models.tiny_gguf import tiny_model, write_gguf

pytestmark = pytest.mark.usefixtures("admitting_once")


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
    # Nothing vouches for a folder that was not downloaded. Where nothing compiles C++, there is no native library.
    assert levels == {"model": "warn"} | ({"native": "warn"} if why_missing() else {})
    assert "after 1, 2, 3" in found["self test"][1]


def test_a_model_that_is_not_here_fails_with_the_command_that_fetches_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor("--cache-dir", tmp_path) == 1
    found = lines(capsys.readouterr().out)
    assert {name: level for name, (level, _) in found.items() if level not in ("ok", "warn")} == {"model": "fail"}
    assert "kakeya models fetch smollm2-135m" in found["model"][1]


@pytest.mark.parametrize(
    ("rows", "tokens", "level", "says"),
    [
        (128, {}, "ok", "present"),
        (128, {"<extra>": 128}, "warn", "its ids reach 128, and the model has 128 rows"),
        (128, {"<|im_end|>": 128}, "fail", "eos_token is 128, and the model has 128 rows"),
    ],
)
def test_a_tokenizer_with_ids_that_are_no_rows_of_the_model_is_found(
    rows: int,
    tokens: dict[str, int],
    level: str,
    says: str,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for check in ("family", "self test"):
        monkeypatch.setitem(CHECKS, check, CHECKS["machine"])
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "tiny"))
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == rows
    specification = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = specification["model"]["vocab"]
    added = {token["content"]: token for token in specification["added_tokens"]}
    for text, at in tokens.items():
        vocabulary |= {f"filler{n}": n for n in range(max(vocabulary.values()) + 1, at)}
        added[text] = {**added["<|im_start|>"], **added.get(text, {}), "id": at, "content": text}
        vocabulary[text] = at
    specification["added_tokens"] = sorted(added.values(), key=lambda token: token["id"])
    (folder / "tokenizer.json").write_text(json.dumps(specification))
    assert doctor("--model", folder) == (1 if level == "fail" else 0)
    found, text = lines(capsys.readouterr().out)["tokenizer"]
    assert found == level
    assert says in text


@pytest.fixture
def of_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a GGUF file is made in this process, which has imported what that takes."""
    monkeypatch.setattr(gguf_model, "make_tokenizer_folder", gguf_model.make_tokenizer)
    for check in ("family", "self test"):
        monkeypatch.setitem(CHECKS, check, CHECKS["machine"])


@pytest.mark.usefixtures("of_a_tokenizer")
def test_what_is_wrong_with_the_templates_of_a_gguf_file_is_said_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = {f"tokenizer.chat_template.{name}": "{{ messages }}" for name in ("rag", "tool_use")}
    write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", values={"tokenizer.chat_template": None, **named})
    assert doctor("--model", tmp_path / "tiny.gguf", "--cache-dir", tmp_path / "cache") == 0
    level, text = lines(capsys.readouterr().out)["tokenizer"]
    assert level == "warn"
    assert f"{tmp_path / 'tiny.gguf'}: the chat templates are named rag, tool_use, and none is the default" in text


_EACH = "{% for message in messages %}"
UNFIT_TEMPLATES = {
    _EACH
    + "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}": "content as a list of parts",
    _EACH + "<|start|>{% endfor %}": "drops the words of messages[0]",
    _EACH: "Unexpected end of template",
    "{{ raise_exception('system first') }}": "system first",
}


@pytest.mark.usefixtures("of_a_tokenizer")
def test_a_template_that_cannot_render_what_a_user_says_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (template, says) in enumerate(UNFIT_TEMPLATES.items()):
        path = tmp_path / f"{number}.gguf"
        write_gguf(tiny_model("llama"), path, values={"tokenizer.chat_template": template})
        assert doctor("--model", path, "--cache-dir", tmp_path / "cache") == 0
        level, text = lines(capsys.readouterr().out)["tokenizer"]
        assert level == "warn"
        assert f"cannot use this model: {path}: the chat template" in text
        assert says in text


def test_doctor_and_show_say_that_a_tokenizer_cannot_be_loaded(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for check in ("family", "self test"):
        monkeypatch.setitem(CHECKS, check, CHECKS["machine"])
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "tiny"))
    (folder / "chat_template.json").write_text("{")
    assert doctor("--model", folder) == 0
    level, text = lines(capsys.readouterr().out)["tokenizer"]
    assert (level, "holds no tokenizer that can be loaded: Expecting property name" in text) == ("warn", True)
    assert main(["models", "show", str(folder)]) == 0
    assert "`kakeya chat` cannot use it" in capsys.readouterr().out


def test_a_family_that_is_not_served_fails_with_the_reason(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "tiny"))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0],
        "long_factor": [1.0],
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert doctor("--model", folder) == 1
    found = lines(capsys.readouterr().out)
    assert found["family"][0] == "fail"
    assert "short_factor of 1 numbers" in found["family"][1]


def test_cores_are_those_that_the_process_may_use_and_more_threads_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container with a quota of two."""
    monkeypatch.setattr("psutil.cpu_count", lambda: 64)
    monkeypatch.setattr("inference_engine.cli.doctor.usable_cores", lambda: 2)
    found = []
    for threads in ("0", "3"):
        assert doctor("--model", "nosuch", "--threads", threads) == 1
        found.append(lines(capsys.readouterr().out)["machine"])
    (level, text), (too_many, says) = found
    assert (level, too_many) == ("ok", "warn")
    assert ", 2 of 64 cores, " in text
    assert says.endswith("; threads is 3, more than the cores; set 0 for one per core")


def test_what_the_system_refuses_to_one_check_is_its_finding_and_the_others_go_on(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "No usable temporary directory found in ['/tmp']"
    monkeypatch.setitem(CHECKS, "machine", Mock(side_effect=FileNotFoundError(errno.ENOENT, reason)))
    assert doctor("--model", tiny_folder) == 1
    found = lines(capsys.readouterr().out)
    assert found["machine"] == ("fail", f"{reason}; name one with TMPDIR")
    assert found["self test"][0] == "ok"


def test_after_a_library_was_loaded_in_part_nothing_is_checked_that_needs_it(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    monkeypatch.setitem(CHECKS, "executor", Mock(side_effect=missing))
    monkeypatch.setitem(CHECKS, "family", Mock(side_effect=AssertionError("it is registered already")))
    assert doctor("--model", tiny_folder) == 1
    found = lines(capsys.readouterr().out)
    assert found["executor"][1].endswith("name one with TMPDIR; not checked without it: family, tokenizer, self test")
    assert {*CHECKS} - {*found} == {"family", "tokenizer", "self test"}


def test_a_port_in_use_is_a_warning(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        assert doctor("--model", tiny_folder, "--bind", bind) == 0
    assert lines(capsys.readouterr().out)["port"] == (
        "warn",
        f"{bind} is in use; a server may be running, or choose another --bind",
    )


def test_without_the_native_library_it_says_what_to_do(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "libkakeya.so")
    assert doctor("--model", tiny_folder) == 0
    level, text = lines(capsys.readouterr().out)["native"]
    assert level == "warn"
    assert text.startswith("none, torch computes on the CPU: ")
    assert text.endswith(build.REMEDY)


def test_a_native_library_of_other_sources_fails(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise BackendError("libkakeya.so was compiled from other sources")

    monkeypatch.setattr("inference_engine.native.library.load", refuse)
    assert doctor("--model", tiny_folder) == 1
    assert lines(capsys.readouterr().out)["native"] == ("fail", "libkakeya.so was compiled from other sources")
