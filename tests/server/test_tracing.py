"""Traces: one Generate is one tree, from the client's span to the draft that was verified, and it holds no content."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, Tracer

import kakeya
from inference_engine.engine import Engine
from inference_engine.errors import ConfigError
from inference_engine.logs import tag
from inference_engine.server import trace_export
from inference_engine.server.trace_export import exported
from inference_engine.tracing import MOST_EVENTS, Tracing
from inference_engine.types import GenerateParams, TokenCommitted
from tests.laws.drafters import Knowing
from tests.server.wire import HISTORY, connected, refused, serving
from tests.tiny_native import served_engine

SERVICE = "kakeya.v1.RuntimeService"
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


class Recorded:
    """Spans in memory."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider()
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer: Tracer = self._provider.get_tracer("test")

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        """Those that have ended, in that order."""
        return self._exporter.get_finished_spans()

    def one(self, name: str) -> ReadableSpan:
        (found,) = (span for span in self.spans if span.name == name)
        return found

    def tree(self) -> dict[str, str | None]:
        """Each span's name with its parent's; None for a parent that is none of ours."""
        names = {span.context.span_id: span.name for span in self.spans}
        return {span.name: names.get(span.parent.span_id) if span.parent else None for span in self.spans}

    def text(self) -> str:
        """All that was recorded, but for the ids of spans and their times, which are random or ours."""
        said: list[object] = []
        for span in self.spans:
            said += [span.name, span.status.description, dict(span.attributes or {}), dict(span.resource.attributes)]
            said += [(event.name, dict(event.attributes or {})) for event in span.events]
        return str(said)


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
def engine(recorded: Recorded) -> Iterator[Engine]:
    with served_engine(tracing=Tracing(recorded.tracer)) as engine:
        yield engine


async def test_one_generate_is_one_tree_under_the_clients_span(engine: Engine, recorded: Recorded) -> None:
    request_id = os.urandom(16)
    async with serving(engine) as handle, connected(handle, metadata=[("traceparent", TRACEPARENT)]) as client:
        session_id = await client.open()
        assert len(await client.generate(session_id, 8, request_id=request_id)) == 8
    assert recorded.tree() == {
        f"{SERVICE}/CreateSession": None,
        f"{SERVICE}/AppendTokens": None,
        f"{SERVICE}/Generate": None,
        "generate": f"{SERVICE}/Generate",
        "queue": "generate",
        "prefill": "generate",
        "decode": "generate",
    }
    call = recorded.one(f"{SERVICE}/Generate")
    assert call.kind is SpanKind.SERVER
    assert {f"{span.context.trace_id:032x}" for span in recorded.spans} == {TRACE_ID}
    assert call.parent is not None and f"{call.parent.span_id:016x}" == SPAN_ID
    assert dict(call.attributes or {}) == {
        "rpc.system": "grpc",
        "rpc.service": SERVICE,
        "rpc.method": "Generate",
        "rpc.grpc.status_code": 0,
        "kakeya.request": tag(request_id),
    }
    assert dict(recorded.one("generate").attributes or {}) == {
        "kakeya.session": tag(session_id),
        "kakeya.strategy": "full",
        "kakeya.outcome": "max_tokens",
        "kakeya.prefilled_tokens": len(HISTORY),
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kakeya",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.usage.input_tokens": len(HISTORY),
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 8,
        "kakeya.drafted_tokens": 0,
        "kakeya.accepted_tokens": 0,
    }


def test_chunks_and_verified_drafts_are_events_and_bounded(recorded: Recorded) -> None:
    with served_engine() as engine:
        said = _said(engine, 3 * MOST_EVENTS)
    drafter = Knowing(text=[*HISTORY, *said])
    with served_engine(tracing=Tracing(recorded.tracer), drafter=drafter, draft_tokens=1) as engine:
        assert _said(engine, 3 * MOST_EVENTS) == said
    (chunk,) = recorded.one("prefill").events
    assert (chunk.name, dict(chunk.attributes or {})) == ("chunk", {"kakeya.tokens": len(HISTORY)})
    verified = recorded.one("decode").events
    assert len(verified) == MOST_EVENTS
    assert {event.name for event in verified} == {"verify"}
    assert dict(verified[0].attributes or {}) == {"kakeya.drafted": 1, "kakeya.accepted": 1}
    whole = recorded.one("generate").attributes or {}
    assert whole["kakeya.accepted_tokens"] == whole["kakeya.drafted_tokens"]


def _said(engine: Engine, count: int) -> list[int]:
    session_id = engine.create_session().session_id
    engine.append(session_id, HISTORY)
    events = engine.generate(session_id, GenerateParams(max_tokens=count))
    return [event.token_id for event in events if isinstance(event, TokenCommitted)]


