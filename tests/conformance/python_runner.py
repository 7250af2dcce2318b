"""Plays the scenarios with the Python SDK, blocking or asyncio.

usage: python_runner.py TARGET

Prints, for the asyncio client, what was seen in each step of each scenario, as JSON.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import inspect
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import kakeya
from tests.conformance.scenarios import PATIENCE_SECONDS, SCENARIOS, Seen, Step, differences, resolved

Do = Callable[..., Awaitable[Any]]

RETRY = kakeya.RetryPolicy(patience_seconds=PATIENCE_SECONDS)
# Not facts of the session but of the clock.
TIMES = {"idle_seconds", "prefill_seconds", "total_seconds"}
# What depends on other clients of the server.
SHARED = {"kv_reserved_bytes", "tier_reserved_bytes", "history_tokens", "usage", "version"}
SESSION_FACTS = (
    "strategy",
    "sustained_bytes",
    "reserved_bytes",
    "peak_bytes",
    "tier_bytes",
    "limit_tokens",
    "mode",
    "model_id",
)
STRATEGIES: dict[str, Any] = {
    "full": kakeya.Full,
    "sink_window": kakeya.SinkWindow,
    "layer_window": kakeya.LayerWindow,
    "restored": kakeya.Restored,
    "gather": kakeya.Gather,
    "tiered": kakeya.Tiered,
    "mac": kakeya.Mac,
}


CONSTRAINTS: dict[str, Any] = {
    "schema": kakeya.JsonSchema,
    "pattern": kakeya.Regex,
    "grammar": kakeya.Lark,
    "choices": lambda lists: kakeya.Choice(lists.values()),
}


class Player:
    """One scenario's sessions, and the tokens that its steps keep."""

    def __init__(self, client: Any, do: Do) -> None:
        self._client = client
        self._do = do
        self._sessions: dict[str, Any] = {}
        self._tokens: dict[str, list[int]] = {}

    async def play(self, steps: list[Step]) -> list[Seen]:
        """What was seen in each step. Raises AssertionError where that is not what the step expects."""
        story = []
        try:
            for step in steps:
                meanwhile = asyncio.ensure_future(self._meanwhile(step.get("meanwhile")))
                seen = await self._seen(step)
                await meanwhile
                wrong = differences(resolved(step.get("expect", {}), self._tokens), seen)
                assert not wrong, f"{step}: " + "; ".join(wrong)
                story.append({key: seen[key] for key in step.get("observe", seen)})
        finally:
            for session in self._sessions.values():
                await self._do(session.close)
        return story

    async def _seen(self, step: Step) -> Seen:
        try:
            seen: Seen = await getattr(self, f"_{step['do']}")(step, resolved(step.get("options", {}), self._tokens))
        except kakeya.KakeyaError as error:
            return _described(error)
        return seen

    async def _meanwhile(self, step: Step | None) -> None:
        if step is not None:
            await asyncio.sleep(step["after_seconds"])
            await self._seen(step)

    async def _server_info(self, step: Step, options: dict[str, Any]) -> Seen:
        return _facts(await self._do(self._client.server_info))

    async def _create(self, step: Step, options: dict[str, Any]) -> Seen:
        strategy = None
        if "strategy" in step:
            strategy = _strategy(step["strategy"])
        session = await self._do(self._client.create_session, strategy, **options)
        self._sessions[step["session"]] = session
        return {name: _plain(getattr(session, name)) for name in SESSION_FACTS}

    async def _fork(self, step: Step, options: dict[str, Any]) -> Seen:
        session = await self._do(self._sessions[step["of"]].fork, **options)
        self._sessions[step["session"]] = session
        facts = {name: _plain(getattr(session, name)) for name in SESSION_FACTS}
        return {**facts, "history_length": session.history_length}

    async def _rewind(self, step: Step, options: dict[str, Any]) -> Seen:
        old = self._sessions[step["session"]]
        session = await self._do(old.rewind, step["position"], **options)
        self._sessions[step["session"]] = session
        facts = {name: _plain(getattr(session, name)) for name in SESSION_FACTS}
        return {
            **facts,
            "history_length": session.history_length,
            "prefill_tokens": session.prefill_tokens,
            "is_another": session.id != old.id,
            "old_is_closed": old.is_closed,
        }

    async def _append(self, step: Step, options: dict[str, Any]) -> Seen:
        ids = resolved(step["token_ids"], self._tokens)
        return {"history_length": await self._do(self._sessions[step["session"]].append, ids, **options)}

    async def _generate(self, step: Step, options: dict[str, Any]) -> Seen:
        if "seed" in options:
            options["seed"] = int(options["seed"])
        if "logit_bias" in options:
            options["logit_bias"] = {int(token_id): bias for token_id, bias in options["logit_bias"].items()}
        if "constraint" in options:
            kind, value = next(iter(options["constraint"].items()))
            options["constraint"] = CONSTRAINTS[kind](value)
        session = self._sessions[step["session"]]
        stream = session.generate(step["max_tokens"], **options)
        if "leave_after" in step:
            return {"token_ids": await self._leave(stream, step["leave_after"])}
        result = await self._do(stream.result)
        self._tokens[step.get("as", "")] = list(result.token_ids)
        # A seed that the server drew is another each time.
        seed = str(result.seed) if "seed" in options else None
        return {**_facts(result), "seed": seed, "session_history_length": session.history_length}

    async def _prefill(self, step: Step, options: dict[str, Any]) -> Seen:
        session, reports = self._sessions[step["session"]], list[tuple[int, int]]()
        result = await self._do(
            session.prefill, on_progress=lambda one: reports.append((one.done_tokens, one.total_tokens)), **options
        )
        last = list(reports[-1]) if reports else None
        return {**_facts(result), "seed": None, "progress": last, "session_history_length": session.history_length}

    async def _leave(self, stream: Any, count: int) -> list[int]:
        is_async = hasattr(stream, "__aiter__")
        tokens, following = (aiter(stream), anext) if is_async else (iter(stream), next)
        ids = [await self._do(following, tokens) for _ in range(count)]
        stream.cancel()
        return ids

    async def _info(self, step: Step, options: dict[str, Any]) -> Seen:
        return _facts(await self._do(self._sessions[step["session"]].info))

    async def _close(self, step: Step, options: dict[str, Any]) -> Seen:
        return {"history_length": await self._do(self._sessions[step["session"]].close)}


