"""The site is whole, and needs nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from inference_engine.config import child_environment
from scripts.check_links import ROOT, broken_links, documents
from tests.once import made_once

# What a browser fetches by itself when it opens a page; a link that a reader may follow is not that.
FETCHED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?([^\"\s>]+)|<link\b[^>]*\bhref=\"?([^\"\s>]+)")


def build(folder: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=child_environment(NO_MKDOCS_2_WARNING="1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest) -> Path:
    return made_once("site", build, request)


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    fetched = {one or other for page in pages for one, other in FETCHED.findall(page.read_text(encoding="utf-8"))}
    assert len(pages) > 20
    assert any(address.endswith(".css") for address in fetched)
    assert not [address for address in fetched if re.match(r"(?:[a-z]+:)?//", address)]


def test_what_pages_fetch_is_in_the_site(site: Path) -> None:
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # it is shown at any address, and written for the site's root
            continue
        for one, other in FETCHED.findall(page.read_text(encoding="utf-8")):
            address = (one or other).partition("?")[0].partition("#")[0]
            if not address.startswith("data:"):
                assert (page.parent / address).exists(), f"{page.relative_to(site)}: {address}"


def test_a_link_out_of_the_documents_leads_to_a_page_of_the_site(site: Path) -> None:
    concepts = (site / "concepts.html").read_text(encoding="utf-8")
    assert 'href="results/long_session.html"' in concepts
    written = (site / "write_a_strategy.html").read_text(encoding="utf-8")
    assert 'href="source/plugins/kakeya_tova/kakeya_tova/__init__.py.html"' in written


def test_every_relative_link_leads_somewhere_in_the_repository(subtests: pytest.Subtests) -> None:
    for document in documents():
        with subtests.test(str(document)):
            assert not list(broken_links(document))
