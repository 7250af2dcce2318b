"""The log: two formats, hashes by which to find a session or a call, and no text or token ids."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import threading
from typing import Any

import pytest

from inference_engine import logs
from inference_engine.logs import FIELDS, about_request, about_session, lost_lines, name_request, tag, written
from inference_engine.metrics import EngineMetrics
from inference_engine.tracing import Tracing
from laboratory.scripted import Fault, Script
from tests.load.scripted import scripted_engine
from tests.server.test_tracing import Recorded
from tests.server.wire import connected, refused, serving
from tests.tiny_native import served_engine

KEY = "a-key-that-is-long-enough-0123456789"
POISON = 213

log = logging.getLogger("a.test")


def lines_of(stream: io.StringIO) -> list[Any]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_of_json_is_one_object_with_the_fields_there_are() -> None:
    stream = io.StringIO()
    with written("json", stream):
        log.info("a %s ended", "Generate", extra={"outcome": "eos", "tokens": 7, "reason": ""})
    (line,) = lines_of(stream)
    assert line.pop("time").endswith("Z")
    assert line == {"level": "INFO", "logger": "a.test", "message": "a Generate ended", "outcome": "eos", "tokens": 7}


def test_a_traceback_stays_within_its_object() -> None:
    stream = io.StringIO()
    with written("json", stream):
        try:
            raise RuntimeError("the device failed")
        except RuntimeError:
            log.exception("a step\nfailed")
    (line,) = lines_of(stream)
    assert line["message"] == "a step\nfailed"
    assert line["exception"].startswith("Traceback") and line["exception"].endswith("RuntimeError: the device failed")


def test_only_named_fields_are_shown_whatever_a_record_carries() -> None:
    stream = io.StringIO()
    with written("json", stream):
        log.info("x", extra={"token_ids": [1, 2, 3], "api_key": KEY, "session": tag("an id")})
    (line,) = lines_of(stream)
    assert set(line) - {"time", "level", "logger", "message"} == {"session"} <= set(FIELDS)
    assert KEY not in stream.getvalue()


def test_what_is_logged_within_a_call_is_about_that_call() -> None:
    stream = io.StringIO()
    request_id = os.urandom(16)
    with written("json", stream):
        log.info("before")
        with about_request():
            log.info("one")
            name_request(request_id)
            log.info("two", extra=about_session("an id"))
        log.info("after")
    before, one, two, after = lines_of(stream)
    assert "request" not in before and "request" not in after
    assert len(one["request"]) == logs.TAG_CHARACTERS
    assert (two["request"], two["session"]) == (tag(request_id), tag("an id"))
    assert before.keys() == after.keys()


def test_a_reader_that_does_not_read_stops_no_writer_and_learns_what_was_lost() -> None:
    may_write, is_writing = threading.Event(), threading.Event()

    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            is_writing.set()
            may_write.wait()
            return super().write(text)

    stream = Slow()
    with written("json", stream, queued_lines=10):
        log.info("the first")
        is_writing.wait()
        for number in range(25):
            log.info("line %d", number)
        may_write.set()
    messages = [line["message"] for line in lines_of(stream)]
    assert messages[:11] == ["the first", *(f"line {number}" for number in range(10))]
    assert messages[11:] == ["15 lines of the log were dropped: they came faster than they are read"]


@pytest.mark.hostile
def test_writes_that_fail_lose_their_lines_only_and_are_reported_once_it_works_again() -> None:
    class Full(io.StringIO):
        """A disk without room for the lines that say so."""

        def write(self, text: str) -> int:
            if "no room" in text:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    stream, before = Full(), lost_lines()["write"]
    metrics = EngineMetrics()
    with written("json", stream):
        log.info("before")
        log.info("no room")
        log.info("no room either")
        log.info("after")
    messages = [line["message"] for line in lines_of(stream)]
    assert messages == ["before", "after", "2 lines of the log were lost: writing them failed"]
    assert lost_lines()["write"] == before + 2
    metrics.look()
    assert metrics.registry.get_sample_value("kakeya_log_lost_lines_total", {"reason": "write"}) == 2


async def test_a_generate_leaves_one_line_with_the_tags_of_its_session_call_and_trace() -> None:
    stream, recorded = io.StringIO(), Recorded()
    request_id = os.urandom(16)
    with written("json", stream), served_engine(tracing=Tracing(recorded.tracer)) as engine:
        async with serving(engine) as handle, connected(handle) as client:
            session_id = await client.open()
            await client.generate(session_id, 5, request_id=request_id)
    (line,) = (line for line in lines_of(stream) if line["message"] == "a Generate ended")
    whole = recorded.one("generate")
    assert (line["session"], line["request"]) == (tag(session_id), tag(request_id))
    assert line["trace_id"] == f"{whole.context.trace_id:032x}"
    assert (line["outcome"], line["tokens"]) == ("max_tokens", 5)
    assert (whole.attributes or {})["kakeya.session"] == line["session"]


@pytest.mark.parametrize("kind", ["text", "json"])
async def test_nothing_that_a_client_said_is_in_the_log(kind: str, tmp_path: Any) -> None:
    """Canaries: a key, a label, an owner's key file, ids of tokens and of the session, through good and bad calls."""
    stream = io.StringIO()
    key_file = tmp_path / "keys"
    key_file.write_text(KEY + "\n", encoding="utf-8")
    rare = (199, 211, POISON)
    script = Script(faults={POISON: (Fault.ERROR, 1)})
    with written(kind, stream), scripted_engine(script=script) as engine:
        async with (
            serving(engine, api_key_file=str(key_file)) as handle,
            connected(handle, metadata=[("authorization", f"Bearer {KEY}")]) as client,
        ):
            session_id = await client.open(rare, client_label="a-secret-label")
            assert (await refused(client.generate(session_id))).reason == "INTERNAL INTERNAL"
            said = await client.generate(session_id, 4)
            await refused(client.append(session_id, [987654]))
            await refused(client.append("an-id-that-is-none", [1]))
    text = stream.getvalue()
    assert "incident" in text and tag(session_id) in text
    for secret in (KEY, "a-secret-label", session_id, "987654", "an-id-that-is-none", str(rare)[1:-1]):
        assert secret not in text
    assert str(said)[1:-1] not in text
