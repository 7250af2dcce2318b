"""`kakeya models fetch org/name` gets what is read of a model, whole, or says in a line why not.

The hub is one on loopback (`hub_server.py`).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from rich.console import Console

from inference_engine.backends.base import Forward
from inference_engine.cli import models as command
from inference_engine.compose import drafter_identity
from inference_engine.config import ModelConfig
from inference_engine.errors import ModelError
from inference_engine.models import HubModel, fetch_from_hub, find_model, hub_download, hub_fetch, load_model
from inference_engine.models.hub import snapshot
from tests.further import further
from tests.kv_cache_proposer.test_eagle3 import NESTED, made
from tests.models.hub_entry import share
from tests.models.hub_server import Hub, served
from tests.models.tiny_folder import logits, tiny_llama
from tests.processes import CAN_FORK, Forked
from tests.tiny_folder import tiny_tokenizer

pytestmark = pytest.mark.usefixtures("trying_no_strategies", "forks")

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
NAME = "some-org/tiny"
EXECUTED = hub_fetch.start


@pytest.fixture(autouse=True)
def loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, no proxy between us and loopback, no user's token."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads by forked processes, in the environment that a new one would have: most of its time goes to imports."""

    def start(arguments: Sequence[str], *, shows: bool) -> Forked:
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
            environment = hub_fetch.download_environment(shows=shows)
            return Forked(hub_download.__name__, *arguments, stderr=nowhere, environment=environment)

    if CAN_FORK:
        monkeypatch.setattr(hub_fetch, "start", start)


