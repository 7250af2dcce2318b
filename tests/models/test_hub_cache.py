"""A model in the Hugging Face hub's cache is found by its name and opened; links lead to blobs of its entry alone.

From there they may lead on into the store that entries of the cache share.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from inference_engine.config import hub_cache
from inference_engine.errors import ModelError
from inference_engine.models import find_model, load_model
from inference_engine.models.hub import HubModel, snapshot
from tests.models.hub_entry import COMMIT, share, write_entry
from tests.models.tiny_folder import logits, tiny_llama

OTHER_COMMIT = "f" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's, which the settings lead to."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def refusal(name_or_path: str | Path, cache: Path) -> str:
    with pytest.raises(ModelError) as caught:
        find_model(str(name_or_path), cache=cache)
    return str(caught.value)


# -- opening -----------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_opened_and_bears_the_name_of_its_model(hub: Path, folder: Path, cache: Path) -> None:
    loaded = load_model(str(write_entry(hub, "some-org/tiny.llama_1", folder)), cache=cache)
    assert loaded.model_id == "some-org/tiny.llama_1"
    assert torch.equal(logits(loaded.model), logits(tiny_llama()))


# -- links that are not followed ---------------------------------------------------------------------------------------


def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.json"
    path.write_text('{"version": "1.0"}')
    return path


@pytest.mark.hostile
def test_a_link_out_of_the_entry_is_refused(hub: Path, folder: Path, cache: Path, tmp_path: Path) -> None:
    found = write_entry(hub, "org/tiny", folder)
    (found / "tokenizer.json").symlink_to(secret(tmp_path))
    assert "tokenizer.json: a link that leads out of the folder" in refusal(found, cache)


@pytest.mark.hostile
def test_a_blob_that_is_a_link_out_of_the_entry_is_refused(
    hub: Path, folder: Path, cache: Path, tmp_path: Path
) -> None:
    found = write_entry(hub, "org/tiny", folder)
    blob = (found / "generation_config.json").resolve()
    blob.unlink()
    blob.symlink_to(secret(tmp_path))
    assert "leads out of the folder" in refusal(found, cache)


def test_blobs_in_the_store_that_entries_share_are_read(hub: Path, folder: Path, cache: Path) -> None:
    found = write_entry(hub, "org/tiny", folder)
    share(hub, found)
    assert torch.equal(logits(load_model(str(found), cache=cache).model), logits(tiny_llama()))


@pytest.mark.hostile
@pytest.mark.parametrize("how", ["no marker", "past the entry", "another name", "a link out of the store"])
def test_what_only_looks_like_a_shared_blob_is_refused(
    hub: Path, folder: Path, cache: Path, tmp_path: Path, how: str
) -> None:
    found = write_entry(hub, "org/tiny", folder)
    shared, link = share(hub, found), found / "model.safetensors"
    if how == "no marker":
        (hub / "blobs" / ".huggingface-shared-blobs").unlink()
    elif how == "past the entry":
        link.unlink()
        link.symlink_to(shared)
    elif how == "another name":
        blob = found.parent.parent / "blobs" / link.readlink().name
        blob.unlink()
        blob.symlink_to(shared.rename(shared.with_name("weights")))
    else:
        shared.symlink_to(shared.rename(tmp_path / "weights"))
    message = refusal(found, cache)
    assert "model.safetensors: a link that leads out of the folder" in message
    assert "cp -rL" in message


@pytest.mark.hostile
@pytest.mark.parametrize("target", ["refs/main", f"snapshots/{OTHER_COMMIT}/config.json", "blobs"])
def test_what_is_no_blob_of_the_entry_is_refused(hub: Path, folder: Path, cache: Path, target: str) -> None:
    found = write_entry(hub, "org/tiny", folder)
    other = found.parent / OTHER_COMMIT
    other.mkdir()
    (other / "config.json").write_text("{}")
    (found / "more").symlink_to(found.parent.parent / target)
    assert "leads out of the folder" in refusal(found, cache)


@pytest.mark.hostile
@pytest.mark.parametrize("place", ["org--tiny/snapshots", "models--org--tiny/versions"])
def test_only_a_snapshot_of_an_entry_may_have_blobs_beside_it(
    hub: Path, folder: Path, cache: Path, tmp_path: Path, place: str
) -> None:
    found = write_entry(hub, "org/tiny", folder)
    moved = tmp_path / place
    moved.parent.mkdir()
    shutil.copytree(found.parent, moved, symlinks=True)
    shutil.copytree(found.parent.parent / "blobs", moved.parent / "blobs")
    assert "leads out of the folder" in refusal(moved / COMMIT, cache)


@pytest.mark.hostile
def test_a_blob_that_is_not_whole_yet_is_refused(hub: Path, folder: Path, cache: Path) -> None:
    found = write_entry(hub, "org/tiny", folder)
    (found / "config.json").resolve().unlink()
    assert "no config.json" in refusal(found, cache)
    (found / "generation_config.json").resolve().unlink()
    (found / "config.json").unlink()
    (found / "config.json").write_text((folder / "config.json").read_text())
    assert "leads nowhere" in refusal(found, cache)


# -- names -------------------------------------------------------------------------------------------------------------


def test_a_model_that_is_not_in_the_cache_says_the_command_that_gets_it(hub: Path, cache: Path) -> None:
    message = refusal("org/tiny", cache)
    assert message.endswith("get it with: kakeya models fetch org/tiny")
    assert str(hub) in message
    assert refusal("org/tiny@v2", cache).endswith("kakeya models fetch org/tiny@v2")


@pytest.mark.parametrize("revision", ["v2", OTHER_COMMIT])
def test_a_revision_that_is_not_in_the_cache_says_which_are(
    hub: Path, folder: Path, cache: Path, revision: str
) -> None:
    write_entry(hub, "org/tiny", folder)
    message = refusal(f"org/tiny@{revision}", cache)
    assert f"kakeya models fetch org/tiny@{revision}" in message
    assert f"org/tiny@{COMMIT}" in message


@pytest.mark.hostile
@pytest.mark.parametrize("commit", ["../../../elsewhere", "", "main", "\xff" * 40])
def test_a_name_of_a_commit_that_is_none_is_not_followed(hub: Path, folder: Path, cache: Path, commit: str) -> None:
    found = write_entry(hub, "org/tiny", folder)
    (found.parent.parent / "refs" / "main").write_text(commit, encoding="latin-1")
    assert "not its revision main" in refusal("org/tiny", cache)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HUB_CACHE": "{tmp}/one", "HF_HOME": "{tmp}/two", "XDG_CACHE_HOME": "{tmp}/three"}, "one"),
        ({"HF_HOME": "{tmp}/two", "XDG_CACHE_HOME": "{tmp}/three"}, "two/hub"),
        ({"XDG_CACHE_HOME": "{tmp}/three"}, "three/huggingface/hub"),
        ({"HOME": "{tmp}"}, ".cache/huggingface/hub"),
        ({"HOME": "{tmp}", "HF_HOME": "~/$HUB"}, "named/hub"),
    ],
)
def test_the_cache_is_where_the_library_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HUB", "named")
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    assert hub_cache() == tmp_path / expected
    (tmp_path / expected / "models--a--b" / "refs").mkdir(parents=True)
    with pytest.raises(ModelError, match="not its revision main"):
        snapshot(HubModel("a/b"), hub_cache())
