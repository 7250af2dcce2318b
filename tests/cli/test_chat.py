"""`kakeya chat` with messages from a pipe, with a server of its own and with one that runs already."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import NoReturn
from unittest.mock import Mock

import pytest

from inference_engine.cli import auto_calibration as first_use
from inference_engine.cli import chat as chat_command
from inference_engine.cli import demo as demo_command
from inference_engine.cli import kill_demo
from inference_engine.cli.main import main
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.errors import ConfigError
from kakeya import Client
from tests.processes import Server
from tests.tiny_folder import END, START, save_tiny_chat_model, save_tiny_model

pytestmark = pytest.mark.usefixtures("warm_servers")

COST = re.compile(
    r"[\d.]+ s · first token [\d.]+ s · (\d+) tokens? in, (\d+) out \((\w+)\) · history (\d+) · .+ held · (\d+) evicted"
)


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    return Chat(monkeypatch, capsys)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Chat:
    """The command in this process, which has loaded the libraries already."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(
        self,
        typed: str,
        *arguments: str | Path,
        where: type[io.StringIO] = io.StringIO,
        command: str = "chat",
    ) -> tuple[int, str, str]:
        """Status, output and errors. where: it is typed; by default into a pipe."""
        self._monkeypatch.setattr("sys.stdin", where(typed))
        status = main((command, *map(str, arguments)))
        printed = self._capsys.readouterr()
        return status, printed.out, printed.err


