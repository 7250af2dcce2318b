"""The live page: its data, which callers may read it, and that its script draws that data.

The page as a browser shows it is checked by `scripts/screenshot_dashboard.py`, which needs one.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from inference_engine.config import ServerConfig
from inference_engine.engine import Engine
from inference_engine.metrics import STEP_PARTS, EngineMetrics
from inference_engine.server import metrics_port
from inference_engine.server.dashboard import Buckets, Dashboard
from inference_engine.server.metrics_port import PAGE, MetricsPort
from inference_engine.types import GenerateParams
from tests.frozen_clients.build import node_environment
from tests.server.wire import HISTORY
from tests.tiny_native import served_engine

FOLDER = Path(metrics_port.__file__).parent / "dashboard_page"
MOST_BYTES = 30_000
HALF_REQUESTS = 200
MOST_THREADS = 70  # of 64 readers, and of what listens
SECONDS = 60.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def data(self) -> Any:
        return json.loads(self.body)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with served_engine() as engine:
        yield engine


@pytest.fixture
def port(engine: Engine) -> Iterator[MetricsPort]:
    port = MetricsPort(engine.metrics, ServerConfig(metrics_bind="127.0.0.1:0"))
    yield port
    port.stop()


def get(port: MetricsPort, path: str, *, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection(port.target, timeout=SECONDS)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
    finally:
        connection.close()


def chat(engine: Engine, *, tokens: int = 5, owner: str = "") -> str:
    session_id = engine.create_session(owner=owner, label="a-label").session_id
    engine.append(session_id, HISTORY, owner=owner)
    assert list(engine.generate(session_id, GenerateParams(max_tokens=tokens), owner=owner))
    return session_id


# -- the port ---------------------------------------------------------------------------------------------------------


def test_the_page_and_its_parts_are_served_whole_and_need_nothing_else(port: MetricsPort) -> None:
    size = 0
    for path, (name, content_type) in PAGE.items():
        answer = get(port, path)
        assert (answer.status, answer.headers["content-type"]) == (200, content_type)
        assert answer.body == (FOLDER / name).read_bytes()
        assert b"//" not in answer.body.replace(b"// ", b"").replace(b"http://www.w3.org/", b""), "no address but ours"
        size += len(answer.body)
    assert size <= MOST_BYTES
    assert {path.name for path in FOLDER.iterdir()} == {name for name, _ in PAGE.values()}


def test_a_page_in_a_browser_can_neither_embed_nor_extend_ours(port: MetricsPort) -> None:
    answer = get(port, "/dashboard")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in answer.headers


OTHER_HOSTS: list[str] = [
    "evil.example:9090",
    "evil.example",
    "127.0.0.1.evil.example",
    "[2001:db8::1]:9090",
    "[",
    "[::1",
    "",
]


@pytest.mark.parametrize("path", ["/metrics", "/dashboard", "/dashboard/data"])
def test_a_request_for_another_host_name_is_refused(port: MetricsPort, path: str, subtests: pytest.Subtests) -> None:
    """Else a foreign page could have its own name resolve to us, and read along."""
    for host in OTHER_HOSTS:
        with subtests.test(host):
            answer = get(port, path, Host=host)
            assert answer.status == 421
            assert b"session" not in answer.body


def test_the_root_leads_to_the_dashboard(port: MetricsPort) -> None:
    with urllib.request.urlopen(f"http://{port.target}/", timeout=10.0) as answer:
        assert (answer.status, answer.url) == (200, f"http://{port.target}/dashboard")


def test_what_is_not_there_is_said_to_be_so_and_nothing_can_be_changed(port: MetricsPort) -> None:
    for path in ("/dashboard/", "/dashboard/../run.py", "/dashboard/__init__.py", "/%2e%2e/run.py"):
        assert get(port, path).status == 404, path
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert get(port, "/dashboard/data", method=method).status == 501, method
    head = get(port, "/metrics", method="HEAD")
    assert (head.status, head.body) == (200, b"")


def test_an_engine_that_fails_to_answer_fails_that_answer_only(port: MetricsPort, engine: Engine) -> None:
    def broken() -> Any:
        raise RuntimeError("secret-detail")

    statistics = engine.metrics._statistics
    engine.metrics._statistics = broken
    answer = get(port, "/dashboard/data")
    assert (answer.status, answer.body) == (500, b"internal error\n")
    engine.metrics._statistics = statistics
    assert get(port, "/dashboard/data").status == 200


@pytest.mark.hostile
def test_metrics_are_served_beside_half_requests_and_a_bounded_number_of_threads() -> None:
    before = set(threading.enumerate())  # of other tests, which may end meanwhile
    port = MetricsPort(EngineMetrics(), ServerConfig(metrics_bind="127.0.0.1:0"))
    host, _, number = port.target.rpartition(":")
    with contextlib.ExitStack() as stack:
        stack.callback(port.stop)
        for _ in range(HALF_REQUESTS):
            half = stack.enter_context(socket.create_connection((host, int(number)), timeout=10.0))
            half.sendall(b"GET /metrics HTTP/1.1\r\nHost: loc")
        for _ in range(3):
            with urllib.request.urlopen(f"http://{port.target}/metrics", timeout=10.0) as answer:
                assert b"kakeya_session_kv_bytes" in answer.read()
        assert len(set(threading.enumerate()) - before) < MOST_THREADS


# -- the data ---------------------------------------------------------------------------------------------------------


def test_the_data_says_what_the_engine_holds_and_names_no_owner(port: MetricsPort, engine: Engine) -> None:
    engine.metrics.set_build_info(version="1", model="tiny", device="cpu", dtype="float32", mode="batched")
    ids = [chat(engine, owner=owner) for owner in ("an-owner", "another")]
    answer = get(port, "/dashboard/data")
    data = answer.data
    assert data["server"] == {"version": "1", "model": "tiny", "device": "cpu", "dtype": "float32", "mode": "batched"}
    assert data["sessions"] == [{"strategy": "full", "state": "idle", "count": 2}]
    assert data["ended"] == {"max_tokens": 2}
    info = engine.info()
    assert data["bytes"]["capacity"] == info.kv_capacity_bytes
    assert data["bytes"]["reserved"] == info.kv_reserved_bytes
    held_bytes = [
        engine.session_info(ids[0], owner="an-owner").kv_live_bytes,
        engine.session_info(ids[1], owner="another").kv_live_bytes,
    ]
    assert sum(data["bytes"]["kinds"].values()) == sum(held_bytes) > 0
    for secret in (*ids, "an-owner", "another", "a-label"):
        assert secret.encode() not in answer.body


def test_a_point_says_what_happened_within_its_window(engine: Engine) -> None:
    clock = iter([0.0, 0.0, 2.0, 4.0])
    dashboard = Dashboard(engine.metrics, clock=lambda: next(clock), wall=lambda: 1000.0)
    chat(engine, tokens=5)
    dashboard.sample()
    points = dashboard_points(dashboard)
    assert points["tokens_per_second"] == [2.5]
    assert points["prefilled_per_second"] == [len(HISTORY) / 2]
    assert points["acceptance"] == [None]
    assert points["running"] == [0]
    assert points["first_token_p50"][0] > 0
    assert math.isclose(sum(points[f"{part}_share"][0] for part in STEP_PARTS), 1, abs_tol=0.002)
    dashboard.sample()
    assert dashboard_points(dashboard)["tokens_per_second"] == [2.5, 1.25]


def dashboard_points(dashboard: Dashboard) -> dict[str, list[Any]]:
    with dashboard._lock:
        points = list(dashboard._points)
    return {name: [point[name] for point in points] for name in points[-1]}


PERCENTILES: list[tuple[tuple[float, ...], float, float | None]] = [
    ((0, 0, 0), 50, None),
    ((10, 10, 10), 50, 0.5),
    ((0, 10, 10), 50, 1.5),
    ((5, 10, 10), 95, 1.9),
    ((0, 0, 4), 99, 2.0),  # beyond the last bound: at least that
    ((1, 1, 1), 100, 1.0),
]


def test_percentiles_are_read_off_buckets(subtests: pytest.Subtests) -> None:
    for counts, percent, expected in PERCENTILES:
        with subtests.test(counts=counts, percent=percent):
            found = Buckets((1.0, 2.0, math.inf), counts).percentile(percent)
            assert found == (expected if expected is None else pytest.approx(expected))


# -- the script -------------------------------------------------------------------------------------------------------


def in_node(expression: str) -> Any:
    """What a JavaScript expression over the functions of charts.js gives."""
    program = f"""
        import * as charts from {json.dumps((FOLDER / "charts.js").as_uri())};
        const {{ bandPaths, bar, bytes, ceiling, chart, count, duration, linePath, pointAt, seconds, sessionRows, share,
            table }} = charts;
        process.stdout.write(JSON.stringify({expression}));
    """
    return run_in_node(program)


def run_in_node(program: str) -> Any:
    """What a module prints as JSON; it warns about nothing."""
    done = subprocess.run(
        ["node", "--input-type=module", "--eval", program],
        capture_output=True,
        text=True,
        env=node_environment(),
        timeout=SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_a_chart_says_in_words_what_it_shows() -> None:
    spec = "{title: 'Queue <b>', series: [['p50', [0.1, 0.2]], ['p95', [null, null]]], format: seconds}"
    drawn = in_node(f"chart({spec}, 300, '10 min ago')")
    assert 'role="img" aria-label="Queue &lt;b&gt;. Now: p50 200 ms, highest 200 ms; p95 –, highest –"' in drawn
    assert "<b>" not in drawn.split("</h3>")[0], "text is never markup"
    assert "NaN" not in drawn and "undefined" not in drawn
    looked_at = in_node(f"chart({spec}, 300, '10 min ago', 0)")
    assert "p50 <b>100 ms</b>" in looked_at and 'class="at"' in looked_at


def test_the_page_draws_what_a_real_engine_says(port: MetricsPort, engine: Engine, tmp_path: Path) -> None:
    """Its whole script, on a document that keeps what it is given; a browser does the rest."""
    engine.metrics.set_build_info(version="1", model="tiny", device="cpu", dtype="float32", mode="batched")
    ticks = count()
    dashboard = Dashboard(engine.metrics, clock=lambda: 2.0 * next(ticks))
    chat(engine)
    dashboard.sample()
    dashboard.sample()
    data = tmp_path / "data.json"
    data.write_text(json.dumps(dashboard.data()), encoding="utf-8")
    program = f"""
        import {{ readFileSync }} from "node:fs";
        const places = {{}};
        const element = () => ({{ children: [], dataset: {{}}, innerHTML: "", textContent: "", addEventListener() {{}},
            appendChild(child) {{ this.children.push(child); return child; }} }});
        globalThis.document = {{ hidden: false, documentElement: element(), createElement: element,
            getElementById: (id) => (places[id] ??= element()) }};
        globalThis.setTimeout = () => {{}};
        const data = JSON.parse(readFileSync({json.dumps(str(data))}));
        globalThis.fetch = async () => ({{ ok: true, json: async () => data }});
        await import({json.dumps((FOLDER / "page.js").as_uri())});
        await new Promise((done) => setImmediate(done));
        const shown = Object.fromEntries(Object.entries(places).map(([id, place]) =>
            [id, place.innerHTML + place.textContent + place.children.map((child) => child.innerHTML).join("")]));
        process.stdout.write(JSON.stringify({{ ...shown, drawn: document.documentElement.dataset.drawn }}));
    """
    shown = run_in_node(program)
    assert shown["drawn"]
    assert shown["server"].startswith("tiny in float32 on cpu · batched · version 1 · up ")
    assert shown["status"] == "serving"
    assert shown["charts"].count("<svg") > 8
    assert '<th scope="row">full</th><td>1</td>' in shown["tables"]
    assert "of 67.1 MB" in shown["memory"]
    for part, text in shown.items():
        assert "NaN" not in str(text) and "undefined" not in str(text), part
