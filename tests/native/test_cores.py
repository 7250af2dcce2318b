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


def test_the_least_quota_of_a_group_and_those_above_it_holds(files: Files) -> None:
    group = "/kubepods/pod/one"
    assert files.unified(group, kubepods="max 100000", kubepods__pod="300000 100000") == 3
    assert files.unified(group, kubepods__pod__one="700000 100000") == 3
    assert files.unified(group, kubepods__pod__one="50000 50000") == 1
    assert files.unified(group, top="40000 100000", kubepods__pod__one="max 100000") == 1


def test_groups_beside_and_below_it_say_nothing(files: Files) -> None:
    assert files.unified("/a", b="100000 100000", a__c="100000 100000") is None


def test_what_limits_nothing_is_no_quota(files: Files) -> None:
    assert files.unified("/a/b", a="max 100000\n", a__b="max 100000\n") is None
    assert files.separate("/a", top=("-1\n", "100000\n"), a=("-1\n", "100000\n")) is None


def test_version_1_has_a_file_for_the_quota_and_one_for_the_period(files: Files) -> None:
    assert files.separate("/a/b", a__b=("250000\n", "100000\n")) == 3
    assert files.separate("/a/b", a=("100000\n", "50000\n")) == 2


def test_a_container_that_sees_names_of_its_host_has_its_own_group_as_the_top(files: Files) -> None:
    """So it is with version 1 as a rule: of /docker/7f only what is below can be seen."""
    own = OF_CPU.replace("0:30 / ", "0:30 /docker/7f ")
    assert files.separate("/docker/7f", own, top=("200000", "100000")) == 2
    assert files.separate("/docker/7f/inner", own, inner=("100000", "100000")) == 1
    assert files.separate("/docker/8a", own) == 2


def test_a_group_beside_the_top_has_no_name_here(files: Files) -> None:
    """A process that was moved there. What is above it may still limit it."""
    assert files.unified("/../8a", top="200000 100000") == 2


def test_both_versions_may_be_there_at_once(files: Files) -> None:
    """Then version 2 has no quotas: a controller is in one of them."""
    both = SEPARATE + UNIFIED.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    assert files.separate("/a", both, a=("400000", "100000")) == 4


def test_groups_may_lie_in_any_folder(files: Files) -> None:
    mounts = UNIFIED.replace("/sys/fs/cgroup", "/my\\040groups")
    assert files.unified("/a:b", mounts) is None
    assert files.write({"my groups/a:b/cpu.max": "500000 100000\n"}) == 5


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


def test_numbers_without_end_limit_nothing(files: Files) -> None:
    assert files.unified("/", top="9" * 5000 + " 1") is None


def test_lists_that_are_not_as_the_kernel_writes_them_limit_nothing(files: Files) -> None:
    assert files.write({"proc/self/cgroup": "\n0::\n:\nx\n", "proc/self/mountinfo": "\n- -\n1 2 - cgroup2\n"}) is None
    assert files.write({"proc/self/mountinfo": UNIFIED, "sys/fs/cgroup/cpu.max": "200000 100000"}) == 2
    (files.root / "proc/self/cgroup").write_bytes(b"0::/\xff\xfe\n")
    assert quota_cores(files.root) == 2


def test_files_that_are_missing_limit_nothing(files: Files) -> None:
    assert quota_cores(files.root) is None
    assert files.write({"proc/self/cgroup": "0::/a\n"}) is None
    assert files.write({"proc/self/mountinfo": UNIFIED}) is None
    assert files.write({"sys/fs/cgroup/a/cpu.cfs_quota_us": "100000"}) is None


def test_a_folder_in_place_of_a_file_limits_nothing(files: Files) -> None:
    (files.root / "sys/fs/cgroup/a/cpu.max").mkdir(parents=True)
    assert files.unified("/a") is None


def test_the_smaller_of_affinity_and_quota_is_used(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert usable_cores(files.root) == 64
    files.unified("/", top="200000 100000")
    assert usable_cores(files.root) == 2
    files.unified("/", top="100 100000")
    assert usable_cores(files.root) == 1
    files.unified("/", top="9900000 100000")
    assert usable_cores(files.root) == 64
