"""What the suite of a Mac measures, as functions that run on any device of MLX, over any model."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from inference_engine.backends.base import Forward
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.errors import NoCapacity
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.types import Failed, GenerateParams, TokenCommitted
from laboratory.evaluation.sessions import append_all


def said(engine: Engine, session: str, tokens: int) -> list[int]:
    """The ids of a greedy Generate. Fails for one that did not end well."""
    events = list(engine.generate(session, GenerateParams(max_tokens=tokens)))
    assert not isinstance(events[-1], Failed), events[-1]
    return [event.token_id for event in events if isinstance(event, TokenCommitted)]


def active_bytes() -> int:
    """Memory that MLX holds for arrays that are referred to."""
    gc.collect()
    return int(mx.get_active_memory())


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes: of the weights, of an open engine's pool beyond them, and what is left of the pool when it has closed."""

    weights: int
    pool: int
    left: int


def memory_held(open_forward: Callable[[], Forward], *, kv_bytes: int) -> Held:
    before = active_bytes()
    forward = open_forward()
    loaded = active_bytes()
    with Engine(forward, EngineConfig(kv_bytes=kv_bytes, default_limit_tokens=64, share_prefixes="off")) as engine:
        session = engine.create_session().session_id
        engine.append(session, range(1, 33))
        said(engine, session, 4)
        opened = active_bytes()
    del engine
    return Held(weights=loaded - before, pool=opened - loaded, left=active_bytes() - loaded)


def sessions_under_pressure(forward: Forward, *, tokens: int) -> int:
    """How many sessions of `tokens` tokens a pool for three and a half takes before one is refused.

    Those that are there say afterwards what one says alone.
    """
    ids = [int(one) for one in np.random.default_rng(0).integers(1, 100, tokens // 2)]
    room = forward.geometry(page_tokens=16, segment_tokens=256).entry_bytes
    pages = -(-tokens // 16) * 16
    with Engine(
        forward, EngineConfig(kv_bytes=room * pages * 7 // 2, default_limit_tokens=tokens, share_prefixes="off")
    ) as engine:
        sessions: list[str] = []
        with suppress(NoCapacity):
            sessions.extend(engine.create_session(guaranteed=True).session_id for _ in range(8))
        for session in sessions:
            engine.append(session, ids)
        streams = [said(engine, session, 8) for session in sessions]
        assert all(stream == streams[0] for stream in streams), "a session lost something"
    return len(sessions)


@dataclass(frozen=True, kw_only=True)
class LongSession:
    """tokens: appended and generated. first, last: bytes that MLX held early on, and at the end.

    cached: of buffers that are free and kept for another use, at most between turns.
    """

    turns: int
    tokens: int
    first_bytes: int
    last_bytes: int
    cached_bytes: int


def long_session(forward: Forward, *, seconds: float, kv_bytes: int) -> LongSession:
    """One session under `sink_window` that goes on and on; its memory is to stay."""
    rng = np.random.default_rng(1)
    turns = tokens = first = cached = 0
    # By default, too: memory for a session under `full` of all trained positions is not needed.
    settings = EngineConfig(
        kv_bytes=kv_bytes, segment_tokens=64, strategy=str(SinkWindow(sink=4, window=256)), share_prefixes="off"
    )
    with Engine(forward, settings) as engine:
        session = engine.create_session().session_id
        began = time.monotonic()
        while turns < 8 or time.monotonic() - began < seconds:
            appended = [int(one) for one in rng.integers(1, 100, int(rng.integers(1, 90)))]
            engine.append(session, appended)
            tokens += len(appended) + len(said(engine, session, 16))
            turns += 1
            cached = max(cached, int(mx.get_cache_memory()))
            if not first and turns >= 4 and time.monotonic() - began >= seconds / 8:
                first = active_bytes()
        last = active_bytes()
    return LongSession(turns=turns, tokens=tokens, first_bytes=first, last_bytes=last, cached_bytes=cached)


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Tokens per second of each round: ours, mlx-lm's own over the same weights, llama.cpp's if it is here."""

    ours: list[float]
    theirs: list[float]
    llama_cpp: list[float]


def speeds(
    forward: Forward, folder: Path, prompt: Sequence[int], *, tokens: int, rounds: int, gguf: Path | None = None
) -> Speeds:
    """Decode steps after the same prompt, taking turns; between the first token and the last.

    gguf: what llama.cpp runs, from no history, as its own benchmark does.
    """
    model, _ = load_model(folder, model_config=older_names(json.loads((folder / "config.json").read_text())))
    model.set_dtype(getattr(mx, forward.facts.dtype))
    mx.eval(model.parameters())
    found = Speeds(ours=[], theirs=[], llama_cpp=[])
    with Engine(
        forward, EngineConfig(kv_bytes=2**28, default_limit_tokens=len(prompt) + tokens, share_prefixes="off")
    ) as engine:
        for _ in range(rounds):
            session = engine.create_session().session_id
            append_all(engine, session, prompt)
            events = engine.generate(session, GenerateParams(max_tokens=tokens))
            found.ours.append(_rate(event for event in events if isinstance(event, TokenCommitted)))
            engine.close_session(session)
            stream = generate_step(mx.array(list(prompt)), model, max_tokens=tokens)
            found.theirs.append(_rate(stream))
            if gguf is not None and (rate := llama_cpp_speed(gguf, tokens=tokens)) is not None:
                found.llama_cpp.append(rate)
    return found


def _rate(stream: Any) -> float:
    times = [time.perf_counter() for _ in stream]
    return (len(times) - 1) / (times[-1] - times[0])


def older_names(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the names of rotation that mlx-lm reads and transformers 5 does not write any more."""
    rotation = config.get("rope_parameters") or {}
    if "rope_theta" not in rotation or rotation.get("rope_type", "default") != "default":
        return config
    return {"rope_theta": rotation["rope_theta"], "rope_scaling": None, **config}


def llama_cpp_speed(gguf: Path, *, tokens: int) -> float | None:
    """Tokens per second of `llama-bench` on its default device; None where it is not installed."""
    if shutil.which("llama-bench") is None:
        return None
    command = ["llama-bench", "-m", str(gguf), "-p", "0", "-n", str(tokens), "-r", "1", "-o", "json"]
    ran = subprocess.run(command, capture_output=True, check=True, timeout=300)
    return float(json.loads(ran.stdout)[0]["avg_ts"])
