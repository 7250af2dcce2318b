"""The index of results, made of the records and of nothing else, so that making it again changes nothing.

`page` is the file in the repository: one line for each experiment, its newest record and one headline.
`shown` is the rest: every record in full, for the terminal and for the site's page of an experiment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any
from urllib.parse import quote

from inference_engine.errors import KakeyaError
from laboratory.evaluation import measured
from laboratory.evaluation.record import RESULTS, load

INDEX = "README.md"
HEADLINES = 12  # values shown of a record that does not name its own; of one that does, all of those
LONGEST_TABLE = 60  # rows of the table
NEAREST = 3  # names shown for one that is none
LEAST_ALIKE = 0.6  # as difflib has it

# The index shows one value of each record: the first whose name fits the earliest of these, else the first of all.
# Values of what is compared come before those of the baseline.
_HEADLINE = tuple(
    re.compile(pattern)
    for pattern in (
        r"^(faults|caught|families admitted|turn_last_over_first_paired|first_token_asked_p99_1x)$",
        r"^critical mass|^default sessions .* best effort|^rapid reset: p99, attacked / calm|^error on rows never",
        r"^(speed ÷|same ids as) plain, (hybrid|trained)",
        r"^K error, lloyd4, less own mean|^KL, worst kind .* 1152 bytes",
        r"^KL to full, mean, (?!sink_window).*bytes_per_token=1152",
        r"^KL to full, mean, full:codec=lloyd4",
        r"^KL to full, mean, (?!sink_window|full:codec=bfloat16)",
        r"^tokens a second, together ÷ .* (8|64) sessions",
        r"^(first token|allocated, idle) ÷ .*restored.*latent",
        r"^(?!perplexity|.*÷ int8)(?!.*, full, ).* ÷ ",
        r"^(restored|gather|full:codec=(?!bfloat16|int8)).*: ",
    )
)

_INTRODUCTION = """\
# Results

Every number in the documents comes from a record: what ran, on what machine, and the command that makes it again. Each
experiment below links to its folder. One line shows its newest record and one value of it.

- The whole record, in the terminal: `kakeya evaluate report --show EXPERIMENT`; without a name, all of them.
- The record as data: `results/EXPERIMENT/DATE-MACHINE/record.json`, some with pictures beside
  it. On the site every experiment has a page with all of them; `kakeya evaluate report --pictures DIR` draws them, too.
- A record keeps medians, quartiles and counts, not every trial, turn or sample. With `--items FILE` the command that
  measures writes those to a file elsewhere, a line of JSON for each.
- In the file, names of values are split at their commas, and what names have in common stands once. A value is
  `[median, low, high, count, unit]`, or `[value, unit]`; count and unit of all values below a name stand there as `*`.
  A table is its columns and its rows. `{3}` is the strategy of that place in the config, counted from 0.
- Records that a newer one replaced are in the history of the repository: `git log -- results/EXPERIMENT`.

