"""What holds for every test: idle threads sleep, no model hub is asked, property tests repeat themselves."""

from __future__ import annotations

import gc
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from inference_engine.config import configure_threads_environment, forbid_model_hub
from tests.further import BENCHMARKS, HTTP, LABORATORY, PUBLISHED, UNREAD, further, make_further

if TYPE_CHECKING:
    from tests.kept import Database, Place
    from tests.session.postgres_server import PostgresServer

BEGUN = time.monotonic()
# Where all tests are further ones. Without an expression of the caller's own, UNREAD, they are not even read.
FURTHER_PLACES = (*LABORATORY, *BENCHMARKS, *HTTP, *PUBLISHED)

# Conftest is read before any test module, so this comes before the first import of torch and transformers.
configure_threads_environment()
forbid_model_hub()

# Collecting makes a million objects that stay: no need to look for garbage among them, now or later.
gc.disable()

# A slow machine is not a failure: no deadline.
settings.register_profile("reproducible", derandomize=True, deadline=None)
settings.load_profile("reproducible")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than processors: many tests wait for a process or a clock."""
    return (os.cpu_count() or 1) + 1


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.option.markexpr != UNREAD or not collection_path.is_relative_to(config.rootpath):
        return None
    named = any(argument.startswith(FURTHER_PLACES) for argument in config.args)
    return True if not named and str(collection_path.relative_to(config.rootpath)) in FURTHER_PLACES else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {config.rootpath / place for place in FURTHER_PLACES}
    for item in items:
        is_long = item.get_closest_marker("long") is not None
        is_further = item.get_closest_marker("further") is not None
        if not is_long and (is_further or not places.isdisjoint((item.path, *item.path.parents))):
            make_further(item)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """Say how a worker ended that pytest did not ask to end. Its own stacks are on standard error."""
    reporter = node.config.pluginmanager.getplugin("terminalreporter")
    if error and reporter is not None:
        reporter.write_line(f"\n{node.gateway.id} ended {_ending(node.gateway._io.wait())}")


def _ending(status: int | None) -> str:
    if status is None or status >= 0:
        return f"with status {status}"
    return f"by signal {-status} ({signal.strsignal(-status)})"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> Iterator[None]:
    """The last line but pytest's own: what it took, with the checks before, which `make test` hands over."""
    yield
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    processor = sum(each.ru_utime + each.ru_stime for each in used)
    of_checks = [_seconds(word) for word in config.getoption("--checks-took").split()]
    wall, *parts = of_checks or [0.0]
    took = (time.monotonic() - BEGUN + wall, processor + sum(parts))
    said = " and ".join(f"{seconds // 60:.0f} min {seconds % 60:.0f} s" for seconds in took)
    terminalreporter.write_line(f"wall and processor time{' with the checks' * bool(of_checks)}: {said}")


def _seconds(word: str) -> float:
    """As bash writes it: 1m2.345s, or a number."""
    minutes, _, seconds = word.rstrip("s").rpartition("m")
    return 60 * float(minutes or 0) + float(seconds)


@pytest.fixture
def warm_servers() -> Iterator[None]:
    """For commands that start a server of their own: it is forked, too, where that can be done."""
    from tests.processes import warm_children

    with warm_children():
        yield


@pytest.fixture
def admitting_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests whose caches are empty and whose models have few configurations."""
    from inference_engine.backends import twin
    from tests.admissions import admitted_once

    monkeypatch.setattr(twin, "admit_config", admitted_once)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server of PostgreSQL, the same for all tests of this process."""
    from tests.session.postgres_server import postgres_server

    with postgres_server() as server:
        yield server


@pytest.fixture
def database(postgres: PostgresServer) -> Database:
    """An empty one."""
    from tests.kept import Database

    return Database(postgres)


@pytest.fixture(params=["sqlite", further("postgres")])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """What sessions are kept in."""
    if request.param == "sqlite":
        return tmp_path / "state"
    found: Database = request.getfixturevalue("database")
    return found


@pytest.fixture
def trying_no_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of many families, in whose models no strategy but `full` is used."""
    from inference_engine.backends import twin
    from tests.admissions import admitted_untried

    monkeypatch.setattr(twin, "admit_config", admitted_untried)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--strategies", nargs="+", help="of tests/laws, the cases of these strategies alone")
    parser.addoption(
        "--executor",
        choices=("mlx", "hybrid", "hybrid-native", "ranks"),
        help="all of tests/laws on it, and on nothing else",
    )
    parser.addoption("--checks-took", default="", help="wall time, and processor times as bash writes them")
