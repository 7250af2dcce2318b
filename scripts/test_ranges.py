"""Install one end of the ranges in pyproject.toml into an environment of its own, and try servers and clients there.

    python scripts/test_ranges.py floor     the oldest versions that the ranges allow
    python scripts/test_ranges.py newest    the newest ones

Extras are installed, too, but for a device's own. What runs the tests is pinned as everywhere.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
OF_A_DEVICE = ("mlx", "hopper")
TESTERS = ("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "triton", "trustme")
TRIED = (
    "tests/cli/test_serve.py",
    "tests/cli/test_gateway.py",
    "tests/models/test_fetch.py",
    "tests/server/test_constraints.py",
    "tests/server/test_tracing.py",
    "tests/session/test_sqlite_journal.py",
    "tests/session/test_postgres_journal.py",
    "sdks/python/tests/test_tokenization.py",
)


def asked() -> list[Requirement]:
    """What the runtime and its extras ask for here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [some for name, some in project["optional-dependencies"].items() if name not in OF_A_DEVICE]
    return [Requirement(each) for each in (*project["dependencies"], *(each for some in extras for each in some))]


def floor(requirement: Requirement) -> str:
    """The requirement of the oldest version that this one allows. Raises ValueError if it names none."""
    oldest = [each.version for each in requirement.specifier if each.operator == ">="]
    if len(oldest) != 1:
        raise ValueError(f"{requirement} has no floor: write {requirement.name}>=VERSION")
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}=={oldest[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("end", choices=("floor", "newest"))
    end = parser.parse_args().end
    pins = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8")
    testers = [match[0] for name in TESTERS if (match := re.search(rf"(?m)^{name}==[^\s;]+", pins))]
    wanted = sorted({floor(each) if end == "floor" else str(each) for each in asked()})
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "bin", "python"))
        quiet = ("--disable-pip-version-check", "--no-input", "install", "--quiet")
        subprocess.run((python, "-m", "pip", *quiet, *wanted, *testers), check=True)
        (packages,) = Path(folder).glob("lib/*/site-packages")
        (packages / "ours.pth").write_text(f"{ROOT}\n{ROOT / 'sdks/python/src'}\n", encoding="utf-8")
        tried = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--numprocesses=auto", *TRIED)
        return subprocess.run(tried, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
