"""What is built for others: what it asks an index for, and that it works where nothing of this folder is in sight."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from inference_engine.config import child_environment
from inference_engine.native.build import LIBRARY, ZIG, is_supported
from inference_engine.native.library import load
from laboratory.evaluation.record import load as load_record

ROOT = Path(__file__).resolve().parents[1]
BUILT = ("LICENSE", "README.md", "inference_engine", "kakeya_gateway", "kv_cache_proposer", "laboratory", "sdks/python")
BUILT_BY = ("pyproject.toml", "setup.py", "build_backend.py")
PLUGINS = [path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml")]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


def copy_sources(copy: Path) -> None:
    for name in (*BUILT, *BUILT_BY):
        copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        copied(ROOT / name, copy / name)
    for left in (*copy.rglob("*.egg-info"), *copy.rglob("build")):
        shutil.rmtree(left)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By the name of their distribution, built from a copy: setuptools leaves folders where it builds."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    copy_sources(copy)
    without_network = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--wheel-dir", str(out))
    subprocess.run((*PIP, "wheel", *without_network, str(copy), str(copy / "sdks/python")), check=True, timeout=240)
    return {path.name.split("-", 1)[0].replace("_", "-"): path for path in out.iterdir()}


def fresh_environment(folder: Path, *installed: Path) -> Path:
    """A virtual environment with these wheels or projects, and what others publish. Its folder of packages."""
    venv.create(folder, with_pip=False)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    (packages,) = folder.rglob("site-packages")
    # What others publish comes from here. Our own does not: it lies elsewhere, and .pth files there are not read.
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "others.pth").write_text("\n".join(others), encoding="utf-8")
    install = ("install", "--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--no-compile")
    subprocess.run((*PIP, "--python", str(python), *install, *map(str, installed)), check=True, timeout=120)
    return packages


def alone() -> dict[str, str]:
    """The environment of a process that is led nowhere by this one's."""
    return {name: value for name, value in child_environment().items() if not name.startswith(("PYTHON", "KAKEYA_"))}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("name", ["kakeya", "kakeya-runtime"])
def test_a_wheel_asks_for_published_packages_only(wheels: dict[str, Path], name: str) -> None:
    """Those that the pins name: they were installed from an index. Neither of ours is in one.

    The pins leave out what a GPU alone can use; it was installed from an index on one.
    """
    pinned = {
        normal(line.split("==")[0].split("[")[0])
        for name in ("requirements.txt", "requirements-dev.txt")  # of the extras, too
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines()
        if "==" in line and not line.lstrip().startswith("#")
    }
    required = metadata(wheels[name]).get_all("Requires-Dist") or []
    asked = {normal(re.split(r"[^\w.-]", each, maxsplit=1)[0]) for each in required}
    assert asked
    assert asked <= pinned | {"fa3-fwd"}
    assert not asked & {"kakeya", "kakeya-runtime"}


def test_the_runtimes_wheel_is_for_one_kind_of_machine_and_any_python(wheels: dict[str, Path]) -> None:
    python, abi, machine = wheels["kakeya-runtime"].stem.split("-")[-3:]
    with zipfile.ZipFile(wheels["kakeya-runtime"]) as archive:
        held = set(archive.namelist())
    ours = {"inference_engine/native/src/kernels.cpp", "inference_engine/backends/known_verdicts.json"}
    assert ours | {"kakeya_gateway/app.py", "kakeya_gateway/py.typed"} <= held
    assert (f"inference_engine/native/{LIBRARY.name}" in held) == (machine != "any") == (load() is not None)
    assert (python, abi) == ("py3", "none")


def test_the_runtime_asks_for_what_the_sdk_in_it_needs() -> None:
    def asked(project: Path) -> dict[str, str]:
        listed = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
        return {re.split(r"[^\w.-]", each, maxsplit=1)[0]: each for each in listed}

    of_runtime = asked(ROOT / "pyproject.toml")
    for name, requirement in asked(ROOT / "sdks/python/pyproject.toml").items():
        assert of_runtime[name] == requirement


def test_the_runtimes_wheel_alone_gives_the_command_and_the_sdk(wheels: dict[str, Path], tmp_path: Path) -> None:
    fresh = fresh_environment(tmp_path / "fresh", wheels["kakeya-runtime"])
    scripts = tmp_path / "fresh" / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / "python"

    def said(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=alone(), check=True, timeout=120, capture_output=True, text=True
        )
        return done.stdout

    where = said(str(python), "-c", "import inference_engine as one, kakeya; print(one.__file__, kakeya.__file__)")
    assert [Path(each).parent.parent for each in where.split()] == [fresh, fresh]
    assert "serve" in said(str(scripts / "kakeya"), "--help")
    levels = "from inference_engine.native.library import load; found = load(); print(found and found.levels())"
    opened = load()
    assert said(str(python), "-c", levels).strip() == str(opened and opened.levels())
    help_of_serve = said(str(scripts / "kakeya"), "serve", "--help")
    assert "--model" in help_of_serve


