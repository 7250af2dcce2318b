"""Error, bytes and time of every K/V compressor on a model's own keys and values.

    python scripts/bench_codecs.py --model smollm2-135m      writes results/codec_error_<model>/<date>-<machine>/

Keys are taken before rotation, as the engine codes them, from texts that ship with Python. Each compressor codes them
as they are, less each channel's mean over the first entries of the same text (which a session can find by itself), and
less the mean over other texts (which needs a calibration). The error is the squared length of what is lost as a share
of the squared length of the vector, averaged over layers; a sample is one text. Positions that any mean was taken from
are not counted. Times are taken beside int8's, in the same round.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pydoc_data.topics
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_engine.config import ModelConfig, configure_threads_environment, forbid_model_hub

configure_threads_environment()
forbid_model_hub()

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from inference_engine.config import resolve
from inference_engine.errors import InvalidArgument, ModelError
from inference_engine.kv.compressor import KVCompressor
from inference_engine.kv.compressors import compressor_names, make_compressor
from inference_engine.models import load_model, tokenizer_folder
from laboratory.evaluation import record

SEED = 1
SINK, FIRST = 4, 256  # the session's mean is over positions from SINK to FIRST
MEASURED = ("topics", "argparse", "difflib", "tarfile")  # prose, then code
CALIBRATION = ("more topics", "typing", "statistics")
CENTRES = ("nothing", "own mean", "calibrated mean")
BASELINE = "int8"


@dataclass(frozen=True, slots=True)
class Captured:
    """Keys and values of one text, a tensor [S, Hkv, D] for each layer."""

    keys: list[Tensor]
    values: list[Tensor]


def text_of(name: str) -> str:
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    if name == "topics":
        return "\n".join(topics[::2])
    if name == "more topics":
        return "\n".join(topics[1::2])
    return inspect.getsource(importlib.import_module(name))


def capture(model: PreTrainedModel, ids: list[int]) -> Captured:
    """Run the model over `ids` and keep what its key and value layers put out, keys normalised but not rotated."""
    captured = Captured([], [])
    hooks = []
    for layer in model.modules():
        if hasattr(layer, "k_proj") and hasattr(layer, "v_proj"):
            head_dim = layer.head_dim
            key_source, value_source = (
                getattr(layer, f"{kind}_norm", None) or getattr(layer, f"{kind}_proj") for kind in "kv"
            )
            hooks.append(key_source.register_forward_hook(_keep(captured.keys, len(ids), head_dim)))
            hooks.append(value_source.register_forward_hook(_keep(captured.values, len(ids), head_dim)))
    if not hooks:
        raise ModelError(f"{type(model).__name__} has no layers named k_proj and v_proj to take keys and values from")
    try:
        with torch.inference_mode():
            model(input_ids=torch.tensor([ids], device=model.device), use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return captured


def _keep(kept: list[Tensor], length: int, head_dim: int) -> Callable[[nn.Module, Any, Tensor], None]:
    def keep(_layer: nn.Module, _given: Any, out: Tensor) -> None:
        vectors = out[0].float()
        if vectors.dim() == 2:
            vectors = vectors.view(length, -1, head_dim)
        kept.append(vectors if vectors.shape[0] == length else vectors.transpose(0, 1))

    return keep


def centres_of(states: list[Tensor], calibrated: list[Tensor]) -> dict[str, list[Tensor]]:
    """What is taken off before coding, for each layer: [Hkv, D]."""
    own = [layer[SINK:FIRST].mean(dim=0) for layer in states]
    return dict(zip(CENTRES, ([torch.zeros_like(mean) for mean in own], own, calibrated), strict=True))


def calibrated_means(texts: Iterable[Captured], kind: str) -> list[Tensor]:
    """[Hkv, D] for each layer, over all positions but the first few of each text."""
    layers = zip(*(getattr(text, kind) for text in texts), strict=True)
    return [torch.cat([states[SINK:] for states in layer]).mean(dim=0) for layer in layers]


def relative_error(compressor: KVCompressor, states: list[Tensor], centres: list[Tensor], stride: int) -> float:
    shares = []
    for layer, centre in zip(states, centres, strict=True):
        vectors = layer[FIRST::stride]
        decoded = compressor.decode(compressor.encode(vectors - centre), vectors.shape[-1]) + centre
        shares.append((decoded - vectors).square().sum() / vectors.square().sum())
    return float(torch.stack(shares).mean())


def errors_of(
    compressors: Iterable[KVCompressor], texts: Iterable[Captured], calibration: list[Captured], stride: int
) -> dict[tuple[str, str, str], list[float]]:
    """Samples by (K or V, codec, what was taken off)."""
    errors: dict[tuple[str, str, str], list[float]] = {}
    means = {kind: calibrated_means(calibration, kind) for kind in ("keys", "values")}
    for text in texts:
        for letter, kind in (("K", "keys"), ("V", "values")):
            states = getattr(text, kind)
            for centre, taken in centres_of(states, means[kind]).items():
                for compressor in compressors:
                    error = relative_error(compressor, states, taken, stride)
                    errors.setdefault((letter, compressor.name, centre), []).append(error)
    return errors


def times_of(
    compressors: Iterable[KVCompressor], head_dim: int, count: int, rounds: int, device: str
) -> dict[str, Any]:
    """Microseconds a vector of int8, and every other's time as a multiple of it, in one round."""
    vectors = torch.randn(count, head_dim, generator=torch.Generator().manual_seed(SEED)).to(device)
    baseline = make_compressor(BASELINE)
    samples: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):  # the first round warms up
        reference = seconds_of(baseline, vectors)
        for compressor in compressors:
            for verb, seconds in seconds_of(compressor, vectors).items():
                if number:
                    samples.setdefault((verb, compressor.name), []).append(seconds / reference[verb])
        for verb, seconds in reference.items():
            if number:
                samples.setdefault((verb, ""), []).append(seconds / count * 1e6)
    return {
        f"{verb} time, {name} ÷ {BASELINE}" if name else f"{verb} time of {BASELINE}, a vector": record.summarize(
            taken, "ratio" if name else "microseconds"
        )
        for (verb, name), taken in samples.items()
    }


