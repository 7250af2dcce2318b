"""`kakeya serve` as a process: what it refuses, how it ends, what it shows to Prometheus."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import socket
import struct
import time
from pathlib import Path
from tempfile import TemporaryFile
from typing import NoReturn

import pytest

import kakeya as sdk
from inference_engine.cli.main import main
from inference_engine.server.watchdog import EXIT_SPOILED
from tests.further import further, further_test
from tests.models.hub_entry import write_entry
from tests.processes import Server, kakeya, kakeya_serve

HISTORY = (3, 14, 15, 92, 65, 35, 89, 79)
PAUSE_SECONDS = 0.05  # a server that is looked at again and again has work enough for one core
ENDLESS = sdk.SinkWindow(window=32)


def test_a_server_says_in_one_line_what_it_serves(server: Server) -> None:
    said = server.ready_line
    numerics = "(native, exact, float16 K/V, float32 weights)"
    assert f"ready at {server.target}: tiny in float32 on cpu {numerics}, strategy full, " in said
    assert "MB for K/V, metrics at http://127.0.0.1:" in said


def test_a_client_that_disconnects_abruptly_leaves_nothing_in_the_log(
    tiny_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
    goodbye = b"\0\0\x08\x07" + bytes(9) + struct.pack(">I", 8)  # GOAWAY, CANCEL: as Node.js destroys a connection
    with kakeya_serve("--model", tiny_folder, "--kv-bytes=64MiB") as server:
        host, port = server.target.split(":")
        with socket.create_connection((host, int(port)), timeout=60) as client:
            client.sendall(hello + goodbye)
            client.shutdown(socket.SHUT_WR)
            while client.recv(4096):
                pass
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    assert "goaway" not in capfd.readouterr().err.lower()


def test_a_port_in_use_is_one_line_and_status_1(server: Server, tiny_folder: Path) -> None:
    done = kakeya("serve", "--model", tiny_folder, "--bind", server.target)
    assert done.returncode == 1
    assert done.stderr.startswith(f"kakeya serve: bind: {server.target} is already in use")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_an_address_that_cannot_be_served_is_refused_before_any_weights_are_read(
    server: Server, tiny_folder: Path, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    (folder / "model.safetensors").write_bytes(b"not weights at all")
    for flag, said in (
        ("--bind=0.0.0.0:0", "bind 0.0.0.0:0 can be reached from other machines: set both api_key_file and tls_"),
        ("--bind=", "bind must be host:port with a port from 0 to 65535, got ''"),
        ("--metrics-bind=nowhere", "metrics_bind must be host:port with a port from 0 to 65535, got 'nowhere'"),
        ("--metrics-bind=0.0.0.0:0", "metrics_bind 0.0.0.0:0 can be reached from other machines"),
        (f"--metrics-bind={server.target}", f"metrics_bind: {server.target} is already in use"),
    ):
        with subtests.test(flag):
            done = kakeya("serve", "--model", folder, "--kv-bytes=64MiB", "--bind=127.0.0.1:0", flag)
            assert done.returncode == 1
            assert done.stderr.startswith(f"kakeya serve: {said}")
            assert done.stderr.count("\n") == 1
            assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "no-such-folder"), "no-such-folder: neither a known model (smollm2-135m"),
        (("--model", "smollm2-135m", "--cache-dir", "{empty}"), "kakeya models fetch smollm2-135m"),
        (("--model", "org/name@v2", "--cache-dir", "{empty}"), "kakeya models fetch org/name@v2"),
        (("--model", "{tampered}"), "adapter_config.json"),
        (("--model", "{unserved}", "--http-bind=127.0.0.1:0", "--latent={empty}"), "short_factor of 1 numbers"),
        (("--model", "{tiny}", "--drafter=ngrams"), "drafter must be auto, none, ngram, trained or a folder that is"),
        (("--model", "{tiny}", "--latent=my/own"), "latent must be auto, none or a folder that is there, got 'my/own'"),
        (("--model", "{tiny}", "--device", "cuda:99"), "device 'cuda:99' cannot be used here"),
        (
            ("--model", "{tiny}", "--kernels", "triton", "--device", "cpu"),
            "kernels=triton needs a GPU, and device is cpu",
        ),
        (("--model", "{tiny}", "--graphs", "on", "--device", "cpu"), "graphs=on needs a GPU"),
        (("--model", "{tiny}", "--strategy", "sink_window:window=4096"), "the model was trained for 512"),
    ],
)
def test_a_model_that_cannot_be_served_is_one_line_and_status_1(
    arguments: tuple[str, ...],
    said: str,
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)  # as it is where CI is set
    tampered = Path(shutil.copytree(tiny_folder, tmp_path / "tampered"))
    (tampered / "adapter_config.json").write_text("{}")
    unserved = Path(shutil.copytree(tiny_folder, tmp_path / "unserved"))
    config = json.loads((unserved / "config.json").read_text())
    rotary = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [1.0]}
    (unserved / "config.json").write_text(json.dumps({**config, "rope_parameters": rotary}))
    (unserved / "model.safetensors").write_bytes(b"not weights at all")
    values = {"tiny": tiny_folder, "empty": tmp_path / "empty", "tampered": tampered, "unserved": unserved}
    serve = ("serve", "--kv-bytes=64MiB", "--bind=127.0.0.1:0")
    assert main((*serve, *(argument.format(**values) for argument in arguments))) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("kakeya serve: ")
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@further_test
def test_a_model_in_the_hubs_cache_is_served_by_its_name(
    tiny_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    published = Path(shutil.copytree(tiny_folder, tmp_path / "published"))
    (published / "pytorch_model.bin").write_bytes(b"\x80\x04")
    write_entry(tmp_path / "hub", "some-org/tiny", published)
    variables = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    with (
        kakeya_serve("--model", "some-org/tiny", "--kv-bytes=64MiB", variables=variables) as server,
        sdk.Client(server.target) as client,
        client.create_session() as session,
    ):
        assert "some-org/tiny in float32" in server.ready_line
        assert session.model_id == "some-org/tiny"
        session.append(HISTORY)
        assert len(session.generate(5).result().token_ids) == 5
    assert "some-org/tiny: code and other formats are ignored: pytorch_model.bin" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        further([signal.SIGTERM], 0),
        # A terminal that is closed may send it twice, and a session of systemd behind SIGTERM.
        further([signal.SIGHUP, signal.SIGHUP], 0),
        ([signal.SIGTERM, signal.SIGHUP], 0),
        ([signal.SIGHUP, signal.SIGTERM], -signal.SIGTERM),
        further([signal.SIGINT, signal.SIGINT], -signal.SIGINT),
    ],
    ids=str,
)
def test_a_signal_lets_a_running_generate_end_and_refuses_new_ones_until_another_signal_ends_it(
    sent: list[signal.Signals], status: int, tiny_folder: Path
) -> None:
    with (
        kakeya_serve("--model", tiny_folder, "--kv-bytes=64MiB") as server,
        sdk.Client(server.target, retry=sdk.RetryPolicy(attempts=1)) as client,
    ):
        running, other = client.create_session(ENDLESS, eos_token_ids=()), client.create_session()
        running.append(HISTORY)
        other.append(HISTORY)
        stream = running.generate(1500)
        tokens = iter(stream)
        next(tokens)
        server.process.send_signal(sent[0])
        with pytest.raises(sdk.Draining):
            generate_until_refused(other)
        for number in sent[1:]:
            server.process.send_signal(number)
        if status:
            assert server.wait() == status
            return
        assert len(list(tokens)) == 1499
        assert stream.result().stop_reason is sdk.StopReason.MAX_TOKENS
        assert server.wait() == 0


def generate_until_refused(session: sdk.Session) -> NoReturn:
    while True:
        session.generate(1).result()
        time.sleep(PAUSE_SECONDS)


def test_a_server_that_was_tied_to_its_parent_ends_when_the_parent_is_gone(tiny_folder: Path) -> None:
    """Its log names a default limit that no session can have."""
    with TemporaryFile("w+", encoding="utf-8") as errors:
        asked = ("--model", tiny_folder, "--kv-bytes=64MiB", "--default-limit-tokens=100000")
        with kakeya_serve(*asked, stderr=errors) as server, sdk.Client(server.target) as client:
            given = client.server_info().default_limit_tokens
            assert server.process.stdin is not None
            server.process.stdin.close()
            assert server.wait() == 0
        errors.seek(0)
        said = errors.read()
    assert given and f"default_limit_tokens is 100000; with full the model allows {given}, " in said


@pytest.mark.hostile
@pytest.mark.parametrize("how", ["overwritten", further("cut")])
def test_a_server_whose_weights_are_written_into_ends_and_says_so(how: str, tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "tiny"))
    weights, log = folder / "model.safetensors", tmp_path / "log"
    with (
        log.open("w", encoding="utf-8") as stderr,
        kakeya_serve("--model", folder, "--kv-bytes=64MiB", "--backend=torch", stderr=stderr) as server,
        sdk.Client(server.target, retry=sdk.RetryPolicy(attempts=1)) as client,
    ):
        session = client.create_session()
        session.append([1, 2, 3])
        if how == "cut":
            with weights.open("r+b") as file:
                file.truncate(4096)
        else:
            size = weights.stat().st_size
            with weights.open("r+b") as file:
                file.seek(size // 2)
                file.write(b"\xff" * 64)
        # The page may be missed (SIGBUS) before the file is looked at.
        with pytest.raises(sdk.KakeyaError):
            generate_until_refused(session)
        status = server.wait()
    said = log.read_text(encoding="utf-8")
    noticed = status == EXIT_SPOILED and "model.safetensors was written to" in said and "intact files" in said
    assert noticed or (how == "cut" and status == -signal.SIGBUS and "Bus error" in said), (status, said)
