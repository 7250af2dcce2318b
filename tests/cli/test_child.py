"""A server as our child: it runs with our settings only, and reports why it could not start."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from inference_engine.cli.child import ChildServer, child_server
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.errors import KakeyaError
from kakeya import Client

SMALL = EngineConfig(kv_bytes=64 * 2**20)


def test_a_child_runs_with_what_it_was_given_and_ends_with_its_block(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("BIND", "0.0.0.0:1"), ("TLS_CERT_FILE", "cert.pem"), ("DETERMINISM", "batch-invariant")):
        monkeypatch.setenv(f"KAKEYA_{name}", value)
    with child_server(ModelConfig(model=str(tiny_folder)), SMALL) as child:
        with Client(child.wait_ready()) as client:
            assert client.server_info().mode.value == "batched"
        assert psutil.pid_exists(child.pid)
    assert not psutil.pid_exists(child.pid)


def test_a_child_that_does_not_start_gives_its_reason() -> None:
    with (
        pytest.raises(KakeyaError, match="the server did not start: no-such-folder: neither a known model"),
        child_server(ModelConfig(model="no-such-folder"), SMALL) as child,
    ):
        child.wait_ready()


def test_a_child_that_ends_badly_is_an_error(tiny_folder: Path) -> None:
    with (
        pytest.raises(KakeyaError, match=r"the server ended with status -9"),
        child_server(ModelConfig(model=str(tiny_folder)), SMALL) as child,
    ):
        psutil.Process(child.pid).kill()


def test_a_child_that_says_nothing_in_time_is_stopped() -> None:
    with subprocess.Popen(
        ["sleep", "1000"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        with pytest.raises(KakeyaError, match="it printed no error"):
            ChildServer(process).wait_ready(seconds=0.01)
        assert process.poll() is not None
