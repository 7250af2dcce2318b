"""Pictures: valid, named where things stand, nothing over anything else, the same bytes each time."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laboratory.evaluation import pictures
from laboratory.evaluation.pictures import Bar, Course, Mark, Panel

LETTER = 0.45 * 13  # narrower than any estimate: what overlaps by this does so in every font
HEIGHT = 11


def texts(path: Path) -> list[tuple[float, float, float, str]]:
    """Left, right, baseline and words of every text. Raises ParseError if it is no XML."""
    found = []
    for element in ET.parse(path).getroot().iter("{http://www.w3.org/2000/svg}text"):
        words, x, y = element.text or "", float(element.attrib["x"]), float(element.attrib["y"])
        width = len(words) * LETTER
        left = {"end": x - width, "middle": x - width / 2}.get(element.attrib.get("text-anchor", ""), x)
        found.append((left, left + width, y, words))
    return found


def check(path: Path) -> None:
    root = ET.parse(path).getroot()
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for left, right, y, words in texts(path):
        assert left >= 0 and right <= width and 0 < y <= height, f"{words!r} is cut off"
    for one, other in itertools.combinations(texts(path), 2):
        is_apart = one[1] <= other[0] or other[1] <= one[0] or abs(one[2] - other[2]) >= HEIGHT
        assert is_apart, f"{one[3]!r} over {other[3]!r}"


# Ends that are close or equal, ticks whose numbers are long, values that differ by a million.
VALUES = st.lists(st.floats(1e-4, 1e4), min_size=3, max_size=3)


@given(st.lists(VALUES, min_size=1, max_size=9), st.booleans(), st.booleans())
def test_no_text_stands_over_another(
    tmp_path_factory: pytest.TempPathFactory, ys: list[list[float]], is_log_x: bool, is_log_y: bool
) -> None:
    courses = [
        Course(f"sink_window:sink=4,window={64 * place}", [1000, 1024, 131072], own) for place, own in enumerate(ys)
    ]
    path = tmp_path_factory.mktemp("drawn") / "lines.svg"
    pictures.lines(path, title="t", x_label="x", y_label="y", courses=courses, is_log_x=is_log_x, is_log_y=is_log_y)
    check(path)
    assert {text for *_, text in texts(path)} >= set(pictures.distinct(course.name for course in courses).values())


def test_marks_that_stand_close_keep_the_names_that_fit(tmp_path: Path) -> None:
    marks = [Mark(f"codec{place}", 100 + place % 3, 1 + place // 3, place < 3) for place in range(12)]
    path = tmp_path / "marks.svg"
    pictures.panels(path, title="t", shown=[Panel("x", "y", marks=marks, is_log_x=True, reference=(1.0, "full"))])
    check(path)
    assert {"codec0", "codec1", "codec2"} & {text for *_, text in texts(path)}


def test_one_length_is_bars_with_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "bars.svg"
    courses = [Course("full", [1024], [0.5], [(0.4, 0.6)]), Course("restored:source=latent", [1024], [12345.0])]
    pictures.lines(path, title="t", x_label="tokens", y_label="y", courses=courses)
    check(path)
    assert {"full", "latent", "0.5", "12,300", "T; tokens: 1,024"} <= {text for *_, text in texts(path)}


def test_bars_reach_below_zero(tmp_path: Path) -> None:
    path = tmp_path / "bars.svg"
    pictures.bars(path, title="t", label="y", groups={"a": [Bar("b", -1.0), Bar("c", 2.0)], "d": [Bar("b", 0.0)]})
    check(path)


def test_names_are_words_and_what_tells_them_apart() -> None:
    found = pictures.distinct(
        ("full", "full:codec=lloyd4,exact_window=64", "sink_window:sink=4,window=64", "sink_window:sink=4,window=572")
    )
    assert list(found.values()) == ["full", "full, lloyd4", "window 64", "window 572"]


def test_the_same_record_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        pictures.lines(
            tmp_path / name, title="<t> & t", x_label="x", y_label="y", courses=[Course("a", [1, 2], [3, 4])]
        )
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
