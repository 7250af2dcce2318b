"""The page of the Python SDK."""

from __future__ import annotations

from scripts.reference.markdown import page
from scripts.reference.python_api import TOKENIZATION, TOOLS, entries
from scripts.reference.sdk_page import sections

INTRODUCTION = """
    `from kakeya import Client`; everything below is in `kakeya`, but for the last two sections, which are in
    `kakeya.tokenization` and `kakeya.tools`. How to use it: [the SDK's guide](../../sdks/python/README.md). The same in
    TypeScript: [both, side by side](sdk_names.md).
"""

TITLES = {
    "_sync": "Client, session, stream",
    "_async": "The same for asyncio",
    "_strategies": "Strategies",
    "_text": "Text",
    "_thinking": "Thinking",
    "_constraints": "Constraints",
    "_values": "Answers",
    "_channel": "Certificates",
    "_retry": "Retries",
    "_errors": "Errors",
    TOKENIZATION: "Tokenization",
    TOOLS: "Tools",
}


def render() -> str:
    return page("Python SDK", "sdks/python/src/kakeya", INTRODUCTION, *sections(entries(), TITLES, "python"))
