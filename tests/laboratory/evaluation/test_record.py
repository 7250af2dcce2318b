"""A record can be made again from what it says, and gives nothing away."""

import sys
from pathlib import Path
from typing import Any

import pytest

from laboratory.evaluation import record


def payload(**changes: Any) -> dict[str, Any]:
    return {
        "command": "kakeya bench anything --rounds 3",
        "config": {"rounds": 3},
        "seeds": [1, 2],
        "values": {"latency": record.summarize([1.0, 2.0, 4.0], "ms"), "tokens": record.exact(7, "tokens")},
        "baseline": "the same without it",
        **changes,
    }


def test_a_record_says_what_ran_on_what_and_what_came_out(tmp_path: Path) -> None:
    path = record.write_record("anything", payload(), results_dir=tmp_path)
    content = record.load(path)
    assert path.parent.parent == tmp_path / "anything"
    assert path.parent.name == f"{content['date']}-{record.machine_name(content['machine'])}"
    assert content["values"]["latency"] == {"unit": "ms", "median": 2.0, "low": 1.5, "high": 3.0, "count": 3}
    assert content["values"]["tokens"] == {"unit": "tokens", "median": 7, "low": 7, "high": 7, "count": 1}
    assert {"commit", "machine", "command", "config", "seeds", "baseline"} <= set(content)
    assert {"cpu", "cores", "memory_bytes", "python", "packages"} <= set(content["machine"])


def test_a_record_is_read_as_it_was_given_to_six_digits_and_items_are_elsewhere(tmp_path: Path) -> None:
    values = {
        "step": record.exact(1 / 3, "ms"),
        "step, full, at 8": record.summarize([1.0, 2.0, 4.0], "ms"),
        "step, full": record.exact(12_345_678.0, "bytes"),
        "step, full, at 16": record.exact(0, "ms"),
    }
    tables = {"steps": [{"name": "a", "ms": [1.5]}, {"name": "b", "bytes": 2**40 + 1}], "none": []}
    items, given = tmp_path / "items", payload(values=values, tables=tables, items={"steps": [{"ms": 1.25}, {"ms": 2}]})
    path = record.write_record("anything", given, results_dir=tmp_path / "results", items=items)
    found = record.load(path)
    third = {**values["step"], "median": 0.333333, "low": 0.333333, "high": 0.333333}
    assert found["values"] == {**values, "step": third}
    steps = [{"name": "a", "ms": [1.5], "bytes": None}, {"name": "b", "ms": None, "bytes": 2**40 + 1}]
    assert found["tables"] == {"steps": steps, "none": []}
    assert items.read_text() == '{"of": "steps", "ms": 1.25}\n{"of": "steps", "ms": 2}\n'
    assert "items" not in found


def test_what_names_and_units_repeat_stands_once_and_is_read_as_it_was_given(tmp_path: Path) -> None:
    window, codec = "sink_window:sink=4,window=64", "sink_window:sink=4,window=64,codec=int8"
    values = {
        f"{statistic}, {strategy}, at {length}": record.summarize([1.0, 2.0, length], "nats")
        for statistic in ("mean", "p99")
        for strategy in (window, codec, f"{window}0", "full")
        for length in (8, 16)
    }
    values |= {f"{window}: hits": record.exact(7, "of 8"), "hits, full": record.exact(8, "of 9")}
    tables = {"all": [{"strategy": codec, "kl": 0.5}, {"strategy": "full", "kl": 0}]}
    config = {"strategies": ["full", window, codec]}
    given = payload(values=values, tables=tables, headlines=[f"mean, {codec}, at 8"], config=config)
    path = record.write_record("anything", given, results_dir=tmp_path)
    found, text = record.load(path), path.read_text()
    assert (list(found["values"]), found["tables"]) == (list(values), tables)
    assert (found["values"], found["headlines"]) == (values, given["headlines"])
    assert (text.count(f'"{window}"'), text.count(f'"{codec}"'), text.count('"nats"')) == (1, 1, 2)
    path.write_text(text.replace("{2}", "{3}"))
    with pytest.raises(ValueError, match=r"\{3\} is none of the config's 3"):
        record.load(path)
    with pytest.raises(ValueError, match="stands for a strategy"):
        record.write_record("anything", payload(values={"a{3}": values[f"{window}: hits"]}, config=config))
    record.write_record("anything", payload(values={"a{3}": values[f"{window}: hits"]}), results_dir=tmp_path)


def test_a_record_that_lacks_something_is_refused_by_its_name(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for missing in record.REQUIRED:
        with subtests.test(missing):
            incomplete = payload()
            del incomplete[missing]
            with pytest.raises(ValueError, match=missing):
                record.write_record("anything", incomplete, results_dir=tmp_path)
            assert not list(tmp_path.iterdir())


def test_a_record_must_not_show_a_folder_of_the_machine(tmp_path: Path) -> None:
    for text in (f"python {sys.executable}", f"--model={tmp_path}"):
        with pytest.raises(ValueError, match="folder of this machine"):
            record.write_record("anything", payload(command=text), results_dir=tmp_path)


def test_a_command_is_quoted_and_shows_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["--model=/some/model", "--kinds", "a b", "--results", "/there", "--latent", "own", "--text", "/x/y z.md"]
    monkeypatch.setattr(sys, "argv", [str(record.ROOT / "scripts/soak.py"), *typed])
    assert record.command_line(without=("--results",)) == (
        "python scripts/soak.py --model=model --kinds 'a b' --latent own --text 'y z.md'"
    )


def test_a_record_must_not_name_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "secret-host")
    with pytest.raises(ValueError, match="name the host"):
        record.write_record("anything", payload(config={"target": "secret-host:50051"}), results_dir=tmp_path)
