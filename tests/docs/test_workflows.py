"""Workflows run elsewhere: here, each is one that can be read, and what it runs and watches is in this folder."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from scripts.check_links import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())


def read(text: str) -> dict[str, Any]:
    """YAML takes the key `on` for a truth value."""
    return {"on" if key is True else key: value for key, value in yaml.safe_load(text).items()}


def steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def problems(text: str) -> list[str]:
    workflow = read(text)
    found = [f"no {key}" for key in ("name", "on", "permissions", "jobs") if not workflow.get(key)]
    for job in workflow.get("jobs", {}).values():
        found += [f"a job without {key}" for key in ("runs-on", "steps") if not job.get(key)]
    for event in (workflow.get("on") or {}).values():
        found += [
            f"nothing at {path}" for path in (event or {}).get("paths", ()) if not list(ROOT.glob(path.rstrip("*")))
        ]
    for step in steps(workflow):
        if (action := step.get("uses")) and not re.fullmatch(r"[\w-]+/[\w-]+@v\d+", action):
            found.append(f"{action} has no version")
        if not action and "run" not in step:
            found.append("a step that does nothing")
        found += [problem for line in step.get("run", "").splitlines() if (problem := problem_of(line))]
    return found


def problem_of(command: str) -> str | None:
    """What is wrong with a line of shell that starts something of this folder, or None."""
    program, *arguments = shlex.split(command)
    if program == "make":
        unknown = {word for word in arguments if "=" not in word} - TARGETS
        return f"the Makefile has no {', '.join(sorted(unknown))}" if unknown else None
    script = next((word for word in arguments if not word.startswith("-")), "")
    if program in ("bash", "python") and "-m" not in arguments and not (ROOT / script).is_file():
        return f"there is no {script}"
    return None


def test_every_workflow_can_be_read_and_runs_what_is_there(subtests: pytest.Subtests) -> None:
    for path in WORKFLOWS:
        with subtests.test(path.name):
            assert path.suffix == ".yml"
            assert problems(path.read_text(encoding="utf-8")) == []


def test_actions_have_one_version_each() -> None:
    used = {
        step["uses"] for path in WORKFLOWS for step in steps(read(path.read_text(encoding="utf-8"))) if "uses" in step
    }
    assert len(used) == len({action.split("@")[0] for action in used})


def test_continuous_integration_runs_what_the_documents_say_it_runs() -> None:
    """On every change to the main branch and to one that asks to become part of it."""
    workflow = read((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
    assert {"push", "pull_request"} <= workflow["on"].keys()
    assert "bash .ci/run" in [step.get("run") for step in steps(workflow)]
    run = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert {"test", "test-further"} <= set(re.findall(r"make --no-print-directory ([a-z-]+)", run)) <= TARGETS


def test_a_workflow_with_a_mistake_is_found(subtests: pytest.Subtests) -> None:
    text = (ROOT / ".github/workflows/apple_silicon.yml").read_text(encoding="utf-8")
    for right, wrong in [
        ("make test-mac", "make test-apple"),
        ('make test-mac ARGS="--seconds 60"', "bash .ci/walk"),
        ('make test-mac ARGS="--seconds 60"', "python scripts/no_such.py"),
        ("actions/checkout@v4", "actions/checkout"),
        ("inference_engine/backends/mlx/**", "inference_engine/backends/apple/**"),
        ("scripts/mlx/**", "scripts/apple/suite.py"),
        ("    runs-on: macos-15\n", ""),
    ]:
        with subtests.test(wrong):
            assert right in text
            assert problems(text) == []
            assert problems(text.replace(right, wrong, 1))
