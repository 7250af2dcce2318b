"""The page of the TypeScript SDK."""

from __future__ import annotations

from scripts.reference.markdown import page
from scripts.reference.sdk_page import sections
from scripts.reference.typescript_api import TOKENIZATION, TOOLS, entries

INTRODUCTION = """
    `import { Client } from "@kakeya/runtime"`; everything below is there, but for the last two sections, which are in
    `@kakeya/runtime/tokenization` and `@kakeya/runtime/tools`. How to use it: [the SDK's
    guide](../../sdks/typescript/README.md). The same in Python: [both, side by side](sdk_names.md).
"""

TITLES = {
    "client": "Client",
    "options": "What a client and its calls take",
    "session": "Session",
    "stream": "Stream",
    "checks": "Token ids",
    "strategies": "Strategies",
    "text": "Text",
    "thinking": "Thinking",
    "constraints": "Constraints",
    "values": "Answers",
    "retry": "Retries",
    "errors": "Errors",
    TOKENIZATION: "Tokenization",
    TOOLS: "Tools",
}


def render() -> str:
    return page("TypeScript SDK", "sdks/typescript/api.json", INTRODUCTION, *sections(entries(), TITLES, "typescript"))
