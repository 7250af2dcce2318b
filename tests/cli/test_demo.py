"""`kakeya demo` holds its whole conversation, and its status says whether everything it claims was so."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from inference_engine.cli.demo import FACT, SCRIPT, next_commands
from inference_engine.cli.kill_demo import KILLED_TURN
from inference_engine.cli.kill_demo import SCRIPT as KILL_SCRIPT
from inference_engine.cli.main import main, parser
from inference_engine.config import ModelConfig

pytestmark = pytest.mark.usefixtures("warm_servers")

CLOSING = re.compile(r"prefilled its new tokens only: (\d+) in all, and (\d+) were read .* have prefilled (\d+)\.")


@pytest.fixture
def demo(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the command prints, in this process, which has loaded the libraries already; its server is another one.

    Neither has an error to report.
    """

    def run(*arguments: str) -> str:
        capfd.readouterr()
        status = main(("demo", *arguments))
        printed = capfd.readouterr()
        assert (status, printed.err) == (0, "")
        return printed.out

    return run


@pytest.mark.real_model
def test_the_demo_holds_a_conversation_with_the_real_model(demo: Callable[..., str]) -> None:
    printed = demo("--max-tokens=24")
    assert all(f"> {message}" in printed for message in SCRIPT)
    *_, asked = re.findall(r"> What is the secret word\?\n(.*)", printed)
    assert FACT in asked
    # The word is read from the question, the number from what the tool answered.
    assert re.search(
        r'> How many of tea .*\n.*"in_stock".*"tea".*\n[^>]*> in_stock → 12 of tea\n.*\b12\b', printed, re.DOTALL
    )
    prefilled, cached, whole = map(int, CLOSING.findall(printed)[0])
    assert prefilled + cached == whole > 2 * prefilled
    assert all(f"\n  {command}\n" in printed for command, _ in next_commands(ModelConfig().model, "kakeya"))


@pytest.mark.parametrize("model", [ModelConfig().model, "my models/one.gguf"])
def test_what_the_demo_ends_with_can_be_typed(model: str) -> None:
    """Each is taken by its own parser, and is about the model that was just seen."""
    commands = next_commands(model, "kakeya")
    assert len(commands) == 3
    for command, _ in commands:
        program, *words = shlex.split(command)
        given = parser().parse_args(words)
        assert program == "kakeya"
        assert (given.model or ModelConfig().model) == model


def test_a_window_forgets_and_the_demo_says_so(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--kv-bytes=64MiB", "--max-tokens=4", "--strategy=sink_window:window=32")
    assert main(("demo", "--model", str(tiny_folder), *arguments)) == 0
    assert re.search(r"^\d+ positions were evicted", capsys.readouterr().out, re.MULTILINE)


def test_a_conversation_that_cannot_go_on_fails_the_demo(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("demo", "--model", str(tiny_folder), "--kv-bytes=64MiB", "--max-tokens=100")) == 1
    printed = capsys.readouterr()
    assert "would exceed the session's limit of 512" in printed.err
    assert CLOSING.search(printed.out) is None


KILLED = r"\[process (\d+) killed by SIGKILL, process (\d+) started\]"


@pytest.mark.long
@pytest.mark.further
@pytest.mark.real_model
def test_an_answer_goes_on_after_its_server_was_killed(demo: Callable[..., str]) -> None:
    printed = demo("--kill")  # a shorter answer can be over before its server is killed
    (killed, started), *others = re.findall(KILLED, printed)
    assert killed != started and not others
    assert f"> {KILL_SCRIPT[KILLED_TURN]}" in printed
    assert "the same tokens as in a session that nothing happened to" in printed
