"""Greedy output against transformers' own `generate` on the real model, strategy full.

    python scripts/evaluate_greedy.py                  writes results/greedy/<date>-<machine>/
    python scripts/evaluate_greedy.py --device mlx     writes results/greedy_mlx/…; torch runs the other side on the CPU

Prompts are stretches of the Python documentation that ships with Python, of different lengths. Where two runs part, the
margin between the two likeliest tokens there is reported: below 1e-3 it is a near-tie that rounding may decide.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass, replace

from inference_engine.config import ModelConfig, configure_threads_environment, forbid_model_hub

configure_threads_environment()
forbid_model_hub()

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from inference_engine.compose import open_backend
from inference_engine.config import EngineConfig, resolve
from inference_engine.engine import Engine
from inference_engine.models import load_model, tokenizer_folder
from inference_engine.types import GenerateParams, TokenCommitted
from laboratory.evaluation import record

NEAR_TIE = 1e-3
LENGTHS = (20, 60, 150, 300, 600)


@dataclass(frozen=True, slots=True)
class Comparison:
    """margin: of transformers' two likeliest tokens where the runs parted; None: they did not."""

    prompt_tokens: int
    margin: float | None

    @property
    def is_equal(self) -> bool:
        return self.margin is None


def prompts(tokenizer: PreTrainedTokenizerBase, count: int) -> Iterator[list[int]]:
    """`count` stretches of documentation, by turns of each length."""
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > 4000]
    for number in range(count):
        ids: list[int] = tokenizer(topics[number % len(topics)], add_special_tokens=False).input_ids
        yield ids[: LENGTHS[number % len(LENGTHS)]]


def compare(engine: Engine, model: PreTrainedModel, prompt: list[int], count: int) -> Comparison:
    session = engine.create_session(limit_tokens=len(prompt) + count, guaranteed=True).session_id
    engine.append(session, prompt)
    events = engine.generate(session, GenerateParams(max_tokens=count))
    ours = [event.token_id for event in events if isinstance(event, TokenCommitted)]
    engine.close_session(session)
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
    theirs = out.sequences[0, len(prompt) :].tolist()
    for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            best = out.logits[place][0].float().topk(2).values
            return Comparison(len(prompt), float(best[0] - best[1]))
    return Comparison(len(prompt), None)


def main() -> None:
    parser = argparse.ArgumentParser(description="Greedy output against transformers' generate.")
    parser.add_argument("--model", default=None)
    parser.add_argument("--device", default=None)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    config = resolve(ModelConfig, {"model": arguments.model, "device": arguments.device})
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(config.model, config.cache_path))
    theirs = load_model(config.model, cache=config.cache_path, device=config.torch_device, attention="sdpa")
    found: dict[str, list[Comparison]] = {}
    forward = open_backend(config)
    forwards = [forward]
    if config.device != "mlx":  # which refuses the other
        forwards.append(open_backend(replace(config, determinism="batch-invariant")))
    for each in forwards:
        with Engine(each, EngineConfig(kv_bytes=2**29)) as engine:
            found[each.facts.mode.value] = [
                compare(engine, theirs.model, prompt, arguments.tokens)
                for prompt in prompts(tokenizer, arguments.prompts)
            ]
    values = {}
    for mode_name, comparisons in found.items():
        parted = [comparison for comparison in comparisons if not comparison.is_equal]
        near = sum(comparison.margin is not None and comparison.margin < NEAR_TIE for comparison in parted)
        values[f"prompts with equal output, {mode_name}"] = record.exact(len(comparisons) - len(parted), "prompts")
        values[f"prompts that part at a near-tie, {mode_name}"] = record.exact(near, "prompts")
        values[f"prompts that part elsewhere, {mode_name}"] = record.exact(len(parted) - near, "prompts")
    kind = config.device.partition(":")[0]
    packages = ("torch", "transformers", *(("mlx",) if kind == "mlx" else ()))
    path = record.write_record(
        "greedy" if kind == "cpu" else f"greedy_{kind}",
        {
            "command": record.command_line(),
            "machine": record.describe_machine(packages),
            "config": {
                "model": theirs.model_id,
                "weights_sha256": theirs.weights_sha256,
                "device": config.device,
                "backend": f"{forward.facts.backend} {forward.facts.numerics}".strip(),
                "prompts": arguments.prompts,
                "tokens": arguments.tokens,
                "near_tie": NEAR_TIE,
            },
            "seeds": [],
            "values": values,
            "baseline": "transformers generate(), do_sample=False",
        },
    )
    for name, value in values.items():
        print(f"{name}: {value['median']} of {arguments.prompts}")
    print(path.relative_to(record.ROOT))


if __name__ == "__main__":
    main()
