"""Tool calls as agents exchange them: JSON of made-up tools, arguments and results, the same for the same seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

_VERBS = ("get", "list", "create", "update", "delete", "search", "run", "send")
_THINGS = ("user", "invoice", "file", "event", "ticket", "order", "branch", "metric", "message", "device")
_FIELDS = ("id", "name", "path", "query", "limit", "since", "status", "tags", "amount", "is_active", "owner", "region")
_WORDS = ("alpha", "north", "draft", "urgent", "backup", "v2", "eu-west", "weekly", "ada", "kernel", "blue", "final")


def tool_calls(seed: int) -> Iterator[str]:
    """Exchanges without end: a call, its result, sometimes an error."""
    rng = random.Random(seed)
    while True:
        call = {
            "name": f"{rng.choice(_VERBS)}_{rng.choice(_THINGS)}",
            "arguments": {field: _value(rng) for field in rng.sample(_FIELDS, rng.randint(1, 4))},
        }
        results = [
            {field: _value(rng) for field in rng.sample(_FIELDS, rng.randint(2, 5))} for _ in range(rng.randint(1, 4))
        ]
        result: object = {"ok": True, "results": results}
        if rng.random() < 0.2:
            result = {"ok": False, "error": f"{rng.choice(_FIELDS)} must not be {_value(rng)!r}"}
        indent = rng.choice((None, None, 2))
        yield f"<tool_call>\n{json.dumps(call, indent=indent)}\n</tool_call>\n"
        yield f"<tool_response>\n{json.dumps(result, indent=indent)}\n</tool_response>\n"


def _value(rng: random.Random) -> object:
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randint(0, 99_999)
    if kind == 1:
        return round(rng.uniform(0, 1000), 2)
    if kind == 2:
        return rng.random() < 0.5
    if kind == 3:
        return [rng.choice(_WORDS) for _ in range(rng.randint(0, 3))]
    if kind == 4:
        day = f"{rng.randint(2019, 2029)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
        return f"{day}T{rng.randint(0, 23):02d}:00:00Z"
    return "/".join(rng.choice(_WORDS) for _ in range(rng.randint(1, 3)))