async def test_spans_hold_no_token_ids_no_session_ids_no_labels_and_no_keys(recorded: Recorded, tmp_path: Any) -> None:
    key = "a-key-that-is-long-enough-0123456789"
    key_file = tmp_path / "keys"
    key_file.write_text(key + "\n", encoding="utf-8")
    rare = [111, 113, 127]
    with served_engine(tracing=Tracing(recorded.tracer)) as engine:
        authorization = [("authorization", f"Bearer {key}")]
        async with (
            serving(engine, api_key_file=str(key_file)) as handle,
            connected(handle, metadata=authorization) as client,
        ):
            session_id = await client.open(rare, client_label="a-label")
            said = await client.generate(session_id, 4)
            await refused(client.append(session_id, [9999]))
    facts = [span.attributes or {} for span in recorded.spans]
    facts += [event.attributes or {} for span in recorded.spans for event in span.events]
    numbers = {value for each in facts for value in each.values() if isinstance(value, int)}
    assert len(said) == 4
    assert not {*rare, *said, 9999} & (numbers - {3, 4}), "but for how many there were"
    for secret in (session_id, "a-label", key, "9999"):
        assert secret not in recorded.text()


@pytest.mark.parametrize(
    "sent", ["", "nonsense", "00-zz-zz-01", f"00-{'0' * 32}-{'0' * 16}-01", "ff-" + TRACEPARENT[3:]]
)
async def test_a_traceparent_that_is_none_begins_a_trace_of_its_own(
    engine: Engine, recorded: Recorded, sent: str
) -> None:
    async with serving(engine) as handle, connected(handle, metadata=[("traceparent", sent)]) as client:
        await client.open()
    assert len(recorded.spans) == 2
    for span in recorded.spans:
        assert span.parent is None
        assert f"{span.context.trace_id:032x}" != TRACE_ID


async def test_the_python_sdk_hands_its_span_on(engine: Engine, recorded: Recorded) -> None:
    async with serving(engine) as handle:

        def talk() -> None:
            with (
                recorded.tracer.start_as_current_span("agent"),
                kakeya.Client(handle.target) as client,
                client.create_session() as session,
            ):
                session.append(HISTORY)
                assert len(session.generate(3).result().token_ids) == 3

        await asyncio.to_thread(talk)

        with recorded.tracer.start_as_current_span("async agent"):
            async with kakeya.AsyncClient(handle.target) as client:
                await client.server_info()
    tree = recorded.tree()
    assert tree[f"{SERVICE}/Generate"] == "agent"
    assert tree["generate"] == f"{SERVICE}/Generate"
    assert tree[f"{SERVICE}/GetServerInfo"] in ("agent", "async agent")
    assert trace.get_current_span().get_span_context().is_valid is False


# -- leaving ----------------------------------------------------------------------------------------------------------


class Collector:
    """What an OTLP collector is asked to take."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.is_away = False
        self._server = grpc.server(ThreadPoolExecutor(1))
        method = grpc.unary_unary_rpc_method_handler(
            self._export,
            trace_service_pb2.ExportTraceServiceRequest.FromString,
            trace_service_pb2.ExportTraceServiceResponse.SerializeToString,
        )
        name = "opentelemetry.proto.collector.trace.v1.TraceService"
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Export": method}),))
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def _export(self, request: Any, context: Any) -> Any:
        if self.is_away:
            context.abort(grpc.StatusCode.INTERNAL, "away")
        for of_resource in request.resource_spans:
            self.services |= {
                attribute.value.string_value
                for attribute in of_resource.resource.attributes
                if attribute.key == "service.name"
            }
            self.spans += [span for of_scope in of_resource.scope_spans for span in of_scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def __enter__(self) -> Collector:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()


def test_spans_reach_a_collector_that_speaks_otlp() -> None:
    with Collector() as collector:
        with exported(collector.endpoint) as tracing, served_engine(tracing=tracing) as engine:
            assert len(_said(engine, 3)) == 3
        assert [span.name for span in collector.spans] == ["queue", "prefill", "decode", "generate"]
        assert collector.services == {"kakeya"}


def test_a_collector_that_is_away_is_logged_once_and_when_it_is_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with Collector() as collector, exported(collector.endpoint) as tracing, served_engine(tracing=tracing) as engine:

        def logged() -> list[str]:
            return [record.getMessage() for record in caplog.records if "collector" in record.getMessage()]

        def talk_until(count: int) -> None:
            for _ in range(100):
                _said(engine, 1)
                if len(logged()) >= count or (count == 0 and collector.spans):
                    return
                time.sleep(0.1)
            raise AssertionError(logged())

        talk_until(0)
        collector.is_away = True
        talk_until(1)
        for _ in range(3):
            _said(engine, 1)
            time.sleep(0.1)
        collector.is_away = False
        talk_until(2)
    away, back = logged()
    assert "takes no spans" in away and "INTERNAL" in away
    assert "takes spans again" in back
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


def test_without_the_exporters_packages_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(trace_export, "import_module", missing)
    with (
        pytest.raises(ConfigError, match="pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc"),
        exported("http://127.0.0.1:4317"),
    ):
        pass
    with exported("") as tracing:
        assert not tracing.is_on