def seconds_of(compressor: KVCompressor, vectors: Tensor) -> dict[str, float]:
    """What this thread spends, so that neighbours on a busy machine count for less; on a GPU, the time that passes."""
    clock = time.thread_time if vectors.device.type == "cpu" else _device_clock
    began = clock()
    codes = compressor.encode(vectors)
    between = clock()
    compressor.decode(codes, vectors.shape[-1])
    return {"encode": between - began, "decode": clock() - between}


def _device_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def bytes_per_token(compressor: KVCompressor, text: Captured) -> int:
    return sum(states.shape[1] * compressor.vector_bytes(states.shape[2]) for states in (*text.keys, *text.values))


def family_of(codec: str) -> str:
    """`int8g32` -> `intg`"""
    return re.sub(r"\d+", "", codec)


def plot(path: Path, title: str, values: Mapping[str, Mapping[str, Any]], codecs: Iterable[str], centre: str) -> None:
    """Error over bytes, keys and values apart, a line for each family of codecs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    for letter, axes in zip("KV", figure.subplots(1, 2, sharey=True), strict=True):
        families: dict[str, list[tuple[float, float, str]]] = {}
        for codec in codecs:
            error = values[f"{letter} error, {codec}, less {centre}"]["median"]
            if codec not in ("identity", "bfloat16"):  # so far out that all others would lie on one point
                point = (values[f"bytes a token, {codec}"]["median"], error, codec)
                families.setdefault(family_of(codec), []).append(point)
        for family, points in families.items():
            xs, ys, names = zip(*sorted(points), strict=True)
            axes.plot(xs, ys, marker="o", markersize=3, linewidth=1, label=family)
            for x, y, name in zip(xs, ys, names, strict=True):
                axes.annotate(name, (x, y), fontsize=6, xytext=(3, 3), textcoords="offset points")
        axes.set(title=f"{letter}, less {centre}", xlabel="bytes a token", ylabel="relative squared error")
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    record.save_figure(figure, path)


def fitting(head_dims: set[int]) -> tuple[list[KVCompressor], list[str]]:
    """All compressors that take these head sizes, and the names of the others."""
    taken, refused = [], []
    for compressor in map(make_compressor, compressor_names()):
        try:
            for head_dim in head_dims:
                compressor.check(head_dim)
            taken.append(compressor)
        except InvalidArgument:
            refused.append(compressor.name)
    return taken, refused


def main() -> None:
    parser = argparse.ArgumentParser(description="Error, bytes and time of every K/V compressor.")
    parser.add_argument("--model", default=None)
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1024, help="of each text")
    parser.add_argument("--stride", type=int, default=4, help="count every stride-th position")
    parser.add_argument("--vectors", type=int, default=8192, help="coded at once when times are taken")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--commit", default=record.commit(), help="what runs, where there is no repository to ask")
    arguments = parser.parse_args()
    if arguments.tokens <= FIRST:
        parser.error(f"--tokens must be above {FIRST}, which the means are taken from, got {arguments.tokens}")
    torch.set_num_threads(arguments.threads)
    config = resolve(ModelConfig, {"model": arguments.model, "device": arguments.device, "dtype": arguments.dtype})
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(config.model, config.cache_path))
    loaded = load_model(
        config.model, cache=config.cache_path, device=config.torch_device, dtype=config.dtype, attention="sdpa"
    )

    def captured(name: str) -> Captured:
        ids = tokenizer(text_of(name), add_special_tokens=False).input_ids[: arguments.tokens]
        assert len(ids) == arguments.tokens, f"{name} has {len(ids)} tokens, fewer than {arguments.tokens}"
        return capture(loaded.model, ids)

    texts = [captured(name) for name in MEASURED]
    calibration = [captured(name) for name in CALIBRATION]
    head_dims = {states.shape[-1] for states in texts[0].keys}
    compressors, refused = fitting(head_dims)
    errors = errors_of(compressors, texts, calibration, arguments.stride)
    values = {
        f"bytes a token, {compressor.name}": record.exact(bytes_per_token(compressor, texts[0]), "bytes")
        for compressor in compressors
    }
    values |= {
        f"{letter} error, {codec}, less {centre}": record.summarize(samples, "share of the squared length")
        for (letter, codec, centre), samples in errors.items()
    }
    values |= times_of(compressors, max(head_dims), arguments.vectors, arguments.rounds, config.torch_device)
    path = record.write_record(
        f"codec_error_{loaded.model_id}",
        {
            "command": record.command_line(),
            "commit": arguments.commit,
            "config": {
                "model": loaded.model_id,
                "weights_sha256": loaded.weights_sha256,
                "device": torch.cuda.get_device_name() if config.device.startswith("cuda") else config.device,
                "dtype": config.dtype,
                "threads": torch.get_num_threads(),
                "head_dims": sorted(head_dims),
                "texts": list(MEASURED),
                "calibration_texts": list(CALIBRATION),
                "tokens_per_text": arguments.tokens,
                "counted": f"every position {arguments.stride} apart from {FIRST} on",
                "own_mean": f"positions {SINK} to {FIRST - 1} of the same text",
                "vectors_timed": arguments.vectors,
                "rounds": arguments.rounds,
            },
            "seeds": [SEED],
            "values": values,
            "baseline": f"bfloat16 vectors for bytes and error, {BASELINE} for time",
            "codecs_that_do_not_fit": refused,
        },
    )
    names = [compressor.name for compressor in compressors]
    title = f"K/V compressors on {loaded.model_id}, unrotated keys"
    plot(path.with_name("error_over_bytes.png"), title, values, names, "own mean")
    print_table(values, names)
    print(path.relative_to(record.ROOT))


def print_table(values: Mapping[str, Mapping[str, Any]], codecs: Iterable[str]) -> None:
    heads = [f"{letter} less {centre}" for letter in "KV" for centre in CENTRES]
    print(" | ".join(("codec", "bytes a token", *heads, "encode", "decode")))
    for codec in sorted(codecs, key=lambda name: float(values[f"bytes a token, {name}"]["median"])):
        cells = [codec, f"{values[f'bytes a token, {codec}']['median']}"]
        cells += [
            f"{values[f'{letter} error, {codec}, less {centre}']['median']:.3g}"
            for letter in "KV"
            for centre in CENTRES
        ]
        cells += [f"{values[f'{verb} time, {codec} ÷ {BASELINE}']['median']:.2f}" for verb in ("encode", "decode")]
        print(" | ".join(cells))


if __name__ == "__main__":
    main()
