"""Make the reference pages in docs/reference from the code, or check that those checked in are current.

    python scripts/generate_reference.py            write them
    python scripts/generate_reference.py --check    write nothing; exit 1 and name every page that differs

They are tracked, because the repository is where most people read them, and because a change to what is public is then
seen in its diff.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from laboratory.evaluation import measured
from laboratory.evaluation.record import RESULTS
from laboratory.evaluation.report import INDEX, page
from scripts.reference import (
    command_line,
    errors,
    metrics,
    model_files,
    python_sdk,
    sdk_names,
    settings,
    tensor_types,
    typescript_sdk,
    wire,
)

FOLDER = ROOT / "docs" / "reference"
PAGES = {
    "command_line.md": command_line.render,
    "errors.md": errors.render,
    "metrics.md": metrics.render,
    "model_files.md": model_files.render,
    "python_sdk.md": python_sdk.render,
    "sdk_names.md": sdk_names.render,
    "settings.md": settings.render,
    "tensor_types.md": tensor_types.render,
    "typescript_sdk.md": typescript_sdk.render,
    "wire.md": wire.render,
}


def main() -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Make the reference pages from the code.")
    parser.add_argument("--check", action="store_true", help="compare, pages of records, too; exit 1 on a difference")
    if not parser.parse_args().check:
        for name, render in PAGES.items():
            (FOLDER / name).write_text(render(), encoding="utf-8")
        return 0
    stale = stale_pages()
    for name in stale:
        print(f"{FOLDER.relative_to(ROOT) / name} is not what the code says; run: make reference")
    of_records = {measured.PAGE: measured.rendered(_held(measured.PAGE) or ""), RESULTS / INDEX: page(RESULTS)}
    other = [path.relative_to(ROOT) for path, text in of_records.items() if _held(path) != text]
    for path in other:
        print(f"{path} is not what the records say; run: kakeya evaluate report")
    return 1 if stale or other else 0


def stale_pages() -> list[str]:
    """Pages that are missing, or not what the code makes of them now."""
    return [name for name, render in PAGES.items() if _held(FOLDER / name) != render()]


def _held(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
