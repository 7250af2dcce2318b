"""The native library: what compiles it, what happens where nothing does, and which library is refused."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_engine.backends.base import use_threads
from inference_engine.errors import BackendError
from inference_engine.native import build, cores
from inference_engine.native.cores import usable_cores
from inference_engine.native.library import LEVELS, Library, load, why_missing


@pytest.fixture
def library() -> Library:
    """What `make test` has compiled; a compiler may be missing, but nothing else."""
    if reason := why_missing():
        with pytest.raises(build.NoCompiler):
            build.find_compiler()
        pytest.skip(reason)
    found = load()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def compiler() -> list[str]:
    try:
        return build.find_compiler()
    except build.NoCompiler as missing:
        pytest.skip(str(missing))


def never(_: Sequence[str]) -> bool:
    return False


def test_the_library_of_these_sources_is_open(library: Library) -> None:
    assert library.path == build.LIBRARY
    remedy = "these tests compare levels: python -m inference_engine.native.build --every-level"
    assert build.is_current(library.path, every_level=True), remedy


def test_the_best_level_of_this_processor_is_taken(library: Library) -> None:
    levels = library.levels()
    assert [level for level in LEVELS if level in levels] == list(levels)
    assert levels[-1] == "plain"
    assert set(levels) <= set(build.LEVELS[build.machine()])
    assert library.kernels().level == levels[0]
    for level in levels:
        assert library.kernels(level).level == level


def test_a_level_that_does_not_run_here_is_refused_with_those_that_do(library: Library) -> None:
    with pytest.raises(BackendError, match=f"'abacus' do not run here; choose one of {library.levels()[0]}"):
        library.kernels("abacus")


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="nothing else here says what the processor can do")
@pytest.mark.parametrize(
    ("level", "words"),
    [
        ("avx2", {"avx2", "fma", "f16c"}),
        ("avxvnni", {"avx2", "fma", "f16c", "avx_vnni"}),
        ("avx512", {"avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}),
        ("neon", {"asimddp", "atomics"}),
        ("i8mm", {"asimddp", "atomics", "i8mm"}),
    ],
)
def test_the_system_names_the_same_instructions(library: Library, level: str, words: set[str]) -> None:
    if level.encode() not in re.findall(rb"avx512|avxvnni|avx2|neon|i8mm", library.path.read_bytes()):
        pytest.skip(f"this build has no {level}")
    listed = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    assert listed is not None
    assert (level in library.levels()) == (words <= set(listed[1].split()))


def test_threads_are_as_many_as_cores_unless_a_number_is_given(library: Library) -> None:
    with library.open_threads() as threads:
        assert threads.count == usable_cores()
    with library.open_threads(3) as threads:
        assert threads.count == 3
    threads.close()
    with pytest.raises(AssertionError, match="closed"):
        _ = threads.address


def test_both_torch_and_the_library_stay_within_the_quota(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(cores, "quota_cores", lambda _: 3)
    try:
        use_threads(0)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    with library.open_threads() as threads:
        assert threads.count == 3


def test_a_library_of_other_sources_is_refused_with_the_way_to_make_it_again(library: Library, tmp_path: Path) -> None:
    other = tmp_path / library.path.name
    found = build.fingerprint().encode()
    whole = library.path.read_bytes()
    assert whole.count(found) == 1
    other.write_bytes(whole.replace(found, found[::-1]))
    assert not build.is_current(other)
    with pytest.raises(BackendError, match=r"other sources.*python -m inference_engine\.native\.build"):
        Library(other)


def test_a_library_without_our_functions_is_refused(compiler: list[str], tmp_path: Path) -> None:
    source, other = tmp_path / "other.cpp", tmp_path / "other.so"
    source.write_text('extern "C" int other() { return 1; }\n')
    subprocess.run([*compiler, "-shared", "-fPIC", str(source), "-o", str(other)], check=True)
    with pytest.raises(BackendError, match="other sources"):
        Library(other)


def test_a_file_that_is_no_library_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "libkakeya.so")
    build.LIBRARY.write_text("no library")
    assert load() is None
    assert "cannot be loaded" in (why_missing() or "")


def test_a_library_that_is_not_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "libkakeya.so")
    assert load() is None
    assert build.REMEDY in (why_missing() or "")


def test_without_a_compiler_the_reason_says_what_to_install() -> None:
    with pytest.raises(build.NoCompiler, match=f"no C\\+\\+ compiler works here; .*{re.escape(build.ZIG)}"):
        build.find_compiler(works=never, has_zig=False)


def test_a_compiler_that_was_asked_for_is_not_replaced_by_another() -> None:
    with pytest.raises(build.NoCompiler, match="'no-such-c\\+\\+ -m64' does not work"):
        build.find_compiler("no-such-c++ -m64", has_zig=True)
    assert build.find_compiler("our-c++ -m64", works=lambda _: True) == ["our-c++", "-m64"]


def test_where_only_zig_works_it_compiles_for_every_processor() -> None:
    command = build.find_compiler(works=lambda command: "ziglang" in command, has_zig=True)
    assert command == [sys.executable, "-m", "ziglang", "c++", "-mcpu=baseline"]


def test_a_system_without_the_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(build.NoCompiler, match=r"no native library for .* on riscv64"):
        build.find_compiler(works=lambda _: True)
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "libkakeya.so")
    assert "on riscv64" in (why_missing() or "")


def test_without_a_compiler_the_command_says_so_and_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(_: str) -> list[str]:
        raise build.NoCompiler("no C++ compiler works here")

    monkeypatch.setattr(build, "find_compiler", none)
    assert build.main(["--library", str(tmp_path / "libkakeya.so")]) == 0
    assert capsys.readouterr().out == "native library: none, torch computes instead: no C++ compiler works here\n"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What pip asks, in a folder where nothing has been compiled, on a machine with no compiler."""
    path = Path(__file__).resolve().parents[2] / "build_backend.py"
    spec = importlib.util.spec_from_file_location("build_backend", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.native, "LIBRARY", tmp_path / "libkakeya.so")
    monkeypatch.setattr(module.native.shutil, "which", lambda _: None)
    monkeypatch.delenv("CXX", raising=False)
    return module


