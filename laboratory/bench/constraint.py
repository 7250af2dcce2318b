"""Constrained output: is it valid, what does a mask cost, what do forced tokens gain.

    valid      made schemas, greedy and sampled, against the same prompts without a constraint
    cost       a token within a long JSON string beside one that is free, at several numbers of sessions, without drafts
    gain       JSON whose keys are long and fixed beside as many free tokens, in one session

What is timed is interleaved, free and constrained by turns; a ratio is of one round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inference_engine.compose import open_parts
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.errors import InvalidConstraint
from inference_engine.kv.strategies.full import Full
from inference_engine.models import tokenizer_folder
from inference_engine.types import Constraint, ConstraintKind, Finished, GenerateParams, Sampling, TokenCommitted
from laboratory.bench.experiments import Save
from laboratory.bench.shared import add_model, device_name, model_config, named
from laboratory.evaluation import record
from laboratory.evaluation.models import load_tokenizer, stop_ids
from laboratory.evaluation.schemas import Schema, begins_validly, is_valid, schemas

SEED = 1
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_p=0.95, seed=SEED)}
# Drawn without a cut, from all ids: what a mask refuses must be so improbable that no noise lifts it.
SAMPLINGS_OF_VALID = SAMPLINGS | {"sampled from all ids": Sampling(temperature=1.3, seed=SEED)}
FREE, HELD = "free", "constrained"
PARTS = ("gain", "cost", "valid")
# Inside it nearly every token may follow, and none must.
LONG_STRING = {"type": "string", "minLength": 4000}
FIXED_KEYS: dict[str, Any] = {
    "type": "object",
    "properties": {
        f"the {word} measurement of the temperature in degrees Celsius": {
            "type": "integer",
            "minimum": 0,
            "maximum": 9,
        }
        for word in ("first", "second", "third", "fourth", "fifth", "sixth")
    },
    "additionalProperties": False,
}
FIXED_KEYS["required"] = list(FIXED_KEYS["properties"])


@dataclass(slots=True)
class Outputs:
    """What became of the Generates of one kind."""

    valid: int = 0
    cut: int = 0  # by max_tokens, and say so
    wrong: list[str] = field(default_factory=list)  # whole, and do not validate
    tokens: int = 0


def constraint_of(schema: Schema) -> Constraint:
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, source=json.dumps(schema, ensure_ascii=False))


class Bench:
    """An engine and the texts of its model's tokens."""

    def __init__(self, engine: Engine, tokenizer: Any, together: int) -> None:
        self.engine, self._tokenizer, self._together = engine, tokenizer, together

    def ids_of(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def opened(self, ids: Sequence[int], *, tokens: int = 0) -> str:
        """tokens: that are generated, whichever they are; 0: to an id that ends a turn."""
        limit = len(ids) + tokens + 1 if tokens else None
        session = self.engine.create_session(strategy=Full(), limit_tokens=limit, model_ends=not tokens).session_id
        self.engine.append(session, ids)
        return session

    def answers(self, asked: Sequence[tuple[Schema, GenerateParams]]) -> Iterator[tuple[Schema, str, Finished]]:
        """Of each the schema, the text and the ending; several run at once."""
        for first in range(0, len(asked), self._together):
            running = []
            for schema, params in asked[first : first + self._together]:
                prompt = f"The schema:\n{json.dumps(schema, ensure_ascii=False)}\nJSON that fits it:\n"
                session = self.opened(self.ids_of(prompt))
                running.append((schema, session, self.engine.generate(session, params)))
            for schema, session, generation in running:
                events = list(generation)
                ids = [event.token_id for event in events if isinstance(event, TokenCommitted)]
                end = events[-1]
                assert isinstance(end, Finished)
                self.engine.close_session(session)
                yield schema, self._tokenizer.decode(ids, skip_special_tokens=True), end

    def validity(self, count: int, most: int, sampling: Sampling, *, is_held: bool) -> Outputs:
        found = Outputs()
        params = GenerateParams(max_tokens=most, sampling=sampling)
        asked = [
            (schema, replace(params, constraint=constraint_of(schema)) if is_held else params)
            for schema in itertools.islice(schemas(SEED), count)
        ]
        for schema, text, end in self.answers(asked):
            found.tokens += end.generated_tokens
            if not is_held:
                found.valid += begins_validly(text, schema)
            elif not end.fits_constraint:
                found.cut += 1
            elif is_valid(text, schema):
                found.valid += 1
            else:
                found.wrong.append(f"{text!r} for {json.dumps(schema, ensure_ascii=False)}")
        return found

    def token_seconds(self, sessions: int, tokens: int, params: GenerateParams) -> float:
        """Of a token of each of the sessions, from the first token of all to the last."""
        text = self.ids_of("A long text about the weather of the last years follows, in one paragraph without an end: ")
        first = 4
        opened = [self.opened([*text, *self.ids_of(str(number))], tokens=first + tokens) for number in range(sessions)]
        running = [self.engine.generate(each, replace(params, max_tokens=first)) for each in opened]
        for each in running:
            list(each)
        began = time.perf_counter()
        running = [self.engine.generate(each, replace(params, max_tokens=tokens)) for each in opened]
        done = 0
        for each in running:
            done += sum(isinstance(event, TokenCommitted) for event in each)
        seconds = time.perf_counter() - began
        for session in opened:
            self.engine.close_session(session)
        return seconds / (done / sessions)


def cost(bench: Bench, counts: Sequence[int], tokens: int, rounds: int) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {}
    for count in counts:
        for name, sampling in SAMPLINGS.items():
            free = GenerateParams(max_tokens=tokens, sampling=sampling, drafting=False)
            held = replace(free, constraint=constraint_of(LONG_STRING))
            taken: dict[str, list[float]] = {FREE: [], HELD: []}
            for number in range(rounds + 1):
                for kind, params in ((FREE, free), (HELD, held))[:: 1 if number % 2 else -1]:
                    seconds = bench.token_seconds(count, tokens, params)
                    if number:  # the first one makes kernels and memory ready
                        taken[kind].append(seconds)
            ratios = [mine / free_one for mine, free_one in zip(taken[HELD], taken[FREE], strict=True)]
            where = f"{name}, {count} sessions" if count > 1 else f"{name}, 1 session"
            values[f"token time, {HELD} ÷ {FREE}, {where}"] = record.summarize(ratios, "ratio")
            for kind, seconds_of in taken.items():
                values[f"token time, {kind}, {where}"] = record.summarize([1e3 * one for one in seconds_of], "ms")
    return values


def gain(bench: Bench, rounds: int) -> dict[str, dict[str, Any]]:
    prompt = bench.ids_of("The temperatures that were measured, as JSON:\n")
    held = GenerateParams(max_tokens=400, constraint=constraint_of(FIXED_KEYS))
    taken: dict[str, list[float]] = {FREE: [], HELD: [], "without drafts": []}
    accepted = 0.0
    for number in range(rounds + 1):
        count = 0
        for kind, params in ((HELD, held), ("without drafts", replace(held, drafting=False)), (FREE, None)):
            session = bench.opened(prompt)
            list(bench.engine.generate(session, GenerateParams(max_tokens=1)))
            began = time.perf_counter()
            end = list(bench.engine.generate(session, params or GenerateParams(max_tokens=count)))[-1]
            seconds = time.perf_counter() - began
            assert isinstance(end, Finished)
            bench.engine.close_session(session)
            if kind == HELD:
                count, accepted = end.generated_tokens, end.accepted_tokens / end.generated_tokens
            if number:
                taken[kind].append(end.generated_tokens / seconds)
    values = {f"tokens/s, fixed keys, {kind}": record.summarize(each, "tokens/s") for kind, each in taken.items()}
    ratios = [mine / other for mine, other in zip(taken[HELD], taken[FREE], strict=True)]
    values[f"tokens/s, fixed keys, {HELD} ÷ {FREE}"] = record.summarize(ratios, "ratio")
    values["accepted draft tokens, fixed keys"] = record.exact(accepted, "share")
    return values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured (default: all)")
    parser.add_argument("--schemas", type=int, default=500, metavar="N")
    parser.add_argument("--control", type=int, default=100, metavar="N", help="of them, without the constraint, too")
    parser.add_argument("--most", type=int, default=400, metavar="N", help="tokens of an output")
    parser.add_argument("--together", type=int, default=16, metavar="N", help="outputs that are generated at once")
    parser.add_argument("--sessions", type=int, nargs="*", default=[1, 8, 64], metavar="N")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="of each session that is timed")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")


