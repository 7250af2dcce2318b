"""The index of results has every experiment, is the same when made again, and makes nothing up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference_engine.errors import KakeyaError
from laboratory.evaluation import measured, record
from laboratory.evaluation.report import experiments, page, rebuild, shown

ROOT = record.RESULTS.parent


def write(results: Path, experiment: str, **changes: Any) -> Path:
    payload = {
        "command": f"kakeya evaluate {experiment} --lengths 512",
        "config": {"device": "cpu"},
        "seeds": [0],
        "values": {"decode, full": record.summarize([10.0, 11.0, 13.0], "tokens/s"), "found": record.exact(7, "of 8")},
        "baseline": "full, on the same prompts",
        **changes,
    }
    return record.write_record(experiment, payload, results_dir=results)


def another_day(path: Path, date: str) -> Path:
    content = record.load(path) | {"date": date}
    other = path.parent.with_name(f"{date}-another-machine") / path.name
    other.parent.mkdir()
    other.write_text(record.record_text(content))
    return other


def test_the_index_has_a_line_for_each_experiment_with_its_newest_record(tmp_path: Path) -> None:
    newest = write(tmp_path, "needle_tiny")
    older = another_day(newest, "2020-02-03")
    write(tmp_path, "cost_tiny")
    lines = [line for line in page(tmp_path).splitlines() if line.startswith("| [")]
    assert [line.partition("]")[0] for line in lines] == ["| [cost tiny", "| [needle tiny"]
    content = record.load(newest)
    link = f"[{content['date']}]({newest.relative_to(tmp_path).as_posix()})"
    assert f"| [needle tiny](needle_tiny) | {link}, {content['machine']['cpu']}" in lines[1]
    assert lines[1].endswith("| decode, full | 11 [10.5, 12] | tokens/s |")
    assert older.parent.name not in page(tmp_path)


def test_the_headline_is_of_what_is_compared(tmp_path: Path) -> None:
    values = {
        "decode, full": record.exact(10, "tokens/s"),
        "decode speed ÷ full, full, at 128": record.exact(1, "ratio"),
        "decode speed ÷ full, sink_window, at 128": record.exact(1.5, "ratio"),
    }
    write(tmp_path, "cost_tiny", values=values)
    assert "| decode speed ÷ full, sink\\_window, at 128 | 1.5 | ratio |" in page(tmp_path)


def test_every_record_is_shown_with_date_machine_values_and_command(tmp_path: Path) -> None:
    paths = [write(tmp_path, "needle_tiny"), write(tmp_path, "cost_tiny")]
    paths.append(another_day(paths[0], "2020-02-03"))
    text = shown(tmp_path)
    for path in paths:
        content = record.load(path)
        assert f"({path.relative_to(tmp_path).as_posix()})" in text
        assert f"## {content['date']}, {content['machine']['cpu']}, {content['machine']['cores']} cores" in text
        assert f"```\n{content['command']}\n```" in text
    assert text.count("| decode, full | 11 [10.5, 12] | tokens/s |") == 3
    assert text.count("| found | 7 | of 8 |") == 3


def test_making_it_again_changes_nothing_and_depends_on_records_alone(tmp_path: Path) -> None:
    write(tmp_path, "needle")
    path = rebuild(tmp_path)
    first = path.read_bytes()
    (tmp_path / "stray.txt").write_text("not a record")
    assert rebuild(tmp_path).read_bytes() == first
    path.unlink()
    assert rebuild(tmp_path).read_bytes() == first


@pytest.mark.parametrize("content", ["{", "[]", '{"values": {}}'])
def test_a_broken_record_is_named_and_the_page_stays(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, "needle")
    before = rebuild(tmp_path).read_bytes()
    path.write_text(content)
    with pytest.raises(KakeyaError, match=r"record\.json: not a record"):
        rebuild(tmp_path)
    assert (tmp_path / "README.md").read_bytes() == before


def test_the_index_in_the_repository_is_what_its_records_say_and_short() -> None:
    listed = (record.RESULTS / "README.md").read_text(encoding="utf-8")
    assert listed == page(record.RESULTS), "records changed: run `kakeya evaluate report`"
    assert len(listed.splitlines()) <= 300


def test_a_record_that_a_newer_one_replaced_is_kept_only_if_a_document_cites_it() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(document.read_text(encoding="utf-8") for document in documents)
    older = [path.parent for paths in experiments(record.RESULTS).values() for path in paths[1:]]
    uncited = [folder.relative_to(ROOT) for folder in older if folder.relative_to(ROOT).as_posix() not in text]
    assert not uncited, "remove them; the history of the repository keeps them"


TABLE = """
[speed]
of = "cost_tiny"
head = "history"
spread = true
[speed.columns]
"one" = "full"
"two" = "found"
[speed.rows]
"tokens/s" = "decode, {}"
"""


def test_a_table_of_the_page_is_made_of_the_records_it_names(tmp_path: Path) -> None:
    decoded = {"decode, found": record.summarize([1_000.0, 2_000.0], "tokens/s")}
    decoded["decode, full"] = record.exact(7, "of 8")
    path = write(tmp_path, "cost_tiny", values=decoded)
    (tmp_path / measured.TABLES).write_text(TABLE)
    text = "Before.\n\n<!-- records speed -->\nold\n<!-- end -->\n\nAfter.\n"
    made = measured.rendered(text, tmp_path)
    assert "| history | one | two |\n|---|---:|---:|\n| tokens/s | 7 of 8 | 1,500 (1,250–1,750) |" in made
    assert path.parent.name in made and "old" not in made
    assert made.startswith("Before.") and made.endswith("After.\n")
    assert measured.rendered(made, tmp_path) == made


@pytest.mark.parametrize(
    ("changed", "reason"),
    [("cost_none", "a record 'cost_none'"), ("decode {}", "a value 'decode full'"), ("[other]", "does not show other")],
)
def test_what_no_record_has_is_refused_by_name(tmp_path: Path, changed: str, reason: str) -> None:
    write(tmp_path, "cost_tiny")
    table = {"cost_none": TABLE.replace("cost_tiny", changed), "[other]": f"{TABLE}\n[other]\n"}
    (tmp_path / measured.TABLES).write_text(table.get(changed, TABLE.replace("decode, {}", changed)))
    with pytest.raises(KakeyaError, match=reason):
        measured.rendered("<!-- records speed -->\n<!-- end -->", tmp_path)


def test_the_page_in_the_repository_is_what_its_records_say() -> None:
    page_text = measured.PAGE.read_text(encoding="utf-8")
    assert page_text == measured.rendered(page_text), "records changed: run `kakeya evaluate report`"
