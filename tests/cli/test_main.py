"""What all commands have in common: quick help, one line for an error, an exit status that says whose turn it is."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from inference_engine.cli import doctor, shells
from inference_engine.cli import lazy_commands as late
from inference_engine.cli.connection import add_connection, in_flags
from inference_engine.cli.main import main, parser
from inference_engine.config import child_environment
from tests.further import further_test
from tests.processes import run

ROOT = Path(__file__).resolve().parents[2]
ABOUT_TLS = re.compile(r'f?"([^"\n]*(?:\btls=T|\bout tls\b|\bin tls\b)[^"\n]*)"')


def status_of(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


def all_commands(parser: argparse.ArgumentParser) -> Iterator[late.LateParser]:
    assert isinstance(parser, late.LateParser)
    parser.complete()
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from all_commands(below)


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    commands = {one.prog: one for one in all_commands(parser())}
    assert {"kakeya serve", "kakeya models list", "kakeya train drafter", "kakeya bench hostile"} <= set(commands)
    for prog, command in commands.items():
        command.print_help()
        assert f"usage: {prog} " in capsys.readouterr().out


def test_what_needs_a_clone_finds_it_as_an_installed_command_and_says_so_elsewhere(tmp_path: Path) -> None:
    """A command has its own folder among those that are searched, and not the current one."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in ("inference_engine", "kv_cache_proposer", "laboratory"):
        (packages / name).symlink_to(ROOT / name)
    found = [path for path in sys.path if path.endswith("-packages")]
    paths = os.pathsep.join([str(packages), str(ROOT / "sdks/python/src"), *found])
    # It is found and not imported: that takes long. Without `site`, which in an installation for development has the
    # clone among the folders that are searched.
    program = """
import sys
from importlib.util import find_spec
from inference_engine.cli.main import main
from laboratory.bench import experiments
experiments.import_module = lambda name: sys.exit(find_spec(name).origin)
main(["bench", "hostile", "--help"])
"""

    def said() -> str:
        done = subprocess.run(
            [sys.executable, "-S", "-P", "-c", program],
            cwd=tmp_path,
            env=child_environment(PYTHONPATH=paths),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout) == (1, "")
        return done.stderr

    assert said() == f"{ROOT / 'tests/hostile/bench.py'}\n"
    (packages / "laboratory").unlink()
    shutil.copytree(ROOT / "laboratory", packages / "laboratory")
    elsewhere = said()
    assert elsewhere.startswith("kakeya bench hostile: this benchmark's attacks are those of the tests: run it in a")
    assert elsewhere.count("\n") == 1


def test_a_long_help_begins_with_what_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    """And names nothing of the code."""
    assert status_of("audit", "--help") == 0
    printed = capsys.readouterr().out
    assert "Check that a server's tokens depend on the history alone.\n\n    in one piece" in printed
    assert "NEAR_TIE" not in printed


