"""A real Prometheus reads a real server, by the files of `deploy`: its token, the rules, every panel's question."""

from __future__ import annotations

import http
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kakeya import Client
from tests.deploy.fronts import free_port, program, replaced
from tests.deploy.test_files import ALERTS, COMPOSE, expressions, load, read
from tests.further import further_test
from tests.processes import LIMIT_SECONDS, kakeya_serve
from tests.tiny_folder import save_tiny_chat_model

TOKEN = "0123456789abcdef0123456789abcdef"


@contextmanager
def prometheus(folder: Path, *targets: str) -> Iterator[str]:
    """Its address. It reads every second."""
    token = folder / "token"
    token.write_text(TOKEN, encoding="ascii")
    shutil.copy(ALERTS, folder / "alerts.yaml")
    changes = {
        "15s": "1s",
        "/run/secrets/metrics_token": str(token),
        "[kakeya-0:9090, kakeya-1:9090]": f"[{', '.join(targets)}]",
    }
    (folder / "prometheus.yaml").write_text(replaced(read(COMPOSE / "prometheus.yaml"), changes), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    command = [program("prometheus", "`make fronts`"), f"--config.file={folder / 'prometheus.yaml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield address
    finally:
        process.kill()
        process.wait()


def asked(address: str, path: str, **words: str) -> Any:
    """The data of an answer; None while there is none."""
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(words)}"
    try:
        with urllib.request.urlopen(url, timeout=10.0) as answer:
            return json.loads(answer.read())["data"]
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.SERVICE_UNAVAILABLE:  # it listens, and is not ready yet
            return None
        raise AssertionError(error.read()) from error
    except urllib.error.URLError:
        return None


@further_test
def test_prometheus_reads_a_server_and_answers_every_question(tmp_path: Path, subtests: pytest.Subtests) -> None:
    model = tmp_path / "model"
    save_tiny_chat_model(model)
    metrics = f"127.0.0.1:{free_port()}"
    token = tmp_path / "server.token"
    token.write_text(TOKEN, encoding="ascii")
    arguments = ("--kv-bytes=64MiB", f"--metrics-bind={metrics}", f"--metrics-token-file={token}")
    with (
        kakeya_serve("--model", model, *arguments) as server,
        prometheus(tmp_path, metrics) as address,
        Client(server.target) as client,
    ):
        session = client.create_session()
        session.append(range(1, 40))
        assert len(list(session.generate(20))) == 20
        until = time.monotonic() + LIMIT_SECONDS
        while not values(address, "increase(generate_tokens_total[1m]) or generate_tokens_total"):
            assert time.monotonic() < until, asked(address, "targets")
            time.sleep(0.2)
        assert values(address, 'up{job="kakeya"}') == [1.0]
        assert values(address, "generate_tokens_total") == [20.0]
        rules = asked(address, "rules")["groups"][0]["rules"]
        assert [each["name"] for each in rules] == [each["alert"] for each in load(ALERTS)["groups"][0]["rules"]]
        assert [each["name"] for each in rules if each["health"] == "err"] == []
        for expression in list(expressions())[:-1]:  # the last is Grafana's own
            with subtests.test(expression):
                assert asked(address, "query", query=expression)["resultType"] == "vector"


def values(address: str, expression: str) -> list[float]:
    found = asked(address, "query", query=expression)
    return [float(each["value"][1]) for each in found["result"]] if found else []
