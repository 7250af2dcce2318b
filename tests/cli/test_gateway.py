"""`kakeya gateway` as users start it: its ready line, its port, its end, and what it refuses."""

from __future__ import annotations

import signal
import ssl
import sys
from pathlib import Path

import httpx2
import pytest

from inference_engine.cli import main
from kakeya import Client
from tests.further import further, further_test
from tests.processes import LIMIT_SECONDS, PROGRAM, Server, ending, kakeya_serve, started
from tests.server.certificates import Authority

HELLO = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize("sent", [further(signal.SIGTERM), signal.SIGHUP])
def test_it_serves_until_it_is_stopped_and_leaves_the_sessions_to_the_next(
    sent: signal.Signals, server: Server, tiny_folder: Path
) -> None:
    arguments = ("gateway", "--server", server.target, "--tokenizer", str(tiny_folder), "--port=0")
    with ending(started(PROGRAM, *arguments)) as gateway:
        assert gateway.stdout is not None
        url = gateway.stdout.readline().split()[2].rstrip(":")
        assert httpx2.get(f"{url}/healthz").json() == {"status": "ok"}
        body = {**HELLO, "max_tokens": 100, "stream": True}
        with httpx2.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            gateway.send_signal(sent)
            *_, last, _ = (first, *lines)
        assert last == "data: [DONE]"
        assert gateway.wait(timeout=LIMIT_SECONDS) == -sent
    with Client(server.target) as client:
        (left,) = (each for each in client.sessions() if each.label.startswith("gateway/"))
        client.session(left.id).close()


def test_beyond_loopback_it_asks_for_keys(
    server: Server, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["gateway", "--host", "0.0.0.0", "--port", "0", "--tokenizer", str(tiny_folder)]
    assert main.main([*asked, "--server", server.target]) == 1
    assert "answers without a key" in capsys.readouterr().err


def test_without_its_extra_it_says_which_one_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "kakeya_gateway.app", raising=False)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main.main(["gateway"]) == 1
    assert "kakeya-runtime[gateway]" in capsys.readouterr().err


@further_test
def test_beyond_loopback_it_speaks_tls_and_asks_the_server_for_each_key(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("a-key-of-its-owner\n")
    authority = Authority()
    files = authority.settings(tmp_path)
    with kakeya_serve("--model", tiny_folder, "--kv-bytes=64MiB", "--api-key-file", key_file) as guarded:
        arguments = [
            "gateway",
            "--server",
            guarded.target,
            "--tokenizer",
            str(tiny_folder),
            "--host=0.0.0.0",
            "--port=0",
        ]
        assert main.main(arguments) == 1
        assert "--tls-cert-file" in capsys.readouterr().err
        arguments += ["--tls-cert-file", files["tls_cert_file"], "--tls-key-file", files["tls_key_file"]]
        with ending(started(PROGRAM, *arguments)) as gateway:
            assert gateway.stdout is not None
            port = gateway.stdout.readline().split()[2].rstrip(":").rpartition(":")[2]
            trusted = ssl.create_default_context(cadata=authority.pem.decode())
            with httpx2.Client(base_url=f"https://127.0.0.1:{port}", verify=trusted, timeout=60) as http:
                assert http.post("/v1/chat/completions", json=HELLO).status_code == 401
                key = {"authorization": "Bearer a-key-of-its-owner"}
                assert http.post("/v1/chat/completions", json=HELLO, headers=key).status_code == 200
