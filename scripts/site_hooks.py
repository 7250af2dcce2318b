"""What MkDocs does besides, to make the site whole: pages from outside docs/, decisions in the menu, links that fit.

Documents link to files of the repository by relative paths, so that they can be read there. In the site such a link
leads to the page made of that file; a source file becomes a page that shows it, as does a folder of `deploy`.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from laboratory.commands.evaluate import pictures_of
from laboratory.evaluation.report import experiments, shown

DOCS = PurePosixPath("docs")
RESULTS = PurePosixPath("results")
DECISIONS = PurePosixPath("docs/adr")
DEPLOY = PurePosixPath("deploy")
# Pages of the site that are made from files outside docs/.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "results/README.md": "results/index.md",
    "sdks/python/README.md": "sdks/python.md",
    "sdks/typescript/README.md": "sdks/typescript.md",
}
LANGUAGES = {".json": "json", ".py": "python", ".proto": "protobuf", ".toml": "toml", ".ts": "typescript"}
LANGUAGES |= {".conf": "nginx", ".service": "ini", ".yaml": "yaml"}

# A link outside of code: code, in fences or in a line, is matched first and left alone.
LINK = re.compile(
    r"^```.*?^```|`[^`\n]+`|(?P<before>\]\()(?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)", re.MULTILINE | re.DOTALL
)
MARKUP = re.compile(r"[`*\[]|\](\(.*?\))?")

log = logging.getLogger("mkdocs.hooks.site")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every decision into the menu, below the list of them."""
    for section in config.nav or []:
        for pages in section.values():
            for page in pages if isinstance(pages, list) else ():
                if page == {"Decisions": "adr/README.md"}:
                    page["Decisions"] = ["adr/README.md", *(f"adr/{path.name}" for path in _decisions())]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the site shows of the repository beside docs/."""
    for path, uri in PAGES.items():
        if uri not in files.src_uris and (ROOT / path).exists():
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    cited = _cited(files)
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder)
        for name, records in experiments(ROOT / RESULTS).items():
            for record in records:
                place = record.parent.relative_to(ROOT / RESULTS)
                for image in pictures_of(record, drawn / place):
                    uri = f"{RESULTS}/{place.as_posix()}/{image.name}"
                    files.append(File.generated(config, uri, content=image.read_text(encoding="utf-8")))
            page = shown(ROOT / RESULTS, name, drawn) + cited.get(name, "")
            files.append(File.generated(config, _results_uri(name), content=page))
    for source in _linked_sources(files):
        files.append(File.generated(config, _source_uri(source), content=_shown(source)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Point links at the site's pages. A link to nothing is a warning, which fails a strict build."""
    here = PurePosixPath(page.file.src_uri)
    home = _home(page.file)

    def pointed(match: re.Match[str]) -> str:
        if home is None or not (target := match["target"]) or _is_elsewhere(target):
            return match[0]
        path = _resolve(home, target)
        uri = _uri(path)
        if uri is None:
            log.warning("%s links to %s, which does not exist", home, target)
            return match[0]
        return f"]({os.path.relpath(uri, here.parent)}{match['anchor'] or ''})"

    return LINK.sub(pointed, markdown)


def on_page_content(html: str, **_: object) -> str:
    """Write the name of its column into each cell of a table: on a phone a row is a card."""

    def named(table: re.Match[str]) -> str:
        columns = [
            re.sub(r"<[^>]*>", "", head).strip() for head in re.findall(r"<th\b[^>]*>(.*?)</th>", table[0], re.DOTALL)
        ]

        def row(match: re.Match[str]) -> str:
            places = iter(columns)
            return re.sub(r"<td\b", lambda _: _cell(next(places, "")), match[0])

        return re.sub(r"<tr>.*?</tr>", row, table[0], flags=re.DOTALL)

    def _cell(column: str) -> str:
        return f'<td data-column="{column.replace(chr(34), "&quot;")}"' if column else "<td"

    return re.sub(r"<table>.*?</table>", named, html, flags=re.DOTALL)


