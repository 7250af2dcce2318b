"""The index of results has every experiment, is the same when made again, and makes nothing up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference_engine.errors import KakeyaError
from laboratory.evaluation import record
from laboratory.evaluation.report import INDEX, experiments, page, rebuild, shown

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


def test_a_headline_is_one_that_the_record_names(tmp_path: Path) -> None:
    write(tmp_path, "needle", headlines=["found"])
    assert "| found | 7 | of 8 |" in page(tmp_path)


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


def test_experiments_come_by_name_and_their_records_latest_first(tmp_path: Path) -> None:
    another_day(write(tmp_path, "needle"), "2020-02-03")
    write(tmp_path, "cost")
    headings = [line for line in shown(tmp_path).splitlines() if line.startswith(("# ", "## "))]
    assert [line for line in headings if line.startswith("# ")] == ["# cost", "# needle"]
    assert headings[-1].startswith("## 2020-02-03")


def test_one_experiment_is_shown_alone(tmp_path: Path) -> None:
    write(tmp_path, "needle_tiny")
    write(tmp_path, "cost_tiny")
    text = shown(tmp_path, "cost_tiny")
    assert text.startswith("# cost tiny\n")
    assert "needle" not in text


def test_an_unknown_experiment_is_refused_with_a_few_of_a_like_name_and_where_all_are(tmp_path: Path) -> None:
    for name in ("cost_tiny", "needle_tiny", "needle_4k_tiny", "needle_8k_tiny", "needle_16k_tiny"):
        write(tmp_path, name)
    with pytest.raises(KakeyaError, match=r"'needle_tyni' \(did you mean needle_tiny or [^)]*\?\); `kakeya") as refused:
        shown(tmp_path, "needle_tyni")
    assert str(refused.value).endswith(f"`kakeya evaluate report` writes a list of all 5 to {tmp_path / INDEX}")
    with pytest.raises(KakeyaError, match=r"'needle' \(did you mean needle_\w+ or needle_\w+ or needle_\w+\?\)"):
        shown(tmp_path, "needle")
    with pytest.raises(KakeyaError, match=r"'needel' \(did you mean needle_"):
        shown(tmp_path, "needel")
    with pytest.raises(KakeyaError, match="an experiment 'nosuch'; `kakeya evaluate report`"):
        shown(tmp_path, "nosuch")


def test_making_it_again_changes_nothing_and_depends_on_records_alone(tmp_path: Path) -> None:
    write(tmp_path, "needle")
    path = rebuild(tmp_path)
    first = path.read_bytes()
    (tmp_path / "stray.txt").write_text("not a record")
    assert rebuild(tmp_path).read_bytes() == first
    path.unlink()
    assert rebuild(tmp_path).read_bytes() == first


def test_plots_are_shown_where_they_are(tmp_path: Path) -> None:
    folder = write(tmp_path, "needle").parent
    (folder / "recall.png").write_bytes(b"")
    assert f"![recall](needle/{folder.name}/recall.png)" in shown(tmp_path)


def test_tables_of_a_record_stand_in_for_its_values(tmp_path: Path) -> None:
    rows = [
        {"strategy": "a|b", "hits": 39, "share": 0.123456, "note": "", "parts": [1]},
        {"strategy": "full", "hits": 40_000, "share": 1.0, "note": ""},
    ]
    write(tmp_path, "needle", tables={"recall": rows})
    text = shown(tmp_path)
    assert "| strategy | hits | share |\n|---|---:|---:|\n| a\\|b | 39 | 0.1235 |\n| full | 40,000 | 1 |" in text
    assert "note" not in text
    assert "parts" not in text
    assert "tokens/s" not in text


def test_a_record_can_name_its_headlines(tmp_path: Path) -> None:
    write(tmp_path, "needle", headlines=["found"], what="What <it> is.")
    text = shown(tmp_path)
    assert "| found | 7 | of 8 |" in text
    assert "tokens/s" not in text
    assert "and 1 more in the record" in text
    assert "What \\<it\\> is" in text


def test_a_long_record_is_cut_and_says_so(tmp_path: Path) -> None:
    write(tmp_path, "cost", values={f"value {number}": record.exact(number, "ms") for number in range(40)})
    assert "… and 28 more in the record." in shown(tmp_path)


def test_a_record_that_names_many_headlines_is_cut_too(tmp_path: Path) -> None:
    values = {f"value {number}": record.exact(number, "ms") for number in range(60)}
    write(tmp_path, "cost", values=values, headlines=list(values))
    assert "… and 20 more in the record." in shown(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"values": {}}'])
def test_a_broken_record_is_named_and_the_page_stays(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, "needle")
    before = rebuild(tmp_path).read_bytes()
    path.write_text(content)
    with pytest.raises(KakeyaError, match=r"record\.json: not a record"):
        rebuild(tmp_path)
    assert (tmp_path / "README.md").read_bytes() == before


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(KakeyaError, match="no such folder"):
        rebuild(tmp_path / "nowhere")


def test_the_index_in_the_repository_is_what_its_records_say_and_short() -> None:
    listed = (record.RESULTS / "README.md").read_text(encoding="utf-8")
    assert listed == page(record.RESULTS), "records changed: run `kakeya evaluate report`"
    assert len(listed.splitlines()) <= 300
    assert sum(path.stat().st_size for path in record.RESULTS.rglob("*.*")) < 3_000_000, "records keep no single items"


def test_a_record_that_a_newer_one_replaced_is_kept_only_if_a_document_cites_it() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(document.read_text(encoding="utf-8") for document in documents)
    older = [path.parent for paths in experiments(record.RESULTS).values() for path in paths[1:]]
    uncited = [folder.relative_to(ROOT) for folder in older if folder.relative_to(ROOT).as_posix() not in text]
    assert not uncited, "remove them; the history of the repository keeps them"
