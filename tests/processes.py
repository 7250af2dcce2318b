"""The `kakeya` command as a process of its own: started, waited for with a limit, ended by its id.

Where processes can be forked safely, it is forked from one that has imported everything (`tests/warm.py`).
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import IO, Protocol
from unittest.mock import patch

from inference_engine.cli import child
from inference_engine.cli.serve import ready_target
from inference_engine.config import child_environment

# Generous: a machine that is busy with something else starts a process slowly. Nothing is expected to take that long.
LIMIT_SECONDS = 120.0
PROGRAM = "inference_engine.cli.main"
ROOT = Path(__file__).resolve().parents[1]
CAN_FORK = sys.platform == "linux"  # elsewhere libraries of the system mind


class Process(Protocol):
    """What tests do with a process, forked or not."""

    pid: int
    stdin: IO[str] | None
    stdout: IO[str] | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...


def started(
    program: str, *arguments: str, stderr: IO[str] | None = None, variables: Mapping[str, str] | None = None
) -> Process:
    """A module, or a file that ends in .py, as a process with pipes to its standard input and from its output.

    variables: of its environment, which no library reads when it is imported.
    """
    environment = environment_of_ours(variables)
    if CAN_FORK:
        return Forked(program, *arguments, stderr=stderr, environment=environment if variables else None)
    return executed(program, *arguments, environment=environment, stderr=stderr)


def executed(program: str, *arguments: str, environment: Mapping[str, str], stderr: IO[str] | None = None) -> Process:
    """As `started`, and it imports everything itself."""
    return subprocess.Popen(
        [sys.executable, *([program] if program.endswith(".py") else ["-m", program]), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        encoding="utf-8",
        env=dict(environment),
    )


class Forked:
    """A process forked from a warm one, in the environment in which the first was, or in `environment`.

    What the warm one has imported keeps what it read from its own.
    """

    def __init__(
        self,
        program: str,
        *arguments: str,
        stderr: IO[str] | int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        (given, to_it), (from_it, its) = os.pipe(), os.pipe()
        self.stderr: IO[str] | None = None
        errors = 2
        if stderr == subprocess.PIPE:
            errors_from_it, errors = os.pipe()
            self.stderr = os.fdopen(errors_from_it, encoding="utf-8", errors="replace")
        elif stderr is not None:
            errors = stderr if isinstance(stderr, int) else stderr.fileno()
        request = {"program": program, "arguments": arguments, "environment": environment}
        self.pid = int(_asked(request, (given, its, errors)))
        self._ended = os.pidfd_open(self.pid)
        self._status: int | None = None
        self._reaping = Lock()
        for descriptor in (given, its, *([errors] if self.stderr else [])):
            os.close(descriptor)
        self.stdin: IO[str] | None = os.fdopen(to_it, "w", encoding="utf-8")
        self.stdout: IO[str] | None = os.fdopen(from_it, encoding="utf-8")

    def poll(self) -> int | None:
        return self._status_within(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._status_within(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return status

    @property
    def returncode(self) -> int | None:
        return self._status

    def communicate(self) -> None:
        """As a test's process is left: its streams are closed, and it has ended."""
        self.__exit__()

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._ended, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()

    def _status_within(self, seconds: float | None) -> int | None:
        if self._status is None and select.select([self._ended], [], [], seconds)[0]:
            with self._reaping:
                if self._status is None:
                    self._status = int(_asked({"pid": self.pid}))
        return self._status

    def __del__(self) -> None:
        os.close(self._ended)


_asking = Lock()


def _asked(request: Mapping[str, object], streams: tuple[int, ...] = ()) -> bytes:
    with _asking:
        socket.send_fds(_warm(), [json.dumps(request).encode()], streams)
        answer = _warm().recv(64)
    assert answer, "the warm process has ended"
    return answer


@cache
def _warm() -> socket.socket:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.warm", str(its.fileno())],
        stdin=subprocess.DEVNULL,
        pass_fds=[its.fileno()],
        env=environment_of_ours(),
        cwd=ROOT,
    )
    its.close()

    def end() -> None:
        ours.close()
        process.wait(LIMIT_SECONDS)

    atexit.register(end)
    return ours


@contextmanager
def warm_children() -> Iterator[None]:
    """Meanwhile a command's own server is forked, too, where that can be done."""

    def start(module: str, *arguments: str, variables: Mapping[str, str] | None = None) -> Forked:
        environment = environment_of_ours(variables) if variables else None
        return Forked(module, *arguments, stderr=subprocess.PIPE, environment=environment)

    with patch.object(child, "start_child", start) if CAN_FORK else nullcontext():
        yield


@contextmanager
def ending(process: Process) -> Iterator[Process]:
    """Whatever happens, it is gone at the end."""
    try:
        yield process
    finally:
        process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        process.wait()


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready."""

    target: str
    ready_line: str
    process: Process

    def wait(self) -> int:
        """The exit status of a server that was asked to stop."""
        return self.process.wait(LIMIT_SECONDS)


def kakeya(*arguments: str | Path, typed: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with `typed` on its standard input."""
    return run(PROGRAM, *map(str, arguments), typed=typed)


def run(
    program: str, *arguments: str, typed: str = "", variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; see `started`."""
    with (
        TemporaryFile("w+", encoding="utf-8") as errors,
        ending(started(program, *arguments, stderr=errors, variables=variables)) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(typed)
        process.stdin.close()
        output = process.stdout.read()
        status = process.wait(LIMIT_SECONDS)
        errors.seek(0)
        return subprocess.CompletedProcess((program, *arguments), status, output, errors.read())


@contextmanager
def kakeya_serve(
    *arguments: str | Path, variables: Mapping[str, str] | None = None, stderr: IO[str] | None = None
) -> Iterator[Server]:
    """A server on a free loopback port. Whatever happens, its process is gone at the end, and if we die, too.

    With `variables`, which libraries may read when they are imported, it is not forked.
    """
    words = (PROGRAM, "serve", "--bind=127.0.0.1:0", "--until-eof", *map(str, arguments))
    begun = (
        started(*words, stderr=stderr)
        if variables is None
        else executed(*words, environment=environment_of_ours(variables), stderr=stderr)
    )
    with ending(begun) as process:
        assert process.stdout is not None
        # Ends when the process does, so a server that does not start fails here. Pytest's limit holds if it hangs.
        line = process.stdout.readline()
        target = ready_target(line)
        assert target is not None, f"the server did not start (status {process.poll()}): {line!r}"
        yield Server(target, line, process)


class Restarted:
    """A server that a test kills and starts again, always at one address. `stack` ends it."""

    def __init__(self, stack: ExitStack, *arguments: str | Path) -> None:
        self._stack = stack
        self._arguments = arguments
        self._bind = "127.0.0.1:0"
        self.start()

    @property
    def target(self) -> str:
        return self._server.target

    def start(self) -> None:
        """Returns when it is ready."""
        self._server = self._stack.enter_context(kakeya_serve(*self._arguments, f"--bind={self._bind}"))
        self._bind = self._server.target

    def kill(self) -> None:
        """By SIGKILL. Returns when it is gone."""
        self._server.process.kill()
        self._server.wait()


def environment_of_ours(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without KAKEYA_… settings, which are the tester's own, and with `variables`."""
    ours = {name: value for name, value in child_environment().items() if not name.startswith("KAKEYA_")}
    return {**ours, "COLUMNS": "100", "NO_COLOR": "1", **(variables or {})}
