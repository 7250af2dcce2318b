"""Texts that are there after a plain install, as documents: where they are, and what of them reads as their kind.

prose    English paragraphs from Python's language reference and from docstrings of networkx and numpy
code     modules of Python's standard library
cpp      headers of torch: ATen, c10 and its C++ interface
polish   stories, a recipe, a letter, in the folder `texts` beside this file, written for it
"""

from __future__ import annotations

import ast
import importlib.util
import pydoc_data.topics
import re
import sysconfig
import tokenize
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_DOCUMENTED = ("networkx", "numpy")
_HEADERS = ("ATen", "c10", "torch")
_LEFT_OUT = {"test", "tests", "testing", "idle_test", "site-packages", "dist-packages", "_vendor"}
# Of the standard library: tables, prose, code in other languages' shapes, files that differ from build to build.
_NOT_CODE = {"encodings", "pydoc_data", "lib2to3", "idlelib", "ensurepip", "lib-dynload"}
# Of the headers: what a program wrote, and what only some builds have.
_NOT_HEADERS = {"ops", "generated", "cuda", "cudnn", "miopen", "hip", "mps", "metal", "xpu", "mtia"}
_SHORTEST_FILE, _LONGEST_FILE = 4_000, 200_000  # characters
_SHORTEST_PARAGRAPH = 12  # words
_MARKUP = re.compile(r">>>|::|\.\. | : |[{}\\|~]|----|====|\*\*\*")


@dataclass(frozen=True, slots=True)
class Document:
    """`name` is relative to what it came with: `networkx/algorithms/cluster.py`."""

    name: str
    text: str


def collect(kind: str) -> tuple[Document, ...]:
    """Every document of a kind of KINDS, sorted by name."""
    return tuple(sorted(_COLLECTORS[kind](), key=lambda document: document.name))


# -- prose ------------------------------------------------------------------------------------------------------------


def _prose() -> Iterator[Document]:
    return _without_repeats(sorted(_paragraphs_of_all(), key=lambda document: document.name))


def _paragraphs_of_all() -> Iterator[Document]:
    for topic, text in pydoc_data.topics.topics.items():
        if paragraphs := list(_paragraphs(text)):
            yield Document(f"pydoc_data/topics/{topic}", "\n\n".join(paragraphs))
    for package in _DOCUMENTED:
        root = _folder_of(package)
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


def _docstrings(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in others' code
        tree = ast.parse(path.read_bytes())
    for node in _statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """In the order of `ast.walk`, which also looks into expressions; no statement is in one."""
    left: deque[ast.AST] = deque([tree])
    while left:
        node = left.popleft()
        yield node
        for parts in vars(node).values():
            if isinstance(parts, list):
                left.extend(part for part in parts if isinstance(part, ast.stmt | ast.ExceptHandler | ast.match_case))


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


# -- code -------------------------------------------------------------------------------------------------------------


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


def _cpp() -> Iterator[Document]:
    root = _folder_of("torch") / "include"
    for folder in _HEADERS:
        for path in (root / folder).rglob("*.h"):
            name = path.relative_to(root)
            if _NOT_HEADERS.intersection(name.parts):
                continue
            text = path.read_text(encoding="utf-8")
            if _SHORTEST_FILE <= len(text) <= _LONGEST_FILE:
                yield Document(name.as_posix(), text)


# -- a language -------------------------------------------------------------------------------------------------------


def _polish() -> Iterator[Document]:
    for path in (Path(__file__).parent / "texts").glob("polish_*.txt"):
        yield Document(path.name, path.read_text(encoding="utf-8").strip())


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is there or comes with torch"
    return Path(spec.submodule_search_locations[0])


_COLLECTORS: dict[str, Callable[[], Iterator[Document]]] = {
    "prose": _prose,
    "code": _code,
    "cpp": _cpp,
    "polish": _polish,
}
KINDS = tuple(_COLLECTORS)
