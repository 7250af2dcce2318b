"""The index of results: one page, made of every record and of nothing else, so that making it again changes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from inference_engine.errors import KakeyaError
from laboratory.evaluation.record import RESULTS, validate_record

INDEX = "README.md"
HEADLINES = 12  # values shown of a record that does not name its own
MOST_HEADLINES = 40  # of one that does
LONGEST_TABLE = 60  # rows

_INTRODUCTION = """\
# Results

Every number that is claimed anywhere comes from a record below: what ran, on what, and the command that makes it again.
This page is made by `kakeya evaluate report` from the records; edit those, or better, run them again.

Values are medians with their quartiles in brackets, or what the record says they are; a value without brackets was
counted or measured once.
"""


def rebuild(results: Path = RESULTS) -> Path:
    """Write the index of all records under `results` and return its path. Raises KakeyaError for a broken record."""
    path = results / INDEX
    if not results.is_dir():
        raise KakeyaError(f"{results}: no such folder; records are written there by `kakeya evaluate …`")
    path.write_text(page(results), encoding="utf-8")
    return path


def page(results: Path) -> str:
    """The index as text: experiments by name, each with its records, the latest first."""
    found = sorted(results.glob("*/*/record.json"))
    by_experiment: dict[str, list[Path]] = {}
    for path in found:
        by_experiment.setdefault(path.parent.parent.name, []).append(path)
    parts = [_INTRODUCTION]
    if by_experiment:
        parts.append("\n".join(f"- [{_words(name)}](#{_anchor(name)})" for name in by_experiment))
    for name, paths in by_experiment.items():
        parts.append(f"## {_words(name)}")
        # By date, which their names begin with; machines of one day by name.
        parts += [_section(path, results) for path in sorted(paths, key=lambda path: path.parent.name, reverse=True)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _section(path: Path, results: Path) -> str:
    record = _read(path)
    folder = path.parent
    here = quote(folder.relative_to(results).as_posix())
    lines = [f"### {record['date']}, {_machine(record)}"]
    if what := record.get("what"):
        lines.append(_inline(what))
    lines.append(
        f"Against: {_inline(record['baseline'])}. Commit `{record['commit'][:12]}`, "
        f"[record]({here}/record.json). Made by:"
    )
    lines.append(f"```\n{record['command']}\n```")
    lines.append(_values(record))
    for title, rows in record.get("tables", {}).items():
        lines.append(_table(title, rows))
    lines += [f"![{image.stem}]({here}/{quote(image.name)})" for image in sorted(folder.glob("*.png"))]
    return "\n\n".join(lines)


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        validate_record(record)
    except (OSError, ValueError) as error:
        raise KakeyaError(f"{path}: not a record: {error}; make it again, or remove it") from error
    assert isinstance(record, dict)
    return record


def _values(record: Mapping[str, Any]) -> str:
    values = record["values"]
    names = list(record.get("headlines", values))
    if "headlines" not in record and "tables" in record:
        return f"{len(values)} values; in tables:"
    shown = names[: MOST_HEADLINES if "headlines" in record else HEADLINES]
    lines = ["| value | | unit |", "|---|---:|---|"]
    lines += [f"| {_cell(name)} | {_spread(values[name])} | {_cell(values[name]['unit'])} |" for name in shown]
    if len(shown) < len(values):
        lines.append(f"\n… and {len(values) - len(shown)} more in the record.")
    return "\n".join(lines)


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return f"**{_inline(title)}**: empty"
    columns = list(dict.fromkeys(key for row in rows for key in row))
    kept = [column for column in columns if _can_show([row.get(column) for row in rows])]
    numbers = [all(isinstance(row.get(column, 0), int | float) for row in rows) for column in kept]
    lines = [
        f"**{_inline(title)}**\n",
        f"| {' | '.join(map(_cell, kept))} |",
        f"|{'|'.join('---:' if is_number else '---' for is_number in numbers)}|",
    ]
    lines += [f"| {' | '.join(_cell(row.get(column)) for column in kept)} |" for row in rows[:LONGEST_TABLE]]
    if len(rows) > LONGEST_TABLE:
        lines.append(f"\n… and {len(rows) - LONGEST_TABLE} more rows in the record.")
    return "\n".join(lines)


def _can_show(values: Sequence[object]) -> bool:
    """Whether a column says anything, and in single words or numbers; what is nested stays in the record."""
    return any(value not in ("", None) for value in values) and not any(isinstance(one, list | dict) for one in values)


def _spread(value: Mapping[str, Any]) -> str:
    if value["low"] == value["high"]:
        return _number(value["median"])
    return f"{_number(value['median'])} [{_number(value['low'])}, {_number(value['high'])}]"


def _number(value: float) -> str:
    """Whole numbers in full, others to four digits."""
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number(value)
    return _inline(str(value)).replace("|", "\\|")


def _inline(text: str) -> str:
    """One line, and no markup of its own."""
    return " ".join(re.sub(r"([<>`*_\[\]])", r"\\\1", text).split()).rstrip(".")


def _machine(record: Mapping[str, Any]) -> str:
    machine, device = record["machine"], record["config"].get("device", "cpu")
    place = f"{machine['cpu']}, {machine['cores']} cores"
    return place if device == "cpu" else f"{device}, {place}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _anchor(name: str) -> str:
    """As GitHub makes it of the heading."""
    return re.sub(r"[^\w\- ]", "", _words(name).lower()).replace(" ", "-")
