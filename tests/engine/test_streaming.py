"""A session whose old entries are streamed, through the engine: what it answers, and what it holds while it does."""

from __future__ import annotations

from inference_engine.engine import Engine
from inference_engine.kv.strategies import make_strategy
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategy import KVStrategy, Option
from inference_engine.types import GenerateParams, Mode
from tests.laws.variants import LATENT, each_mode, engine_for, generate, same, text


def restored(**options: Option) -> KVStrategy:
    return make_strategy("restored", **{**LATENT, "window": 16, **options})


def answers(engine: Engine, strategy: KVStrategy) -> list[list[tuple[int, float | None]]]:
    """What three turns give."""
    session = engine.create_session(strategy=strategy).session_id
    reported = []
    for turn in range(3):
        engine.append(session, text(50, seed=turn))
        reported.append(generate(engine, session, 12))
    return reported


@each_mode
def test_streaming_answers_as_holding_does(mode: Mode) -> None:
    """Sums are taken in another order, so equality is up to rounding in both modes."""
    with engine_for(mode) as engine:
        held, streamed = (answers(engine, restored(mode=how)) for how in ("hold", "stream"))
    assert all(same(one, other, Mode.BATCHED) for one, other in zip(held, streamed, strict=True))


def test_a_streaming_session_never_holds_what_full_holds() -> None:
    """Only the latents and the entries of a chunk are held, even while it generates."""
    with engine_for(Mode.BATCHED, windowed=False) as engine:
        bounds = {}
        for name, strategy in (
            ("full", Full()),
            ("hold", restored(bytes_per_token=None)),
            ("stream", restored(bytes_per_token=None, mode="stream", resident_latent_bytes=1024)),
        ):
            session = engine.create_session(strategy=strategy)
            engine.append(session.session_id, text(300))
            live = [
                engine.session_info(session.session_id).kv_live_bytes
                for _ in engine.generate(session.session_id, GenerateParams(max_tokens=20))
            ]
            assert max(live) <= session.bound.peak_bytes
            bounds[name] = max(live)
        assert bounds["stream"] < bounds["full"] / 4 < bounds["hold"]