def _home(file: File) -> PurePosixPath | None:
    """Where a page comes from in the repository; None for a page that is made here.

    The page of an experiment is made here too, and its links are those of the index.
    """
    if not file.abs_src_path:
        return RESULTS / "README.md" if PurePosixPath(file.src_uri).parent == RESULTS else None
    return PurePosixPath(Path(file.abs_src_path).resolve().relative_to(ROOT).as_posix())


def _resolve(home: PurePosixPath, target: str) -> PurePosixPath:
    return PurePosixPath(os.path.normpath(home.parent / target))


def _uri(path: PurePosixPath) -> str | None:
    """The site's address of a file or folder of the repository; None if there is no such thing."""
    if str(path) in PAGES:
        return PAGES[str(path)] if (ROOT / path).exists() else None
    if path == DECISIONS:
        return "adr/README.md"
    if path.is_relative_to(RESULTS) and (ROOT / path).is_dir():
        return _results_uri(path.parts[1]) if len(path.parts) > 1 else PAGES["results/README.md"]
    if path.parent == DEPLOY and (ROOT / path).is_dir():
        return _source_uri(path)
    if path.is_relative_to(RESULTS) and path.suffix == ".svg":
        return str(path)  # drawn here, most of them; MkDocs says if one is not
    if not (ROOT / path).is_file():
        return None
    if path.is_relative_to(DOCS):
        return str(path.relative_to(DOCS))
    return _source_uri(path)


def _results_uri(experiment: str) -> str:
    return f"{RESULTS}/{experiment}.md"


def _cited(files: Files) -> dict[str, str]:
    """What a record's page says at its end: which parts of which pages draw on it, and so say what is won and lost."""
    found: dict[str, dict[str, None]] = {}
    for file in files.documentation_pages():
        if (home := _home(file)) is None or home.is_relative_to(RESULTS):
            continue
        heading = title = ""
        for line in file.content_string.splitlines():
            if line.startswith("#"):
                heading = line.lstrip("# ")
                title = title or heading
            for match in LINK.finditer(line):
                path = _resolve(home, match["target"] or "")
                if path.is_relative_to(RESULTS) and len(path.parts) > 1:
                    words = title if heading == title else f"{title}: {heading}"
                    link = f"[{MARKUP.sub('', words)}]({os.path.relpath(home, RESULTS)})"
                    found.setdefault(path.parts[1], {})[link] = None
    return {name: "\n## Read about it\n\n- " + "\n- ".join(links) + "\n" for name, links in found.items()}


def _linked_sources(files: Files) -> list[PurePosixPath]:
    """Source files that a page links to, as far as they are text."""
    found = set()
    for file in files.documentation_pages():
        if (home := _home(file)) is None:
            continue
        for match in LINK.finditer(file.content_string):
            target = match["target"]
            if target and not _is_elsewhere(target):
                path = _resolve(home, target)
                if (uri := _uri(path)) is not None and uri == _source_uri(path):
                    found.add(path)
    return sorted(found)


def _source_uri(path: PurePosixPath) -> str:
    return f"source/{path}.md"


def _shown(path: PurePosixPath) -> str:
    files = sorted((ROOT / path).iterdir()) if (ROOT / path).is_dir() else [ROOT / path]
    shown = [f"---\nsearch: {{exclude: true}}\n---\n\n# {path}\n"]
    for file in (each for each in files if each.is_file()):
        title = f"## {file.name}\n\n" if len(files) > 1 else ""
        text = file.read_text(encoding="utf-8")
        shown.append(f"{title}````{LANGUAGES.get(file.suffix, '')}\n{text}\n````\n")
    return "\n".join(shown)


def _is_elsewhere(target: str) -> bool:
    return re.match(r"[a-z]+:", target) is not None


def _decisions() -> list[Path]:
    return sorted((ROOT / DECISIONS).glob("0*.md"))
