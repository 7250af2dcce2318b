"""The scenarios that every SDK plays step by step, and what their words mean.

A step does one thing to the session it names. What was seen is an object in the words of the Python SDK; 64-bit seeds
are text. `expect` is a part of what has to be seen; `observe` names what is kept of it, where the rest is a matter of
time. `as` keeps a Generate's tokens, for `{"all_of": name}` and `{"of": name, "at": index}` in later steps;
`{"repeat": ids, "times": n}` is a long list. `meanwhile` is another step, done while this one waits. Clients have
PATIENCE_SECONDS, less than any wait that a server asks for. The server has one strategy more than the wire contract has
arms for, NewerWindow (tests/newer_strategy.py). The TypeScript SDK's runner is src/conformance.test.ts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 0.5

Seen = dict[str, Any]
Step = Mapping[str, Any]

FILE: dict[str, Any] = json.loads(Path(__file__).with_name("scenarios.json").read_text(encoding="utf-8"))
SCENARIOS: list[dict[str, Any]] = FILE["scenarios"]
SETTINGS: dict[str, Any] = FILE["server"]


def resolved(value: Any, tokens: Mapping[str, list[int]]) -> Any:
    """`value` with everything in it that stands for tokens replaced by them."""
    match value:
        case {"all_of": name}:
            return tokens[name]
        case {"of": name, "at": index}:
            return tokens[name][index]
        case {"repeat": ids, "times": times}:
            return ids * times
        case dict():
            return {key: resolved(each, tokens) for key, each in value.items()}
        case list():
            lists = [item if isinstance(item := resolved(each, tokens), list) else [item] for each in value]
            return [item for part in lists for item in part]
    return value


def differences(expected: Any, seen: Any, path: str = "seen") -> list[str]:
    """Where `seen` is not what a step expects. Objects may have more than is expected of them."""
    if isinstance(expected, dict) and isinstance(seen, dict):
        return [line for key, each in expected.items() for line in differences(each, seen.get(key), f"{path}.{key}")]
    return [] if expected == seen else [f"{path} is {seen!r}, expected {expected!r}"]
