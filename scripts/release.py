"""Make everything that a release is made of, in dist/: wheels, sources, the npm tarball, the site, notes.

python scripts/release.py VERSION [--no-node] [--no-site]    `make release VERSION=…` says so, too

Everything is built from a copy of what is committed. Nothing is uploaded: names in indexes are taken by hand. The
runtime's wheel is for this system and processor; those for others come from the workflow `wheels`, at the tag.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
WITHOUT_NETWORK = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet")
SDIST = "import sys, build_backend; build_backend.build_sdist(sys.argv[1])"


def versions(root: Path = ROOT) -> dict[str, str]:
    """What each package of ours says that it is, by its file."""
    found = {}
    for path in sorted((*root.glob("sdks/*/pyproject.toml"), *root.glob("plugins/*/pyproject.toml"))):
        found[str(path.relative_to(root))] = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["version"]
    found["sdks/typescript/package.json"] = json.loads((root / "sdks/typescript/package.json").read_text())["version"]
    runtime = (root / "inference_engine/__init__.py").read_text(encoding="utf-8")
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    for name, text, pattern in (
        ("inference_engine/__init__.py", runtime, r'__version__ = "(.+)"'),
        ("CITATION.cff", citation, r"(?m)^version: (.+)$"),
    ):
        found[name] = match[1] if (match := re.search(pattern, text)) else "none"
    return found


def notes(version: str, changelog: str) -> str:
    """The page of the changelog for this version. Raises SystemExit if there is none, or it is not dated."""
    match = re.search(rf"(?ms)^## {re.escape(version)}(?P<said>[^\n]*)\n(?P<page>.*?)(?=^## |\Z)", changelog)
    if match is None:
        sys.exit(f"CHANGELOG.md has no page `## {version}, DATE`")
    if not re.fullmatch(r", \d{4}-\d{2}-\d{2}", match["said"]):
        sys.exit(f"CHANGELOG.md: `## {version}{match['said']}` has no date; write `## {version}, YYYY-MM-DD`")
    return match["page"].strip() + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("version")
    parser.add_argument("--no-node", action="store_true", help="no npm tarball")
    parser.add_argument("--no-site", action="store_true")
    args = parser.parse_args(arguments)
    if wrong := {name: said for name, said in versions().items() if said != args.version}:
        sys.exit(f"not {args.version}: " + ", ".join(f"{name} is {said}" for name, said in wrong.items()))
    if not (ROOT / f"tests/session/released/{args.version}.sql").exists():
        sys.exit(f"first keep this version's folder: python -m tests.session.test_released_folders {args.version}")
    page = notes(args.version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    out = ROOT / "dist"
    if out.exists() and any(out.iterdir()):
        sys.exit(f"{out} has something; move it away")
    out.mkdir(exist_ok=True)
    (out / "NOTES.md").write_text(page, encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        sources = subprocess.run(("git", "archive", "HEAD"), cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(sources)) as archive:
            archive.extractall(copy, filter="data")
        _build(copy, out, has_node=not args.no_node, has_site=not args.no_site)
    for path in sorted(out.iterdir()):
        print(path.relative_to(ROOT))
    return 0


def _build(copy: Path, out: Path, *, has_node: bool, has_site: bool) -> None:
    plugins = [str(path.parent) for path in sorted(copy.glob("plugins/*/pyproject.toml"))]
    projects = (str(copy), str(copy / "sdks/python"), *plugins)
    subprocess.run((sys.executable, "-c", SDIST, str(out)), cwd=copy, stdout=subprocess.DEVNULL, check=True)
    subprocess.run((*PIP, "wheel", *WITHOUT_NETWORK, "--wheel-dir", str(out), *projects), check=True)
    if has_node:
        typescript = copy / "sdks/typescript"
        (typescript / "node_modules").symlink_to(ROOT / "sdks/typescript/node_modules")
        subprocess.run(("npm", "pack", "--silent", "--pack-destination", str(out)), cwd=typescript, check=True)
    if has_site:
        mkdocs = (sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(copy / "site"))
        subprocess.run(mkdocs, cwd=copy, check=True)
        shutil.make_archive(str(out / "site"), "gztar", copy / "site")


if __name__ == "__main__":
    sys.exit(main())