def test_run_starts_a_model_by_its_folder_and_one_without_a_template_goes_on_with_a_text(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    base = copytree(tiny_folder, tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    for folder, has_template in ((tiny_folder, True), (base, False)):
        monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nAgain\n"))
        assert main(("run", str(folder), "--kv-bytes=64MiB", "--max-tokens=3")) == 0
        printed = capfd.readouterr()
        assert f"{folder} is here" in printed.err
        lengths = [int(appended) for appended, *_ in COST.findall(printed.out)]
        assert (lengths == [5, 5]) is not has_template, "as it was typed, with nothing around it"


def test_a_misspelled_model_is_not_said_to_be_here(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(("run", "smolm2-135m")) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("kakeya run: smolm2-135m: neither") and line.endswith("(did you mean smollm2-135m?)")


def test_what_its_own_server_would_calibrate_is_made_before_and_not_behind_a_spinner(
    chat: Chat, server: Server, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []

    def started(_model: ModelConfig, engine: EngineConfig) -> NoReturn:
        happened.append(f"a server with {engine.strategy}")
        raise ConfigError("that is all")

    monkeypatch.setattr(first_use, "before_start", lambda _, engine: happened.append(f"before {engine.strategy}"))
    monkeypatch.setattr(chat_command, "child_server", started)
    assert chat("", "--model", tiny_folder, "--strategy=gather")[0] == 1
    assert happened == ["before gather", "a server with gather"]
    assert chat("", "--model", tiny_folder, "--target", server.target)[0] == 0
    assert len(happened) == 2, "a server that runs is another's"


def test_info_shows_the_session_and_quit_ends_the_chat(chat: Chat, server: Server, tiny_folder: Path) -> None:
    options = ("--model", tiny_folder, "--target", server.target, "--strategy", "sink_window:window=40")
    status, printed, _ = chat("/info\n/help\n/halp\n/quit\nnever read\n", *options, where=Terminal)
    assert status == 0
    assert "on tiny, sink_window:sink=4,window=40" in printed
    assert "history   0 tokens (no limit); 0 evicted" in printed
    assert "unknown command /halp; /help lists them" in printed
    assert "/strategy SPEC  goes on in another session with this strategy" in printed
    assert COST.search(printed) is None


def test_back_drops_the_last_turn_and_retry_answers_it_again(chat: Chat, server: Server, tiny_folder: Path) -> None:
    options = ("--model", tiny_folder, "--target", server.target, "--max-tokens=3")
    typed = "/back\n/retry\nOne\n/retry\nTwo\n/back\n/back\n/back\nOne\n"
    for where in (io.StringIO, Terminal):
        status, printed, _ = chat(typed if where is io.StringIO else typed + "/quit\n", *options, where=where)
        assert status == 0
        assert printed.count("there is no turn to go back to") == 3
        one, again, two, anew = COST.findall(printed)
        length = int(one[0]) + 3
        assert (again[0], again[3]) == ("0", str(length)), "the message stays, and is not sent again"
        assert two[3] == str(length + int(two[0]) + 3)
        assert re.findall(r"(\d+) tokens dropped · history (\d+)", printed) == [
            (str(int(two[0]) + 3), str(length)),
            (str(length), "0"),
        ]
        assert anew == one, "the same message at the beginning has the same answer"


def test_fork_goes_on_behind_any_turn_and_switch_comes_back(chat: Chat, server: Server, tiny_folder: Path) -> None:
    options = ("--model", tiny_folder, "--target", server.target, "--max-tokens=3")
    typed = "One\nTwo\n/fork 1\nTwo\n/switch\n/fork\n/fork 9\nThree\n/switch\n/fork 0\nOne\n"
    status, printed, _ = chat(typed, *options)
    assert status == 0
    one, two, again, three, anew = COST.findall(printed)
    assert (again, anew) == (two, one), "a fork answers as the session would that it begins with"
    lengths = int(one[3]), int(two[3])
    places = re.findall(r"session (\d) of (\d) · (\d) turns? · history (\d+)", printed)
    assert places == [
        ("2", "2", "1", str(lengths[0])),
        ("1", "2", "2", str(lengths[1])),
        ("3", "3", "2", str(lengths[1])),
        ("1", "3", "2", str(lengths[1])),
        ("4", "4", "0", "0"),
    ]
    assert "there is no turn 9: this session has 2 turns" in printed
    assert int(three[3]) > lengths[1]


def test_a_line_that_is_not_utf_8_ends_the_chat_with_the_reason(chat: Chat, server: Server, tiny_folder: Path) -> None:
    """As Python reads bytes from a pipe that are none."""
    status, printed, said = chat("caf\udce9\n", "--model", tiny_folder, "--target", server.target)
    assert (status, printed) == (1, "")
    assert said.startswith("kakeya chat: messages[0]: holds '\\udce9', no character")
    assert said.count("\n") == 1


def test_at_a_terminal_a_conversation_outlives_mistakes_and_interrupts(
    chat: Chat, server: Server, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed leaves nothing in the session: the next message is answered as if it had not been sent."""
    lines: Iterator[str | BaseException] = iter(
        (
            *("One", KeyboardInterrupt(), "caf\udce9", "x" * 600, '"""Two', "lines", '"""', "/fork 0"),
            *('"""', "dropped", KeyboardInterrupt(), "One", "Two\nlines", "/strategy nonsense", EOFError()),
        )
    )

    def typed(_prompt: str) -> str:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", typed)
    status, printed, _ = chat("", "--model", tiny_folder, "--target", server.target, "--max-tokens=3", where=Terminal)
    assert status == 0
    one, two, *again = COST.findall(printed)
    assert int(two[3]) == int(one[3]) + int(two[0]) + 3
    assert again == [one, two]
    assert printed.count("/quit or Ctrl-D ends the chat") == 3
    assert "holds '\\udce9', no character" in printed
    assert "would exceed the session's limit of 512" in printed
    assert "there is no strategy 'nonsense'" in printed


def test_what_is_saved_is_loaded_with_its_turns_and_goes_on_with_another_strategy(
    chat: Chat, server: Server, tiny_folder: Path, tmp_path: Path
) -> None:
    options = ("--model", tiny_folder, "--target", server.target, "--max-tokens=3")
    file = tmp_path / "talk.json"
    status, printed, _ = chat(f"One\nTwo\n/save {file}\nThree\n", *options, "--system=Be brief.")
    assert status == 0
    _, two, three = COST.findall(printed)
    typed = f"/load {file}\n/strategy\nThree\n/back\n/back\nTwo\n/strategy sink_window:window=240\nThree\n/info\n"
    status, printed, said = chat(typed, *options)
    assert status == 0, said
    assert re.findall(r"(\d) turns · history (\d+)", printed) == [("2", two[3])] * 2
    assert COST.findall(printed) == [three, two, three]
    assert "sink_window:sink=4,window=240" in printed
    status, _, said = chat(f"/save {file}\n", *options)
    assert (status, said.count("\n")) == (1, 1), "what is there is not written over"
    file.write_text("[]")
    status, _, said = chat(f"/load {file}\n", *options)
    assert (status, "is no conversation that /save wrote" in said) == (1, True)


def test_a_session_that_is_kept_goes_on_in_another_chat(chat: Chat, server: Server, tiny_folder: Path) -> None:
    options = ("--model", tiny_folder, "--target", server.target, "--max-tokens=3")
    status, whole, _ = chat("One\nTwo\nThree\n", *options)
    assert status == 0
    status, printed, _ = chat("One\nTwo\n", *options, "--session=new")
    kept = re.search(r"kept: --session (\S+)", printed)
    assert (status, bool(kept)) == (0, True)
    assert kept is not None
    status, printed, _ = chat("/back\nTwo\nThree\n", *options, "--session", kept[1])
    assert status == 0
    assert COST.findall(printed) == COST.findall(whole)[1:]
    assert chat("", "--model", tiny_folder, "--session=new")[0] == 1
    with Client(server.target) as client:
        for one in client.sessions():
            client.session(one.id).close()


def test_a_chat_with_a_server_that_runs_imports_no_torch(server: Server, tiny_folder: Path) -> None:
    """Nor transformers: importing them takes longer than most answers."""
    program = (
        "import sys; from inference_engine.cli.main import main;"
        f"print(main(['chat', '--model', {str(tiny_folder)!r}, '--target', {server.target!r}, '--max-tokens=3']));"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input="Hello\n", capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.endswith("\n0\nset()\n"), done.stderr


def test_a_message_that_does_not_fit_ends_the_chat_with_the_reason(
    chat: Chat, server: Server, tiny_folder: Path
) -> None:
    status, printed, said = chat(
        "Hi\n" + "x" * 600, "--model", tiny_folder, "--target", server.target, "--max-tokens=3"
    )
    assert status == 1
    assert len(COST.findall(printed)) == 1
    assert "would exceed the session's limit of 512" in said
    assert "sink_window has no limit" in said, "512 is all that the model has, so a larger limit_tokens is no way out"


def test_a_longer_answer_than_its_own_server_would_give_is_refused_before_that_is_started(
    chat: Chat, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (chat_command, demo_command, kill_demo):
        monkeypatch.setattr(command, "child_server", Mock(side_effect=AssertionError("a server was started")))
    monkeypatch.setenv("KAKEYA_MAX_GENERATE_TOKENS", "40")
    assert "--max-tokens 512 is more than the server's limit of 40" in chat("Hi\n", "--model", tiny_folder)[2]
    for more in ((), ("--kill",)):
        status, printed, said = chat("", "--model", tiny_folder, *more, command="demo")
        assert (status, printed) == (1, "")
        assert "--max-tokens 48 is more than the server's limit of 40" in said


def test_what_cannot_be_sampled_with_is_refused_before_a_server_is_started_or_asked(
    chat: Chat, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    for name in ("child_server", "connect"):
        monkeypatch.setattr(chat_command, name, Mock(side_effect=AssertionError("a server was started or asked")))
    for flag, said in (
        ("--temperature=-1", "temperature: must be 0, or from 2^-20 (about 0.000001) to 100, got -1"),
        ("--temperature=nan", "temperature: must be 0, or from 2^-20 (about 0.000001) to 100, got nan"),
        ("--top-p=0", "top_p: must be in (0, 1], got 0"),
        ("--top-k=-1", "top_k: must be ≥ 0, got -1"),
        ("--repetition-penalty=0", "repetition_penalty: must be from 0.0078125 to 100, got 0"),
        ("--seed=-1", "seed: must be in [0, 2^64), got -1"),
    ):
        for more in ((), ("--target=127.0.0.1:1",)):
            with subtests.test(" ".join((flag, *more))):
                assert chat("Hi\n", "--model", tiny_folder, flag, *more) == (1, "", f"kakeya chat: {said}\n")


def test_a_folder_without_a_tokenizer_is_refused(chat: Chat, server: Server, tmp_path: Path) -> None:
    status, _, said = chat("Hi\n", "--model", save_tiny_model(tmp_path / "bare"), "--target", server.target)
    assert status == 1
    assert "holds no tokenizer" in said


def test_a_tokenizer_of_another_model_is_refused(chat: Chat, server: Server, tmp_path: Path) -> None:
    other = save_tiny_chat_model(tmp_path / "other")
    config = other / "tokenizer_config.json"
    config.write_text(config.read_text().replace(f'"eos_token": "{END}"', f'"eos_token": "{START}"'))
    status, _, said = chat("Hi\n", "--model", other, "--target", server.target)
    assert status == 1
    assert "is not that of the server's model, tiny" in said


def test_a_server_that_is_not_there_is_named(chat: Chat, tiny_folder: Path) -> None:
    status, _, said = chat("Hi\n", "--model", tiny_folder, "--target", "127.0.0.1:1")
    assert status == 1
    assert "127.0.0.1:1" in said
    assert said.count("\n") == 1
