"""Published clients of other APIs, each in one conversation of 50 turns: a turn computes what is new in it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import httpx2
import openai
import pytest
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_openai import ChatOpenAI

from inference_engine.config import child_environment
from kakeya import Client
from tests.processes import PROGRAM, Server, ending, kakeya_serve, started

TURNS = 50
MODEL = "smollm2-135m"
CONVERSATION = Path(__file__).parent / "clients" / "conversation.mjs"


class Cost(NamedTuple):
    """Of a turn, in tokens: the whole prompt, what of it was cached, the answer."""

    read: int
    cached: int
    written: int


def questions() -> Iterator[str]:
    return (f"Turn {turn}, if you please." for turn in range(TURNS))


def openai_chat(url: str) -> Iterator[Cost]:
    messages: list[Any] = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for question in questions():
            messages.append({"role": "user", "content": question})
            reply = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
            messages.append(reply.choices[0].message)
            usage: Any = reply.usage
            yield Cost(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens)


def openai_responses(url: str) -> Iterator[Cost]:
    previous: str | None = None
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for question in questions():
            reply = client.responses.create(
                model=MODEL, input=question, max_output_tokens=8, previous_response_id=previous
            )
            previous, usage = reply.id, reply.usage
            assert usage is not None
            yield Cost(usage.input_tokens, usage.input_tokens_details.cached_tokens or 0, usage.output_tokens)


def anthropic_messages(url: str) -> Iterator[Cost]:
    messages: list[Any] = []
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        for question in questions():
            messages.append({"role": "user", "content": question})
            with client.messages.stream(model=MODEL, max_tokens=8, messages=messages) as stream:
                reply = stream.get_final_message()
            messages.append({"role": "assistant", "content": reply.content})
            cached = reply.usage.cache_read_input_tokens or 0
            yield Cost(reply.usage.input_tokens + cached, cached, reply.usage.output_tokens)


def langchain(**settings: Any) -> Callable[[str], Iterator[Cost]]:
    def talk(url: str) -> Iterator[Cost]:
        made: dict[str, Any] = {"model": MODEL, "base_url": f"{url}/v1", "api_key": "none", "max_tokens": 8}
        model, messages = ChatOpenAI(**made, max_retries=0, **settings), list[BaseMessage]()
        for question in questions():
            messages.append(HumanMessage(question))
            reply = model.invoke(messages)
            messages.append(reply)
            usage: Any = reply.usage_metadata
            cached = usage["input_token_details"]["cache_read"]
            yield Cost(usage["input_tokens"], cached, usage["output_tokens"])

    return talk


def node(client: str) -> Callable[[str], Iterator[Cost]]:
    def talk(url: str) -> Iterator[Cost]:
        assert (CONVERSATION.parent / "node_modules").is_dir(), "make clients installs them"
        words = ["node", str(CONVERSATION), client, f"{url}/v1", MODEL, str(TURNS)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=child_environment())
        assert done.returncode == 0, done.stderr
        return (Cost(**json.loads(line)) for line in done.stdout.splitlines())

    return talk


CLIENTS: dict[str, Callable[[str], Iterator[Cost]]] = {
    "openai chat": openai_chat,
    "openai responses": openai_responses,
    "anthropic": anthropic_messages,
    "langchain": langchain(),
    "langchain responses": langchain(use_responses_api=True),
    "langchain by id": langchain(use_responses_api=True, use_previous_response_id=True),
    **{f"node {name}": node(name) for name in ("openai chat", "openai responses", "ai chat", "ai responses")},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with kakeya_serve("--model", MODEL, "--http-bind=127.0.0.1:0") as server:
        yield server


def prefilled(server: Server) -> float:
    """How many tokens the server has prefilled so far, by its metrics."""
    found = re.search(r"chat completions at (\S+)/v1", server.ready_line)
    assert found is not None
    lines = httpx2.get(f"{found[1]}/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("generate_prefilled_tokens_total "))


@pytest.mark.real_model
@pytest.mark.parametrize("name", CLIENTS)
def test_a_turn_computes_what_is_new_in_it(server: Server, name: str) -> None:
    before = prefilled(server)
    arguments = ("gateway", "--server", server.target, "--port=0")
    with ending(started(PROGRAM, *arguments)) as gateway, Client(server.target) as client:
        assert gateway.stdout is not None
        costs = list(CLIENTS[name](gateway.stdout.readline().split()[2].rstrip(":")))
        (session,) = client.sessions()
        client.session(session.id).close()
    assert len(costs) == TURNS
    for last, this in pairwise(costs):
        assert this.read > last.read + last.written
        assert this.cached == last.read + last.written - 1  # K/V of the last token comes with the next step
    # And not only by what the replies say.
    assert prefilled(server) - before == sum(cost.read - cost.cached for cost in costs)
