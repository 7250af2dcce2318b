"""Error, bytes and time of every K/V compressor on a model's own keys and values.

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
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from inference_engine.errors import ConfigError, InvalidArgument, ModelError
from inference_engine.kv.compressor import KVCompressor
from inference_engine.kv.compressors import compressor_names, make_compressor
from inference_engine.models import load_model, tokenizer_folder
from laboratory.bench.experiments import Save
from laboratory.bench.shared import add_model, device_name, model_config
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


def fitting(head_dims: set[int]) -> tuple[list[KVCompressor], dict[str, str]]:
    """All compressors that take these head sizes, and why the others do not."""
    taken, refused = [], {}
    for compressor in map(make_compressor, compressor_names()):
        try:
            for head_dim in head_dims:
                compressor.check(head_dim)
            taken.append(compressor)
        except InvalidArgument as error:
            refused[compressor.name] = str(error)
    return taken, refused


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "model", "device", "dtype", "threads")
    parser.add_argument("--tokens", type=int, default=1024, metavar="N", help="of each text")
    parser.add_argument("--stride", type=int, default=4, metavar="N", help="count every stride-th position")
    parser.add_argument("--vectors", type=int, default=8192, metavar="N", help="coded at once when times are taken")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")


def main(arguments: argparse.Namespace, _save: Save) -> dict[str, Any]:
    if arguments.tokens <= FIRST:
        raise ConfigError(f"--tokens must be above {FIRST}, which the means are taken from, got {arguments.tokens}")
    torch.set_num_threads(arguments.threads or 1)
    config = model_config(arguments)
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
    return {
        "experiment": f"codec_error_{loaded.model_id}",
        "config": {
            "model": loaded.model_id,
            "weights_sha256": loaded.weights_sha256,
            "device": device_name(config.device),
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
        "left_out": refused,
        "baseline": f"bfloat16 vectors for bytes and error, {BASELINE} for time",
    }
