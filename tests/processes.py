"""The `kakeya` command as a process of its own: started, waited for with a limit, ended by its id."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from inference_engine.cli.serve import ready_target
from inference_engine.config import child_environment

# Generous: a machine that is busy with something else starts a process slowly. Nothing is expected to take that long.
LIMIT_SECONDS = 120.0
COMMAND = (sys.executable, "-m", "inference_engine.cli.main")


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready."""

    target: str
    ready_line: str
    process: subprocess.Popen[str]

    def wait(self) -> int:
        """The exit status of a server that was asked to stop."""
        return self.process.wait(LIMIT_SECONDS)


def kakeya(
    *arguments: str | Path, typed: str = "", variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with `typed` on its standard input."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=typed,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=_environment(variables),
        timeout=LIMIT_SECONDS,
        check=False,
    )


@contextmanager
def kakeya_serve(
    *arguments: str | Path, variables: Mapping[str, str] | None = None, stderr: IO[str] | None = None
) -> Iterator[Server]:
    """A server on a free loopback port. Whatever happens, its process is gone at the end, and if we die, too."""
    process = subprocess.Popen(
        [*COMMAND, "serve", "--bind=127.0.0.1:0", "--until-eof", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        encoding="utf-8",
        env=_environment(variables),
    )
    with process:
        try:
            assert process.stdout is not None
            # Ends when the process does, so a server that does not start fails here. Pytest's limit holds if it hangs.
            line = process.stdout.readline()
            target = ready_target(line)
            assert target is not None, f"the server did not start (status {process.poll()}): {line!r}"
            yield Server(target, line, process)
        finally:
            process.kill()


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


def _environment(variables: Mapping[str, str] | None) -> dict[str, str]:
    """Ours without KAKEYA_… settings, which are the tester's own, and with `variables`."""
    ours = {name: value for name, value in child_environment().items() if not name.startswith("KAKEYA_")}
    return {**ours, "COLUMNS": "100", "NO_COLOR": "1", **(variables or {})}
