"""The page shows the package as it is."""

from __future__ import annotations

import re
import tomllib

from tests.test_packages import ROOT

PAGE = (ROOT / "docs/write_a_strategy.md").read_text(encoding="utf-8")
PLUGIN = ROOT / "plugins/kakeya_tova"


def test_what_the_page_shows_is_in_the_package() -> None:
    source = (PLUGIN / "kakeya_tova/__init__.py").read_text(encoding="utf-8")
    shown = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(shown) == 2
    assert all(code in source for code in shown)
    assert len(source.splitlines()) <= 150
    project = (PLUGIN / "pyproject.toml").read_text(encoding="utf-8")
    (points,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    assert tomllib.loads(points)["project"]["entry-points"] == tomllib.loads(project)["project"]["entry-points"]
