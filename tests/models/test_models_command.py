"""`kakeya models` prints facts, and one line and a status when something is wrong."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import pytest
from rich.console import Console

from inference_engine.cli import models as command
from inference_engine.config import ModelConfig
from tests.further import further_test
from tests.models.odd_models import ODD, saved
from tests.models.tiny_gguf import tiny_model, write_gguf
from tests.tiny_folder import tiny_tokenizer


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
    spelled = {0: ("<｜begin｜>", 3), 1: ("<｜end｜>", 3), 3: ("<said>", 3)}
    template = "{% for message in messages %}{{ message['content'] }}<said>{% endfor %}"
    write_gguf(
        tiny_model("llama"),
        tmp_path / "m.gguf",
        spelled=spelled,
        ids={"eot": 2},
        values={"tokenizer.chat_template": template},
    )
    assert kakeya_models("show", str(tmp_path / "m.gguf"), "--cache-dir", str(cache)) == 0
    assert "rows of the model; ends of a turn, by the files: 1, 2, 3" in unwrapped(capsys)
    write_gguf(tiny_model("llama"), tmp_path / "n.gguf", spelled={5: ("<｜end｜>", 3), 6: ("<｜end｜>", 3)})
    assert kakeya_models("show", str(tmp_path / "n.gguf"), "--cache-dir", str(cache)) == 0
    assert "the tokens 5 and 6 are both" in unwrapped(capsys)


def test_show_says_what_its_files_contradict(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ODD["tied, another head"].make(tmp_path / "model")
    assert kakeya_models("show", str(tmp_path / "model"), "--cache-dir", str(cache)) == 0
    printed = capsys.readouterr().out
    assert "remarks" in printed and "lm_head.weight is another matrix than" in printed


def test_list_says_before_a_download_what_to_expect_and_reads_on_a_narrow_screen(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hub/models--org--small/snapshots/abc").mkdir(parents=True)
    monkeypatch.setattr(command, "hub_cache", lambda: tmp_path / "hub")
    monkeypatch.setattr(command, "reading_speed", lambda: 9_836_243_200.0)
    monkeypatch.setenv("COLUMNS", "40")
    assert kakeya_models("list", "--cache-dir", str(cache)) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 40
    said = " ".join(printed.split())
    assert "smollm2-135m: SmolLM2 135M Instruct; Apache-2.0 here: no downloads 92.9 MB; serves in about 398.4" in said
    assert "decodes at most about 100 tokens/s" in said
    assert "org/small: of the hub, here" in said


def test_memory_is_read_at_some_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "READ_BYTES", 4096)
    assert command.reading_speed.__wrapped__() > 0


def test_what_is_here_is_not_fetched_and_what_is_not_is_announced(
    folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def fetch(name: str, *_: object, **_more: object) -> str:
        fetched.append(name)
        return f"{name} is ready"

    monkeypatch.setattr(command, "fetch_named", fetch)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    console = Console(file=io.StringIO(), width=200)
    for name, is_fetched in ((str(folder), False), ("org/name", True), ("smollm2-135m", True)):
        config = ModelConfig(model=name, cache_dir=str(cache))
        assert command.fetched(config, console) == (f"{name} is ready" if is_fetched else f"{name} is here")
    assert fetched == ["org/name", "smollm2-135m"]
    assert isinstance(console.file, io.StringIO) and "downloads 92.9 MB" in console.file.getvalue()


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


DAMAGED = (
    ("tokenizer_config.json", "{", "tokenizer_config.json: not readable as JSON: Expecting"),
    ("tokenizer_config.json", "[]", "tokenizer_config.json: expected a JSON object, got list; get the file again"),
    ("generation_config.json", "{", "generation_config.json: not readable as JSON"),
    *(
        ("generation_config.json", f'{{"eos_token_id": {odd}}}', "eos_token_id is")
        for odd in ('"</s>"', "1e30", "[[1]]", "true")
    ),
    ("special_tokens_map.json", "{", "special_tokens_map.json: not readable as JSON"),
    ("special_tokens_map.json", '{"eos_token": "<none>"}', "as an end of a turn is no token of it: '<none>'"),
    ("chat_template.jinja", "{% for %}", "cannot use it"),
)


def test_show_says_what_of_a_tokenizer_is_damaged(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    subtests: pytest.Subtests,
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    saved(folder := tmp_path / "folder", "llama")
    (beside := tmp_path / "beside").mkdir()
    write_gguf(tiny_model("llama"), beside / "m.gguf")
    for place in (folder, beside):
        tiny_tokenizer().save_pretrained(place)
        for name, text, said in DAMAGED:
            path = place / name
            before = path.read_text() if path.exists() else None
            with subtests.test(place=place.name, name=name, text=text):
                path.write_text(text)
                kakeya_models("show", str(place), "--cache-dir", str(cache))
                printed = capsys.readouterr()
                assert said in " ".join((printed.out.replace("│", " ") + printed.err).split())
            if before is None:
                path.unlink()
            else:
                path.write_text(before)
