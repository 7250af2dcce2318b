"""Words that the vocabulary has replaced do not come back; the field's words are where its readers look for them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    *("docs", "inference_engine", "kakeya_gateway", "kv_cache_proposer", "laboratory", "proto", "scripts", "sdks"),
    "tests",
)
KINDS = {".cpp", ".css", ".h", ".html", ".js", ".json", ".md", ".mjs", ".proto", ".py", ".pyi", ".toml", ".ts"}
# Installed, built, or text that a model is trained on; and this file.
ASIDE = {"node_modules", "dist", "build", "__pycache__", "phrases", "test_words.py", "package-lock.json"}
# Lane, row, ring and way are not among them: a vector, a table, a buffer and an error message have these.
RETIRED = re.compile(
    r"\b(told|nobody|asleep|(?<!malloc )arenas?|trunks?|slabs?|bells?|news|condemn\w*|sayings|strangers?|keep[- ]sets?"
    r"|guess(?!-Verify)\w*|want of memory|somebody|anybody|everybody|whoever)\b",
    re.IGNORECASE,
)

# Where who knows vLLM or llama.cpp searches first: a page, or a room one of whose modules begins with the word.
ENGINE = "inference_engine"
FIELD = {
    "attention sink": (f"{ENGINE}/kv/strategies", "docs/architecture.md"),
    "backpressure": (f"{ENGINE}/server",),
    "chunked prefill": (f"{ENGINE}/scheduler", "docs/capacity.md", "docs/architecture.md"),
    "continuous batching": (f"{ENGINE}/scheduler", "README.md", "docs/architecture.md"),
    "CUDA graphs": (f"{ENGINE}/backends", "README.md", "docs/gpu.md"),
    "dependent launch": (f"{ENGINE}/kernels",),
    "flash decoding": (f"{ENGINE}/kernels",),
    "FlashAttention-3": (f"{ENGINE}/kernels", "docs/gpu.md"),
    "fsync": (f"{ENGINE}/session", "docs/durability.md"),
    "GQA": (f"{ENGINE}/kernels", f"{ENGINE}/kv", "docs/architecture.md"),
    "group commit": (f"{ENGINE}/session",),
    "Gumbel noise": (f"{ENGINE}/kernels", "docs/architecture.md", "docs/concepts.md"),
    "idempotent": (f"{ENGINE}/engine", f"{ENGINE}/session", "docs/concepts.md", "docs/durability.md"),
    "IP ban": (f"{ENGINE}/server", "docs/security.md"),
    "KV cache": (f"{ENGINE}/kv", "README.md", "docs/concepts.md", "docs/index.md", "docs/strategies.md"),
    "KV offload": (f"{ENGINE}/kv",),
    "prefix sharing": (f"{ENGINE}/kv", "README.md", "docs/concepts.md", "docs/architecture.md"),
    "prompt lookup": ("kv_cache_proposer", "README.md", "docs/concepts.md"),
    "rate limit": (f"{ENGINE}/server", "docs/access.md", "docs/security.md"),
    "RoPE": (f"{ENGINE}/models", f"{ENGINE}/kernels", "docs/architecture.md", "docs/operations.md"),
    "speculative decoding": (f"{ENGINE}/decode", f"{ENGINE}/scheduler", "README.md", "docs/concepts.md"),
    "split-K": (f"{ENGINE}/kernels",),
    "time to first token (TTFT)": (f"{ENGINE}/scheduler", "docs/capacity.md"),
    "trellis-coded quantisation": (f"{ENGINE}/kernels",),
}
# "row" is of a matrix, a table, logits or a database. Of the KV cache it is an entry, of a step it is a token.
WITHOUT_ROWS = ("decode", "engine", "kv", "scheduler")
DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
ROWS_LEFT = 17
ROWS = re.compile(r"(?<!in a )\brows?\b", re.IGNORECASE)


def files() -> Iterator[Path]:
    yield from (ROOT / name for name in ("CONTRIBUTING.md", "Makefile", "README.md", "SECURITY.md"))
    for folder in FOLDERS:
        yield from (
            path
            for path in (ROOT / folder).rglob("*")
            if path.suffix in KINDS and not ASIDE.intersection(path.relative_to(ROOT).parts)
        )


def words(line: str) -> str:
    """A line with the words of its identifiers apart."""
    return re.sub(r"_|(?<=[a-z])(?=[A-Z])", " ", line)


def retired(text: str) -> list[str]:
    """Lines with a retired word, outside of the table that says what the field calls it."""
    lines = text.split("\n## Words\n")
    text = lines[0] + "".join(part[part.find("\n## ") :] for part in lines[1:])
    return [line for line in text.splitlines() if RETIRED.search(words(line))]


def test_words_that_were_replaced_do_not_come_back() -> None:
    found = {str(path.relative_to(ROOT)): lines for path in files() if (lines := retired(path.read_text()))}
    assert found == {}


def first_words(place: str) -> str:
    """A page; or of each module of a room its docstring, all its white space alike."""
    path = ROOT / place
    if path.is_file():
        return " ".join(path.read_text(encoding="utf-8").split())
    docstrings = (DOCSTRING.match(module.read_text(encoding="utf-8")) for module in path.rglob("*.py"))
    return " ".join(" ".join(found[1].split()) for found in docstrings if found)


def test_the_words_of_the_field_are_where_its_readers_look_for_them() -> None:
    places = {place: first_words(place).lower() for all_of in FIELD.values() for place in all_of}
    missing = [(word, place) for word, all_of in FIELD.items() for place in all_of if word.lower() not in places[place]]
    assert missing == []


def test_an_entry_and_a_token_are_no_rows() -> None:
    """What is left are rows of matrices. The number only falls."""
    found = [
        line
        for room in WITHOUT_ROWS
        for path in sorted((ROOT / ENGINE / room).rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if ROWS.search(words(line))
    ]
    assert len(found) <= ROWS_LEFT, "\n".join(found)
