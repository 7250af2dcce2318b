"""An engine that does nothing: sessions without a model, whose Generates say at once whatever they are asked for.

What is measured over it is the server's own cost.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any

import grpc

from inference_engine.config import EngineConfig, ServerConfig
from inference_engine.engine import Engine
from inference_engine.engine.generation import Generation
from inference_engine.engine.results import EngineInfo, HistoryLength, SessionInfo, SessionOpened
from inference_engine.kv.strategies import make_strategy, strategy_names
from inference_engine.kv.strategy import KVStrategy
from inference_engine.metrics import EngineMetrics
from inference_engine.server.run import serve
from inference_engine.session.history import TokenIds
from inference_engine.session.journal import MemoryJournal
from inference_engine.tracing import Tracing
from inference_engine.types import (
    Bound,
    Event,
    Finished,
    GenerateParams,
    Mode,
    ModelFacts,
    StopReason,
    TokenCommitted,
)
from kakeya.v1 import runtime_pb2 as pb

VOCAB_SIZE = 50_000


class NullGeneration(Generation):
    """Emits what it was given, from a thread; it cannot be stopped."""

    def __init__(self) -> None:
        self._said: SimpleQueue[Event] = SimpleQueue()
        self._on_readable: Callable[[], None] = lambda: None
        self._wake: Callable[[], None] | None = None

    @property
    def position(self) -> int:
        return 0

    def say(self, event: Event) -> None:
        self._said.put(event)
        self._notify()

    def read(self) -> list[Event]:
        return [self._said.get() for _ in range(self._said.qsize())]

    def when_readable(self, callback: Callable[[], None], wake: Callable[[], None] | None = None) -> None:
        self._on_readable, self._wake = callback, wake
        self._notify()

    def _notify(self) -> None:
        self._on_readable()
        if self._wake is not None:
            self._wake()

    def leave(self) -> None:
        pass

    def __del__(self) -> None:
        pass

    def cancel(self) -> None:
        pass

    def expire(self) -> None:
        pass


class NullEngine(Engine):
    """Sessions without a model: counts what is appended, and generates at once whatever it is asked for."""

    def __init__(self) -> None:
        self.metrics = EngineMetrics()
        self.tracing = Tracing()
        self.journal = MemoryJournal()
        self._lengths: dict[str, int] = {}
        self._ids = itertools.count()
        self._strategy = make_strategy("full")
        self._bound = Bound(sustained_bytes=1, peak_bytes=1)
        self._work: SimpleQueue[tuple[GenerateParams, NullGeneration]] = SimpleQueue()
        threading.Thread(target=self._generate, daemon=True).start()

    def info(self) -> EngineInfo:
        return EngineInfo(
            facts=ModelFacts(model_id="null", vocab_size=VOCAB_SIZE, trained_positions=1, device="none", dtype="none"),
            mode=Mode.BATCHED,
            strategies=strategy_names(),
            default_strategy=self._strategy,
            limit_tokens=None,
            default_limit_tokens=None,
            growth_is_guaranteed=True,
            kv_capacity_bytes=1,
            kv_reserved_bytes=0,
            prefix_capacity_bytes=0,
            recurrent_state_bytes=0,
            tier_capacity_bytes=0,
            tier_reserved_bytes=0,
            drafter="",
            end_ids=(),
            config=EngineConfig(),
        )

    @property
    def forward_failure(self) -> str:
        return ""

    def has_to_prepare(self, strategy: KVStrategy | None) -> bool:
        return False

    def is_elsewhere(self, session_id: str, *, owner: str = "", request_id: bytes = b"") -> bool:
        return False

    def history_tokens_of(self, owner: str) -> int:
        return 0

    def prefix_bytes_of(self, owner: str) -> int:
        return 0

    def carrying(self, owner: str, tokens: int) -> AbstractContextManager[None]:
        return nullcontext()

    def reserved_by(self, owner: str) -> Bound:
        return Bound(sustained_bytes=0, peak_bytes=0)

    def create_session(self, *, limit_tokens: int | None = None, route: str = "", **_: Any) -> SessionOpened:
        session_id = f"{route}.{next(self._ids):032x}" if route else f"{next(self._ids):032x}"
        self._lengths[session_id] = 0
        return SessionOpened(
            session_id=session_id,
            strategy=self._strategy,
            bound=self._bound,
            limit_tokens=limit_tokens,
            reserved_bytes=self._bound.sustained_bytes,
            eos_token_ids=(),
        )

    def append_once(self, session_id: str, token_ids: Sequence[int] | TokenIds, **_: Any) -> HistoryLength:
        self._lengths[session_id] += len(token_ids)
        return HistoryLength(tokens=self._lengths[session_id])

    def generate(self, session_id: str, params: GenerateParams, **_: Any) -> Generation:
        generation = NullGeneration()
        self._work.put((params, generation))
        return generation

    def session_info(self, session_id: str, *, owner: str = "", saved_only: bool = False) -> SessionInfo:
        return SessionInfo(
            history_length=self._lengths[session_id],
            history_bytes=0,
            cached_tokens=0,
            evicted_tokens=0,
            kv_live_bytes=0,
            spare_live_bytes=0,
            tier_live_bytes=0,
            bound=self._bound,
            reserved_bytes=self._bound.sustained_bytes,
            strategy=self._strategy,
            limit_tokens=None,
            inv1_violations=0,
            inv2_violations=0,
            inv3_violations=0,
            drafted_tokens=0,
            accepted_tokens=0,
            idle_seconds=0.0,
            failure_reason="",
            is_generating=False,
            is_resident=True,
            saved_tokens=0,
            label="",
            eos_token_ids=(),
        )

    def drain(self, grace_seconds: float) -> None:
        pass

    def close(self) -> None:
        pass

    def is_stalled(self) -> bool:
        return False

    def is_alive(self) -> bool:
        return True

    def _generate(self) -> None:
        while True:
            params, generation = self._work.get()
            count = params.max_tokens
            events: list[Event] = [TokenCommitted(index % VOCAB_SIZE, index) for index in range(count)]
            for event in events:
                generation.say(event)
            generation.say(
                Finished(
                    stop_reason=StopReason.MAX_TOKENS,
                    generated_tokens=count,
                    history_length=count,
                    prefill_seconds=0.0,
                    total_seconds=0.0,
                    seed=0,
                    prefilled_tokens=0,
                    cached_tokens=0,
                    attended_positions=count,
                    evicted_positions=0,
                )
            )


# -- servers, each a process of its own -------------------------------------------------------------------------------


def serve_runtime() -> None:
    config = ServerConfig(bind="127.0.0.1:0")
    serve(NullEngine(), config, on_ready=lambda handle: print(handle.target, flush=True))


async def serve_echo() -> None:
    """The least grpc.aio can do: bytes in, the same bytes out; or as many small frames as asked for."""

    async def unary(request: bytes, _: object) -> bytes:
        return request

    async def stream(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        frame = pb.GenerateResponse(token_id=VOCAB_SIZE - 1).SerializeToString()
        for _ in range(int(request)):
            await context.write(frame)

    server = grpc.aio.server()
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    gc.collect()
    gc.freeze()  # as the runtime does
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    serve_runtime() if sys.argv[1:] == ["runtime"] else asyncio.run(serve_echo())
