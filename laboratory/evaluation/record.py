"""Records: a number, and everything a reader needs to make it again.

    results/<experiment>/<date>-<machine>/record.json

A record says what ran (commit, command, config, seeds), on what (machine, packages), what came out (values with unit,
median and spread) and against what (baseline). It names no host and no folder of the machine it was made on.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from inference_engine.config import in_full
from inference_engine.errors import ConfigError, InvalidArgument

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
REQUIRED = ("command", "config", "seeds", "values", "baseline")
VALUE_KEYS = ("unit", "median", "low", "high", "count")
_BETWEEN = ", "  # parts of a value's name
_DIGITS = 6
_LONGEST_LINE = 120  # of one that could be broken
_SHARED = "*"  # beside the parts of names: count and unit of all below
_ABBREVIATED = {"values", "tables", "headlines"}  # parts of a record in which strategies stand by their places
_PLACE = re.compile(r"\{(\d+)\}")
_SHORT_NAME = 4
MOST_HEADLINES = 40
_COMMIT = re.compile(r"[0-9a-f]{7,40}(\+changes)?")


def summarize(samples: Sequence[float], unit: str) -> dict[str, Any]:
    """One value of a record: the median, the quartiles as its spread, and how many samples they stand for."""
    assert samples, "a value needs a sample"
    if len(samples) == 1:
        low = high = samples[0]
    else:
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    median = statistics.median(samples)
    return {"unit": unit, "median": median, "low": low, "high": high, "count": len(samples)}


def exact(value: float, unit: str) -> dict[str, Any]:
    """One value that was counted, not sampled."""
    return {"unit": unit, "median": value, "low": value, "high": value, "count": 1}


def command_line(*, without: Sequence[str] = ()) -> str:
    """The command that is running, as typed from the root of the repository. without: options that are not shown."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT).as_posix() if script.is_relative_to(ROOT) else script.name
    return shlex.join(("python", name, *shown(sys.argv[1:], without=without)))


def shown(typed: Sequence[str], *, without: Sequence[str] = (), without_absolute: Sequence[str] = ()) -> list[str]:
    """The words as typed, but for this machine's folders: files of the repository are named from its root.

    without: options that are left out with their value; without_absolute: only if that names such a folder.
    """
    words = []
    rest = iter(typed)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag in (*without, *without_absolute):
            given = value if equals else next(rest)
            if flag in without_absolute and not in_full(given).is_absolute():
                words += [word] if equals else [word, given]
        elif flag.startswith("--") and equals:
            words.append(f"{flag}={_without_folder(value)}")
        else:
            words.append(_without_folder(word))
    return words


def _without_folder(word: str) -> str:
    path = Path(word)
    if not path.is_absolute():
        return word
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def write_record(
    experiment: str, payload: Mapping[str, Any], *, results_dir: Path = RESULTS, items: Path | None = None
) -> Path:
    """Complete `payload` with date, commit and machine, check it, and write it. Returns the path of the record.

    `payload` has at least REQUIRED. A second run of the experiment on the same day and machine replaces the first.
    Its `items`, each single one of what was measured, by name, are no part of a record: they go to the file `items`, or
    nowhere. Raises ValueError if something is missing or a text would give away this machine's folders.
    """
    today = dt.datetime.now(dt.UTC).date().isoformat()
    machine = describe_machine()
    record = {"experiment": experiment, "date": today, "commit": commit(), "machine": machine, **payload}
    single = record.pop("items", {})
    if len(record.get("headlines", ())) > MOST_HEADLINES:
        record["headlines"] = record["headlines"][:MOST_HEADLINES]
    validate_record(record)
    folder = results_dir / experiment / f"{today}-{machine_name(machine)}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "record.json"
    path.write_text(record_text(record), encoding="utf-8")
    if items is not None and single:
        items.write_text("".join(json.dumps({"of": name, **one}) + "\n" for name in single for one in single[name]))
    return path


