"""Tool calls in JSON to be tested on: schemas, calls that fit them, results that fit the calls.

    {"name": "forecast.hourly", "description": …, "parameters": {"type": "object", "properties": …}}
    {"name": "forecast.hourly", "arguments": {"place": "Tromsø", "hours": 6}}
    {"place": "Tromsø", "hours": [{"at": "07:00", "celsius": -3.5}, …]}

Calibration has calls of its own (laboratory/training/made_text.py): of other tools, other fields and another
layout, for what is tested is whether restoring holds up on calls that no format anticipates.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Make = Callable[[random.Random], Any]


@dataclass(frozen=True, slots=True)
class Field:
    """kind: a type of JSON Schema. make: a value of it."""

    kind: str
    description: str
    make: Make


@dataclass(frozen=True, slots=True)
class Tool:
    """fields: of each thing that the result lists, under `listed`."""

    name: str
    description: str
    parameters: dict[str, Field]
    listed: str
    fields: dict[str, Make]


def exchanges(rng: random.Random) -> Iterator[str]:
    """A few tools' schemas, then calls and their results, then other tools', without end."""
    while True:
        tools = rng.sample(TOOLS, 3)
        indent = rng.choice((None, None, None, 2))
        yield "\n".join(json.dumps(_schema(tool), ensure_ascii=False) for tool in tools) + "\n\n"
        for _ in range(rng.randint(3, 6)):
            yield _exchange(rng, rng.choice(tools), indent)


def _schema(tool: Tool) -> dict[str, Any]:
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": {
            "type": "object",
            "properties": {
                name: {"type": field.kind, "description": field.description} for name, field in tool.parameters.items()
            },
            "required": list(tool.parameters)[:1],
        },
    }


def _exchange(rng: random.Random, tool: Tool, indent: int | None) -> str:
    required, *others = tool.parameters
    given = [required, *(name for name in others if rng.random() < 0.7)]
    arguments = {name: tool.parameters[name].make(rng) for name in given}
    call = {"id": f"call_{rng.randrange(16**8):08x}", "name": tool.name, "arguments": arguments}
    return f"{json.dumps(call, indent=indent, ensure_ascii=False)}\n{_result(rng, tool, call, indent)}\n\n"


def _result(rng: random.Random, tool: Tool, call: dict[str, Any], indent: int | None) -> str:
    required = next(iter(tool.parameters))
    result: dict[str, Any] = {"call": call["id"], required: call["arguments"][required]}
    if rng.random() < 0.15:
        result["problem"] = {"code": rng.choice((404, 409, 422, 503)), "detail": f"cannot serve this {required}"}
    else:
        things = [{name: make(rng) for name, make in tool.fields.items()} for _ in range(rng.randint(1, 4))]
        result |= {tool.listed: things, "remaining": rng.choice((0, 0, 3, 17))}
    return json.dumps(result, indent=indent, ensure_ascii=False)


def _one_of(*values: Any) -> Make:
    return lambda rng: rng.choice(values)


def _whole(low: int, high: int) -> Make:
    return lambda rng: rng.randint(low, high)


def _decimal(low: float, high: float) -> Make:
    return lambda rng: round(rng.uniform(low, high), 1)


def _clock(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.choice((0, 5, 10, 20, 35, 50)):02d}"


def _day(rng: random.Random) -> str:
    return f"{rng.randint(1, 28)} {rng.choice(('Jan', 'Mar', 'May', 'Jul', 'Oct', 'Dec'))} {rng.randint(2031, 2038)}"


def _code(rng: random.Random) -> str:
    return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(3)) + f"-{rng.randint(100, 999)}"


def _is_so(rng: random.Random) -> bool:
    return rng.random() < 0.5


_PLACE = _one_of("Tromsø", "Kyoto", "Valparaíso", "Leeds", "Tbilisi", "Accra", "Brno", "Halifax")
_PERSON = _one_of("M. Okafor", "J. Lindqvist", "P. Castellanos", "R. Adeyemi", "S. Novak", "T. Hayashi")
_GENRE = _one_of("ambient", "baroque", "cumbia", "fado", "techno")

TOOLS = (
    Tool(
        "forecast.hourly",
        "Weather at a place for the next hours.",
        {
            "place": Field("string", "a town", _PLACE),
            "hours": Field("integer", "how many, at most 48", _whole(1, 48)),
            "units": Field("string", "metric or imperial", _one_of("metric", "imperial")),
        },
        "hours",
        {"at": _clock, "celsius": _decimal(-20, 38), "rain_mm": _decimal(0, 9), "wind": _one_of("calm", "SW 4", "N 7")},
    ),
    Tool(
        "trains.connections",
        "Connections between two stations.",
        {
            "origin": Field("string", "where the journey begins", _PLACE),
            "destination": Field("string", "where it ends", _PLACE),
            "departing": Field("string", "earliest time, HH:MM", _clock),
            "with_bicycle": Field("boolean", "only trains that take one", _is_so),
        },
        "connections",
        {"leaves": _clock, "arrives": _clock, "changes": _whole(0, 4), "fare": _decimal(9, 140), "train": _code},
    ),
    Tool(
        "pantry.adjust_stock",
        "Book goods in or out of a kitchen's store.",
        {
            "ingredient": Field(
                "string", "what is booked", _one_of("flour", "olive oil", "lentils", "eggs", "saffron")
            ),
            "grams": Field("integer", "negative if it was used up", _whole(-900, 5000)),
            "shelf": Field("string", "where it lies", _code),
        },
        "shelves",
        {"shelf": _code, "grams": _whole(0, 9000), "best_before": _day},
    ),
    Tool(
        "museum.find_exhibits",
        "Exhibits by period and material.",
        {
            "period": Field("string", "a rough date", _one_of("bronze age", "baroque", "interwar", "Edo")),
            "material": Field("string", "what it is made of", _one_of("glass", "oak", "copper", "silk", "clay")),
            "on_display": Field("boolean", "leave out what is in storage", _is_so),
        },
        "exhibits",
        {"inventory": _code, "room": _whole(1, 41), "curator": _PERSON, "insured_for": _whole(400, 90_000)},
    ),
    Tool(
        "playlist.append_tracks",
        "Put tracks at the end of a playlist.",
        {
            "playlist": Field("string", "its name", _one_of("sunday", "long drive", "focus", "kitchen")),
            "genre": Field("string", "of the tracks", _GENRE),
            "minutes": Field("integer", "how long they last together", _whole(10, 240)),
        },
        "tracks",
        {"title": _one_of("Slow Tide", "Paper Lantern", "Eleven", "Undertow"), "beats": _whole(58, 178), "key": _code},
    ),
    Tool(
        "greenhouse.set_climate",
        "Targets for one bay of a greenhouse.",
        {
            "bay": Field("string", "which bay", _code),
            "humidity": Field("number", "percent", _decimal(30, 95)),
            "celsius": Field("number", "air temperature", _decimal(8, 32)),
            "vents_open": Field("boolean", "whether vents may open", _is_so),
        },
        "sensors",
        {"sensor": _code, "humidity": _decimal(30, 95), "celsius": _decimal(8, 32), "seen": _clock},
    ),
    Tool(
        "clinic.book_slot",
        "Reserve an appointment.",
        {
            "practitioner": Field("string", "with whom", _PERSON),
            "day": Field("string", "the day wished for", _day),
            "reason": Field("string", "in a few words", _one_of("check-up", "vaccination", "knee pain", "results")),
        },
        "slots",
        {"day": _day, "from": _clock, "room": _whole(1, 12), "confirmed": _is_so},
    ),
    Tool(
        "parcel.trace",
        "Where a parcel has been.",
        {
            "consignment": Field("string", "the number on the label", _code),
            "language": Field("string", "of the answer", _one_of("en", "cs", "ja", "pl")),
        },
        "scans",
        {"depot": _PLACE, "scanned": _clock, "weight_kg": _decimal(0.2, 28), "signed_by": _PERSON},
    ),
)