def test_reading_the_command_line_loads_neither_torch_nor_grpc() -> None:
    program = (
        "import sys; from inference_engine.cli.main import parser; parser().parse_args(['serve']);"
        "print({'torch', 'transformers', 'grpc', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    "arguments", [("--no-such-flag",), ("no-such-command",), ("serve", "--no-such-flag"), ("chat", "--seed", "x")]
)
def test_wrong_usage_is_status_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(*arguments) == 2
    assert "usage: kakeya" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("serv", "there is no 'serv'; did you mean serve?"),
        ("models lst", "there is no 'lst'; did you mean list?"),
        ("evaluate nedle", "there is no 'nedle'; did you mean needle?"),
        ("serve --strateg full", "unrecognized arguments: --strateg full; did you mean --strategy?"),
        ("models show m --verif", "unrecognized arguments: --verif; did you mean --verify?"),
        ("completion tcsh", "there is no 'tcsh'; choose from bash, zsh, fish"),
    ],
)
def test_what_is_nearly_right_is_refused_with_what_was_meant(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option that is abbreviated, too: a later version might have two that begin so."""
    assert status_of(*arguments.split()) == 2
    assert said in capsys.readouterr().err


def test_help_of_a_command_is_asked_for_either_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("help", "serve") == status_of("serve", "--help") == 0
    printed = capsys.readouterr().out
    first, second = printed[: len(printed) // 2], printed[len(printed) // 2 :]
    assert first == second
    assert first.index("kakeya serve --model FILE.gguf") < first.index("usual:") < first.index("--strategy")
    assert first.index("--strategy") < first.index("model:") < first.index("--numerics")


SHELLS = {
    "bash": """
eval "$(kakeya completion bash)"
COMP_WORDS=(kakeya "$@"); COMP_CWORD=$#; _kakeya_completion kakeya
printf '%s\\n' "${COMPREPLY[@]}" """,
    "zsh": """
compdef() { :; }; compadd() { print -l -- $completions; }
_describe() { print -l -- ${completions_with_descriptions%%:*}; }
_path_files() { print files; }; eval "$(kakeya completion zsh)"
words=(kakeya "$@"); CURRENT=$#words; _kakeya_completion; true""",
    "fish": """
kakeya completion fish | source; complete -C (string join " " kakeya $argv) | string split -f1 \\t""",
}


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_completes_commands_options_and_values(
    shell: str, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not installed")
    kakeya = tmp_path / "kakeya"
    kakeya.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m inference_engine.cli.main "$@"\n')
    kakeya.chmod(0o755)
    environment = child_environment(PATH=os.pathsep.join((str(tmp_path), child_environment()["PATH"])))
    for words, expected in (
        (["se"], {"serve", "sessions"}),
        (["models", ""], {"list", "fetch", "show"}),
        (["serve", "--tls-c"], {"--tls-cert-file", "--tls-client-ca-file"}),
        (["completion", "z"], {"zsh"}),
        (["evaluate", "need"], {"needle"}),
    ):
        with subtests.test(" ".join(words)):
            given = ["-c", SHELLS[shell], *([] if shell == "fish" else [shell]), *words]
            done = subprocess.run(
                [program, *given], env=environment, capture_output=True, text=True, timeout=60, check=True
            )
            assert set(done.stdout.split()) == expected, done.stderr


def test_a_value_that_is_a_file_is_completed_by_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    top = parser()
    assert shells.items(top, ["serve", "--config"], "se") == [("se", "", "file")]
    assert [text for text, *_ in shells.items(top, ["gateway"], "--tool-format=her")] == ["--tool-format=hermes"]
    assert shells.items(top, ["serve", "--kv-bytes"], "") == []


@pytest.mark.parametrize("command", ["chat", "demo"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("0", "an answer has at least 1 token, got 0"),
        ("-3", "an answer has at least 1 token, got -3"),
        ("many", "must be a whole number of tokens, got 'many'"),
    ],
)
def test_an_answer_of_no_length_is_refused_with_the_command_line(
    command: str, given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model is fetched and loaded for what is left."""
    assert status_of(command, "--model", "no-such-folder", f"--max-tokens={given}") == 2
    assert f"kakeya {command}: error: argument --max-tokens: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("serve", "--dtype", "float16"),
            "kakeya serve: dtype must be float32 or bfloat16, or float16 with device=mlx",
        ),
        (("serve", "--kv-bytes", "lots"), "'lots' is not a whole number or a size such as 512MiB"),
        (("serve", "--kv-bytes", "-5"), "kv_bytes must be at least 0, got -5"),
        (("serve", "--max-running=-1"), "max_running must be at least 1, got -1"),
        (("serve", "--kv-bytes=4gb"), "'4gb' is not a whole number or a size such as 512MiB"),
        (("serve", "--bind=127.0.0.1:0", "--strategy", "sink_windw"), "did you mean sink_window?"),
        (("serve", "--kv-bytes=-5MiB"), "'-5MiB' is not a whole number or a size such as 512MiB"),
        # With more than a system allows, a library ends the process.
        (("serve", "--threads", "100000"), "threads must be at most 1024, got 100000"),
        (("serve", "--determinism", "on"), "determinism must be off or batch-invariant, got 'on'"),
        (("serve", "--mode", "exact"), "mode=exact: the setting is determinism now, off or batch-invariant"),
        (
            ("serve", "--mode", "fixed-shape", "--determinism", "off"),
            "mode=fixed-shape is determinism=batch-invariant now, and determinism is off; leave out mode",
        ),
        (("serve", "--model="), "model must be a name, a folder or a file, got an empty string"),
        (("serve", "--config", "no-such.toml"), "cannot read the settings file no-such.toml"),
        (("serve", "--bind=127.0.0.1:0", "--strategy", "sink_window:windows=1"), "has no option 'windows'; it has "),
        (
            ("serve", "--hibernate", "always"),
            "hibernate=always: without effect, because sessions are kept in a state_dir",
        ),
        (("serve", "--bind=127.0.0.1:0", "--strategy", "layer_window"), "`kakeya evaluate backstop` finds those that"),
        (("serve", "--tls-cert-file", "cert.pem"), "only one of tls_cert_file and tls_key_file is set"),
        (("chat", "--target", "far.example:1", "--api-key-file", "no-such-file"), "cannot read the key"),
        (
            ("chat", "--target", "far.example:1", "--model=m", "--strategy=full", "--kv-bytes=1GiB", "--device=cuda"),
            "--device, --kv-bytes: without effect with --target, whose server has its own settings; leave out either",
        ),
        (("audit", "--target", "far.example:1", "--mode=fixed-shape"), "--mode: without effect with --target"),
        (("bench", "serve", "--target", "far.example:1", "--max-batch=1"), "--max-batch: without effect with --target"),
        (("demo", "--model", "no-such-model"), "neither a known model (smollm2-135m"),
    ],
)
def test_a_fault_is_one_line_and_status_1(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.startswith(f"kakeya {arguments[0]}: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_what_the_sdk_says_about_tls_is_said_in_flags(subtests: pytest.Subtests) -> None:
    taken = argparse.ArgumentParser()
    add_connection(taken)
    flags = set(taken.format_help().split())
    sources = sorted((ROOT / "sdks/python/src/kakeya").glob("_*.py"))
    remedies = {said for path in sources for said in ABOUT_TLS.findall(path.read_text(encoding="utf-8"))}
    assert len(remedies) >= 5
    for remedy in sorted(remedies):
        with subtests.test(remedy):
            said = in_flags(remedy)
            assert "tls=" not in said and " tls" not in said
            assert (named := set(re.findall(r"--[a-z-]+", said))) and named <= flags


def test_an_interrupt_is_status_130_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: argparse.Namespace) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert main(("doctor",)) == 130
    assert capsys.readouterr() == ("", "")


def in_a_process_of_its_own(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


@further_test
def test_everything_that_serves_is_imported_without_the_laboratory(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    # Where it is forked, libraries are there, which take most of the time; what is ours is imported anew.
    program.write_text("""
import pkgutil, sys
from importlib import import_module
for name in [*sys.modules]:
    if name.split(".")[0] in ("inference_engine", "kv_cache_proposer", "laboratory"):
        del sys.modules[name]
import inference_engine, kv_cache_proposer
for package in (inference_engine, kv_cache_proposer):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if ".triton" not in module.name:
            import_module(module.name)
print({"inference_engine.cli.serve", "inference_engine.compose"} <= set(sys.modules))
print([name for name in sys.modules if name.startswith("laboratory")])
""")
    done = run(str(program))
    assert (done.returncode, done.stdout) == (0, "True\n[]\n"), done.stderr


def test_other_commands_do_not_load_the_laboratory() -> None:
    program = """
import sys
from inference_engine.cli.main import main
for words in (["--help"], ["serve", "--help"], ["models", "list"]):
    try:
        main(words)
    except SystemExit:
        pass
print([name for name in sys.modules if name.startswith("laboratory")])
"""
    assert in_a_process_of_its_own(program).endswith("\n[]\n")


@pytest.mark.parametrize("command", late.COMMANDS)
def test_without_the_laboratory_its_commands_say_so_in_one_sentence(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(late, "find_spec", lambda _: None)
    assert status_of(command) == 1
    said = f"kakeya {command}: the laboratory, which this command is part of, is not installed\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("columns", [40, 80])
def test_no_line_of_the_first_help_is_wider_than_the_screen(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        main(["--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= columns