def add_items(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--items", type=Path, metavar="FILE", help="where every single item goes, a line of JSON each")


def record_text(record: Mapping[str, Any]) -> str:
    """As JSON of medians and spreads: what parts of a name, units or columns of a table repeat stands once.

    `values` are nested by the parts of their names, with "" for one that is named by the parts above it; each is
    [median, low, high, count, unit], or [value, unit] where there is no spread. Where all below a part have one count
    and unit, they stand there once, as "*". A table is its columns and its rows. In both, and in headlines, {N} stands
    for strategy N of the config. Numbers have six digits, but whole ones all of theirs.
    """
    tables = {name: _columns(rows) for name, rows in record.get("tables", {}).items()}
    stored = {**record, "values": _with_shared(_nested(record["values"]))}
    if "tables" in record:
        stored["tables"] = tables
    stored = json.loads(json.dumps(stored, allow_nan=False))
    abbreviated = _abbreviation(_strategies(record))
    for part in _ABBREVIATED & stored.keys():
        stored[part] = _mapped(stored[part], abbreviated)
    return _lines(_rounded(stored)) + "\n"


def _strategies(record: Mapping[str, Any]) -> list[str]:
    return [str(name) for name in record.get("config", {}).get("strategies", ())]


def _abbreviation(strategies: Sequence[str]) -> Callable[[str], str]:
    places = {name: place for place, name in enumerate(strategies) if len(name) > _SHORT_NAME}
    if not places:
        return str
    longest_first = sorted(places, key=len, reverse=True)
    names = re.compile(rf"(?<![\w=,])({'|'.join(map(re.escape, longest_first))})(?![\w.]|,\S)")
    return lambda text: names.sub(lambda found: f"{{{places[found[0]]}}}", text)


def _in_words(strategies: Sequence[str]) -> Callable[[str], str]:
    def strategy(place: re.Match[str]) -> str:
        if int(place[1]) >= len(strategies):
            raise ValueError(f"{place[0]} is none of the config's {len(strategies)} strategies")
        return strategies[int(place[1])]

    return (lambda text: _PLACE.sub(strategy, text)) if strategies else str


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The same with every text changed, names too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _mapped(inner, change) for name, inner in value.items()}
    return [_mapped(inner, change) for inner in value] if isinstance(value, list) else value


