"""Check that relative links in the repository's documents lead somewhere, as read in the repository.

    python scripts/check_links.py    exit 1 and name every link whose file, folder or section is not there

The site's build checks the site; this checks what is read without it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.reference.markdown import anchor

# Code, in fences or in a line, is matched first and holds no links.
_LINK = re.compile(r"^```.*?^```|`[^`\n]+`|\]\((?P<target>[^)\s]+)\)", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)


def main() -> int:
    """Run the command; returns its exit status."""
    broken = [problem for document in documents() for problem in broken_links(document)]
    for problem in broken:
        print(problem)
    return 1 if broken else 0


def documents() -> list[Path]:
    """Every document that is tracked, or could be."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for line in listed.stdout.splitlines() if (path := ROOT / line).exists()]


def broken_links(document: Path) -> Iterator[str]:
    """A line for each relative link that leads nowhere."""
    for match in _LINK.finditer(document.read_text(encoding="utf-8")):
        target = match["target"]
        if target is None or re.match(r"[a-z]+:", target):
            continue
        name, _, section = unquote(target).partition("#")
        path = document.parent / name if name else document
        where = f"{document.relative_to(ROOT)}: {target}"
        if not path.exists():
            yield f"{where} does not exist"
        elif section and path.suffix == ".md" and section not in _sections(path):
            yield f"{where}: no heading of that name"


@cache
def _sections(document: Path) -> frozenset[str]:
    """The anchors of its headings; repeated ones get a number, as where repositories are read."""
    seen: dict[str, int] = {}
    found = set()
    for heading in _HEADING.findall(_FENCE.sub("", document.read_text(encoding="utf-8"))):
        name = anchor(heading)
        count = seen.get(name, 0)
        seen[name] = count + 1
        found.add(f"{name}-{count}" if count else name)
    return frozenset(found)


if __name__ == "__main__":
    sys.exit(main())
