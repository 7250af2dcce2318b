"""The real server process, the real SDK and the small real model: what an agent does with them in a day."""

from __future__ import annotations

import re
import subprocess
import sys
import types
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kakeya import Client, Session, tokenization, tools
from tests.processes import LIMIT_SECONDS, Server, kakeya_serve

pytestmark = pytest.mark.real_model

MODEL = "smollm2-135m"
PAGE = Path(__file__).parents[2] / "docs" / "agents_turn.md"
QUESTIONS = ("What is the capital of France?", "How many legs does a dog have?")
TOKENS = 16


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with kakeya_serve("--model", MODEL, "--kv-bytes=2GiB", "--metrics-bind=127.0.0.1:0") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.target) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(server: Server) -> Any:
    with Client(server.target) as client:
        return client.tokenizer()


def ask(session: Session, question: str, tokenizer: Any) -> tuple[int, ...]:
    session.append(tokenization.tokens_for_chat([{"role": "user", "content": question}], tokenizer))
    return session.generate(TOKENS).result().token_ids


def test_a_turn_computes_its_new_tokens_only(client: Client, tokenizer: Any) -> None:
    with client.create_session(eos_token_ids=tokenization.end_of_turn_ids(tokenizer)) as session:
        first = ask(session, QUESTIONS[0], tokenizer)
        before = session.history_length
        more = tokenization.tokens_for_next_turn([{"role": "user", "content": QUESTIONS[1]}], tokenizer, after=first)
        session.append(more)
        second = session.generate(TOKENS).result()
        # The token sampled last had no K/V yet.
        assert (second.prefilled_tokens, second.cached_tokens) == (len(more) + 1, before - 1)
        assert second.history_length == before + len(more) + second.generated_tokens


def test_conversations_at_the_same_time_are_as_each_alone(client: Client, tokenizer: Any) -> None:
    def answer(question: str) -> tuple[int, ...]:
        with client.create_session() as session:
            return ask(session, question, tokenizer)

    alone = [answer(question) for question in QUESTIONS]
    with ThreadPoolExecutor(len(QUESTIONS)) as together:
        assert list(together.map(answer, QUESTIONS)) == alone


CLIENT = """
import sys
from kakeya import Client
session = Client(sys.argv[1]).create_session(eos_token_ids=())
session.append(range(100, 120))
print(session.id, flush=True)
for token_id in session.generate(4000):
    print(token_id, flush=True)
"""


def test_a_client_that_is_killed_stops_its_generate_and_disturbs_no_other(
    server: Server, client: Client, tokenizer: Any
) -> None:
    with client.create_session() as alone:
        expected = ask(alone, QUESTIONS[0], tokenizer)
    with subprocess.Popen([sys.executable, "-c", CLIENT, server.target], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        other.stdout.readline()
        other.stdout.readline()
        assert gauge(server, "kakeya_generate_active") == 1
        other.kill()
        other.wait(LIMIT_SECONDS)
    with client.create_session() as session:
        assert ask(session, QUESTIONS[0], tokenizer) == expected
    # Far fewer than 4000: it was stopped, not run to its end.
    assert gauge(server, "kakeya_generate_active") == 0


def gauge(server: Server, name: str) -> float:
    url = server.ready_line.split("metrics at ")[1].strip()
    with urllib.request.urlopen(url, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def test_the_agent_of_the_documents_calls_and_answers(
    server: Server, client: Client, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every program of the page, one after another; what is about a session goes on with one."""
    whole, *others = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert "127.0.0.1:50051" in whole
    whole = whole.replace("127.0.0.1:50051", server.target)
    module = types.ModuleType("agent")
    sys.modules["agent"] = module  # annotations of functions are looked up in it
    try:
        exec(compile(whole, str(PAGE), "exec"), module.__dict__)
        *_, ordered = capsys.readouterr().out.splitlines()
        assert re.fullmatch(r"ordered \d+ of .* \d+", ordered)
        with client.create_session() as session:
            session.append(module.tools.tokens_for_chat([{"role": "user", "content": "Is there tea?"}]))
            module.__dict__["session"] = session
            for program in others:
                exec(compile(program, str(PAGE), "exec"), module.__dict__)
            attempts = module.attempts
        assert all(isinstance(call, tools.ToolCall) for calls in attempts for call in calls)
        assert len(attempts) == 4
    finally:
        del sys.modules["agent"]
