"""Tool calls over gRPC: are they whole, do they fit, is it the right tool; with the constraint and without.

Every question is about one of two tools, whose schemas the model is shown, and where its template writes no calls an
example of each. It is asked in a session and in its fork, held to a call and free, with as many tokens. Then the call
is read as users read it. A call counts if it is whole and its arguments validate, by another library than the one that
made the constraint.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from inference_engine.cli.serve import ready_target
from inference_engine.models import tokenizer_folder
from kakeya import Client, ToolCallError, ToolFormatUnknown
from kakeya.tokenization import ChatTokenizer, load_tokenizer
from kakeya.tools import ToolCall, Tools
from laboratory.bench.experiments import Save
from laboratory.bench.shared import add_model, model_config
from laboratory.bench.start import started
from laboratory.evaluation import record
from laboratory.evaluation.schemas import value_is_valid
from laboratory.evaluation.tool_json import TOOLS, Tool

SEED = 1
HELD, FREE = "required", "free"
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": SEED}}
OFFERED = 2  # tools with each question
# Without an end of its own, what a small model writes into a text is as long as it may be.
LONGEST = {"string": {"maxLength": 40}, "integer": {"minimum": -99_999, "maximum": 99_999}}
FALLBACK = "hermes"  # where the template writes no calls


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, the tool that it is about, and its arguments as they are named. shown: calls of both tools."""

    text: str
    offered: tuple[Tool, ...]
    name: str
    arguments: dict[str, Any]
    shown: tuple[dict[str, str], ...]


def questions(count: int) -> list[Question]:
    rng = random.Random(SEED)
    made = []
    for _ in range(count):
        offered = tuple(rng.sample(TOOLS, OFFERED))
        shown: list[dict[str, str]] = []
        for tool in offered:
            text, given = _asked(rng, tool)
            call = json.dumps({"name": tool.name, "arguments": given}, ensure_ascii=False)
            shown += [
                {"role": "user", "content": text},
                {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
            ]
        tool = rng.choice(offered)
        text, arguments = _asked(rng, tool)
        made.append(Question(text, offered, tool.name, arguments, tuple(shown)))
    return made


def _asked(rng: random.Random, tool: Tool) -> tuple[str, dict[str, Any]]:
    """A question that names all arguments, and these."""
    arguments = {name: field.make(rng) for name, field in tool.parameters.items()}
    said = ", ".join(f"{name.replace('_', ' ')} {json.dumps(of, ensure_ascii=False)}" for name, of in arguments.items())
    return f"{tool.description.rstrip('.')}: {said}", arguments


def definition(tool: Tool) -> dict[str, Any]:
    properties = {
        name: {"type": field.kind, "description": field.description, **LONGEST.get(field.kind, {})}
        for name, field in tool.parameters.items()
    }
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": tool.name, "description": tool.description, "parameters": parameters}


class Bench:
    """A server, asked by several clients at once."""

    def __init__(self, client: Client, tokenizer: ChatTokenizer, most: int) -> None:
        self._client, self._tokenizer, self._most = client, tokenizer, most

    def outcomes(self, question: Question, sampling: dict[str, Any]) -> dict[str, str]:
        """What became of the call, held and free: right, other arguments, another tool, invalid, cut, none."""
        tools, shown = self.tools_of(question)
        found = {}
        with self._client.create_session() as session:
            session.append(tools.tokens_for_chat([*shown, {"role": "user", "content": question.text}]))
            session.prefill()
            with session.fork() as other:
                for kind, one in ((HELD, session), (FREE, other)):
                    constraint = tools.constraint("required", parallel=False) if kind == HELD else None
                    result = one.generate(self._most, constraint=constraint, **sampling).result()
                    found[kind] = self._outcome(question, tools, result.token_ids)
        return found

    def _outcome(self, question: Question, tools: Tools, token_ids: Sequence[int]) -> str:
        try:
            calls = tools.read(token_ids).calls
        except ToolCallError as error:
            # The first call counts, whatever follows it.
            calls = tuple(part for part in error.parts if isinstance(part, ToolCall))
            if not calls:
                return "cut" if len(token_ids) == self._most else "no call that can be read"
        if not calls:
            return "no call that can be read"
        call = calls[0]
        by_name = {tool.name: definition(tool) for tool in question.offered}
        if not value_is_valid(dict(call.arguments), by_name[call.name]["parameters"]):
            return "invalid"
        if call.name != question.name:
            return "another tool"
        return "right" if dict(call.arguments) == question.arguments else "other arguments"

    def tools_of(self, question: Question) -> tuple[Tools, Sequence[dict[str, str]]]:
        definitions = [definition(tool) for tool in question.offered]
        try:
            return Tools(definitions, self._tokenizer), ()
        except ToolFormatUnknown:
            return Tools(definitions, self._tokenizer, format=FALLBACK), question.shown


WHOLE = ("right", "other arguments", "another tool")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "model")
    parser.add_argument("--questions", type=int, default=100, metavar="N")
    parser.add_argument("--most", type=int, default=200, metavar="N", help="tokens of an answer")
    parser.add_argument("--together", type=int, default=8, metavar="N", help="answers that are generated at once")


def main(arguments: argparse.Namespace, _save: Save) -> dict[str, Any]:
    config = model_config(arguments)
    tokenizer = load_tokenizer(tokenizer_folder(config.model, config.cache_path))
    serve = [sys.executable, "-m", "inference_engine.cli.main", "serve", "--model", config.model]
    asked = questions(arguments.questions)
    values: dict[str, dict[str, Any]] = {}
    with started([*serve, "--bind", "127.0.0.1:0"], "127.0.0.1:") as server:
        target = ready_target(server.line)
        assert target is not None
        with Client(target) as client, ThreadPoolExecutor(arguments.together) as pool:
            bench = Bench(client, tokenizer, arguments.most)
            for name, sampling in SAMPLINGS.items():
                found: dict[str, Counter[str]] = {HELD: Counter(), FREE: Counter()}
                for outcomes in pool.map(lambda one, given=sampling: bench.outcomes(one, given), asked):
                    for kind, outcome in outcomes.items():
                        found[kind][outcome] += 1
                values |= _values(name, found, len(asked))
    return {
        "experiment": f"tools_{config.model.rsplit('/', 1)[-1]}",
        "config": {
            "model": config.model,
            "questions": len(asked),
            "tools": f"{OFFERED} of {len(TOOLS)} with each question",
            "format": f"the template's, {FALLBACK} where it writes no calls",
            "most": arguments.most,
            "together": arguments.together,
            "samplings": SAMPLINGS,
        },
        "seeds": [SEED],
        "values": values,
        "baseline": "forks of the same sessions, with as many tokens and no constraint",
    }


def _values(sampling: str, found: dict[str, Counter[str]], count: int) -> dict[str, dict[str, Any]]:
    values = {}
    for kind, outcomes in found.items():
        where = f"{kind}, {sampling}"
        values[f"calls that are whole and validate, {where}"] = record.exact(
            sum(outcomes[each] for each in WHOLE) / count, "share"
        )
        values[f"calls of the tool that was meant, {where}"] = record.exact(
            (outcomes["right"] + outcomes["other arguments"]) / count, "share"
        )
        values[f"calls with the arguments that were named, {where}"] = record.exact(outcomes["right"] / count, "share")
        for each in ("invalid", "cut", "no call that can be read"):
            values[f"{each}, {where}"] = record.exact(outcomes[each] / count, "share")
    return values
