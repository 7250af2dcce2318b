"""The examples run, end to end, against the real server where they need one."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

from inference_engine.config import ServerConfig
from inference_engine.types import TokenBytes
from tests.further import further

Example = Callable[[str], ModuleType]
EXAMPLES = Path(__file__).parent.parent / "examples"
SDK = EXAMPLES.parent / "src"
# What each program prints, whatever the model says.
PRINTED = {
    "chat_template_hazard.py": "part at index",
    "minimal_session.py": "22 tokens in the history",
    "tokenization_per_family.py": ": a turn ends with <|im_end|>",
    "tool_calling_agent.py": "user   What is 30 + 12?",
}


@pytest.fixture(scope="module")
def roomy_target(run_server: Callable[..., Any]) -> Iterator[str]:
    """TinyModel without a length limit: an agent's prompt has more characters than it was trained for. Its tokens are
    those of the ChatML example."""
    from tests.tiny import VOCABULARY

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        tokenizer: Any = importlib.import_module("tokenization_per_family").FAMILIES["ChatML"].tokenizer()
    texts = [tokenizer.decode([token_id]).encode() for token_id in range(len(tokenizer))]
    specials = tuple(tokenizer.added_tokens_decoder)
    tokens = TokenBytes(tokens=(*texts, *[b""] * (VOCABULARY - len(texts))), specials=specials)
    config = ServerConfig(bind="127.0.0.1:0", drain_seconds=1.0)
    with run_server(config, strategy="sink_window:sink=4,window=64", read_tokens=lambda: tokens) as target:
        yield target


def test_the_minimal_session_prints_what_it_generated(
    server_target: str, example: Example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["minimal_session.py", server_target])
    example("minimal_session")
    tokens, summary = capsys.readouterr().out.splitlines()
    assert len(tokens.split()) == 16
    assert summary.startswith("22 tokens in the history, at most ")


def save_chatml(example: Example, folder: Path) -> None:
    chatml = example("tokenization_per_family").FAMILIES["ChatML"]
    example("small_tokenizer").save_tokenizer(folder, chatml.template, chatml.special_tokens, eos_token=chatml.end)


def test_the_agent_holds_a_conversation_whatever_the_model_says(
    roomy_target: str, example: Example, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_chatml(example, tmp_path)
    agent = example("tool_calling_agent")
    arguments = ["--target", roomy_target, "--tokenizer", str(tmp_path), "--max-tokens", "400", "What is 2 + 3?"]
    assert agent.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "user   What is 2 + 3?" in printed
    assert "tokens in the history" in printed


def test_the_agent_feeds_tool_results_back(
    roomy_target: str, example: Example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TinyModel asks for no tool by itself, so its words are put into its mouth; everything else is real."""
    from kakeya import Client

    agent = example("tool_calling_agent")
    tokenizer = example("tokenization_per_family").FAMILIES["ChatML"].tokenizer()
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    words = iter([call, "It is 5."])

    class Saying:
        """The model's words, over what it generated."""

        def __init__(self, stream: Any) -> None:
            self._stream, self._ids = stream, tuple(tokenizer.encode(next(words)))

        def __iter__(self) -> Iterator[int]:
            return iter(self._ids)

        def result(self) -> Any:
            return dataclasses.replace(self._stream.result(), token_ids=self._ids)

    with Client(roomy_target) as client, client.create_session() as session:
        generate = session.generate
        monkeypatch.setattr(session, "generate", lambda _, **options: Saying(generate(4, **options)))
        assert agent.answer(session, tokenizer, "What is 2 + 3?", max_tokens=4, max_calls=3) == "It is 5."
        assert generate(1).result().prefilled_tokens < session.history_length
    assert "tool   add → 5" in capsys.readouterr().out


def test_the_agent_reports_that_no_server_answers(
    example: Example, tmp_path: Path, unused_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    save_chatml(example, tmp_path)
    arguments = ["--target", f"127.0.0.1:{unused_port}", "--tokenizer", str(tmp_path)]
    assert example("tool_calling_agent").main(arguments) == 1
    assert "no connection" in capsys.readouterr().out


def test_the_hazard_shows_where_rendered_prompts_leave_the_history(
    example: Example, capsys: pytest.CaptureFixture[str]
) -> None:
    hazard = example("chat_template_hazard")
    assert hazard.reasoning_is_stripped() is not None
    assert hazard.text_is_encoded_differently() is not None
    assert hazard.nothing_happens() is None
    assert "part at index" in capsys.readouterr().out


def installed_with(name: str, extras: frozenset[str]) -> set[str]:
    """The distributions that pip brings with this one, itself included."""
    found: set[str] = set()
    open_: list[tuple[str, frozenset[str]]] = [(name, extras)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while open_:
        asked = open_.pop()
        if asked in seen:
            continue
        seen.add(asked)
        found.add(asked[0])
        open_.extend(
            (each.name, frozenset(each.extras))
            for each in map(Requirement, importlib.metadata.requires(asked[0]) or ())
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in (*asked[1], ""))
        )
    return found


def put(distributions: set[str], folder: Path) -> None:
    """What these distributions have in site-packages, and nothing else, in `folder`."""
    for name in distributions - {"kakeya"}:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in {"..", "/"}}:
            if not (folder / top).exists():
                (folder / top).symlink_to(str(distribution.locate_file(top)))


@pytest.mark.parametrize(
    "program", [each if each == "minimal_session.py" else further(each) for each in sorted(PRINTED)]
)
def test_a_program_runs_where_what_its_text_names_is_installed_and_nothing_else(
    roomy_target: str, example: Example, tmp_path: Path, program: str
) -> None:
    text = ast.get_docstring(ast.parse((EXAMPLES / program).read_text(encoding="utf-8"))) or ""
    asked = re.search(r"pip install '?\./sdks/python(?:\[(\w+)\])?'?", text)
    assert asked is not None
    others = tmp_path / "installed"
    others.mkdir()
    put(installed_with("kakeya", frozenset(asked.groups("")) - {""}), others)
    served = tmp_path / "models" / "tiny"
    served.mkdir(parents=True)
    save_chatml(example, served)
    given = {"FOLDER": str(served), "[TARGET]": roomy_target}
    # -S: without the packages that are installed beside this test.
    environment = {"PYTHONPATH": os.pathsep.join((str(SDK), str(others))), "KAKEYA_CACHE_DIR": str(tmp_path)}
    commands = re.findall(rf"^ *python ({re.escape(program)}.*)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        words = [given.get(word, word) for word in shlex.split(command, comments=True)]
        if program == "tool_calling_agent.py":
            words += ["--target", roomy_target, "--max-tokens", "400"]
        call = (sys.executable, "-S", *words)
        done = subprocess.run(
            call, cwd=EXAMPLES, env=environment, check=False, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert PRINTED[program] in done.stdout


def test_every_program_among_the_examples_says_what_it_needs() -> None:
    texts = {
        path.name: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in EXAMPLES.glob("*.py")
    }
    assert {name for name, text in texts.items() if text is not None and f"python {name}" in text} == set(PRINTED)