def _nested(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        *parts, last = name.split(_BETWEEN)
        node = found
        for part in parts:
            if isinstance(inner := node.setdefault(part, {}), list):
                inner = node[part] = {"": inner}
            node = inner
        if last in node:  # the beginning of another one's name
            node, last = node[last], ""
        keys = ("median", "unit") if value["count"] == 1 else ("median", "low", "high", "count", "unit")
        node[last] = [value[key] for key in keys]
    return found


def _with_shared(node: dict[str, Any]) -> dict[str, Any]:
    leaves = list(_leaves(node))
    count_and_unit = {(1 if len(leaf) == 2 else leaf[3], leaf[-1]) for leaf in leaves}
    if len(leaves) > 1 and len(count_and_unit) == 1:
        return {_SHARED: list(count_and_unit.pop()), **_bare(node)}
    return {part: _with_shared(inner) if isinstance(inner, dict) else inner for part, inner in node.items()}


def _leaves(node: Mapping[str, Any]) -> Iterator[list[Any]]:
    for inner in node.values():
        if isinstance(inner, dict):
            yield from _leaves(inner)
        else:
            yield inner


def _bare(node: Mapping[str, Any]) -> dict[str, Any]:
    """Without counts and units."""
    return {
        part: _bare(inner) if isinstance(inner, dict) else inner[:3] if len(inner) == 5 else inner[0]
        for part, inner in node.items()
    }


def _named(
    node: Mapping[str, Any], before: tuple[str, ...] = (), shared: Sequence[Any] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The values of nested ones, by their whole names. Raises ValueError for what is none."""
    shared = node.get(_SHARED, shared)
    for part, inner in node.items():
        parts = (*before, part) if part else before
        if part == _SHARED:
            continue
        if isinstance(inner, dict):
            yield from _named(inner, parts, shared)
            continue
        numbers = inner if isinstance(inner, list) else [inner]
        if len(numbers) + len(shared) not in ((3, 5) if shared else (2, 5)):
            raise ValueError(f"value {_BETWEEN.join(parts)!r} must be [median, low, high, count, unit], got {inner!r}")
        median, *spread, unit = *numbers, *(shared if len(numbers) == 3 else shared[1:])
        low, high, count = spread or (median, median, 1)
        yield _BETWEEN.join(parts), {"unit": unit, "median": median, "low": low, "high": high, "count": count}


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {"columns": names, "rows": [[row.get(name) for name in names] for row in rows]}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else value


def _lines(value: Any) -> str:
    """JSON in lines without indentation, of which a record's bytes would be a tenth."""
    flat = json.dumps(value, ensure_ascii=False)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if len(flat) <= _LONGEST_LINE or not any(isinstance(part, dict | list) for part in inner):
        return flat
    if isinstance(value, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {_lines(part)}" for key, part in value.items()]
        return "{\n" + ",\n".join(parts) + "\n}"
    return "[\n" + ",\n".join(map(_lines, value)) + "\n]"


def read_record(path: Path, experiment: str, table: str | None) -> dict[str, Any]:
    """As `load`, a record that has that table (None: any). Raises InvalidArgument, naming what it should be of."""
    try:
        found = load(path)
    except (OSError, ValueError) as error:
        raise InvalidArgument(experiment, f"{path}: not a record: {error}") from None
    if table is not None and table not in found.get("tables", {}):
        raise InvalidArgument(experiment, f"{path}: no record of `kakeya evaluate {experiment}`: no table {table!r}")
    return found


def load(path: Path) -> dict[str, Any]:
    """A record as `write_record` was given it; all rows of a table have its columns. Raises OSError or ValueError."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("it must be an object")
    for part in _ABBREVIATED & found.keys():
        found[part] = _mapped(found[part], _in_words(_strategies(found)))
    found["values"] = dict(_named(found.get("values", {})))
    for name, stored in found.get("tables", {}).items():
        if not isinstance(stored, dict) or stored.keys() != {"columns", "rows"}:
            raise ValueError(f"table {name!r} must have columns and rows")
        found["tables"][name] = [dict(zip(stored["columns"], row, strict=True)) for row in stored["rows"]]
    validate_record(found)
    return found


def validate_record(record: Mapping[str, Any]) -> None:
    """Raises ValueError saying what is wrong."""
    required = ("experiment", "date", "commit", "machine", *REQUIRED)
    if missing := [key for key in required if key not in record]:
        raise ValueError(f"the record lacks {', '.join(missing)}")
    if not record["values"]:
        raise ValueError("the record holds no values")
    for name, value in record["values"].items():
        if not isinstance(value, Mapping) or any(key not in value for key in VALUE_KEYS):
            raise ValueError(f"value {name!r} must have {', '.join(VALUE_KEYS)}, got {value!r}")
        if not value["low"] <= value["median"] <= value["high"]:
            raise ValueError(f"value {name!r}: the median {value['median']} is outside its spread")
    for name, rows in record.get("tables", {}).items():
        if any(not isinstance(row, Mapping) for row in rows):
            raise ValueError(f"table {name!r} must be a list of rows that name their columns")
    for text in _texts([record.get(part, ()) for part in _ABBREVIATED]) if _strategies(record) else ():
        if _PLACE.search(text):
            raise ValueError(f"{{N}} stands for a strategy of the config, it cannot be in a text: {text!r}")
    for text in _texts(record):
        if platform.node() and platform.node() in re.split(r"[\s=:/@]", text):
            raise ValueError(f"a record must not name the host: {text!r}")
        for word in re.split(r"[\s=,'\"]", text):
            if word.startswith("/") and len(Path(word).parts) > 1 and Path(word).parents[-2].exists():
                raise ValueError(f"a record must not show a folder of this machine: {text!r}")


def commit() -> str:
    """The commit checked out, with `+changes` if tracked files differ from it; `none` where there is no repository."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--verify", "HEAD")
    if head is None:
        return "none"
    return f"{head}+changes" if git("status", "--porcelain", "--untracked-files=no") else head


def running_commit(given: str | None) -> str:
    """The commit that runs: the repository's own, or, where there is none, the one that was given.

    Raises ConfigError for what is no commit, or is another one than is checked out.
    """
    found = commit()
    if given is None:
        return found
    if not _COMMIT.fullmatch(given):
        raise ConfigError(f"--commit must be a commit's hash, of 7 to 40 digits, got {given!r}")
    if found == "none":
        return given
    if not found.startswith(given):
        raise ConfigError(f"--commit is {given!r}, but {found[:12]!r} is checked out: leave it out, or check that out")
    return found


def describe_machine(packages: Sequence[str] = ("torch", "transformers", "grpcio", "protobuf")) -> dict[str, Any]:
    """What the numbers depend on, and nothing that identifies the machine."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1
    return {
        "cpu": cpu_model(),
        "cores": min(threads, psutil.cpu_count(logical=False) or threads),  # those that this process may use
        "threads": threads,
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version for name in packages if (version := _version(name))},
    }


def machine_name(machine: Mapping[str, Any]) -> str:
    """Short and speaking: `intel-xeon-2-cores`."""
    model = re.sub(r"\((R|TM)\)|\bCPU\b|\bProcessor\b|@.*$", " ", machine["cpu"], flags=re.IGNORECASE)
    words = re.findall(r"[a-z0-9]+", model.lower())
    return "-".join((*words[:4], str(machine["cores"]), "cores"))


def cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if platform.system() == "Darwin":
        asked = subprocess.run(
            ("sysctl", "-n", "machdep.cpu.brand_string"), capture_output=True, text=True, check=False
        )
        if asked.returncode == 0 and asked.stdout.strip():
            return asked.stdout.strip()
    return platform.processor() or platform.machine() or "unknown"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _texts(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _texts(inner)
