"""Without a latent codec, restoring from one is refused by name; nothing falls back to something else."""

from __future__ import annotations

import pytest

from inference_engine.errors import InvalidArgument
from inference_engine.kv.strategies import make_strategy
from tests.tiny import LATENT_BYTES, tiny_engine

LATENT = make_strategy("restored", sink=4, window=16, source="latent", bytes_per_token=LATENT_BYTES)


def test_a_session_restored_from_a_latent_is_refused_where_no_codec_is_loaded() -> None:
    with tiny_engine(latent=None) as engine:
        with pytest.raises(InvalidArgument, match="kakeya train latent") as refusal:
            engine.create_session(strategy=LATENT)
        assert refusal.value.field == "source"
        assert engine.info().kv_reserved_bytes == 0


def test_an_engine_whose_default_needs_a_codec_does_not_start_without_one() -> None:
    with pytest.raises(InvalidArgument, match="kakeya train latent"):
        tiny_engine(latent=None, strategy=str(LATENT))
