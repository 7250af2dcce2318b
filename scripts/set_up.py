"""Makes the virtual environment and what runs from it, side by side, with a line of progress every few seconds.

    python3 scripts/set_up.py .venv [--fetch MODEL]    packages of requirements.txt, Kakeya, its SDK, the native library
    python3 scripts/set_up.py .venv --development      then those of requirements-dev.txt

`make` calls it with the interpreter that the environment is to have: nothing is imported that this does not bring. What
each command says is in the environment's folder, in setup-*.log; the end of it is shown if the command fails.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "inference_engine" / "native" / "build.py"
_LINES_OF_A_FAILURE = 15
# A seventh of the environment: programs and data by which torch's wheel is tested, and its builds of protoc.
_UNUSED = "torch/test torch/bin/test_* torch/bin/*Test torch/bin/protoc*"
# Of what commands say, lines that are progress, and as what they are shown.
_SHOWN: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\s*Downloading ([^- ]+-[^- ]+)-\S+ \(([\d.]+ [MG]B)\)"), lambda found: f"{found[1]}, {found[2]}"),
    (re.compile(r"Installing collected packages: (.+)"), lambda found: f"unpacking {found[1].count(',') + 1}"),
    (re.compile(r"native library: (.+)"), lambda found: found[1]),
    (re.compile(r"(\S+ \(.+\) is ready) in "), lambda found: found[1]),
)


@dataclass(eq=False)
class Task:
    """Commands that run one after another, once the tasks `after` have succeeded."""

    name: str
    commands: Sequence[Sequence[str | Path]]
    log: Path
    after: Sequence[Task] = ()
    done: threading.Event = field(default_factory=threading.Event)
    is_running: bool = False
    process: subprocess.Popen[str] | None = None
    status: int | None = None


class Run:
    """All tasks of a run: starts them, shows how they get on, and stops the others when one fails."""

    def __init__(self, tasks: Sequence[Task], environment: Path, *, silence_seconds: float = 3.0) -> None:
        """silence_seconds: after as long without a line of progress, what is running is shown."""
        self._tasks = tasks
        self._silence_seconds = silence_seconds
        self._environment = environment
        self._began = self._shown = time.monotonic()
        self._said: queue.Queue[tuple[Task, str]] = queue.Queue()
        self._is_stopping = threading.Event()

    def finish(self) -> int:
        """The exit status: 0 if every task succeeded, else that of the first one that failed."""
        threads = [threading.Thread(target=self._perform, args=(task,), daemon=True) for task in self._tasks]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads) or not self._said.empty():
                self._show()
                if failed := next((task for task in self._tasks if task.status), None):
                    self._stop()
                    self._show_failure(failed)
                    return 1
        except KeyboardInterrupt:
            self._stop()
            return 128 + signal.SIGINT
        self._say("done")
        return 0

    def _perform(self, task: Task) -> None:
        for other in task.after:
            other.done.wait()
        if not self._is_stopping.is_set() and not any(other.status for other in task.after):
            task.is_running = True
            with task.log.open("w", encoding="utf-8") as log:
                statuses = (self._command(task, command, log.write) for command in task.commands)
                task.status = next((status for status in statuses if status), 0)
            task.is_running = False
        task.done.set()

    def _command(self, task: Task, command: Sequence[str | Path], note: Callable[[str], object]) -> int:
        try:
            # A group of its own, so that what it has started is stopped with it.
            task.process = subprocess.Popen(
                list(map(str, command)), cwd=ROOT, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            note(f"{command[0]}: {error}\n")
            return 127
        if self._is_stopping.is_set():
            self._stop()
        with task.process as process:
            assert process.stdout is not None
            for line in process.stdout:
                note(line)
                self._said.put((task, line))
        return process.returncode

    def _show(self) -> None:
        """A line that is progress, or after a while without one what is running."""
        try:
            task, line = self._said.get(timeout=0.2)
        except queue.Empty:
            pass
        else:
            for pattern, shown in _SHOWN:
                if found := pattern.match(line):
                    self._say(f"{task.name}: {shown(found)}")
        if time.monotonic() - self._shown >= self._silence_seconds:
            running = ", ".join(task.name for task in self._tasks if task.is_running)
            self._say(f"{running} … {self._size() / 1e6:,.0f} MB in {self._environment.name}")

    def _say(self, text: str) -> None:
        self._shown = time.monotonic()
        print(f"setup: {self._shown - self._began:4.0f} s  {text}", flush=True)

    def _size(self) -> int:
        total = 0
        for parent, _, names in os.walk(self._environment):
            for name in names:
                with suppress(OSError):  # pip moves files meanwhile
                    total += Path(parent, name).lstat().st_size
        return total

    def _show_failure(self, failed: Task) -> None:
        said = failed.log.read_text(encoding="utf-8", errors="replace").splitlines()
        print(f"setup: {failed.name} failed (exit status {failed.status}); {failed.log} ends:", file=sys.stderr)
        print("\n".join(said[-_LINES_OF_A_FAILURE:]), file=sys.stderr, flush=True)

    def _stop(self) -> None:
        self._is_stopping.set()
        for task in self._tasks:
            if task.process is not None and task.process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(task.process.pid, signal.SIGTERM)


def tasks(given: argparse.Namespace) -> list[Task]:
    """What there is to do, in an order in which each comes after what it needs."""
    environment: Path = given.environment
    python = environment / "bin" / "python"
    # Bytecode is made when a module is imported first: for all of them it takes longer than everything else here.
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--no-input")
    install = (*pip, "install", "--progress-bar", "off", "--no-compile")

    def task(name: str, *commands: Sequence[str | Path], after: Sequence[Task] = ()) -> Task:
        return Task(name, commands, environment / f"setup-{name.replace(' ', '-')}.log", after)

    if given.development:
        return [task("development packages", (*install, "-r", "requirements-dev.txt"))]
    compiling = ("--quiet", *["--every-level"] * given.every_level)
    if given.compiler:
        compiling += ("--compiler", given.compiler)
    is_there = (environment / "bin" / "pip").exists()
    make = () if is_there else ((sys.executable, "-m", "venv", environment),)
    # With a compiler that is none: the library is compiled beside this.
    editable = ("env", "CXX=none", *install, "--no-deps", "--no-build-isolation", "-e", "sdks/python", "-e", ".")
    leave_out = ("sh", "-c", f'cd "$1"/lib/python*/site-packages && rm -rf {_UNUSED}', "sh", environment)
    packages = task("packages", *make, (*install, "-r", "requirements.txt"), leave_out, editable)
    library = task("native library", (sys.executable, "-u", BUILD, *compiling))
    # Does nothing where that has found a compiler; else one is fetched as a package, now that there is pip.
    compiler = task("compiler", (python, "-u", BUILD, "--fetch", *compiling), after=(packages, library))
    found = [packages, library, compiler]
    if given.fetch:
        fetch = (python, "-m", "inference_engine.cli.main", "models", "fetch", given.fetch)
        found.append(task("model", fetch, after=(packages,)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the virtual environment and what runs from it.")
    parser.add_argument("environment", type=Path, help="its folder")
    parser.add_argument("--development", action="store_true", help="instead: what checks and tests need besides")
    parser.add_argument("--every-level", action="store_true", help="compile what other processors run, too")
    parser.add_argument("--compiler", default="", metavar="COMMAND", help="instead of the first one that works")
    parser.add_argument("--fetch", default="", metavar="MODEL", help="a model known by name, if it is not there")
    given = parser.parse_args()
    given.environment = given.environment.absolute()
    given.environment.mkdir(exist_ok=True)
    print(f"setup: {'development packages' if given.development else 'packages and the native library'}", flush=True)
    return Run(tasks(given), given.environment).finish()


if __name__ == "__main__":
    sys.exit(main())