`kakeya evaluate report` makes this page from the records. A value is a median, with its quartiles in brackets. A value
without brackets was counted or measured once. [How to read a record](../docs/evaluation.md#reading-a-record).
"""


def rebuild(results: Path = RESULTS) -> Path:
    """Write the index of all records under `results`, and return its path. Raises KakeyaError for a broken record.

    Of the project's own, the tables of docs/measured.md are made again, too.
    """
    text = page(results)
    path = results / INDEX
    if results == RESULTS:
        measured.PAGE.write_text(measured.rendered(measured.PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    return path


def page(results: Path) -> str:
    """The index as text: experiments by name, each with its newest record and a headline."""
    rows = ["| experiment | newest record | headline | value | unit |", "|---|---|---|---:|---|"]
    for name, paths in experiments(results).items():
        record = _read(paths[0])
        value_name = _headline(record)
        value = record["values"][value_name]
        here = quote(name)
        device = record["config"].get("device", "cpu")
        machine = _machine(record) if device == "cpu" else _inline(device)
        rows.append(
            f"| [{_words(name)}]({here}) "
            f"| [{record['date']}]({here}/{quote(paths[0].parent.name)}/record.json), {machine} "
            f"| {_cell(value_name)} | {_spread(value)} | {_cell(value['unit'])} |"
        )
    return "\n\n".join((_INTRODUCTION.strip("\n"), "\n".join(rows))) + "\n"


def shown(results: Path = RESULTS, experiment: str | None = None, pictures: Path | None = None) -> str:
    """Every record in full, or those of one experiment, the newest first. Raises KakeyaError for an unknown one.

    pictures: a folder like `results`, with more pictures than are kept there.
    """
    found = experiments(results)
    if experiment is not None and experiment not in found:
        near = _nearest(experiment, found)
        meant = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise KakeyaError(
            f"no record of an experiment {experiment!r}{meant}; `kakeya evaluate report` writes a list of all "
            f"{len(found)} to {results / INDEX}"
        )
    parts = []
    for name in found if experiment is None else (experiment,):
        parts.append(f"# {_words(name)}")
        parts += [_section(path, results, pictures or results) for path in found[name]]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _nearest(asked: str, names: Iterable[str]) -> list[str]:
    """A few that read like it, in full or as far as it goes: names end with that of a model."""

    def alike(name: str) -> float:
        return max(SequenceMatcher(None, asked, name[:end]).ratio() for end in (len(asked), len(name)))

    found = [name for name in names if asked in name or alike(name) >= LEAST_ALIKE]
    return sorted(found, key=alike, reverse=True)[:NEAREST]


def experiments(results: Path) -> dict[str, list[Path]]:
    """The records of each experiment, by name; the newest first. Raises KakeyaError if there is no such folder."""
    if not results.is_dir():
        raise KakeyaError(f"{results}: no such folder; records are written there by `kakeya evaluate …`")
    found: dict[str, list[Path]] = {}
    # By date, which their folders begin with; records of one day by machine.
    for path in sorted(results.glob("*/*/record.json"), key=lambda path: path.parent.name, reverse=True):
        found.setdefault(path.parent.parent.name, []).append(path)
    return dict(sorted(found.items()))


def _headline(record: Mapping[str, Any]) -> str:
    """The name of the value that stands for the record."""
    names = list(record.get("headlines", record["values"]))
    fitting = (name for pattern in _HEADLINE for name in names if pattern.search(name))
    return str(next(fitting, names[0]))


def _section(path: Path, results: Path, pictures: Path) -> str:
    record = _read(path)
    place = path.parent.relative_to(results)
    here = quote(place.as_posix())
    lines = [f"## {record['date']}, {_machine(record)}"]
    if what := record.get("what"):
        lines.append(_inline(what))
    drawn = sorted((pictures / place).glob("*.svg"))
    lines += [f"![{image.stem.replace('_', ' ')}]({here}/{quote(image.name)})" for image in drawn]
    lines.append(
        f"Against: {_inline(record['baseline'])}. Commit `{record['commit'][:12]}`, "
        f"[record]({here}/record.json). Made by:"
    )
    lines.append(f"```\n{record['command']}\n```")
    lines.append(_values(record))
    for title, rows in record.get("tables", {}).items():
        lines.append(_table(title, rows))
    return "\n\n".join(lines)


def _read(path: Path) -> dict[str, Any]:
    try:
        return load(path)
    except (OSError, ValueError) as error:
        raise KakeyaError(f"{path}: not a record: {error}; make it again, or remove it") from error


def _values(record: Mapping[str, Any]) -> str:
    values = record["values"]
    names = list(record.get("headlines", values))
    if "headlines" not in record and "tables" in record:
        return f"{len(values)} values; in tables:"
    shown = names if "headlines" in record else names[:HEADLINES]
    lines = ["| value | | unit |", "|---|---:|---|"]
    lines += [f"| {_cell(name)} | {_spread(values[name])} | {_cell(values[name]['unit'])} |" for name in shown]
    if len(shown) < len(values):
        lines.append(f"\n… and {len(values) - len(shown)} more in the record.")
    return "\n".join(lines)


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return f"**{_inline(title)}**: empty"
    kept = [column for column in rows[0] if _can_show([row[column] for row in rows])]
    numbers = [all(isinstance(row[column], int | float | None) for row in rows) for column in kept]
    lines = [
        f"**{_inline(title)}**\n",
        f"| {' | '.join(map(_cell, kept))} |",
        f"|{'|'.join('---:' if is_number else '---' for is_number in numbers)}|",
    ]
    lines += [f"| {' | '.join(_cell(row[column]) for column in kept)} |" for row in rows[:LONGEST_TABLE]]
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
    place = f"{machine['cpu']}, {machine['cores']} cores" if "cores" in machine else machine["cpu"]
    return place if device == "cpu" else f"{device}, {place}"


def _words(name: str) -> str:
    return name.replace("_", " ")
