"""Whatever comparisons launch interpreted compiles for a GPU, too: none is needed to find what the compiler refuses."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from inference_engine.config import child_environment
from scripts.test_gpu import SANITIZED
from tests.further import further_test
from tests.kernels import compiling

MOST = 4  # launches of a kernel, with other types or constants, that are compiled
GROUPS = {
    "steps": ("test_fused", "test_experts", "test_quantised", "test_step_ends", "test_noise", "test_long_chunks"),
    "reading": ("test_ragged_attention", "test_offloaded", "test_choosing", "test_topk", "test_latent_attention"),
    "latents": ("test_latents", "test_trellis"),
    "states": ("test_states",),
}


def run(*arguments: str, given: str = "", interprets: bool = False) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", compiling.__name__, *arguments],
        check=False,
        env=child_environment(OMP_NUM_THREADS="1", **({"TRITON_INTERPRET": "1"} if interprets else {})),
        input=given,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@further_test
def test_every_comparison_is_in_one_group() -> None:
    modules = [module for group in GROUPS.values() for module in group]
    assert sorted(modules) == sorted({each.partition(".")[0] for each in SANITIZED})


@further_test
@pytest.mark.parametrize("group", GROUPS)
def test_what_comparisons_launch_compiles_for_a_gpu(group: str) -> None:
    comparisons = [each for each in SANITIZED if each.partition(".")[0] in GROUPS[group]]
    counts: Counter[str] = Counter()
    launches = []
    for line in dict.fromkeys(run("launches", *comparisons, interprets=True).splitlines()):
        kernel = line.split(", ", 2)[1]
        counts[kernel] += 1
        if counts[kernel] <= MOST:
            launches.append(line)
    assert len(counts) > 5, counts
    assert run("compile", given="\n".join(launches)) == ""


@further_test
@pytest.mark.parametrize(("weights", "is_taken"), [("*fp32", True), ("fp32", False)])
def test_what_the_compiler_refuses_is_found(weights: str, *, is_taken: bool) -> None:
    """A number where a pointer is read."""
    pointers = {"p_outputs": "*bf16", "p_places": "*i32", "p_weights": weights, "p_residual": "*bf16", "p_out": "*bf16"}
    constants = {"WIDTH": 64, "CHOSEN": 2, "HAS_PLACES": True, "HAS_RESIDUAL": True, "BLOCK": 64, "CHAINED": False}
    arguments = tuple({**pointers, **constants}.items())
    launch = ("inference_engine.kernels.triton.experts", "_add_experts", arguments, (("num_warps", 4),))
    assert run("compile", given=repr(launch)).startswith("_add_experts") != is_taken
