"""The benchmark beside vLLM, with a stand-in for vLLM's package: what is asked, and what becomes of the answers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from laboratory.bench.__main__ import main
from laboratory.evaluation.record import read_record

STAND_IN = """
import time
from types import SimpleNamespace as Names

__version__ = "0.0"


class SamplingParams:
    def __init__(self, **given):
        self.max_tokens = given["max_tokens"]


class LLM:
    def __init__(self, **settings):
        assert settings["load_format"] == "dummy" and settings["enable_prefix_caching"], settings
        self.cached, self.running = set(), {}
        self.llm_engine = Names(
            vllm_config=Names(
                scheduler_config=Names(max_num_batched_tokens=64, async_scheduling=True),
                compilation_config=Names(cudagraph_mode="FULL", cudagraph_capture_sizes=[1, 2]),
                cache_config=Names(block_size=16),
            ),
            add_request=lambda name, prompt, params: self.running.update({name: params.max_tokens}),
            step=self.step,
            abort_request=lambda names: [self.running.pop(name, None) for name in names],
            has_unfinished_requests=lambda: bool(self.running),
        )

    def collective_rpc(self, function):
        print("noise that is no answer")
        return [5]

    def step(self):
        outputs = [Names(request_id=name, outputs=[Names(token_ids=[7])]) for name in self.running]
        self.running = {name: left - 1 for name, left in self.running.items() if left > 1}
        return outputs

    def generate(self, prompts, params, use_tqdm):
        made = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            time.sleep(1e-3 * params.max_tokens)
            known = max((n for n in range(len(ids)) if tuple(ids[:n]) in self.cached), default=0)
            answer = [7] * params.max_tokens
            self.cached |= {tuple(ids), tuple(ids + answer)}
            made.append(Names(outputs=[Names(token_ids=answer)], num_cached_tokens=known))
        return made
"""


@pytest.fixture
def vllm(tmp_path: Path) -> str:
    """An interpreter that has the stand-in."""
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    (package / "sampling_params.py").write_text("class RequestOutputKind:\n    DELTA = FINAL_ONLY = None\n")
    return f"env PYTHONPATH={package.parent} {sys.executable}"


def run(vllm: str, where: Path, *more: str) -> int:
    typed = "--shape tiny --device cpu --dtype float32 --rounds 2 --tokens 8 --answer 4 --seconds 200"
    log = str(where / "vllm.log")
    return main(
        [
            "gpu-vllm",
            *typed.split(),
            "--kv-bytes",
            str(2**25),
            "--results",
            str(where),
            "--log",
            log,
            "--vllm",
            vllm,
            *more,
        ]
    )


def test_both_take_turns_at_steps_prefills_turns_and_agents(vllm: str, tmp_path: Path) -> None:
    cells = ["1x64", "2x24", "2x24+8", "2x24+6*4", "2x24/64+8", "1x9999999"]
    assert run(vllm, tmp_path, "--cells", *cells, "--prefill", "48") == 0
    (path,) = tmp_path.glob("vllm_cpu_float32/*/record.json")
    found = read_record(path, "vllm", "both")
    assert set(found["left_out"]) == {"decode step, 1 x 9999999"}
    rows = {row["what"]: row for row in found["tables"]["both"]}
    assert set(rows) == {
        "decode step, 1 x 64", "decode step, 2 x 24", "turn of 8 new tokens, 2 x 24",
        "4 turns of 6 new tokens, 2 x 24", "turn of 8 new tokens on 64 beside 2 x 24 that decode",
        "prefill of 48, to its first token",
    }  # fmt: skip
    for what, row in rows.items():
        assert found["values"][f"{what}, Kakeya ÷ vLLM"]["median"] > 0
        assert row["÷ vLLM"] > 0
    # Of a turn, what is new is computed: the last token of the answer before counts as new.
    agents = rows["4 turns of 6 new tokens, 2 x 24"]
    assert 6 <= agents["prefilled a turn, Kakeya"] <= 7 and 6 <= agents["prefilled a turn, vLLM"] <= 7
    assert found["config"]["vLLM"]["version"] == "0.0"
    assert str(tmp_path) not in found["command"] and "--vllm" not in found["command"]
    assert "noise" in (tmp_path / "vllm.log").read_text()


def test_an_interpreter_without_vllm_is_named_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"{sys.executable} -I", tmp_path, "--cells", "1x64") != 0
    assert "No module named 'vllm'" in capsys.readouterr().err


def test_a_cell_that_cannot_be_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(sys.executable, tmp_path, "--cells", "1x64-8") != 0
    assert "'1x64-8' is no cell" in capsys.readouterr().err
