"""While the first session that needs a latent codec waits for it to be read, other sessions go on."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from kakeya.v1 import runtime_pb2 as pb
from kv_cache_proposer.f_theta import lazy_codec as late
from kv_cache_proposer.f_theta.codec import LatentCodec
from kv_cache_proposer.f_theta.codec_files import StatedCodec, load_stated, save_codec
from kv_cache_proposer.stored import CalibrationManifest
from tests.server.wire import connected, serving, until
from tests.tiny import LATENT_BYTES, tiny_latent
from tests.tiny_native import served_engine

DIGEST = "5f" * 32
RESTORED = pb.Strategy(restored=pb.RestoredStrategy(window=32, source="latent", bytes_per_token=LATENT_BYTES))


async def test_other_sessions_go_on_while_the_codec_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_codec(tiny_latent(), tmp_path, CalibrationManifest(target_digest=DIGEST, calibration_tokens=2048))
    begun, gate = threading.Event(), threading.Event()

    def slowly(stated: StatedCodec, **where: str) -> LatentCodec:
        begun.set()
        assert gate.wait(30)
        return load_stated(stated, **where)

    monkeypatch.setattr(late, "load_stated", slowly)
    with served_engine(latent=late.open_codec(tmp_path, target_digest=DIGEST)) as engine:
        async with serving(engine) as server, connected(server) as client:
            running = await client.open()
            assert not begun.is_set(), "a session of the default strategy does not need it"
            first = asyncio.create_task(client.open(strategy=RESTORED))
            await until(begun.is_set)
            try:
                assert len(await client.generate(running)) == 8
                assert len(await client.generate(await client.open())) == 8, "others are created meanwhile"
                assert not first.done()
            finally:
                gate.set()
            assert len(await client.generate(await first)) == 8
