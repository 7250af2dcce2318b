"""`kakeya gateway` as users start it: its ready line, its port, its end, and what it refuses."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx2
import pytest

from inference_engine.cli import main
from kakeya import Client
from tests.processes import LIMIT_SECONDS, PROGRAM, Server, ending, kakeya_serve, started

HELLO = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}


def test_it_serves_until_it_is_stopped_and_leaves_the_sessions_to_the_next(server: Server, tiny_folder: Path) -> None:
    arguments = ("gateway", "--server", server.target, "--tokenizer", str(tiny_folder), "--port=0")
    with ending(started(PROGRAM, *arguments)) as gateway:
        assert gateway.stdout is not None
        url = gateway.stdout.readline().split()[2].rstrip(":")
        assert httpx2.get(f"{url}/healthz").json() == {"status": "ok"}
        assert httpx2.post(f"{url}/v1/chat/completions", json=HELLO, timeout=60).status_code == 200
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(timeout=LIMIT_SECONDS) == -signal.SIGTERM
    with Client(server.target) as client:
        (left,) = (each for each in client.sessions() if each.label.startswith("gateway/"))
        client.session(left.id).close()


def test_beyond_loopback_it_asks_for_keys_and_a_certificate(
    server: Server, tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("a-key-of-its-owner\n")
    asked = ["gateway", "--host", "0.0.0.0", "--port", "0", "--tokenizer", str(tiny_folder)]
    assert main.main([*asked, "--server", server.target]) == 1
    assert "answers without a key" in capsys.readouterr().err
    with kakeya_serve("--model", tiny_folder, "--kv-bytes=64MiB", "--api-key-file", key_file) as guarded:
        assert main.main([*asked, "--server", guarded.target]) == 1
        assert "--tls-cert-file" in capsys.readouterr().err
