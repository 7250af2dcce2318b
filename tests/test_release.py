"""A release is one version of everything, and has notes."""

from __future__ import annotations

import pytest
import yaml

from inference_engine import __version__
from scripts import release
from scripts.check_links import ROOT


def test_every_package_has_one_version() -> None:
    found = release.versions()
    assert len(found) >= 6
    assert set(found.values()) == {__version__}


def test_notes_are_the_changelogs_page_which_has_a_date() -> None:
    changelog = (
        "# Changelog\n\n## 0.2.0, 2027-01-02\n\n- new\n\n### More\n\n- b\n\n## 0.1.0, not released yet\n\n- old\n"
    )
    assert release.notes("0.2.0", changelog) == "- new\n\n### More\n\n- b\n"
    with pytest.raises(SystemExit, match="has no date"):
        release.notes("0.1.0", changelog)
    with pytest.raises(SystemExit, match="has no page"):
        release.notes("0.3.0", changelog)


def test_another_version_is_refused_before_anything_is_built() -> None:
    with pytest.raises(SystemExit, match=r"not 9\.9\.9: "):
        release.main(["9.9.9"])


def test_forms_and_citation_can_be_read() -> None:
    forms = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / ".github/ISSUE_TEMPLATE").iterdir()]
    assert sum("body" in form for form in forms) == 2
    for form in forms:
        assert all(field["attributes"]["label"] for field in form.get("body", ()))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
