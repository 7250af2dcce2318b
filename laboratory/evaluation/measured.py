"""The tables of docs/measured.md, made of the records as `results/measured.toml` says; the words between them stay."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inference_engine.errors import KakeyaError
from laboratory.evaluation.record import RESULTS, ROOT, load

PAGE = ROOT / "docs/measured.md"
TABLES = "measured.toml"
_MADE = re.compile(r"(<!-- records (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(text: str, results: Path = RESULTS) -> str:
    """The page with its tables as the records have them now. Raises KakeyaError for what no record has."""
    tables = tomllib.loads((results / TABLES).read_text(encoding="utf-8"))
    if unused := tables.keys() - {found[2] for found in _MADE.finditer(text)}:
        raise KakeyaError(f"{PAGE.name} does not show {', '.join(sorted(unused))} of {TABLES}: take it out there")
    return _MADE.sub(lambda found: f"{found[1]}\n{_table(tables[found[2]], results)}\n\n{found[3]}", text)


def _table(spec: Mapping[str, Any], results: Path) -> str:
    sources: dict[Path, dict[str, Any]] = {}
    lines = [f"| {spec.get('head', '')} | {' | '.join(spec['columns'])} |", "|---|" + "---:|" * len(spec["columns"])]
    for label, row in spec["rows"].items():
        of, name = row if isinstance(row, list) else (spec["of"], row)
        path = _path(of, results)
        record = sources.setdefault(path, load(path))
        cells = [_cell(record, name, column, path, spec) for column in spec["columns"].values()]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    links = ", ".join(
        f"[{path.parent.parent.name}](../results/{path.relative_to(results).as_posix()})" for path in sources
    )
    return "\n".join(lines) + f"\n\nRecords: {links}."


def _path(of: str, results: Path) -> Path:
    found = sorted(results.glob(f"{of}/record.json" if "/" in of else f"{of}/*/record.json"))
    if not found:
        raise KakeyaError(f"{PAGE.name} names a record {of!r}, which {results} does not have")
    return found[-1]


def _cell(record: Mapping[str, Any], row: str, column: str, path: Path, spec: Mapping[str, Any]) -> str:
    name = row.replace("{}", column) if "{}" in row or not column else column.replace("{}", row)
    if (value := record["values"].get(name)) is None:
        if spec.get("absent"):
            return "–"
        raise KakeyaError(f"{PAGE.name} names a value {name!r}, which {path} does not have")
    if value["unit"].startswith("of "):
        return f"{value['median']:g} {value['unit']}"
    median, low, high = (_digits(value[key] / spec.get("per", 1)) for key in ("median", "low", "high"))
    return f"{median} ({low}–{high})" if spec.get("spread") and low != high else median


def _digits(value: float) -> str:
    """Three, and all of what is before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
