"""A folder that differs from its manifest is refused with the file's name, and starts do not hash weights again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inference_engine.errors import ModelError
from inference_engine.models import MANIFEST, check_manifest, load_model, read_manifest, write_manifest
from inference_engine.models.checksums import sha256_of

WEIGHTS = "model.safetensors"


@pytest.fixture
def vouched(folder: Path) -> Path:
    write_manifest(folder, model="tiny", source={"tiny==1": "00"}, licence="none", dtype="float32", parameters=1)
    return folder


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are hashed, as it happens."""
    names: list[str] = []

    def recording(path: Path) -> str:
        names.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr("inference_engine.models.manifest.sha256_of", recording)
    return names


def flip_a_bit(path: Path, *, keep_times: bool = False) -> None:
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    if keep_times:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_what_was_written_is_read_and_agrees(vouched: Path, cache: Path) -> None:
    manifest = check_manifest(vouched, cache=cache, thorough=True)
    assert manifest == read_manifest(vouched)
    assert (manifest.model, manifest.source) == ("tiny", {"tiny==1": "00"})
    assert set(manifest.files) == {path.name for path in vouched.iterdir()} - {MANIFEST}


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_a_flipped_bit_is_found_and_named_with_both_digests(vouched: Path, cache: Path, name: str) -> None:
    expected = read_manifest(vouched).files[name].sha256
    flip_a_bit(vouched / name)
    with pytest.raises(ModelError, match=name) as caught:
        load_model(str(vouched), cache=cache)
    assert expected in str(caught.value)
    assert "got" in str(caught.value)


def test_a_flipped_bit_is_found_though_the_file_was_checked_before_and_its_time_was_set_back(
    vouched: Path, cache: Path
) -> None:
    check_manifest(vouched, cache=cache, thorough=False)
    flip_a_bit(vouched / WEIGHTS, keep_times=True)
    with pytest.raises(ModelError, match=WEIGHTS):
        check_manifest(vouched, cache=cache, thorough=False)


NOT_OURS: list[str] = [
    "",
    "{}",
    '{"format": "another"}',
    '{"format": "kakeya-model"}',
    '{"format": "kakeya-model", "files": {"a": {}}}',
]


def test_a_manifest_that_is_not_ours_is_refused(vouched: Path, cache: Path, subtests: pytest.Subtests) -> None:
    for content in NOT_OURS:
        with subtests.test(content):
            (vouched / MANIFEST).write_text(content)
            with pytest.raises(ModelError, match=MANIFEST):
                load_model(str(vouched), cache=cache)


def test_weights_are_hashed_once_and_again_only_when_asked(vouched: Path, cache: Path, hashed: list[str]) -> None:
    check_manifest(vouched, cache=cache, thorough=False)
    assert WEIGHTS in hashed

    hashed.clear()
    check_manifest(vouched, cache=cache, thorough=False)
    assert WEIGHTS not in hashed
    assert "config.json" in hashed

    check_manifest(vouched, cache=cache, thorough=True)
    assert WEIGHTS in hashed


@pytest.mark.parametrize("note", ["", "{}", "[]", '{"look": null}'])
def test_a_damaged_note_of_what_was_hashed_counts_as_none(
    vouched: Path, cache: Path, hashed: list[str], note: str
) -> None:
    check_manifest(vouched, cache=cache, thorough=False)
    for path in (cache / "verified").iterdir():
        path.write_text(note)
    hashed.clear()
    check_manifest(vouched, cache=cache, thorough=False)
    assert WEIGHTS in hashed


def test_a_cache_that_cannot_be_written_costs_hashing_and_nothing_else(
    vouched: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file where the folder should be")
    check_manifest(vouched, cache=cache, thorough=False)
    assert "every start will hash it again" in caplog.text
