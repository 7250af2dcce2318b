"""A server that is attacked, in a process of its own, and its victim: an owner with a key, whose calls go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest

from inference_engine.config import EngineConfig, ServerConfig
from inference_engine.server.auth import Key
from kakeya.v1 import runtime_pb2 as pb
from kakeya.v1 import runtime_pb2_grpc
from laboratory.load.scripted_server import scripted_child
from tests.hostile.attacks import ATTACKS, KEY

VICTIM = "victim-" + "v" * 32
CALL_SECONDS = 60.0
MAX_CONNECTIONS = 300
# Far above what any attack takes now (docs/security.md has the figures), and far below what they took before there were
# limits: +809 MiB, +340 MiB.
MEMORY_BYTES = 64 * 2**20


def write_keys(folder: Path) -> str:
    path = folder / "keys"
    path.write_text(f"{Key.of(VICTIM, 'victim').line}\n{Key.of(KEY, 'attacker').line}\n", encoding="utf-8")
    return str(path)


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


class Attacked:
    """A server's address, and what it takes."""

    def __init__(self, target: str, pid: int) -> None:
        self.target = target
        self._process = psutil.Process(pid)

    @property
    def resident_bytes(self) -> int:
        return int(self._process.memory_info().rss)


@pytest.fixture(scope="session")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """One for all attacks: what one leaves behind, the next one finds."""
    folder = tmp_path_factory.mktemp("attacked")
    server = ServerConfig(bind="127.0.0.1:0", api_key_file=write_keys(folder), max_connections=MAX_CONNECTIONS)
    with scripted_child(EngineConfig(kv_bytes=2**26), server, step_seconds=0.001) as child:
        attacked = Attacked(child.wait_ready(), child.pid)
        with beside(attacked):  # what is loaded with the first calls is there
            pass
        yield attacked


class Victim:
    """Asks and generates, one call after another, over a connection of its own. What fails is kept."""

    def __init__(self, target: str) -> None:
        self.calls = 0
        self.failed: list[str] = []
        self._stop = threading.Event()
        self._called = threading.Condition()
        self._channel = grpc.insecure_channel(target, options=(("grpc.use_local_subchannel_pool", 1),))
        self._thread = threading.Thread(target=self._run, name="victim", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(CALL_SECONDS)
        self._channel.close()

    def goes_on(self, calls: int = 3) -> None:
        """Returns once so many more calls have been answered."""
        with self._called:
            wanted = self.calls + calls
            assert self._called.wait_for(lambda: self.calls >= wanted or self.failed, CALL_SECONDS), "the victim waits"
        assert self.failed == []

    def _run(self) -> None:
        stub = runtime_pb2_grpc.RuntimeServiceStub(self._channel)
        metadata, timeout = bearer(VICTIM), CALL_SECONDS
        try:
            session_id = stub.CreateSession(
                pb.CreateSessionRequest(limit_tokens=100), metadata=metadata, timeout=timeout
            ).session_id
            append = pb.AppendTokensRequest(session_id=session_id, token_ids=[1, 2, 3])
            stub.AppendTokens(append, metadata=metadata, timeout=timeout)
            while not self._stop.is_set():
                info = stub.GetSessionInfo(
                    pb.GetSessionInfoRequest(session_id=session_id), metadata=metadata, timeout=timeout
                )
                if info.history_length < 90:
                    request = pb.GenerateRequest(session_id=session_id, max_tokens=1)
                    assert len(list(stub.Generate(request, metadata=metadata, timeout=timeout))) == 2
                with self._called:
                    self.calls += 1
                    self._called.notify_all()
            stub.CloseSession(pb.CloseSessionRequest(session_id=session_id), metadata=metadata, timeout=timeout)
        except grpc.RpcError as error:
            self._fails(f"{error.code().name}: {error.details()}")
        except AssertionError as error:
            self._fails(repr(error))

    def _fails(self, how: str) -> None:
        with self._called:
            self.failed.append(how)
            self._called.notify_all()


@contextmanager
def beside(attacked: Attacked) -> Iterator[Victim]:
    """A victim that has been served; at the end all that it asked for was answered, and still is."""
    victim = Victim(attacked.target)
    victim.start()
    try:
        victim.goes_on()
        yield victim
        victim.goes_on()
    finally:
        victim.stop()
    assert victim.failed == []


@pytest.fixture
def victim(attacked: Attacked) -> Iterator[Victim]:
    with beside(attacked) as victim:
        yield victim


def attack(name: str, seconds: float, attacked: Attacked, *, memory_bytes: int = MEMORY_BYTES) -> None:
    """Run an attack beside a victim, whose calls are answered all the while, and watch the server's memory.

    memory_bytes: by how much it may grow.
    """
    with beside(attacked) as victim:
        before = attacked.resident_bytes
        running = in_background(lambda: ATTACKS[name](attacked.target, seconds))
        most = before
        while running.is_alive():
            victim.goes_on(1)
            most = max(most, attacked.resident_bytes)
            running.join(0.05)
        assert most - before < memory_bytes


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
