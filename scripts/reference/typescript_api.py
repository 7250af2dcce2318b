"""The public names of the TypeScript SDK, as its compiler sees them: `npm run api` writes them down in api.json."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.reference.api import Entry, Member

API = Path(__file__).resolve().parents[2] / "sdks" / "typescript" / "api.json"
TOKENIZATION, TOOLS = "tokenization", "tools"


def entries() -> list[Entry]:
    """Every exported name. An entry beside the first one is a room, whatever modules it is made of."""
    return [
        Entry(
            name=one["name"],
            room=one["entry"] if one["entry"] in (TOKENIZATION, TOOLS) else one["room"],
            declaration=one["declaration"],
            says=one["says"],
            members=tuple(Member(**member) for member in one["members"]),
        )
        for one in json.loads(API.read_text(encoding="utf-8"))
    ]
