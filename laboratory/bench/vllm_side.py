"""vLLM's side of `kakeya bench gpu-vllm`, for the Python that has vLLM: it imports nothing of this project.

A line of standard input is a command in JSON, a line of standard output its answer; whatever vLLM prints goes to the
log. vLLM keeps its prefix cache, so a session's history is computed once here, too; it is given all ids at each call.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

FEW = 8  # tokens whose time is subtracted, with that of prompts in the prefix cache


def draw_weights(worker: Any) -> int:
    """As the other side's: normal, 0.02; norms are ones. What is quantised stays as vLLM's dummies are."""
    import torch

    model = worker.model_runner.model
    generator = torch.Generator(next(model.parameters()).device).manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dtype in (torch.bfloat16, torch.float32):
                parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.02, generator=generator)
    return sum(each.numel() for each in model.parameters())


class Side:
    """histories: of the sessions that are open, with the answers to their turns."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import vllm
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._params, self._kinds = SamplingParams, RequestOutputKind
        began = time.perf_counter()
        self._llm = LLM(skip_tokenizer_init=True, load_format="dummy", seed=0, disable_log_stats=True, **settings)
        numbers = self._llm.collective_rpc(draw_weights)[0]
        config = self._llm.llm_engine.vllm_config
        self.facts = {
            "version": vllm.__version__,
            "numbers": numbers,
            "start seconds": round(time.perf_counter() - began, 1),
            "tokens of a step": config.scheduler_config.max_num_batched_tokens,
            "async scheduling": config.scheduler_config.async_scheduling,
            "graphs": str(config.compilation_config.cudagraph_mode),
            "graphs up to, tokens": max(config.compilation_config.cudagraph_capture_sizes or [0]),
            "block": config.cache_config.block_size,
        }
        self._histories: list[list[int]] = []
        self._asked = 0

    def open(self, prompts: list[list[int]]) -> float:
        self._histories = [list(each) for each in prompts]
        return self._generate(self._histories, 1)[0]

    def decode(self, tokens: int) -> float:
        """Milliseconds of a step that gives every session its next token."""
        short = self._generate(self._histories, FEW)[0]
        return 1e3 * (self._generate(self._histories, FEW + tokens)[0] - short) / tokens

    def prefill(self, ids: list[int]) -> float:
        """Seconds to the first token."""
        return self._generate([ids], 1)[0]

    def turn(self, ids: list[list[int]], tokens: int) -> dict[str, float]:
        """Append to every session and generate: milliseconds until the last of them has its tokens."""
        asked = [history + new for history, new in zip(self._histories, ids, strict=True)]
        seconds, outputs = self._generate(asked, tokens)
        self._histories = [
            before + list(output.outputs[0].token_ids) for before, output in zip(asked, outputs, strict=True)
        ]
        prefilled = sum(len(each) - (out.num_cached_tokens or 0) for each, out in zip(asked, outputs, strict=True))
        return {"ms": 1e3 * seconds, "prefilled": prefilled / len(asked)}

    def beside(self, ids: list[int], most: int) -> float:
        """Milliseconds to the first token of the first session's turn, beside the others, which decode."""
        engine = self._llm.llm_engine
        others = [self._add(history, most) for history in self._histories[1:]]
        decoding: set[str] = set()
        while len(decoding) < len(others):
            decoding |= {out.request_id for out in engine.step() if out.outputs[0].token_ids}
        began = time.perf_counter()
        asked = self._add(self._histories[0] + ids, 1)
        while not any(out.request_id == asked for out in engine.step()):
            pass
        taken = 1e3 * (time.perf_counter() - began)
        engine.abort_request(others)
        while engine.has_unfinished_requests():
            engine.step()
        return taken

    def close(self) -> None:
        self._histories = []

    def _add(self, prompt: list[int], tokens: int) -> str:
        self._asked += 1
        name = f"beside-{self._asked}"
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, self._greedy(tokens, streams=True))
        return name

    def _generate(self, prompts: list[list[int]], tokens: int) -> tuple[float, Any]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        outputs = self._llm.generate(asked, self._greedy(tokens), use_tqdm=False)
        seconds = time.perf_counter() - began
        if any(len(each.outputs[0].token_ids) != tokens for each in outputs):
            raise RuntimeError(f"not all of {len(prompts)} sessions got {tokens} tokens")
        return seconds, outputs

    def _greedy(self, tokens: int, *, streams: bool = False) -> Any:
        kind = self._kinds.DELTA if streams else self._kinds.FINAL_ONLY
        return self._params(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=kind)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answered(made: Any) -> Any:
        try:
            found = made()
        except Exception as error:  # noqa: BLE001  # the other side goes on without this row
            traceback.print_exc()
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:400]}) + "\n")
            return None
        answers.write(json.dumps({"answer": found.facts if isinstance(found, Side) else found}) + "\n")
        return found

    side = answered(lambda: Side(json.loads(sys.stdin.readline())))
    if side is None:
        raise SystemExit(1)
    for line in sys.stdin:
        command = json.loads(line)
        answered(lambda command=command: getattr(side, command.pop("do"))(**command))


if __name__ == "__main__":
    main()
