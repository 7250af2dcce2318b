"""The native library: what compiles it, what happens where nothing does, and which library is refused."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
import torch

from inference_engine.backends.base import use_threads
from inference_engine.errors import BackendError
from inference_engine.native import build, cores
from inference_engine.native.library import Library, load, why_missing


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


def test_the_library_of_these_sources_is_open(library: Library) -> None:
    assert library.path == build.LIBRARY
    remedy = "these tests compare levels: python -m inference_engine.native.build --every-level"
    assert build.is_current(library.path, every_level=True), remedy


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
