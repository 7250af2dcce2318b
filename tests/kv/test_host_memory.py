"""Free memory is what the host has, within the limits of this process's control groups."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from inference_engine.kv.memory import host
from inference_engine.kv.memory.host import free_host_bytes, left_in_groups

UNIFIED = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


def left(root: Path, group: str, mounts: str, files: dict[str, str]) -> list[int]:
    """What a process in `group` has left, by `files` in /sys/fs/cgroup; the group itself first."""
    all_files = {"proc/self/cgroup": group, "proc/self/mountinfo": mounts}
    all_files |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in all_files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return list(left_in_groups(root))


def test_a_container_sees_its_own_group_as_the_top(tmp_path: Path) -> None:
    files = {"memory.max": "1000\n", "memory.current": "300\n"}
    assert left(tmp_path, "0::/\n", UNIFIED, files) == [700]


def test_a_group_is_within_the_limits_of_those_above_it(tmp_path: Path) -> None:
    files = {
        "user/one/memory.max": "5000\n",
        "user/one/memory.current": "100\n",
        "user/memory.max": "max\n",
        "user/memory.current": "900\n",
        "memory.max": "1000\n",
        "memory.current": "990\n",
        "beside/memory.max": "10\n",
        "beside/memory.current": "10\n",
    }
    assert left(tmp_path, "0::/user/one\n", UNIFIED, files) == [4900, 10]


@pytest.mark.parametrize("limit", ["", "max\n", "-1\n", "1e9\n", "1000 2000\n", "9" * 5000])
def test_what_is_not_a_number_of_bytes_limits_nothing(tmp_path: Path, limit: str) -> None:
    assert left(tmp_path, "0::/\n", UNIFIED, {"memory.max": limit, "memory.current": "300\n"}) == []


def test_the_least_of_the_host_and_its_groups_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    most = psutil.virtual_memory().total
    monkeypatch.setattr(host, "left_in_groups", lambda _: iter([2 * most, 1000, 4000]))
    assert free_host_bytes() == 1000
    monkeypatch.setattr(host, "left_in_groups", lambda _: iter([2 * most]))
    assert 0 < free_host_bytes() <= most
