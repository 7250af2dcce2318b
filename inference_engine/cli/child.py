"""Runs `kakeya serve` as a child process on a free loopback port, which never outlives its parent.

The child gets every setting as a flag and no KAKEYA_… variables, so it runs with the parent's resolved settings. It
stops when asked to, and also when the pipe to it closes because the parent has ended.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from inference_engine.cli.serve import ready_target
from inference_engine.cli.settings import as_flags, secret_variables
from inference_engine.config import EngineConfig, ModelConfig, ServerConfig, child_environment
from inference_engine.errors import KakeyaError

START_SECONDS = 300.0
STOP_SECONDS = 60.0
_KEPT_LINES = 200


class ChildServer:
    """A server process and its output. Both streams are always read, so that it never blocks on a full pipe."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid = process.pid
        self.is_killed = False
        self._process = process
        self._first_line = ""
        self._has_first_line = threading.Event()
        self._errors: deque[str] = deque(maxlen=_KEPT_LINES)
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_output, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def wait_ready(self, seconds: float = START_SECONDS) -> str:
        """The server's target, once clients can connect. Raises KakeyaError, with its reason, if it does not start."""
        self._has_first_line.wait(seconds)
        target = ready_target(self._first_line)
        if target is None:
            self.stop()
            raise KakeyaError(f"the server did not start: {self.last_words()}")
        return target

    def stop(self, seconds: float = STOP_SECONDS) -> int:
        """SIGTERM, and SIGKILL after `seconds`. Returns the exit status; stopping again returns it again."""
        self._process.terminate()
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        for reader in self._readers:
            reader.join()
        return status

    def kill(self) -> None:
        """SIGKILL: it saves nothing and says nothing more. Returns when it is gone."""
        self.is_killed = True
        self._process.kill()
        self._process.wait()

    def last_words(self) -> str:
        """The last line on standard error, where a command reports its error."""
        line = next((line for line in reversed(self._errors) if line.strip()), "it printed no error")
        return line.strip().removeprefix("kakeya serve: ")

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not self._has_first_line.is_set():
                self._first_line = line
                self._has_first_line.set()
        self._has_first_line.set()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors.extend(self._process.stderr)


def start_child(module: str, *arguments: str, variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """`python -P -m module` with these arguments, of KAKEYA_… variables these alone, with pipes for its three streams.

    -P: without it, files of the current folder are imported instead of libraries.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        env={name: value for name, value in child_environment().items() if not name.startswith("KAKEYA_")}
        | dict(variables or {}),
        # Ctrl-C in the terminal must not reach the child: it may only stop an answer.
        start_new_session=True,
    )


@contextmanager
def child_server(model: ModelConfig, engine: EngineConfig, *, bind: str = "127.0.0.1:0") -> Iterator[ChildServer]:
    """Start a server, which may still be loading (see `wait_ready`). Stops it at the end.

    Raises KakeyaError if its exit status is not 0, and it was not killed.
    """
    server = ServerConfig(bind=bind, drain_seconds=5.0)
    flags = [flag for config in (model, engine, server) for flag in as_flags(config)]
    with start_child(
        "inference_engine.cli.main", "serve", "--until-eof", *flags, variables=secret_variables(engine)
    ) as process:
        child = ChildServer(process)
        try:
            yield child
        finally:
            status = child.stop()
        if status != 0 and not child.is_killed:
            raise KakeyaError(f"the server ended with status {status}: {child.last_words()}")
