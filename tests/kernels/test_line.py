"""Kernels take the numbers of a query's line from where the plan puts them, whatever they are written in.

C++ and Triton have the names with their places once more. Their texts are read here; neither is compiled or imported.
"""

from __future__ import annotations

import ast
import re
from types import ModuleType

import pytest

from inference_engine.kernels import offloaded, reads
from inference_engine.kernels.reads import BlockRead, OffloadedBlockRead, ReadRecord, RegionRead, TokenRead
from inference_engine.native import library
from scripts.check_links import ROOT

NATIVE = ROOT / "inference_engine/native/src"
TRITON = ROOT / "inference_engine/kernels/triton"
PREFIXES = {"Source": "FROM_", "KVType": "KV_", "CodedAs": "CODED_"}
SHORTER = {"FLOAT32": "F32", "FLOAT16": "F16", "BFLOAT16": "BF16"}  # of sources, as llama.cpp has them


def places(module: ModuleType) -> dict[str, int]:
    """Names of a module for places in a line; how many there are is no place."""
    return {name: at for name, at in vars(module).items() if name.isupper() and isinstance(at, int)}


def enumerators(text: str, name: str) -> dict[str, int]:
    """Of an enum in C++: each with its number."""
    (body,) = re.findall(rf"^enum {name}(?: : \w+)? {{(.*?)}};", text, re.MULTILINE | re.DOTALL)
    found: dict[str, int] = {}
    for place, one in enumerate(body.split(",")):
        called, _, same = (part.strip() for part in one.partition("="))
        if same:
            found[called] = int(same) if same.isdigit() else found[same]
        else:
            found[called] = place
    return found


def places_in_kernels(function: str) -> dict[str, int]:
    """What a function of `triton/line.py` looks names up in."""
    tree = ast.parse((TRITON / "line.py").read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    (table,) = (node for node in ast.walk(found) if isinstance(node, ast.Dict))
    return dict(ast.literal_eval(table))


def words(*records: type[ReadRecord]) -> dict[str, int]:
    """Of a row: the header's, and those of these records. One name is in one place."""
    found = {name: at for name, at in places(reads).items() if name not in ("FIELDS", "_OWN")}
    for record in records:
        for name in record.WORDS:
            assert found.setdefault(name, record.word(name)) == record.word(name)
    return found


def test_cpp_has_the_numbers_of_a_row_where_the_plan_puts_them() -> None:
    text = (NATIVE / "attention.h").read_text(encoding="utf-8")
    assert enumerators(text, "Field") == words(BlockRead, TokenRead)
    assert f"FIELDS = {reads.FIELDS};" in text
    numbers = enumerators(text, "Kind")
    assert numbers == {
        "REGION_READ": RegionRead.NUMBER, "BLOCK_READ": BlockRead.NUMBER, "TOKEN_READ": TokenRead.NUMBER
    }  # fmt: skip


def test_triton_has_the_numbers_of_a_row_where_the_plan_puts_them() -> None:
    served = (BlockRead, OffloadedBlockRead, TokenRead)
    assert places_in_kernels("in_line") == words(*served)
    assert places_in_kernels("number_of") == {record.__name__: record.NUMBER for record in (RegionRead, *served)}


def test_the_kernels_that_a_record_names_are_there() -> None:
    for record in (BlockRead, OffloadedBlockRead, TokenRead):
        for named in record.KERNELS.values():
            module, _, name = named.partition(":")
            path = ROOT / (module.replace(".", "/") + ".py") if name else ROOT / "inference_engine/native" / module
            assert path.is_file() and f"def {name}(" * bool(name) in path.read_text(encoding="utf-8"), named


def test_a_record_whose_number_is_taken_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"has the number 3, which is that of .*TokenRead"):
        type("Other", (ReadRecord,), {"NUMBER": TokenRead.NUMBER})


def test_triton_has_the_numbers_of_a_record_where_sessions_put_them() -> None:
    expected = places(offloaded)
    assert expected.pop("NUMBERS") > max(expected.values())
    assert places_in_kernels("in_record") == expected


def test_no_kernel_counts_the_numbers_of_a_line_by_itself() -> None:
    counted = re.compile(r"\b(?:p_line|p_lines|p_first|p_last|p_record|FIELDS) \+ \d")
    texts = {path.name: path.read_text(encoding="utf-8") for path in TRITON.glob("*.py")}
    assert {name: found for name, text in texts.items() if (found := counted.findall(text))} == {}
    assert counted.search("tl.load(p_line + 4)") and counted.search("p_regions + o_query * FIELDS + 6")


@pytest.mark.parametrize("name", ["Format", "Source", "PackError", "ProductIdentity", "KVType", "CodedAs"])
def test_cpp_numbers_what_the_library_names_as_python_does(name: str) -> None:
    found = enumerators((NATIVE / "types.h").read_text(encoding="utf-8"), name.removeprefix("Product"))
    found = {called.removeprefix(PREFIXES.get(name, "")): place for called, place in found.items()}
    if name == "Source":
        found = {SHORTER.get(called, called): place for called, place in found.items()}
    count = found.pop(f"{name.upper()}S", None)
    expected = {member.name: member.value for member in getattr(library, name)}
    assert found == expected
    assert count in (None, len(expected))


def test_an_enum_is_read_with_what_stands_for_another() -> None:
    assert enumerators("enum A { X, Y,\n  Z = X };\n", "A") == {"X": 0, "Y": 1, "Z": 0}
