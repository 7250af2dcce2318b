"""`kakeya serve` under observation: its log as JSON, its traces at a collector, its dashboard beside its metrics."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path

import pytest
from rich.filesize import decimal

import kakeya as sdk
from inference_engine.cli.main import main
from tests.processes import kakeya, kakeya_serve
from tests.server.test_tracing import Collector

HISTORY = (3, 14, 15, 92)


def test_a_server_in_production_shows_what_it_does(tiny_folder: Path) -> None:
    with (
        Collector() as collector,
        kakeya_serve(
            "--model",
            tiny_folder,
            "--kv-bytes=64MiB",
            "--metrics-bind=127.0.0.1:0",
            f"--trace-endpoint={collector.endpoint}",
        ) as server,
    ):
        with sdk.Client(server.target) as client, client.create_session(eos_token_ids=()) as session:
            session.append(HISTORY)
            session.generate(5).result()
        url = server.ready_line.split("metrics at ")[1].strip().removesuffix("/metrics")
        with urllib.request.urlopen(f"{url}/dashboard/data", timeout=30) as answer:
            assert json.load(answer)["totals"]["tokens"] == 5
        with urllib.request.urlopen(f"{url}/dashboard", timeout=30) as answer:
            assert b"<h1>Kakeya</h1>" in answer.read()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        # What was left was sent before the process ended.
        names = {span.name for span in collector.spans}
    assert {"kakeya.v1.RuntimeService/Generate", "generate", "queue", "prefill", "decode"} <= names


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--trace-endpoint=somewhere", "trace_endpoint must be a URL like http"),
        ("--log-format=xml", "log_format must be"),
    ],
)
def test_settings_that_make_no_sense_stop_the_start(tiny_folder: Path, flag: str, said: str) -> None:
    done = kakeya("serve", "--model", tiny_folder, "--bind=127.0.0.1:0", flag)
    assert done.returncode == 1
    assert said in done.stderr and done.stderr.count("\n") == 1


def test_the_doctor_a_server_and_its_metrics_report_the_same_capacity(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one number: `kv_bytes`, less what does not fill a unit of the pool."""
    with kakeya_serve("--model", tiny_folder, "--kv-bytes=64MiB", "--metrics-bind=127.0.0.1:0") as server:
        url = server.ready_line.split("metrics at ")[1].strip()
        with urllib.request.urlopen(f"{url}?name[]=kakeya_session_kv_capacity_bytes", timeout=30) as answer:
            shown = answer.read().decode().splitlines()
        with sdk.Client(server.target) as client:
            reported = client.server_info().kv_capacity_bytes
        arguments = ("--model", str(tiny_folder), "--kv-bytes=64MiB", "--bind=127.0.0.1:0")
        assert main(("doctor", *arguments, "--metrics-bind=127.0.0.1:0")) == 0
        examined = capsys.readouterr().out
    (line,) = (line for line in shown if not line.startswith("#"))
    assert float(line.split()[1]) == reported
    said = f"{decimal(reported)} for K/V"
    assert said in examined and said in server.ready_line


def test_the_doctor_finds_what_would_keep_a_server_from_being_observed(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", str(tiny_folder), "--kv-bytes=64MiB", "--bind=127.0.0.1:0")
    assert main(("doctor", *arguments, "--metrics-bind=0.0.0.0:0", "--trace-endpoint=somewhere")) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fail")]
    assert [line.split()[1] for line in failed] == ["metrics", "traces"]
    assert "set metrics_token_file" in failed[0] and "trace_endpoint must be a URL like http" in failed[1]
