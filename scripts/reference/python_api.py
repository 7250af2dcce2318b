"""The public names of the Python SDK, read from its sources: docstrings, signatures, and the comments beside fields.

Read, not imported: the comment behind a field is a field's documentation, and only the source has it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import kakeya
import kakeya.tokenization
import kakeya.tools
from scripts.reference.api import Entry, Member

PACKAGE = Path(kakeya.__file__).parent
TOKENIZATION = "tokenization"
TOOLS = "tools"
CONSTRUCTOR = "__init__"
# All other classes are frozen values, whose fields say it, or made by a call.
CONSTRUCTED = ("Client", "AsyncClient", "Tools")
_WIDE = 100  # columns, beyond which a signature is broken into lines


def entries() -> list[Entry]:
    """Every name of `kakeya.__all__`, `kakeya.tokenization.__all__` and `kakeya.tools.__all__`, as they are defined.

    Raises LookupError for one that is not found.
    """
    names = [(kakeya, name, "") for name in kakeya.__all__]
    names += [(kakeya.tokenization, name, TOKENIZATION) for name in kakeya.tokenization.__all__]
    names += [(kakeya.tools, name, TOOLS) for name in kakeya.tools.__all__]
    return [entry for _, entry in sorted((_entry(*one) for one in names), key=lambda found: found[0])]


def _entry(module: object, name: str, room: str) -> tuple[int, Entry]:
    """The line where it is defined, and what it is. `room`: empty for the module that defines it."""
    home = getattr(module, name).__module__.removeprefix("kakeya.")
    node = _definition(home, name)
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases if not ast.unparse(base).endswith("Base"))
        declaration = f"class {name}({bases})" if bases else f"class {name}"
        members = tuple(_members(home, node))
    else:
        declaration, members = f"def {name}{_signature(node, home)}", ()
    says = ast.get_docstring(node) or ""
    return node.lineno, Entry(name=name, room=room or home, declaration=declaration, says=says, members=members)


def _members(home: str, node: ast.ClassDef) -> Iterator[Member]:
    """Its own public members, then those of bases of ours that are not public themselves; overridden ones once."""
    seen = set()
    for module, definition in _lineage(home, node):
        for member in _own_members(module, definition):
            if member.name not in seen:
                seen.add(member.name)
                yield member


def _lineage(home: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
    yield home, node
    for base in node.bases:
        name = ast.unparse(base)
        if name in kakeya.__all__ or (source := _imported_from(home, name)) is None:
            continue
        definition = _definition(source, name)
        assert isinstance(definition, ast.ClassDef)
        yield from _lineage(source, definition)


def _own_members(module: str, node: ast.ClassDef) -> Iterator[Member]:
    lines = _source(module).splitlines()
    is_enum = any(ast.unparse(base) == "enum.Enum" for base in node.bases)
    for child in node.body:
        match child:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation) if _is_public(name):
                if not ast.unparse(annotation).startswith("ClassVar"):
                    yield Member(name=name, signature=f": {_declared(child)}", says=_comment(lines, child))
            case ast.Assign(targets=[ast.Name(id=name)]) if is_enum:
                yield Member(name=name, signature=f" = {ast.unparse(child.value)}", says=_comment(lines, child))
            case ast.FunctionDef(name="__init__"):
                yield from _attributes(child)
                if node.name in CONSTRUCTED:
                    yield Member(name=CONSTRUCTOR, signature=_signature(child, module))
            case ast.FunctionDef() | ast.AsyncFunctionDef() if _is_public(child.name):
                yield _method(child, module)


def _method(node: ast.FunctionDef | ast.AsyncFunctionDef, home: str) -> Member:
    says = ast.get_docstring(node) or ""
    if any(ast.unparse(decorator) == "property" for decorator in node.decorator_list):
        assert node.returns is not None
        return Member(name=node.name, signature=f": {ast.unparse(node.returns)}", says=says)
    return Member(name=node.name, signature=_signature(node, home), says=says)


def _attributes(constructor: ast.FunctionDef) -> Iterator[Member]:
    """Public attributes that a constructor sets, as errors have them; the class's docstring says what they are."""
    annotations = {
        argument.arg: argument.annotation for argument in constructor.args.args + constructor.args.kwonlyargs
    }
    for node in ast.walk(constructor):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and _is_public(target.attr):
            kind = getattr(node, "annotation", None) or annotations.get(target.attr)
            yield Member(name=target.attr, signature=f": {ast.unparse(kind)}" if kind else "")


def _declared(field: ast.AnnAssign) -> str:
    annotation = ast.unparse(field.annotation)
    return annotation if field.value is None else f"{annotation} = {ast.unparse(field.value)}"


def _comment(lines: list[str], node: ast.stmt) -> str:
    """The comment behind a field, on its last line."""
    assert node.end_lineno is not None
    rest = lines[node.end_lineno - 1][node.end_col_offset :].strip()
    return rest.removeprefix("#").strip() if rest.startswith("#") else ""


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, home: str) -> str:
    """`(max_tokens: int, *, seed: int | None = None) -> GenerateStream`, without `self`, broken where it is wide."""
    parts = list(_arguments(node.args, home))
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != CONSTRUCTOR else ""
    line = f"({', '.join(parts)}){returns}"
    return line if len(node.name) + len(line) < _WIDE else "(\n    " + ",\n    ".join(parts) + f",\n){returns}"


def _arguments(arguments: ast.arguments, home: str) -> Iterator[str]:
    first_default = len(arguments.args) - len(arguments.defaults)
    for number, argument in enumerate(arguments.args):
        if argument.arg != "self":
            yield _argument(
                argument, arguments.defaults[number - first_default] if number >= first_default else None, home
            )
    if arguments.vararg:
        yield f"*{ast.unparse(arguments.vararg)}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _argument(argument, default, home)
    if arguments.kwarg:
        yield f"**{ast.unparse(arguments.kwarg)}"


def _argument(argument: ast.arg, default: ast.expr | None, home: str) -> str:
    return ast.unparse(argument) if default is None else f"{ast.unparse(argument)} = {_value(default, home)}"


def _value(default: ast.expr, home: str) -> str:
    """A default as it is written; a number that has a name, as the number."""
    if isinstance(default, ast.Name):
        value = getattr(import_module(f"kakeya.{home}"), default.id)
        return repr(value) if isinstance(value, int | float) else default.id
    return ast.unparse(default)


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _definition(module: str, name: str) -> ast.ClassDef | ast.FunctionDef:
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    raise LookupError(f"kakeya.{module} defines no {name}")


def _imported_from(module: str, name: str) -> str | None:
    """The module of ours that a name is imported from, or None."""
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kakeya."):
            if any(alias.name == name for alias in node.names):
                return (node.module or "").removeprefix("kakeya.")
        elif isinstance(node, ast.ClassDef) and node.name == name:
            return module
    return None


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_source(module))


@cache
def _source(module: str) -> str:
    return (PACKAGE / f"{module}.py").read_text(encoding="utf-8")
