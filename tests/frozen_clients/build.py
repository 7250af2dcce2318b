"""Builds clients that know only proto/frozen, each in a folder and a process of its own.

Two copies of the generated Python stubs in one process would be a duplicate-symbol error, and the tests already hold
the current one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inference_engine.config import child_environment

ROOT = Path(__file__).resolve().parent.parent.parent
FROZEN_ROOT = ROOT / "proto" / "frozen"
CONTRACT = "kakeya/v1/runtime.proto"
PYTHON_CLIENT = ROOT / "tests" / "frozen_clients" / "client.py"
TYPESCRIPT_CLIENT = ROOT / "tests" / "frozen_clients" / "typescript"

NODE_AT_LEAST = 20
NODE_NEEDED = (
    f"the TypeScript client needs Node.js {NODE_AT_LEAST} or newer with its npm, {{found}}; "
    "`make node` puts one into the virtual environment"
)
RUN_SECONDS = 60.0
INSTALL_SECONDS = 180.0


@dataclass(frozen=True, kw_only=True)
class FrozenClient:
    """A program that plays a scenario against a server and prints what it saw."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=child_environment)

    def play(self, target: str, scenario: dict[str, Any]) -> dict[str, Any]:
        """What the client saw. Fails with its last words if it ends badly, or not at all."""
        words = _run([*self.command, target, json.dumps(scenario)], RUN_SECONDS, env=self.environment)
        seen: dict[str, Any] = json.loads(words)
        return seen


def build_python_client(folder: Path) -> None:
    """Stubs for the Python client, in `folder`."""
    protoc(f"--python_out={folder}", f"--grpc_python_out={folder}")
    # Packages, or the SDK's package of the same name would be found instead.
    for package in (folder / "kakeya", folder / "kakeya" / "v1"):
        (package / "__init__.py").touch()


def python_client(folder: Path) -> FrozenClient:
    """The Python client whose stubs are in `folder`."""
    return FrozenClient(
        command=[sys.executable, str(PYTHON_CLIENT)], environment=child_environment(PYTHONPATH=str(folder))
    )


def build_typescript_client(folder: Path) -> None:
    """The TypeScript client, installed, generated, type-checked and compiled in `folder`.

    Fails if there is no Node.js to do it with.
    """
    environment = node_environment()
    for path in TYPESCRIPT_CLIENT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    _run(["npm", "ci", "--prefer-offline"], INSTALL_SECONDS, cwd=folder, env=environment)
    generated = folder / "generated"
    generated.mkdir()
    programs = folder / "node_modules" / ".bin"
    protoc(f"--plugin={programs / 'protoc-gen-es'}", f"--es_out=target=ts:{generated}", env=environment)
    _run([str(programs / "tsc")], RUN_SECONDS, cwd=folder, env=environment)


def typescript_client(folder: Path) -> FrozenClient:
    """The TypeScript client that was built in `folder`."""
    return FrozenClient(command=["node", str(folder / "built" / "client.js")], environment=node_environment())


def protoc(*flags: str, env: Mapping[str, str] | None = None) -> None:
    """Compile the frozen contract as `flags` say."""
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={FROZEN_ROOT}", *flags, CONTRACT]
    _run(command, RUN_SECONDS, env=env or child_environment())


def node_environment() -> dict[str, str]:
    """An environment in which `node` and `npm` are found, those of the virtual environment first."""
    environment = child_environment()
    path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    node = shutil.which("node", path=path)
    if node is None or shutil.which("npm", path=path) is None:
        raise AssertionError(NODE_NEEDED.format(found="found none"))
    version = _run([node, "--version"], RUN_SECONDS, env=environment).strip()
    if int(version.lstrip("v").split(".")[0]) < NODE_AT_LEAST:
        raise AssertionError(NODE_NEEDED.format(found=f"found {version} at {node}"))
    return {**environment, "PATH": path}


def _run(
    command: Sequence[str], seconds: float, *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    """What a command prints. Fails with everything it said if it ends badly; ends it after `seconds`."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        timeout=seconds,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout
