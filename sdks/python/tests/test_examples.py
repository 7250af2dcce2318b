"""The examples run, end to end, against the real server where they need one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from inference_engine.config import ServerConfig

Example = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def roomy_target(run_server: Callable[..., Any]) -> Iterator[str]:
    """TinyModel without a length limit: an agent's prompt has more characters than it was trained for."""
    config = ServerConfig(bind="127.0.0.1:0", drain_seconds=1.0)
    with run_server(config, strategy="sink_window:sink=4,window=64") as target:
        yield target


def test_the_minimal_session_prints_what_it_generated(
    server_target: str, example: Example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["minimal_session.py", server_target])
    example("minimal_session")
    tokens, summary = capsys.readouterr().out.splitlines()
    assert len(tokens.split()) == 16
    assert summary.startswith("22 tokens in the history, at most ")


def test_the_agent_holds_a_conversation_whatever_the_model_says(
    roomy_target: str, example: Example, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chatml = example("tokenization_per_family").FAMILIES["ChatML"].tokenizer()
    chatml.save_pretrained(tmp_path)
    agent = example("tool_calling_agent")
    arguments = ["--target", roomy_target, "--tokenizer", str(tmp_path), "--max-tokens", "8", "What is 2 + 3?"]
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
    says = iter(['Sure!\n```json\n{"name": "add", "parameters": {"a": 2, "b": 3}}\n```', "It is 5."])
    speak = agent.speak
    monkeypatch.setattr(agent, "speak", lambda *arguments: (next(says), speak(*arguments)[1]))
    with Client(roomy_target) as client, client.create_session() as session:
        assert agent.answer(session, tokenizer, "What is 2 + 3?", max_tokens=4, max_calls=3) == "It is 5."
        assert session.generate(1).result().prefilled_tokens < session.history_length
    assert "tool   add → 5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        ('{"tool": "add", "arguments": {"a": 1, "b": 2}}', "add"),
        ('I will. ```json\n{"name": "add", "parameters": {"a": 1}}``` ok?', "add"),
        ('{"function": {"name": "add", "arguments": "{}"}}', "add"),
        ('{broken {"function": "count_words", "args": {}}', "count_words"),
        ("The answer is {3}.", None),
        ('{"arguments": {}}', None),
        ("", None),
    ],
)
def test_the_agent_reads_tool_calls_leniently(example: Example, text: str, tool: str | None) -> None:
    found = example("tool_calling_agent").find_tool_call(text)
    assert (found["tool"] if found else None) == tool


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ({"tool": "add", "arguments": {"a": 1, "b": "2"}}, "3"),
        ({"tool": "count_words", "arguments": '{"text": "a b"}'}, "2"),
        ({"tool": "add", "arguments": {"a": 1}}, "failed"),
        ({"tool": "add", "arguments": [1]}, "failed"),
        ({"tool": "add", "arguments": "{"}, "failed"),
        ({"tool": "fly", "arguments": {}}, "no tool 'fly'"),
    ],
    ids=str,
)
def test_a_bad_tool_call_is_told_to_the_model(example: Example, call: dict[str, Any], result: str) -> None:
    assert result in example("tool_calling_agent").use_tool(call)


def test_the_agent_says_when_nobody_serves(
    example: Example, tmp_path: Path, unused_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    example("tokenization_per_family").FAMILIES["ChatML"].tokenizer().save_pretrained(tmp_path)
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


def test_the_family_tour_shows_every_family(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    example("tokenization_per_family").main([])
    printed = capsys.readouterr().out
    assert all(f"{family}: a turn ends with" in printed for family in ("ChatML", "Llama", "Gemma", "Qwen"))
