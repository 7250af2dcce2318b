"""As many cores as this process's affinity has, within the quotas of its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inference_engine.native.cores import quota_cores, usable_cores

UNIFIED = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
OF_CPU = "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
SEPARATE = (
    "30 23 0:27 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    "34 31 0:31 / /sys/fs/cgroup/systemd rw - cgroup systemd rw,name=systemd\n" + OF_CPU
)


class Files:
    """A folder with the files of /proc and /sys that say which control groups a process is in."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, files: dict[str, str]) -> int | None:
        """The quota that these files mean."""
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return quota_cores(self.root)

    def unified(self, group: str, mounts: str = UNIFIED, **quotas: str) -> int | None:
        """Of a process in `group`, by version 2. quotas: `cpu.max` by folder; `__` is a slash, `top` the first."""
        folders = {name.replace("__", "/").replace("top", "."): text for name, text in quotas.items()}
        return self.write(
            {"proc/self/cgroup": f"0::{group}\n", "proc/self/mountinfo": mounts}
            | {f"sys/fs/cgroup/{folder}/cpu.max": text for folder, text in folders.items()}
        )

    def separate(self, group: str, mounts: str = SEPARATE, **quotas: tuple[str, str]) -> int | None:
        """Of a process in `group`, by version 1: quota and period by folder."""
        files = {"proc/self/cgroup": f"9:name=systemd:/b\n4:cpu,cpuacct:{group}\n3:cpuset:/c\n0::/\n"}
        files["proc/self/mountinfo"] = mounts
        for name, (quota, period) in quotas.items():
            folder = f"sys/fs/cgroup/cpu,cpuacct/{name.replace('__', '/').replace('top', '.')}"
            files |= {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": period}
        return self.write(files)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_a_container_sees_its_own_group_as_the_top(files: Files) -> None:
    """So `docker run --cpus=2` looks from within, with version 2."""
    assert files.unified("/", top="200000 100000\n") == 2


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("200000 100000", 2), ("200001 100000", 3), ("150000 100000", 2), ("25000 100000", 1), ("30000 10000", 3)],
)
def test_a_quota_is_rounded_up_to_whole_cores(files: Files, quota: str, expected: int) -> None:
    assert files.unified("/a", a=f"{quota}\n") == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "max",
        "200000",
        "200000 100000 1",
        "0 100000",
        "200000 0",
        "-5 100000",
        "2e5 100000",
        "max max",
        "zwei 1",
    ],
)
def test_a_file_that_is_not_as_the_kernel_writes_it_limits_nothing(files: Files, text: str) -> None:
    assert files.unified("/a", a=text) is None
    assert files.unified("/a", top="300000 100000") == 3


def test_the_smaller_of_affinity_and_quota_is_used(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert usable_cores(files.root) == 64
    files.unified("/", top="200000 100000")
    assert usable_cores(files.root) == 2
    files.unified("/", top="100 100000")
    assert usable_cores(files.root) == 1
    files.unified("/", top="9900000 100000")
    assert usable_cores(files.root) == 64
