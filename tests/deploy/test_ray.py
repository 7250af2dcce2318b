"""Servers that Ray places, behind Envoy. It runs where ray is installed, which no file of ours installs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from inference_engine.config import child_environment
from kakeya import TLS, Client, RetryPolicy
from tests.deploy.fronts import Envoy, Upstream
from tests.further import further_test
from tests.load.kills import ROOT
from tests.tiny_folder import save_tiny_chat_model

PROGRAM = ROOT / "deploy" / "ray" / "replicas.py"
LIMIT_SECONDS = 180.0


def waited_for(is_so: Callable[[], bool], log: Path) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while not is_so():
        assert time.monotonic() < until, log.read_text(encoding="utf-8", errors="replace")
        time.sleep(0.1)


@further_test
def test_servers_of_a_ray_cluster_are_found_by_envoy_and_started_again(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install ray")
    model, log, endpoints = tmp_path / "model", tmp_path / "log", tmp_path / "endpoints.yaml"
    save_tiny_chat_model(model)

    def ports() -> list[str]:
        return re.findall(r"port_value: (\d+)", endpoints.read_text(encoding="utf-8")) if endpoints.exists() else []

    words = (
        "--replicas=2",
        "--num-cpus=0.1",
        "--host=127.0.0.1",
        f"--endpoints={endpoints}",
        "--drain-seconds=5",
        "--",
    )
    served = (f"--model={model}", "--kv-bytes=64MiB", f"--state-dir={tmp_path}/{{name}}", "--threads=1")
    opened = Envoy(tmp_path, (Upstream("127.0.0.1:1"), Upstream("127.0.0.1:2")))
    process = None
    try:
        opened.start()
        endpoints.unlink()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(PROGRAM), *words, *served],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=child_environment(
                    RAY_DISABLE_IMPORT_WARNING="1", RAY_USAGE_STATS_ENABLED="0", PYTHONPATH=f"{ROOT}"
                ),
                start_new_session=True,
            )
        waited_for(lambda: len(ports()) == 2, log)
        retry = RetryPolicy(patience_seconds=LIMIT_SECONDS)
        with Client(opened.target, tls=TLS(root_certificates=opened.ca), retry=retry, timeout=LIMIT_SECONDS) as client:
            sessions = [client.create_session() for _ in range(8)]
            for session in sessions:
                session.append(range(1, 30))
                assert len(list(session.generate(4))) == 4
            before = ports()
            (gone,) = {each.pid for each in psutil.net_connections("tcp") if _listens(each, before[0])}
            assert gone is not None
            os.kill(gone, signal.SIGKILL)
            waited_for(lambda: len(ports()) == 2 and ports()[0] != before[0], log)
            assert ports()[1] == before[1]
            for session in sessions:  # each is found by its server's name, wherever that listens now
                assert len(list(session.generate(4))) == 4
    finally:
        opened.stop()
        if process is not None:
            process.terminate()
            process.wait(LIMIT_SECONDS)
    assert process.returncode == 0, log.read_text(encoding="utf-8", errors="replace")
    listening = [each for each in psutil.net_connections("tcp") if any(_listens(each, port) for port in ports())]
    assert listening == []


def _listens(connection: Any, port: str) -> bool:
    return bool(connection.status == psutil.CONN_LISTEN and connection.laddr.port == int(port))
