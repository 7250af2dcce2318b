"""What the server says of a key, of its load and of its end, as clients of other APIs read it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx2

from kakeya import Client
from tests.further import further_test
from tests.gateway.conftest import ENDS, gateway_for
from tests.server_thread import server_thread
from tests.tiny_native import served_engine

HELLO: Any = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
LONG: Any = HELLO | {"max_tokens": 400}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def test_the_servers_keys_are_the_gateways(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one-key-of-alice\nanother-of-robert\n")
    engine = served_engine(end_ids=ENDS, windowed=False)
    with (
        server_thread(engine, api_key_file=str(tmp_path / "keys")) as target,
        gateway_for(target) as url,
        httpx2.Client(base_url=url) as http,
    ):
        alice, robert = {"authorization": "Bearer one-key-of-alice"}, {"x-api-key": "another-of-robert"}
        for headers in ({}, {"authorization": "Bearer a-key-of-nobodys"}):
            for path in (CHAT, MESSAGES, "/v1/messages/count_tokens"):
                refused = http.post(path, json=HELLO, headers=headers)
                assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
            assert http.get("/v1/models", headers=headers).status_code == 401
        response = http.post("/v1/responses", json={"model": "tiny", "input": "Hello"}, headers=alice).json()
        assert http.get(f"/v1/responses/{response['id']}", headers=alice).json()["id"] == response["id"]
        assert http.get(f"/v1/responses/{response['id']}", headers=robert).status_code == 404
        with Client(target, api_key="one-key-of-alice") as sdk, Client(target, api_key="another-of-robert") as other:
            assert len(list(sdk.sessions())) == 1
            assert list(other.sessions()) == []
    engine.close()


@further_test
def test_what_a_key_may_not_have_is_a_429_that_says_when_to_come_back() -> None:
    """Sessions that are idle make room; one that is busy does not."""
    is_over = threading.Event()  # until then an answer takes long
    settings: Any = {"kv_bytes": 600_000, "growth": "guaranteed"}
    engine = served_engine(end_ids=(), windowed=False, on_step=lambda _: is_over.wait(0.02), **settings)
    with (
        server_thread(engine) as target,
        gateway_for(target, timeout=1.0) as url,
        httpx2.Client(base_url=url, timeout=60) as http,
    ):
        for number in range(2):
            other = [{"role": "user", "content": f"{number} is another conversation"}]
            assert http.post(CHAT, json=HELLO | {"messages": other}).status_code == 200
        with http.stream("POST", CHAT, json=LONG | {"stream": True}) as running:
            lines = running.iter_lines()
            next(lines)
            for path in (CHAT, MESSAGES):
                refused = http.post(path, json=HELLO)
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["type"] == "rate_limit_error"
            is_over.set()
    engine.close()


@further_test
def test_a_server_that_is_gone_is_a_503() -> None:
    engine = served_engine(end_ids=ENDS, windowed=False)
    with server_thread(engine) as target, gateway_for(target, timeout=1.0) as url:
        assert httpx2.post(f"{url}{CHAT}", json=HELLO, timeout=60).status_code == 200
        gone = target
    engine.close()
    with gateway_for(gone, timeout=1.0) as url:
        refused = httpx2.post(f"{url}{MESSAGES}", json=HELLO, timeout=60)
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "overloaded_error"
        assert "retry-after" in refused.headers
