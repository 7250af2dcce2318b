"""A stored codec comes back bit for bit, or not at all."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference_engine.models.checksums import sha256_of
from kv_cache_proposer.f_theta.codec_errors import ForeignLatent, LatentError
from kv_cache_proposer.f_theta.codec_files import MANIFEST, TENSORS, load_stated, read_stated, save_codec
from kv_cache_proposer.f_theta.components import PRECISIONS
from kv_cache_proposer.stored import CalibrationManifest
from tests.kv_cache_proposer.correlated import make_codec, make_entries

DIGEST = "5f" * 32
MADE = CalibrationManifest(
    target_digest=DIGEST, calibration_tokens=3000, recipe={"kinds": ["code", "chat"]}, seeds={"text": 3}, metrics={}
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_codec(make_codec(19, precision="int8"), tmp_path / "latent", MADE)
    return tmp_path / "latent"


def rewrite_manifest(folder: Path, **changes: object) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Other tensors, with a manifest that vouches for them."""
    save_file(tensors, folder / TENSORS)
    rewrite_manifest(folder, tensors_sha256=sha256_of(folder / TENSORS))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_codec_comes_back_bit_for_bit(tmp_path: Path, precision: str) -> None:
    codec = make_codec(19, precision=precision)
    save_codec(codec, tmp_path, MADE)
    stated = read_stated(tmp_path, target_digest=DIGEST)
    loaded, manifest = load_stated(stated), stated.manifest
    entries = make_entries(40)
    codes = codec.encode(entries.keys, entries.values)
    assert manifest == MADE
    assert loaded.shared_bytes == codec.shared_bytes
    assert torch.equal(loaded.encode(entries.keys, entries.values), codes)
    assert all(torch.equal(a, b) for a, b in zip(loaded.decode(codes)[0], codec.decode(codes)[0], strict=True))
    assert torch.equal(
        loaded.at(13).encode(entries.keys, entries.values), codec.at(13).encode(entries.keys, entries.values)
    )


def test_a_codec_keeps_the_kernels_it_was_given() -> None:
    codec = make_codec(kernels="plain")
    assert codec.kernels == codec.at(13).kernels == codec.to("cpu").kernels == "plain"
    assert codec.to("cpu", "auto").kernels == "auto"


@pytest.mark.parametrize(
    ("name", "known", "other"), [("quantiser", "trellis", "alone"), ("bits", "variance", "uniform")]
)
def test_a_codec_that_was_made_in_another_way_is_refused(folder: Path, name: str, known: str, other: str) -> None:
    rewrite_manifest(folder, **{name: known})
    load_stated(read_stated(folder, target_digest=DIGEST))
    rewrite_manifest(folder, **{name: other})
    with pytest.raises(LatentError, match=f"{name} is '{other}', known is '{known}'"):
        read_stated(folder, target_digest=DIGEST)


def test_another_models_codec_is_refused(folder: Path) -> None:
    with pytest.raises(ForeignLatent, match=f"{DIGEST}, this one has abc"):
        load_stated(read_stated(folder, target_digest="abc"))


@pytest.mark.parametrize("name", ["group.0.mean", "group.1.components", "group.2.bits", "layer.3.inverses"])
def test_a_missing_tensor_is_named(folder: Path, name: str) -> None:
    tensors = load_file(folder / TENSORS)
    del tensors[name]
    rewrite_tensors(folder, tensors)
    with pytest.raises(LatentError, match=f"{name} is missing"):
        load_stated(read_stated(folder, target_digest=DIGEST))


@pytest.mark.parametrize("name", ["group.0.mean", "group.1.scales", "layer.5.weights"])
def test_a_tensor_of_wrong_shape_is_named(folder: Path, name: str) -> None:
    tensors = load_file(folder / TENSORS)
    rewrite_tensors(folder, {**tensors, name: tensors[name][:-1].clone()})
    with pytest.raises(LatentError, match=name):
        load_stated(read_stated(folder, target_digest=DIGEST))


def test_tensors_that_the_manifest_does_not_vouch_for_are_refused(folder: Path) -> None:
    save_file(load_file(folder / TENSORS), folder / TENSORS, metadata={"edited": "yes"})
    with pytest.raises(LatentError, match="SHA-256"):
        load_stated(read_stated(folder, target_digest=DIGEST))