@pytest.fixture
def executed(forks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads by new processes, as users have them."""
    monkeypatch.setattr(hub_fetch, "start", EXECUTED)


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A model as people publish it: with code, a pickle of the same weights, pictures."""
    tiny_tokenizer().save_pretrained(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files |= {"pytorch_model.bin": b"\x80\x04", "modeling_llama.py": b"raise SystemExit", "README.md": b"# Tiny"}
    files |= {"original/consolidated.00.pth": b"\x80", "onnx/model.safetensors": b"another"}
    return Hub(name=NAME, commit=COMMIT, files=files)


def kakeya_models(hub: Hub, monkeypatch: pytest.MonkeyPatch, cache: Path, *arguments: str) -> int:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    parser = argparse.ArgumentParser(prog="kakeya")
    command.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["models", *arguments, "--cache-dir", str(cache)])
    status: int = args.run(args)
    return status


def refused(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, cache: Path, capsys: pytest.CaptureFixture[str], name: str = NAME
) -> str:
    """The one line that a fetch ends with."""
    assert kakeya_models(hub, monkeypatch, cache, "fetch", name) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.usefixtures("executed")
def test_a_model_is_fetched_and_opens_by_its_name(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(hub):
        assert kakeya_models(hub, monkeypatch, cache, "fetch", NAME) == 0
    assert f"{NAME} is ready in " in capsys.readouterr().out
    assert torch.equal(logits(load_model(NAME, cache=cache).model), logits(tiny_llama()))
    found = find_model(NAME, cache=cache)
    assert (found.model_id, found.folder.name, found.ignored) == (NAME, COMMIT, ())
    assert hub.fetched() == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }


def test_run_fetches_a_model_of_the_hub_once(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(model=NAME, cache_dir=str(cache))
    with served(hub):
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert command.fetched(config, Console(stderr=True)).startswith(f"{NAME} is ready in ")
        asked = len(hub.asked)
        assert command.fetched(config, Console(stderr=True)) == f"{NAME} is here"
    assert len(hub.asked) == asked


def test_what_is_here_is_not_downloaded_again(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(hub):
        assert kakeya_models(hub, monkeypatch, cache, "fetch", NAME) == 0
        hub.asked.clear()
        assert kakeya_models(hub, monkeypatch, cache, "fetch", NAME) == 0
    assert not any(path.startswith("/large/") for path in hub.asked)


def test_a_drafter_is_fetched_by_its_name_and_taken_by_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a format whose configuration is no model's; one that cannot be run is refused before its weights are asked."""
    drafter = made(tmp_path / "drafter", NESTED)
    files = {path.name: path.read_bytes() for path in drafter.iterdir()}
    hub, config = Hub(name=NAME, commit=COMMIT, files=files), ModelConfig(model="none", drafter=NAME)
    with pytest.raises(ModelError, match=f"get it with: kakeya models fetch {NAME}"):
        drafter_identity(config, cast(Forward, None))
    with served(hub):
        content = files["config.json"]
        hub.files["config.json"] = content.replace(b'"silu"', b'"gelu"')
        assert "hidden_act is 'gelu'" in refused(hub, monkeypatch, cache, capsys)
        assert hub.fetched() == {"config.json"}
    hub = Hub(name=NAME, commit=COMMIT[::-1], files=files | {"config.json": content, "eagle3.py": b"raise SystemExit"})
    with served(hub):
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(ModelError, match=f"a drafter, and no model: name its target, with --drafter {NAME}"):
            command.fetched(ModelConfig(model=NAME, cache_dir=str(cache)), Console(stderr=True))
        assert hub.fetched() == {"config.json"}
        assert kakeya_models(hub, monkeypatch, cache, "fetch", NAME) == 0
    assert f"its target is served with --drafter {NAME}" in capsys.readouterr().out
    assert hub.fetched() == {"config.json", "model.safetensors"}
    assert drafter_identity(config, cast(Forward, None))["tensors_sha256"]


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_model_without_safetensors_is_refused_and_its_pickle_not_fetched(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del hub.files["model.safetensors"]
    with served(hub):
        assert "no model.safetensors" in refused(hub, monkeypatch, cache, capsys)
    assert "pytorch_model.bin" not in hub.fetched()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ('"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 32', "in 0 of them"),
        further('"model_type": "llama", "quantization_config": {"bits": 4}', "quantised"),
        further('"model_type": "no-such-type"', "no model of type 'no-such-type'"),
    ],
)
def test_a_model_that_is_not_served_is_refused_before_its_weights_are_fetched(
    hub: Hub,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: str,
    said: str,
) -> None:
    hub.files["config.json"] = f"{{{changes}}}".encode()
    with served(hub):
        assert said in refused(hub, monkeypatch, cache, capsys)
    assert "config.json" in hub.fetched()
    assert "model.safetensors" not in hub.fetched()


def test_a_gated_model_says_whose_terms_and_which_token(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.gated = True
    with served(hub):
        said = refused(hub, monkeypatch, cache, capsys)
        assert f"{NAME} is gated: accept its terms at {hub.url}/{NAME}" in said
        assert "HF_TOKEN" in said
        monkeypatch.delenv("HF_HUB_DISABLE_IMPLICIT_TOKEN")
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        assert kakeya_models(hub, monkeypatch, cache, "fetch", NAME) == 0
        assert "hf_secret" not in capsys.readouterr().out


@pytest.mark.hostile
def test_weights_in_the_store_that_entries_share_are_compared_by_their_own_name(
    hub: Hub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are named by another hash there. What is damaged is reported and left: other models may use it."""
    with served(hub):
        assert kakeya_models(hub, monkeypatch, cache, "fetch", NAME) == 0
        shared = share(tmp_path / "hub", snapshot(HubModel(NAME, "main"), tmp_path / "hub"))
        assert kakeya_models(hub, monkeypatch, cache, "fetch", NAME) == 0
        capsys.readouterr()
        content = bytearray(shared.read_bytes())
        content[-1] ^= 1
        shared.write_bytes(content)
        assert "remove it, and fetch again" in refused(hub, monkeypatch, cache, capsys)
    assert shared.read_bytes() == content


@pytest.mark.hostile
@pytest.mark.usefixtures("executed")
def test_code_in_the_current_folder_is_not_run(
    hub: Hub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    for name in ("argparse", "json", "huggingface_hub", "inference_engine"):
        (tmp_path / "here" / f"{name}.py").write_text("raise SystemExit('run')")
    monkeypatch.chdir(tmp_path / "here")
    with served(hub):
        assert kakeya_models(hub, monkeypatch, cache, "fetch", NAME) == 0


@pytest.mark.hostile
@pytest.mark.parametrize(
    "shard", ["../x.safetensors", *map(further, ("a\0.safetensors", "\ud800.safetensors", "-x.safetensors"))]
)
def test_shards_with_impossible_names_are_refused_in_a_line(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shard: str
) -> None:
    del hub.files["model.safetensors"]
    hub.files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": shard}}).encode()
    with served(hub):
        assert "is not the name of a safetensors file" in refused(hub, monkeypatch, cache, capsys)


def test_weights_with_another_digest_than_the_hubs_are_removed(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.spoilt = True
    with served(hub):
        said = refused(hub, monkeypatch, cache, capsys)
        assert f"model.safetensors of {NAME} is damaged" in said
        assert "SHA-256" in said
        with pytest.raises(ModelError, match=r"no model\.safetensors"):
            load_model(NAME, cache=cache)
        hub.spoilt = False
        assert kakeya_models(hub, monkeypatch, cache, "fetch", NAME) == 0
    load_model(NAME, cache=cache)


@pytest.mark.hostile
def test_a_hub_that_stops_sending_is_given_up(
    hub: Hub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.stalls = True
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "60")
    with served(hub):
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(ModelError, match="has arrived for 5 seconds"):
            fetch_from_hub(HubModel(NAME), cache, admit=lambda _: None, stall_seconds=5.0)
    assert any(path.startswith("/large/") for path in hub.asked)
    blobs = HubModel(NAME).entry(tmp_path / "hub") / "blobs"
    assert not list(blobs.glob("*.incomplete")), "it would never be used"
