"""The benchmarks on a GPU, on a CPU: the references in the place of kernels, a tiny model."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from inference_engine.backends.pinned import Landed
from laboratory.evaluation.made_models import SHAPES
from laboratory.evaluation.on_gpu import Ceilings
from laboratory.evaluation.record import read_record
from laboratory.evaluation.timing import host_seconds
from scripts import bench_gpu_ops, bench_gpu_steps, bench_long_steps
from scripts.bench_gpu import main


def test_a_record_says_what_was_measured_and_what_did_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = "--shapes tiny --device cpu --dtype float32 --lengths 24 100000 --sessions 1 2 --rounds 2 --tokens 4"
    where = ["--kv-bytes", str(2**21), "--results", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["scripts/bench_gpu.py", *typed.split(), *where])

    main()

    (path,) = tmp_path.glob("listed_cpu_float32/*/record.json")
    found = read_record(path, "listed", "ms of a step, by what the host does")
    assert set(found["left_out"]) == {"tiny, full, 1 at 100000", "tiny, full, 2 at 100000"}
    for sessions in (1, 2):
        cell = f"tiny, full, {sessions} at 24"
        ratio = found["values"][f"time of a step, listed ÷ torch's modules, {cell}"]
        assert (ratio["unit"], ratio["count"]) == ("ratio", 2)
        assert found["values"][f"prefill, listed, {cell}"]["count"] == sessions
        assert found["values"][f"first tokens equal, of {sessions}, {cell}"]["median"] == sessions
        assert found["values"][f"first token's logprob, largest difference, {cell}"]["median"] < 1e-4
    assert "--results" not in found["command"]


def test_steps_are_shown_beside_their_baselines_and_their_floors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = "--shapes tiny --device cpu --dtype float32 --cells 1x700 1x700/sink_window:sink=4,window=256 2x24 1x100000"
    more = f"--compiled 700 --prefill 64 --attended 100 --rounds 2 --tokens 4 --turns 8 --kv-bytes {2**22}"
    where = ["--results", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["scripts/bench_gpu_steps.py", *typed.split(), *more.split(), *where])

    bench_gpu_steps.main()

    (path,) = tmp_path.glob("steps_cpu_float32/*/record.json")
    found = read_record(path, "steps", "decode steps")
    assert set(found["left_out"]) == {"tiny, 1 x 100000"}
    rows = {(row["strategy"], row["sessions"]): row for row in found["tables"]["decode steps"]}
    full, windowed = rows["full", 1], rows["sink_window:sink=4,window=256", 1]
    assert full["entries read"] > 700 > windowed["entries read"] and full["floor ms"] > windowed["floor ms"]
    assert {"÷ full", "÷ transformers, compiled"} <= set(windowed)
    ratio = found["values"]["time of a step, tiny, sink_window:sink=4,window=256 ÷ full, 1 x 700"]
    assert (ratio["unit"], ratio["count"]) == ("ratio", 2)
    assert found["values"]["ceiling, bytes read"]["median"] > 0
    turns = {row["strategy"]: row for row in found["tables"]["turns"]}
    assert set(turns) == {"full", "sink_window:sink=4,window=256"}, "of cells of one session"
    assert found["values"]["turn of 8 new tokens, tiny, full, 1 x 700"]["count"] == 2
    assert "÷ full" in turns["sink_window:sink=4,window=256"] and turns["full"]["÷ a decode step"] > 0
    # Nothing is said of prefills that did not attend.
    assert [row["cell"] for row in found["tables"]["prefills"]] == ["full, 2 x 24", "in chunks of the default, 1 x 64"]


def test_steps_of_many_sessions_are_shown_with_the_bytes_of_each_beside_as_many_of_the_baseline_as_fit_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windowed = "sink_window:sink=4,window=64"
    typed = f"--shape tiny --device cpu --dtype float32 --strategies full {windowed} --lengths 150 700 --sessions 5"
    more = "--attended 200 --prefills 1 --rounds 2 --tokens 4 --segment-tokens 64 --name many"
    where = ["--kv-bytes", str(2**22), "--results", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["scripts/bench_long_steps.py", *typed.split(), *more.split(), *where])

    bench_long_steps.main()

    (path,) = tmp_path.glob("many/*/record.json")
    found = read_record(path, "many", "steps")
    values, rows = found["values"], {(row["strategy"], row["length"]): row for row in found["tables"]["steps"]}
    full, row = rows["full", 700], rows[windowed, 700]
    assert row["sessions"] == 5 and full["in turns"]
    bound = "bytes of a session, bound"
    assert full["sessions"] == 5 * row[bound] // full[bound] < 5
    assert all(0 < each["bytes of a session, held"] <= each[bound] for each in rows.values())
    beside = f"{windowed} ÷ full, 5 ÷ {full['sessions']} sessions at 700"
    assert values[f"time of a step, {beside}"]["count"] == 2
    held = row["bytes of all, held"] / full["bytes of all, held"]
    assert values[f"bytes of all sessions, {beside}"]["median"] == held
    # Nothing is said of prefills that did not attend.
    assert {name for name in values if name.startswith("prefill")} == {
        f"prefill, {windowed}, 5 sessions at 150",
        f"prefill, full, {rows['full', 150]['sessions']} sessions at 150",
        f"prefill, {windowed} ÷ full, 5 ÷ {rows['full', 150]['sessions']} sessions at 150",
    }
    assert found["left_out"] == {}


def test_strategies_that_do_not_fit_beside_each_other_are_measured_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategies = "full sink_window:window=1999 gather:block=16,window=64"
    typed = f"--shape tiny --device cpu --dtype float32 --lengths 500 2000 --attended 100 --strategies {strategies}"
    more = f"--rounds 2 --tokens 4 --segment-tokens 64 --kv-bytes 1080000 --results {tmp_path}"
    monkeypatch.setattr("sys.argv", ["scripts/bench_long_steps.py", *typed.split(), *more.split()])

    bench_long_steps.main()

    (path,) = tmp_path.glob("long_steps_cpu_float32/*/record.json")
    found = read_record(path, "long_steps", "steps")
    rows = {(row["strategy"], row["length"]): row for row in found["tables"]["steps"]}
    windowed = "sink_window:window=1999"
    assert rows["full", 500]["in turns"] and not rows["full", 2000]["in turns"]
    assert found["values"][f"time of a step, {windowed} ÷ full, at 500"]["count"] == 2
    assert found["values"][f"time of a step, {windowed} ÷ full, at 2000"]["count"] == 1  # of medians
    # By itself it does not fit, either.
    assert set(found["left_out"]) == {"gather:block=16,window=64, at 2000"}
    assert ("gather:block=16,window=64", 2000) not in rows


def test_a_step_of_experts_reads_those_that_its_tokens_choose() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SHAPES["qwen3-30b-a3b"]())
    costs = bench_gpu_steps.Costs.of(model, 2)
    ceilings = Ceilings(read_bytes=1e12, copied_bytes=1e12, products=1e14, kernel_us=1.0)
    # 3.3 billion parameters are active, of which the embeddings of the input are not read.
    assert 5.9 < costs.step_ms(1, 0, ceilings) < 6.2
    assert costs.step_ms(1, 0, ceilings) < costs.step_ms(8, 0, ceilings) < 8 * costs.step_ms(1, 0, ceilings)
    read = sum(each.numel() for each in model.parameters()) - model.get_input_embeddings().weight.numel()
    assert costs.step_ms(1000, 0, ceilings) == pytest.approx(1e3 * 2 * read / 1e12, rel=1e-6)


def test_operations_are_shown_beside_the_best_other_and_wrong_ones_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = "--device cpu --attention 2x48 --topk 2x300 --mac 40 --rounds 2"
    monkeypatch.setattr("sys.argv", ["scripts/bench_gpu_ops.py", *typed.split(), "--results", str(tmp_path)])

    bench_gpu_ops.main()

    (path,) = tmp_path.glob("ops_cpu_bfloat16/*/record.json")
    found = read_record(path, "ops", "µs of an operation")
    cases = {row["case"]: row for row in found["tables"]["µs of an operation"]}
    assert cases["attention, 2 x 48"]["best other"] == "SDPA"
    assert found["values"]["attention, 2 x 48, ours ÷ SDPA"]["count"] == 2
    assert cases["2 x 150 of 300"]["best other"] == "torch.topk"
    assert {"MAC, nothing matches", "MAC, every head matches"} < set(cases["MAC, 1 x 40"])
    assert found["left_out"] == {}


def test_an_operation_that_gives_something_else_is_not_timed() -> None:
    contenders = bench_gpu_ops.Contenders(torch.device("cpu"))
    contenders.add("wrong", lambda _copy: 1, 1, lambda found: f"{found} is not 2")
    assert not contenders.timed and contenders.left_out == {"wrong": "1 is not 2"}


def test_an_operation_that_cannot_be_made_is_named_with_the_reason() -> None:
    def make() -> Callable[[int], int]:
        raise ImportError("it is not installed\nand more")

    contenders = bench_gpu_ops.Contenders(torch.device("cpu"))
    contenders.add_made("absent", make, 1, lambda _found: "")
    assert not contenders.timed and contenders.left_out == {"absent": "ImportError: it is not installed"}


@pytest.mark.parametrize("sessions", [1, 3])
def test_pages_are_each_session_s_entries_in_place(sessions: int) -> None:
    cache = torch.randn(sessions, 4, 48, 8)
    pages, ids = bench_gpu_ops.paged(cache), bench_gpu_ops.page_ids(cache)
    assert pages.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
    for session in range(sessions):
        read = pages[ids[session].long()].transpose(0, 1).reshape(4, 48, 8)
        assert torch.equal(read, cache[session])


def test_a_last_page_that_is_not_full_is_refused() -> None:
    with pytest.raises(ValueError, match="40 tokens are not whole pages of 16"):
        bench_gpu_ops.paged(torch.zeros(1, 4, 40, 8))


def test_what_the_host_does_is_timed_between_two_waits_for_the_device() -> None:
    landed = Landed(torch.zeros(1))
    with host_seconds() as found:
        for _ in range(3):
            landed.wait()
            time.sleep(0.01)
    landed.wait()

    assert len(found) == 2 and min(found) >= 0.01
