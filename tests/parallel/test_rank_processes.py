"""`kakeya serve --tensor-parallel 2`: two processes over gloo, one of which ends or hangs, and the server with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from inference_engine.compose import open_backend
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.server.watchdog import EXIT_STALLED
from kakeya import Client, KakeyaError, RetryPolicy
from tests.further import further, further_test
from tests.laws.variants import generate, text
from tests.processes import Server, kakeya_serve
from tests.tiny import SMALL
from tests.tiny_folder import save_tiny_model

COUNT = 30


def served(folder: Path) -> list[str]:
    return [
        *("--model", str(folder / "model"), f"--cache-dir={folder / 'cache'}", "--kv-bytes=64MiB", "--device=cpu"),
        *("--tensor-parallel=2", "--drafter=ngram", "--threads=1", "--stall-seconds=2", "--stall-exit-seconds=0.5"),
    ]


@further_test
def test_a_session_is_read_from_its_file_by_both_processes_after_they_were_killed(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    kept = (f"--state-dir={tmp_path / 'state'}", "--hibernate=always", "--hibernate-after-seconds=0.1")
    with kakeya_serve(*served(tmp_path), *kept) as server, Client(server.target) as client:
        own = client.create_session()
        own.append(text(50))
        cached = own.generate(COUNT).result().history_length - 1
        for _ in range(400):
            if list((tmp_path / "state").rglob("*.kv")):
                break
            signal.sigtimedwait([], 0.05)
        expected = client.session(own.id).fork()
        expected.append([5])
        tokens = expected.generate(COUNT).result().token_ids
        server.process.kill()
    with kakeya_serve(*served(tmp_path), *kept) as server, Client(server.target) as client:
        again = client.session(own.id)
        again.append([5])
        result = again.generate(COUNT).result()
        assert (result.token_ids, result.cached_tokens) == (tokens, cached)


def other_rank(server: Server) -> int:
    """Its process, by Linux."""
    own = server.process.pid
    children = Path(f"/proc/{own}/task/{own}/children").read_text(encoding="utf-8").split()
    (found,) = [int(child) for child in children if b"ranks.worker" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return found


def is_there(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    "ends", [further(None), signal.SIGKILL, further(signal.SIGSTOP)], ids=["stopped", "a rank dies", "a rank hangs"]
)
def test_two_processes_serve_the_tokens_of_one_and_end_together(ends: signal.Signals | None, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    config = ModelConfig(
        model=str(tmp_path / "model"), cache_dir=str(tmp_path / "cache"), backend="torch", linear="plain", threads=1
    )
    with Engine(open_backend(config), EngineConfig(**SMALL)) as engine:
        session = engine.create_session().session_id
        engine.append(session, text(50))
        expected = tuple(token for token, _ in generate(engine, session, COUNT))
    with kakeya_serve(*served(tmp_path)) as server, Client(server.target, retry=RetryPolicy(attempts=1)) as client:
        assert "2 ranks" in server.ready_line and "2 ranks" in client.server_info().numerics
        other = other_rank(server)
        own = client.create_session()
        own.append(text(50))
        assert own.generate(COUNT).result().token_ids == expected
        if ends is None:
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 0
        else:
            os.kill(other, ends)
            with pytest.raises(KakeyaError):  # whose turn it is depends on when the port closed
                own.generate(COUNT).result()
            assert server.wait() == EXIT_STALLED
    for _ in range(100):
        if not is_there(other):
            return
        signal.sigtimedwait([], 0.05)
    pytest.fail("the other rank is still there")
