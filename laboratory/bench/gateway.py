"""One conversation over the gateway's APIs, turn after turn, beside the server's own port for chat completions.

Servers and a gateway run in processes of their own. A conversation of `--turns` is held once by each way, the ways
taking turns: by the gateway with chat completions, responses and messages, and by the port of a server, which has a
session for each request; of one server that prefills all of it (`--share-prefixes off`, as that of the gateway), and
of one that copies what closed sessions of the owner held (`owner`, the default). Answers are sampled, so their text
need not give the ids that were drawn. What a turn prefills is what the server counts
(`generate_prefilled_tokens_total`), not what a reply says; that has to say the same. Exits with 1 if a turn over the
gateway prefills more than what is new in it.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from inference_engine.cli.serve import ready_target
from inference_engine.errors import ConfigError
from laboratory.bench.experiments import Save
from laboratory.bench.shared import add_model, model_config, ratios
from laboratory.bench.start import started
from laboratory.evaluation import record
from laboratory.evaluation.sessions import turned

STATELESS, SHARING = "the port, prefixes not shared", "the port, prefixes shared"
RUN = [sys.executable, "-m", "inference_engine.cli.main"]
PAGES = ("concepts", "architecture", "operations", "durability")
SAMPLED = {"temperature": 1.0, "seed": 1}
LAST = 10  # turns, of which times are taken


class Turn(NamedTuple):
    """In tokens: the prompt, what of it the server prefilled, what the reply says was cached, the answer."""

    read: int
    prefilled: int
    cached: int
    written: int
    seconds: float


def chat(url: str, model: str, tokens: int, key: str) -> Callable[[str], tuple[str, int, int, int]]:
    """Says something, and returns the answer, tokens read, of them cached, and written."""
    messages: list[dict[str, Any]] = []

    def say(words: str) -> tuple[str, int, int, int]:
        messages.append({"role": "user", "content": words})
        body = {"model": model, "messages": messages, "max_tokens": tokens, **SAMPLED}
        reply = posted(f"{url}/v1/chat/completions", body, key)
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
        usage = reply["usage"]
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return messages[-1]["content"], usage["prompt_tokens"], cached, usage["completion_tokens"]

    return say


def responses(url: str, model: str, tokens: int, key: str) -> Callable[[str], tuple[str, int, int, int]]:
    previous: dict[str, Any] = {}

    def say(words: str) -> tuple[str, int, int, int]:
        body = {"model": model, "input": words, "max_output_tokens": tokens, **SAMPLED, **previous}
        reply = posted(f"{url}/v1/responses", body, key)
        previous["previous_response_id"] = reply["id"]
        usage, cached = reply["usage"], reply["usage"]["input_tokens_details"]["cached_tokens"]
        return reply["output"][0]["content"][0]["text"], usage["input_tokens"], cached, usage["output_tokens"]

    return say


def messages(url: str, model: str, tokens: int, key: str) -> Callable[[str], tuple[str, int, int, int]]:
    said: list[dict[str, Any]] = []

    def say(words: str) -> tuple[str, int, int, int]:
        said.append({"role": "user", "content": words})
        body = {"model": model, "messages": said, "max_tokens": tokens, **SAMPLED}
        reply = posted(f"{url}/v1/messages", body, key)
        said.append({"role": "assistant", "content": reply["content"]})
        usage, cached = reply["usage"], reply["usage"]["cache_read_input_tokens"]
        return reply["content"][0]["text"], usage["input_tokens"] + cached, cached, usage["output_tokens"]

    return say


WAYS = {"chat completions": chat, "responses, by their ids": responses, "messages": messages}


def posted(url: str, body: dict[str, Any], key: str) -> dict[str, Any]:
    """key: any. Ways have one each, so that none goes on with the session of another."""
    reply = httpx2.post(url, json=body, timeout=600, headers={"authorization": f"Bearer {key}"})
    assert reply.status_code == 200, reply.text
    read: dict[str, Any] = reply.json()
    return read


def prefilled(port: str) -> int:
    lines = httpx2.get(f"{port}/metrics").text.splitlines()
    return next(int(float(line.split()[1])) for line in lines if line.startswith("generate_prefilled_tokens_total "))


def words_of(turns: int) -> list[str]:
    """Something to say in each turn: sentences of our pages."""
    docs = Path(__file__).parents[2] / "docs"
    text = "\n".join((docs / f"{page}.md").read_text(encoding="utf-8") for page in PAGES)
    sentences = [each.replace("\n", " ").strip() for each in re.split(r"(?<=\.)\s", text)]
    found = [each for each in sentences if 40 <= len(each) <= 160 and not re.search(r"[|`#\[]", each)]
    if turns > len(found):
        raise ConfigError(f"--turns must be at most {len(found)}, the sentences that there are to say, got {turns}")
    return found[:turns]


@contextmanager
def served(model: str, shared: str) -> Iterator[tuple[str, str]]:
    """The targets of a server: for sessions, and of its port for chat completions."""
    flags = ["--model", model, "--bind", "127.0.0.1:0", "--http-bind", "127.0.0.1:0", "--share-prefixes", shared]
    with started([*RUN, "serve", *flags], "ready at ") as server:
        target, port = ready_target(server.line), re.search(r"(http\S+)/v1", server.line)
        assert target is not None and port is not None
        yield target, port[1]


def measured(arguments: argparse.Namespace, model: str) -> dict[str, list[Turn]]:
    with served(model, "off") as (target, port), served(model, "owner") as (_, sharing):
        gate = [*RUN, "gateway", "--server", target, "--tokenizer", model, "--port", "0"]
        with started(gate, "ready at ") as gateway:
            url, name = gateway.line.split()[2].rstrip(":"), Path(model).name
            says = {STATELESS: (chat(port, name, arguments.tokens, "stateless"), port)}
            says[SHARING] = chat(sharing, name, arguments.tokens, "stateless"), sharing
            for number, (way, make) in enumerate(WAYS.items()):
                says[f"gateway, {way}"] = make(url, name, arguments.tokens, f"key-{number}"), port
            turns: dict[str, list[Turn]] = {way: [] for way in says}
            for number, words in enumerate(words_of(arguments.turns)):
                for way in turned(list(says), number):
                    say, counted = says[way]
                    before, began = prefilled(counted), time.perf_counter()
                    _, read, cached, written = say(words)
                    seconds = time.perf_counter() - began
                    turns[way].append(Turn(read, prefilled(counted) - before, cached, written, seconds))
    return turns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "model")
    parser.add_argument("--turns", type=int, default=50, metavar="N")
    parser.add_argument("--tokens", type=int, default=24, metavar="N", help="of an answer, at most")


def main(arguments: argparse.Namespace, _save: Save) -> dict[str, Any]:
    model = model_config(arguments).model
    turns = measured(arguments, model)
    values: dict[str, Any] = {"conversation": record.exact(turns[STATELESS][-1].read, "tokens")}
    wrong: list[str] = []
    for way, taken in turns.items():
        new = [this.read - last.read - last.written + 1 for last, this in pairwise(taken)]
        values[f"prefilled in a turn, {way}"] = record.summarize([float(one.prefilled) for one in taken], "tokens")
        values[f"prefilled in the last turn, {way}"] = record.exact(taken[-1].prefilled, "tokens")
        values[f"prefilled in all turns, {way}"] = record.exact(sum(one.prefilled for one in taken), "tokens")
        values[f"one of the last {LAST} turns, {way}"] = record.summarize([one.seconds for one in taken[-LAST:]], "s")
        if way.startswith("gateway"):
            over = [one.prefilled for one in taken[1:]]
            wrong += [f"{way}: {over} were prefilled, {new} are new"] * (over != new)
            wrong += [f"{way}: replies say otherwise"] * any(one.read - one.cached != one.prefilled for one in taken)
        if way != STATELESS:
            last = {name: [one.seconds for one in turns[name][-LAST:]] for name in (way, STATELESS)}
            name = f"one of the last {LAST} turns, {way} ÷ {STATELESS}"
            values[name] = record.summarize(ratios(last, way, STATELESS), "ratio")
    return {
        "experiment": f"gateway_{Path(model).name}",
        "config": {"model": Path(model).name, "turns": arguments.turns, "answer_tokens": arguments.tokens},
        "seeds": [SAMPLED["seed"]],
        "values": values,
        "baseline": "the server's port for chat completions, which has a session for each request",
        "wrong": "; ".join(wrong),
    }