@pytest.mark.skipif(not build.is_supported(), reason="the library is not written for this machine")
def test_an_installation_without_a_compiler_asks_for_one(backend: Any) -> None:
    assert build.ZIG in backend.get_requires_for_build_wheel()
    assert build.ZIG in backend.get_requires_for_build_editable()
    assert build.ZIG not in backend.get_requires_for_build_sdist()


def test_an_installation_asks_for_no_compiler_that_it_has_no_use_for(
    backend: Any, monkeypatch: pytest.MonkeyPatch, compiler: list[str]
) -> None:
    with monkeypatch.context() as there_is_one:
        there_is_one.setattr(backend.native.shutil, "which", lambda _: compiler[0])
        assert backend.compiler_requirement() == []
    with monkeypatch.context() as asked_for:
        asked_for.setenv("CXX", "no-such-c++")
        assert backend.compiler_requirement() == []
    with monkeypatch.context() as compiled:
        compiled.setattr(backend.native, "is_current", lambda _, **__: True)
        assert backend.compiler_requirement() == []
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert backend.compiler_requirement() == []


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that compile at once; returns where their library shall be."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src/api.cpp").write_text(
        '#include <cstring>\nextern "C" const char* of() { return FINGERPRINT "\\0compiled for " COMPILED_FOR; }\n'
        'extern "C" int kakeya_runs(const char* level) { return strcmp(level, "later") != 0; }\n'
    )
    (tmp_path / "src/kernels.cpp").write_text("namespace KERNELS { int kernel = 1; }\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "src")
    monkeypatch.setitem(build.LEVELS, build.machine(), {"plain": ((),), "abacus": (("-mbeads",), ("-mno-beads",))})
    return tmp_path / "out/libkakeya.so"


def test_a_trial_is_linked_as_the_library_is(small: Path, compiler: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Zig makes its C++ runtime anew, for minutes, for each way of linking."""
    linked: list[list[str]] = []
    run = subprocess.run

    def noted(command: Sequence[str], **options: Any) -> Any:
        if "-shared" in command:
            linked.append([word for word in command if word in (*build.THREADS, *build.STRIPPED)])
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", noted)
    assert build.compiles(compiler)
    build.build(small, compiler=compiler, say=lambda _: None)
    assert linked == [[*build.THREADS, *build.STRIPPED]] * 2


def test_a_level_whose_flags_a_compiler_does_not_know_is_left_out(compiler: list[str], small: Path) -> None:
    said: list[str] = []
    assert build.build(small, compiler=compiler, say=said.append) == ("plain",)
    assert said[0] == "native library: without abacus, which this compiler does not know"
    assert build.is_current(small)
    assert list(small.parent.iterdir()) == [small]


def test_by_default_the_best_level_that_runs_here_is_compiled_and_no_other(
    compiler: list[str], small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `make setup` has no minutes for is what wheels and tests ask for."""
    monkeypatch.setitem(build.LEVELS, build.machine(), {"plain": ((),), "middle": ((),), "later": ((),)})
    given = ["--library", str(small), "--compiler", shlex.join(compiler)]

    assert build.main(given) == 0
    assert "with middle\n" in capsys.readouterr().out
    assert build.is_current(small) and not build.is_current(small, every_level=True)
    assert build.main(given) == 0
    assert "is that of these sources" in capsys.readouterr().out

    assert build.main([*given, "--every-level"]) == 0
    assert "with plain, middle, later\n" in capsys.readouterr().out
    assert build.is_current(small) and build.is_current(small, every_level=True)


def test_a_library_for_another_processor_is_compiled_again_and_until_then_is_a_reason(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder may be carried to another machine, with what was compiled in it."""
    other = tmp_path / library.path.name
    wanted, absent = build.compiled_for(build.EVERY_LEVEL), build.compiled_for("no level...")
    other.write_bytes(library.path.read_bytes().replace(wanted, absent))
    assert not build.is_current(other)
    monkeypatch.setattr(build, "LIBRARY", other)
    monkeypatch.setattr(Library, "levels", lambda _: ())
    assert load() is None
    assert "another processor; run `python -m inference_engine.native.build`" in (why_missing() or "")


def test_a_level_that_the_compiler_lacks_is_not_tried_again_at_each_start(compiler: list[str], small: Path) -> None:
    """Its best one is not to be had here: the others are compiled, once."""
    assert build.build(small, compiler=compiler, every_level=False, say=lambda _: None) == ("plain",)
    assert build.is_current(small)


def test_a_change_of_a_source_is_noticed(compiler: list[str], small: Path) -> None:
    build.build(small, compiler=compiler, say=lambda _: None)
    (build.SOURCES / "kernels.cpp").write_text("namespace KERNELS { int kernel = 2; }\n")
    assert not build.is_current(small)


def test_sources_that_do_not_compile_fail_and_leave_the_library_before(
    compiler: list[str], small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small.parent.mkdir()
    small.write_text("the one before")
    (build.SOURCES / "api.cpp").write_text("this is not C++\n")
    assert build.main(["--library", str(small)]) == 1
    assert "api.cpp" in capsys.readouterr().err
    assert small.read_text() == "the one before"
    assert list(small.parent.iterdir()) == [small]