def with_plugin(plugin: Path, folder: Path) -> tuple[Path, Path]:
    """Python of a fresh environment with a package of plugins/, and the checkout of the runtime that it runs."""
    source, checkout = folder / plugin.name, folder / "checkout"
    copy_sources(checkout)
    shutil.copytree(plugin, source, ignore=shutil.ignore_patterns("*.egg-info", "build", "__pycache__"))
    shutil.copytree(ROOT / "tests", checkout / "tests", ignore=shutil.ignore_patterns("node_modules", "__pycache__"))
    shutil.copytree(source / "tests", checkout / "plugins" / plugin.name / "tests")
    packages = fresh_environment(folder / "fresh", source)
    (packages / "runtime.pth").write_text(f"{checkout}\n{checkout / 'sdks/python/src'}\n", encoding="utf-8")
    return folder / "fresh" / ("Scripts" if os.name == "nt" else "bin") / "python", checkout


def ran(python: Path, checkout: Path, *arguments: str) -> None:
    command = (str(python), "-m", *arguments)
    tried = subprocess.run(
        command, cwd=checkout, env=alone(), check=False, timeout=1200, capture_output=True, text=True
    )
    assert tried.returncode == 0, tried.stdout[-4000:] + tried.stderr[-2000:]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_a_plugin_keeps_the_laws_in_an_environment_of_its_own(plugin: Path, tmp_path: Path) -> None:
    """Its own tests, and the laws of what it adds, beside a checkout of the runtime that knows nothing of it."""
    python, checkout = with_plugin(plugin, tmp_path)
    added = tomllib.loads((plugin / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    pytest_ = ("pytest", "-q", "-x", "-p", "no:cacheprovider")
    ran(python, checkout, *pytest_, f"plugins/{plugin.name}/tests")
    if "kakeya.compressors" in added:
        ran(python, checkout, *pytest_, "tests/kv/test_compressors.py")
    if "kakeya.strategies" in added:
        ran(python, checkout, *pytest_, "tests/laws", "--strategies", *added["kakeya.strategies"])


@pytest.mark.real_model
@pytest.mark.timeout(1200)
def test_the_strategy_of_the_page_is_evaluated_on_needles(tmp_path: Path) -> None:
    python, checkout = with_plugin(ROOT / "plugins/kakeya_tova", tmp_path)
    kept = "tova:budget=1,window=500"  # nothing of a prompt of 512 leaves: it finds what `full` finds
    about = (
        "--quick",
        "--lengths",
        "512",
        "--segment-tokens",
        "64",
        "--results",
        str(tmp_path / "results"),
        "--commit",
        "0" * 7,
    )
    ran(python, checkout, "inference_engine.cli.main", "evaluate", "needle", *about, "--strategies", kept)
    (path,) = tmp_path.glob("results/*/*/record.json")
    values = load_record(path)["values"]
    of_full, of_kept = (
        {name.removeprefix(each): value for name, value in values.items() if name.startswith(each)}
        for each in ("full: single", f"{kept}: single")
    )
    assert of_full == of_kept != {}


@pytest.mark.long
@pytest.mark.skipif(not is_supported(), reason="the library is not written for this machine")
def test_where_no_compiler_is_found_the_wheel_is_built_with_one_from_the_index(tmp_path: Path) -> None:
    """The compiler makes its own runtime first, if it has not: on two slow cores that and the library take minutes."""
    copy, out, fetched = tmp_path / "source", tmp_path / "out", tmp_path / "fetched"
    copy_sources(copy)
    (copy / "inference_engine/native" / LIBRARY.name).unlink(missing_ok=True)
    fetch = subprocess.run(
        (*PIP, "download", "--quiet", "--no-deps", "--dest", str(fetched), "setuptools>=77", ZIG),
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    if fetch.returncode:
        pytest.skip(f"the compiler cannot be fetched: {fetch.stderr.strip()}")
    nowhere = tmp_path / "nowhere"
    nowhere.mkdir()
    environment = {name: value for name, value in child_environment().items() if name != "CXX"}
    # The environment that pip builds in gets its packages by the same two.
    environment |= {"PATH": str(nowhere), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(fetched)}
    command = (*PIP, "wheel", "--no-deps", "--wheel-dir", str(out), str(copy))
    subprocess.run(command, env=environment, check=True, timeout=1800)

    (wheel,) = out.iterdir()
    assert wheel.stem.rpartition("-")[2] != "any"
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    shutil.copytree(ROOT / "tests", unpacked / "tests")
    shutil.copy(ROOT / "pyproject.toml", unpacked)
    environment = {**child_environment(), "PYTHONPATH": str(unpacked)}
    opened = "from inference_engine.native.library import load; print(load().path)"
    where = subprocess.check_output((sys.executable, "-P", "-c", opened), cwd=unpacked, env=environment, text=True)
    assert Path(where.strip()).is_relative_to(unpacked)
    some = [f"tests/native/test_{name}.py" for name in ("matrix", "attention", "forward")]
    tried = (sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *some)
    subprocess.run(tried, cwd=unpacked, env=environment, check=True, timeout=600)
