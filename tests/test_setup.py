"""`make setup`: what it installs is pinned and needed, and what goes wrong in it is shown."""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.set_up import Run, Task, tasks
from scripts.test_ranges import asked, floor

ROOT = Path(__file__).resolve().parents[1]
# What torch brings where an index has a build for GPUs: no pin is for those.
OF_A_GPU = re.compile(r"nvidia-|cuda-|triton$|pytorch-triton")


def pins(name: str) -> dict[str, Requirement]:
    """Those of a file for this machine."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines())
    wanted = [Requirement(line) for line in lines if line]
    return {canonicalize_name(each.name): each for each in wanted if each.marker is None or each.marker.evaluate()}


def brought(by: Iterable[Requirement]) -> set[str]:
    """The names of these packages and of all that they ask for here."""
    found: set[tuple[str, str]] = set()
    left = [(each, "") for each in by]
    while left:
        asked, extra = left.pop()
        if asked.marker is not None and not asked.marker.evaluate({"extra": extra}):
            continue
        for own in ("", *asked.extras):
            if (key := (canonicalize_name(asked.name), own)) not in found:
                found.add(key)
                left += [(Requirement(each), own) for each in importlib.metadata.requires(asked.name) or ()]
    return {name for name, _ in found if not OF_A_GPU.match(name)}


def test_the_pins_for_running_are_what_both_projects_ask_for_and_bring() -> None:
    """No more: what a demo never uses takes minutes to install."""
    projects = (ROOT / "pyproject.toml", ROOT / "sdks/python/pyproject.toml")
    read = [tomllib.loads(path.read_text(encoding="utf-8"))["project"] for path in projects]
    asked = [Requirement(each) for project in read for each in project["dependencies"]]
    if sys.platform == "darwin":
        asked += [Requirement(each) for each in read[0]["optional-dependencies"]["mlx"]]
    assert brought(asked) == pins("requirements.txt").keys()


def names_imported(root: Path) -> dict[str, set[str]]:
    """Packages that code there imports, with the files that do."""
    found: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            for module in modules:
                found.setdefault(module.partition(".")[0], set()).add(str(path.relative_to(ROOT)))
    return found


def test_every_package_that_the_runtime_imports_is_asked_for() -> None:
    """Not only brought by another one, which may do without it tomorrow."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    every = (*project["dependencies"], *(each for some in project["optional-dependencies"].values() for each in some))
    asked = {canonicalize_name(Requirement(each).name) for each in every}
    ours = ("inference_engine", "kakeya_gateway", "kv_cache_proposer")
    provides = importlib.metadata.packages_distributions()
    for name, files in {name: files for root in ours for name, files in names_imported(ROOT / root).items()}.items():
        # The last comes with torch where there is a GPU.
        if name in (*sys.stdlib_module_names, *ours, "kakeya", "laboratory", "triton"):
            continue
        assert {canonicalize_name(each) for each in provides[name]} & asked, (name, files)


def test_no_package_asks_for_more_than_the_floor_of_another() -> None:
    """Of those that are pinned; `scripts/test_ranges.py floor` installs all floors."""
    floors = {canonicalize_name(each.name): floor(each).partition("==")[2] for each in asked()}
    for name in floors:
        for wanted in map(Requirement, importlib.metadata.requires(name) or ()):
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                least = floors.get(canonicalize_name(wanted.name))
                is_exact = any(each.operator in ("==", "~=") for each in wanted.specifier)  # released together
                assert least is None or is_exact or wanted.specifier.contains(least), f"{name} wants {wanted}"


def test_every_pin_names_one_version() -> None:
    for name in ("requirements.txt", "requirements-dev.txt"):
        assert [str(each) for each in pins(name).values() if not re.fullmatch(r"==[\w.]+", str(each.specifier))] == []


def test_what_a_wheel_brings_for_its_own_tests_is_left_out(tmp_path: Path) -> None:
    environment = tmp_path / "an environment"
    packages = environment / "lib" / "python3.12" / "site-packages" / "torch"
    needed = {"testing/__init__.py", "bin/torch_shm_manager", "lib/libtorch.so", "include/torch.h"}
    for name in {*needed, "test/data/a.py", "bin/test_api", "bin/HashStoreTest", "bin/protoc-3.13.0.0"}:
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).touch()
    given = argparse.Namespace(environment=environment, development=False, every_level=False, compiler="", fetch="")
    own = next(each for each in tasks(given) if each.name == "packages")
    subprocess.run(next(each for each in own.commands if each[0] == "sh"), check=True)
    assert {str(each.relative_to(packages)) for each in packages.rglob("*") if each.is_file()} == needed


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_tasks_run_beside_each_other_and_after_what_they_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two wait for each other's file, which would never come if one ran after the other."""
    meets = "import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\n"
    meets += "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.01)\n"
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    first = Task("first", [(*python(meets), one, other)], tmp_path / "first.log")
    second = Task("second", [(*python(meets), other, one)], tmp_path / "second.log")
    said = "import pathlib, sys; print('native library:', all(pathlib.Path(name).exists() for name in sys.argv[1:]))"
    last = Task("last", [(*python(said), one, other)], tmp_path / "last.log", (first, second))
    assert Run([first, second, last], tmp_path).finish() == 0
    assert re.search(r"^setup: +\d+ s  last: True$", capsys.readouterr().out, re.MULTILINE)


def test_a_failure_is_shown_with_what_was_said_last_and_ends_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = Task("endless", [python("import time; time.sleep(600)")], tmp_path / "endless.log")
    fails = Task("packages", [python("print('no such version'); raise SystemExit(3)"), python("print('too late')")],
                 tmp_path / "packages.log")  # fmt: skip
    never = Task("never", [python(f"open({str(tmp_path / 'never')!r}, 'w')")], tmp_path / "never.log", (fails,))
    assert Run([endless, fails, never], tmp_path).finish() == 1
    said = capsys.readouterr().err
    assert said.startswith("setup: packages failed (exit status 3);")
    assert said.endswith("no such version\n")
    assert endless.process is not None and endless.process.wait() != 0
    assert not (tmp_path / "never").exists()
