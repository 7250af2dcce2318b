"""A codec that fails, or gives NaN, ends its own Generate by name, keeps the history, and touches no other session."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from inference_engine.engine import Engine
from inference_engine.errors import RestorationFailed
from inference_engine.kv.context import WholeTokens
from inference_engine.kv.strategies import make_strategy
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import GenerateParams, Mode, TokenCommitted
from kv_cache_proposer.f_theta.codec import LatentCodec
from tests.further import further
from tests.laws.variants import drain, engine_for, generate, same, text
from tests.tiny import LATENT_BYTES, tiny_latent

HOLD, STREAM = (
    make_strategy("restored", sink=4, window=16, source="latent", bytes_per_token=LATENT_BYTES, mode=mode)
    for mode in ("hold", "stream")
)


class Failing(WholeTokens):
    """TinyModel's own codec, but for the moments in which a test lets it fail."""

    def __init__(self) -> None:
        self._codec: LatentCodec = tiny_latent()
        self.fails_in = ""
        self.well_before = 0  # how many times more it decodes well

    @property
    def layers(self) -> tuple[int, ...]:
        return self._codec.layers

    @property
    def bytes_per_token(self) -> int:
        return self._codec.bytes_per_token

    least_bytes_per_token = 1

    def decoder(self, layer: int) -> None:
        if self.fails_in == "decoder":
            raise ValueError("matrices of another codec")

    def encode(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        if self.fails_in == "encode":
            raise ValueError("layer 1 holds a number that is not finite")
        return self._codec.encode(keys, values)

    def decode(self, codes: Tensor, layers: Sequence[int] | None = None) -> tuple[list[Tensor], list[Tensor]]:
        self.well_before -= 1
        if self.well_before >= 0:
            return self._codec.decode(codes, layers)
        if self.fails_in == "decode":
            raise ValueError("codes of another codec")
        if self.fails_in == "numbers":
            return _damaged(self._codec).decode(codes, layers)
        return self._codec.decode(codes, layers)


def _damaged(codec: LatentCodec) -> LatentCodec:
    """The same codec, but one component has NaN for a deviation: whatever the codes, entries come back as NaN."""
    [coder] = codec.coders
    deviations = coder.basis.deviations.clone()
    deviations[0] = math.nan
    return replace(codec, coders=(replace(coder, basis=replace(coder.basis, deviations=deviations)),))


def until_it_fails(engine: Engine, session: str, count: int) -> tuple[list[int], RestorationFailed]:
    """The tokens that were received, and what ended the Generate."""
    received: list[int] = []
    try:
        for event in engine.generate(session, GenerateParams(max_tokens=count)):
            received += [event.token_id] if isinstance(event, TokenCommitted) else []
    except RestorationFailed as failure:
        return received, failure
    raise AssertionError("nothing failed")


@pytest.mark.parametrize("strategy", [HOLD, STREAM], ids=str)
@pytest.mark.parametrize("moment", ["encode", "decode"])
def test_a_failing_codec_ends_its_generate_by_name_and_keeps_the_history(strategy: KVStrategy, moment: str) -> None:
    codec = Failing()
    with engine_for(Mode.BATCHED, latent=codec) as engine:
        session = engine.create_session(strategy=strategy).session_id
        engine.append(session, text(60))
        reported = generate(engine, session, 5)
        codec.fails_in = moment
        neighbour = engine.create_session().session_id
        engine.append(neighbour, text(30))
        beside = engine.generate(neighbour, GenerateParams(max_tokens=30))
        received, failure = until_it_fails(engine, session, 40)
        assert failure.reason == "RESTORATION_FAILED"
        drain(beside)
        info = engine.session_info(session)
        assert info.history_length == 60 + 5 + len(received)
        assert not info.failure_reason
        assert info.kv_live_bytes <= info.bound.sustained_bytes
        codec.fails_in = ""
        again = engine.create_session(strategy=strategy).session_id
        engine.append(again, text(60))
        assert same(generate(engine, again, 5), reported, Mode.BATCHED)
        generate(engine, again, len(received) or 1)
        if received:
            assert same(generate(engine, session, 10), generate(engine, again, 10), Mode.BATCHED)


@pytest.mark.parametrize("strategy", [HOLD, STREAM], ids=str)
def test_entries_restored_as_nan_are_named_and_nothing_is_generated_from_them(
    strategy: KVStrategy,
) -> None:
    codec = Failing()
    with engine_for(Mode.BATCHED, latent=codec) as engine:
        ill, well = (engine.create_session(strategy=strategy).session_id for _ in range(2))
        for session in (ill, well):
            engine.append(session, text(60))
            generate(engine, session, 5)
        codec.fails_in = "numbers"
        received, failure = until_it_fails(engine, ill, 10)
        assert not received
        assert "layer 1: keys and values decoded by the codec hold NaN or infinity" in str(failure)
        assert engine.session_info(ill).history_length == 65
        codec.fails_in = ""
        assert same(generate(engine, ill, 10), generate(engine, well, 10), Mode.BATCHED)


@pytest.mark.parametrize(
    ("strategy", "well_before"),
    [
        (HOLD, 2),
        (STREAM, 5),
        *(further(HOLD, before) for before in (1, 4)),
        *(further(STREAM, before) for before in (1, 2, 9)),
    ],
    ids=str,
)
def test_tokens_reported_before_entries_came_back_as_nan_stand_and_no_more_are_reported(
    strategy: KVStrategy, well_before: int
) -> None:
    """In mode hold a session restores when it wakes and at each boundary, in mode stream in every step."""
    codec = Failing()
    with engine_for(Mode.BATCHED, latent=codec) as engine:
        ill, well = (engine.create_session(strategy=strategy).session_id for _ in range(2))
        for session in (ill, well):
            engine.append(session, text(60))
        expected = [token for token, _ in generate(engine, well, 80)]
        codec.well_before, codec.fails_in = well_before, "numbers"
        received, failure = until_it_fails(engine, ill, 80)
        assert "decoded by the codec hold NaN or infinity" in str(failure)
        assert len(received) < 80
        assert received == expected[: len(received)]
        codec.fails_in = ""
        # Its entries are computed again from the tokens.
        assert engine.session_info(ill).history_length == 60 + len(received)
        assert [token for token, _ in generate(engine, ill, 80 - len(received))] == expected[len(received) :]
