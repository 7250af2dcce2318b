"""A start knows a latent codec by its manifest; the tensors are read for the first session that needs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from safetensors.torch import load_file

from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument, ModelMismatch, RestorationFailed
from inference_engine.kv.archives.restorer import Restorer
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerRule
from inference_engine.kv.strategies import make_strategy
from inference_engine.kv.strategy import KVStrategy
from inference_engine.session.making import SessionMaker
from inference_engine.types import GenerateParams
from kv_cache_proposer.f_theta.codec_errors import LatentError
from kv_cache_proposer.f_theta.codec_files import TENSORS, load_stated, read_stated, save_codec
from kv_cache_proposer.f_theta.lazy_codec import LateCodec, open_codec
from kv_cache_proposer.stored import CalibrationManifest
from tests.kept import keeping, saved
from tests.laws.variants import drain, text, tokens
from tests.newer_strategy import registered
from tests.tiny import LATENT_BYTES, tiny_engine, tiny_latent

DIGEST = "5f" * 32
LATENT = make_strategy("restored", sink=4, window=16, source="latent", bytes_per_token=LATENT_BYTES)
LONG = GenerateParams(max_tokens=8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_codec(tiny_latent(), tmp_path / "latent", CalibrationManifest(target_digest=DIGEST, calibration_tokens=2048))
    return tmp_path / "latent"


def opened(folder: Path) -> LateCodec:
    return open_codec(folder, target_digest=DIGEST)


def damage(folder: Path) -> None:
    """The header stays as it is, and so does the size; the last numbers are others."""
    path = folder / TENSORS
    whole = path.read_bytes()
    path.write_bytes(whole[:-64] + bytes(255 - byte for byte in whole[-64:]))


def generated(engine: Engine, session: str) -> list[tuple[int, float | None]]:
    engine.append(session, text(100))
    return tokens(drain(engine.generate(session, LONG)))


def test_a_start_and_a_full_session_read_no_tensor(folder: Path) -> None:
    damage(folder)
    late = opened(folder)
    with tiny_engine(latent=late) as engine:
        assert not engine.has_to_prepare(None)
        assert len(generated(engine, engine.create_session().session_id)) == 8
        assert engine.has_to_prepare(LATENT)


def test_tokens_are_those_of_a_codec_that_was_read_at_the_start(folder: Path) -> None:
    codec = load_stated(read_stated(folder, target_digest=DIGEST))
    with tiny_engine(latent=codec) as engine:
        expected = generated(engine, engine.create_session(strategy=LATENT).session_id)
    late = opened(folder)
    with tiny_engine(latent=late) as engine:
        engine.prepare(LATENT)
        assert not engine.has_to_prepare(LATENT), "it is in memory now, its bits allocated"
        assert generated(engine, engine.create_session(strategy=LATENT).session_id) == expected
        smaller = make_strategy("restored", sink=4, window=16, source="latent", bytes_per_token=LATENT_BYTES // 2)
        assert engine.has_to_prepare(smaller), "its bits are still to be allocated"
        assert len(generated(engine, engine.create_session(strategy=smaller).session_id)) == 8


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_damaged_codec_is_refused_by_name_to_the_sessions_that_need_it_alone(
    folder: Path, caplog: pytest.LogCaptureFixture, is_prepared: bool
) -> None:
    late, whole = opened(folder), (folder / TENSORS).read_bytes()
    damage(folder)
    with tiny_engine(latent=late) as engine:
        for _ in range(2):
            with pytest.raises(InvalidArgument, match="kakeya train latent") as refusal:
                engine.prepare(LATENT) if is_prepared else engine.create_session(strategy=LATENT)
            assert refusal.value.field == "source"
            assert str(folder) not in str(refusal.value), "a client learns nothing of the server's files"
        assert "SHA-256" in caplog.text and str(folder / TENSORS) in caplog.text, "the operator learns which, and why"
        assert engine.info().kv_reserved_bytes == 0
        assert len(generated(engine, engine.create_session().session_id)) == 8
        (folder / TENSORS).write_bytes(whole)
        assert len(generated(engine, engine.create_session(strategy=LATENT).session_id)) == 8, "it was mended"


def test_a_codec_that_is_replaced_after_the_start_is_not_used(folder: Path) -> None:
    late = opened(folder)
    tensors = load_file(folder / TENSORS)
    save_codec(tiny_latent(seed=1), folder, CalibrationManifest(target_digest=DIGEST, calibration_tokens=2048))
    assert set(load_file(folder / TENSORS)) == set(tensors)
    with pytest.raises(LatentError, match="SHA-256"):
        late.at(LATENT_BYTES)


def test_a_kept_session_reads_it_when_it_comes_back(folder: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with keeping(state, make=tiny_engine, latent=opened(folder), codec_digest="of the first") as engine:
        session = engine.create_session(strategy=LATENT).session_id
        first = generated(engine, session)
        saved(engine)
    late, whole = opened(folder), (folder / TENSORS).read_bytes()
    damage(folder)
    with keeping(state, make=tiny_engine, latent=late, codec_digest="of the first") as engine:
        with pytest.raises(RestorationFailed):
            engine.recall(session)
        (folder / TENSORS).write_bytes(whole)
        engine.recall(session)
        assert not engine.has_to_prepare(LATENT), "it was read before anything was locked"
        assert engine.session_info(session).history_length == 100 + len(first)
        assert len(tokens(drain(engine.generate(session, LONG)))) == 8
    with (
        keeping(state, make=tiny_engine, latent=opened(folder), codec_digest="of another") as engine,
        pytest.raises(ModelMismatch),
    ):
        engine.recall(session)


@pytest.mark.parametrize(
    "strategy",
    [make_strategy("full", codec="int8", exact_window=16), make_strategy("restored", sink=2, window=8)],
    ids=str,
)
@pytest.mark.parametrize("is_named", [False, True], ids=["", "old-record"])
def test_a_kept_session_that_needs_no_latent_comes_back_beside_another_one(
    strategy: KVStrategy, is_named: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    with monkeypatch.context() as patched:
        if is_named:
            patched.setattr(SessionMaker, "codec_of", lambda *_: "of the first")
        with keeping(state, make=tiny_engine, latent=opened(folder), codec_digest="of the first") as engine:
            session = engine.create_session(strategy=strategy).session_id
            first = generated(engine, session)
    with keeping(state, make=tiny_engine, latent=opened(folder), codec_digest="of another") as engine:
        engine.recall(session)
        assert engine.session_info(session).history_length == 100 + len(first)
        assert len(tokens(drain(engine.generate(session, LONG)))) == 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Newer(KVStrategy):
    """Restores from latents and says nothing else of it."""

    name: ClassVar[str] = "newer"

    def rule(self, layer: int, geometry: Geometry) -> LayerRule:
        return LATENT.rule(layer, geometry)

    def restorer(self) -> Restorer:
        return LATENT.restorer()


def test_a_kept_session_of_a_newer_strategy_with_a_latent_is_refused_under_another_one(
    folder: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    with registered(Newer):
        with keeping(state, make=tiny_engine, latent=opened(folder), codec_digest="of the first") as engine:
            session = engine.create_session(strategy=Newer()).session_id
            generated(engine, session)
        with (
            keeping(state, make=tiny_engine, latent=opened(folder), codec_digest="of another") as engine,
            pytest.raises(ModelMismatch),
        ):
            engine.recall(session)