async def in_loop(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call, and wait for what has to be waited for."""
    result = function(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def _strategy(words: dict[str, Any]) -> kakeya.Strategy:
    if words["kind"] == "named":
        return kakeya.Named(words["name"], **words.get("options", {}))
    given = {key: tuple(each) if isinstance(each, list) else each for key, each in words.items()}
    kind = str(given.pop("kind"))
    strategy: kakeya.Strategy = STRATEGIES[kind](**given)
    return strategy


def _described(error: kakeya.KakeyaError) -> Seen:
    """An error as its reader sees it. Words found on this side of the wire are each SDK's own."""
    return {
        "error": type(error).__name__,
        "reason": error.reason,
        "code": error.code,
        "field": getattr(error, "field", None),
        "metadata": error.metadata,
        "message": error.message if error.reason is not None else None,
        "appended_tokens": error.appended_tokens,
        "retry_after_seconds": error.retry_after_seconds,
    }


def _facts(value: Any) -> Seen:
    names = {field.name for field in dataclasses.fields(value)} - TIMES - SHARED
    return {name: _plain(getattr(value, name)) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, kakeya.Named):
        return {"kind": "named", "name": value.name, "options": value.options}
    if isinstance(value, kakeya.Strategy):
        kind = next(name for name, each in STRATEGIES.items() if isinstance(value, each))
        given = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(STRATEGIES[kind])}
        return {"kind": kind, **{name: each for name, each in given.items() if each not in (None, [])}}
    if isinstance(value, kakeya.TopLogprob):
        return dataclasses.asdict(value)
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


async def main(target: str) -> None:
    async with kakeya.AsyncClient(target, retry=RETRY) as client:
        stories = {each["name"]: await Player(client, in_loop).play(each["steps"]) for each in SCENARIOS}
    print(json.dumps(stories))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
