"""Haystacks: text of a kind, of an exact number of tokens, the same for the same (kind, count, seed).

    looped   five short sentences, over and over: the easy case
    prose    English paragraphs from Python's language reference and from docstrings of networkx and numpy
    code     modules of Python's standard library

All of it is there after a plain install and comes with the versions in use, so records hold `digest` of it. Every
document belongs to one half, chosen by a hash of its name: haystacks are made of `test`; whoever calibrates something
takes `calibration`, and the two never share a document.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import pydoc_data.topics
import random
import re
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

from inference_engine.errors import InvalidArgument

Half = Literal["calibration", "test"]

KINDS = ("looped", "prose", "code")
LOOP = (
    " The grass is green.",
    " The sky is blue.",
    " The sun is yellow.",
    " Here we go.",
    " There and back again.",
)

_DOCUMENTED = ("networkx", "numpy")
_LEFT_OUT = {"test", "tests", "testing", "idle_test", "site-packages", "dist-packages", "_vendor"}
# Of the standard library: tables, prose, code in other languages' shapes, files that differ from build to build.
_NOT_CODE = {"encodings", "pydoc_data", "lib2to3", "idlelib", "ensurepip", "lib-dynload"}
_SHORTEST_FILE, _LONGEST_FILE = 4_000, 200_000  # characters
_SHORTEST_PARAGRAPH = 12  # words
_MARKUP = re.compile(r">>>|::|\.\. | : |[{}\\|~]|----|====|\*\*\*")


@dataclass(frozen=True, slots=True)
class Document:
    """`name` is relative to what it came with: `networkx/algorithms/cluster.py`."""

    name: str
    text: str

    @property
    def half(self) -> Half:
        return "test" if hashlib.sha256(self.name.encode()).digest()[0] % 2 else "calibration"


def filler(tokenizer: Any, kind: str, count: int, seed: int | str) -> list[int]:
    """Exactly `count` ids of text of that kind, from the test half, starting and ordered as `seed` says.

    A longer haystack begins with the shorter one of the same seed. Text repeats only once every document was used.
    """
    rng = random.Random(f"{kind}/{seed}")
    ids: list[int] = []
    for text in _stream(kind, rng):
        ids += tokenizer.encode(text, add_special_tokens=False)
        if len(ids) >= count:
            break
    return ids[:count]


def calibration_texts(kind: str) -> tuple[str, ...]:
    """Documents that no haystack contains. There are none of kind `looped`."""
    return tuple(document.text for document in documents(kind, "calibration"))


@lru_cache(maxsize=8)
def documents(kind: str, half: Half) -> tuple[Document, ...]:
    """Sorted by name. Raises InvalidArgument for a kind that has no documents."""
    if kind not in ("prose", "code"):
        raise InvalidArgument("kind", f"there are documents of kind prose and code, not {kind!r}")
    return tuple(document for document in _all(kind) if document.half == half)


def digest(kind: str) -> str:
    """SHA-256 of the texts that haystacks of this kind are cut from: equal digests, equal haystacks."""
    texts = LOOP if kind == "looped" else [part for one in documents(kind, "test") for part in (one.name, one.text)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _stream(kind: str, rng: random.Random) -> Iterator[str]:
    """Text without end."""
    if kind == "looped":
        first = rng.randrange(len(LOOP))
        return cycle((*LOOP[first:], *LOOP[:first]))
    return _shuffled(documents(kind, "test"), rng)


def _shuffled(found: Sequence[Document], rng: random.Random) -> Iterator[str]:
    order = list(found)
    rng.shuffle(order)
    # The first one is entered at some paragraph, so that two seeds differ even where documents are few.
    paragraphs = order[0].text.split("\n\n")
    yield "\n\n".join(paragraphs[rng.randrange(len(paragraphs)) :]) + "\n\n"
    for document in cycle([*order[1:], order[0]]):
        yield document.text + "\n\n"


# -- where the texts are ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def _all(kind: str) -> tuple[Document, ...]:
    found = sorted(_prose() if kind == "prose" else _code(), key=lambda document: document.name)
    return tuple(_without_repeats(found) if kind == "prose" else found)


def _prose() -> Iterator[Document]:
    for topic, text in pydoc_data.topics.topics.items():
        if paragraphs := list(_paragraphs(text)):
            yield Document(f"pydoc_data/topics/{topic}", "\n\n".join(paragraphs))
    for package in _DOCUMENTED:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations, f"{package} comes with torch and cannot be missing"
        root = Path(spec.submodule_search_locations[0])
        for path in _python_files(root, _LEFT_OUT):
            paragraphs = [part for text in _docstrings(path) for part in _paragraphs(text)]
            if paragraphs:
                yield Document(f"{package}/{path.relative_to(root).as_posix()}", "\n\n".join(paragraphs))


def _without_repeats(found: Sequence[Document]) -> Iterator[Document]:
    """Docstrings quote one another: a paragraph stays in the first document that has it, or both halves would."""
    seen: set[str] = set()
    for document in found:
        kept = [part for part in dict.fromkeys(document.text.split("\n\n")) if part not in seen]
        seen.update(kept)
        if kept:
            yield Document(document.name, "\n\n".join(kept))


def _code() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in _python_files(root, _LEFT_OUT | _NOT_CODE):
        if path.name.startswith("_sysconfigdata"):
            continue
        with tokenize.open(path) as file:
            text = file.read()
        if _SHORTEST_FILE <= len(text) <= _LONGEST_FILE:
            yield Document(path.relative_to(root).as_posix(), text)


def _python_files(root: Path, left_out: set[str]) -> Iterator[Path]:
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if not left_out.intersection(parts) and not any(part.startswith("config-") for part in parts):
            yield path


def _docstrings(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of somebody else's escapes
        tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def _paragraphs(text: str) -> Iterator[str]:
    """Those that read as English: whole sentences of words, no markup, no tables, no examples of code."""
    for part in re.split(r"\n\s*\n", text):
        words = part.split()
        paragraph = " ".join(words)
        if len(words) < _SHORTEST_PARAGRAPH or not paragraph[0].isupper() or not paragraph.endswith((".", "!", "?")):
            continue
        plain = sum(word.strip(".,;:()\"'*`?!").replace("'", "").replace("-", "").isalpha() for word in words)
        if plain >= 0.85 * len(words) and not _MARKUP.search(paragraph):
            yield paragraph