def main(arguments: argparse.Namespace, save: Save) -> dict[str, Any]:
    config = model_config(arguments, drafter="none")
    parts = open_parts(config)
    folder = tokenizer_folder(config.model, config.cache_path)
    tokenizer = load_tokenizer(folder)
    values: dict[str, dict[str, Any]] = {}
    wrong: list[str] = []
    payload: dict[str, Any] = {
        "experiment": named("constraint", config, parts.forward.facts),
        "config": {
            "model": config.model,
            "device": device_name(config.device),
            "numerics": parts.forward.facts.numerics,
            **{name: getattr(arguments, name) for name in ("schemas", "control", "most", "together", "rounds")},
            "tokens": arguments.tokens,
            "samplings": {name: str(sampling) for name, sampling in SAMPLINGS_OF_VALID.items()},
        },
        "seeds": [SEED],
        "values": values,
        "baseline": "the same prompts and lengths without a constraint, in the same process; what is timed by turns",
    }
    engine_config = EngineConfig(kv_bytes=2**30, max_batch=64, max_running=64, max_queued=256, share_prefixes="off")
    with replace(parts, end_ids=stop_ids(folder, tokenizer)).engine(engine_config) as engine:
        bench = Bench(engine, tokenizer, arguments.together)
        if "gain" in arguments.parts:
            values |= gain(bench, arguments.rounds)
        if "cost" in arguments.parts:
            values |= cost(bench, arguments.sessions, arguments.tokens, arguments.rounds)
        if values:
            save(payload)
        for name, sampling in SAMPLINGS_OF_VALID.items() if "valid" in arguments.parts else ():
            try:
                held = bench.validity(arguments.schemas, arguments.most, sampling, is_held=True)
            except InvalidConstraint as error:
                payload["wrong"] = f"a schema was refused: {error}"
                break
            free = bench.validity(arguments.control, arguments.most // 2, sampling, is_held=False)
            whole = arguments.schemas - held.cut
            values[f"whole outputs that validate, {HELD}, {name}"] = record.exact(held.valid / whole, "share")
            values[f"outputs cut by max_tokens, {HELD}, {name}"] = record.exact(held.cut / arguments.schemas, "share")
            values[f"outputs that validate, {FREE}, {name}"] = record.exact(free.valid / arguments.control, "share")
            values[f"tokens of an output, {HELD}, {name}"] = record.exact(held.tokens / arguments.schemas, "tokens")
            wrong += held.wrong
            save(payload)
    if wrong:
        payload["wrong"] = f"{len(wrong)} outputs do not validate, such as {wrong[0]}"
    payload["headlines"] = [name for name in values if "÷" in name or "validate" in name or "cut" in name]
    return payload
