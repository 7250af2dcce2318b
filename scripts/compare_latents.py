"""Methods of making a latent, side by side: what each part of it is worth, at equal bytes, from one calibration.

    python scripts/compare_latents.py --model smollm2-135m      writes results/latent_variants_<model>/<date>-<machine>/

With --calibrated-on, the default variant is made of that many tokens, too, fewer than all: what more of them gain.
Every variant is measured as KL to the model's own predictions with all entries beyond sink and window restored at once
(`laboratory/training/divergence.py`), on texts that nothing was calibrated on. With it, of the default variant: what an
entropy coder would save, and what refining by gradient gains. Through the engine, with entries leaving one after
another, `kakeya evaluate fidelity` and `kakeya evaluate restoration` measure the same codecs.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inference_engine.config import EngineConfig, ModelConfig, configure_threads_environment, forbid_model_hub

configure_threads_environment()
forbid_model_hub()

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference_engine.config import resolve
from inference_engine.errors import InvalidArgument, KakeyaError
from inference_engine.kv.archives.latent import default_bytes_per_token, latent_layers
from inference_engine.models import load_model
from kv_cache_proposer.f_theta.codec import LatentCodec
from kv_cache_proposer.f_theta.fit import fit
from kv_cache_proposer.f_theta.importance import from_projections, unweighted
from laboratory.evaluation import record
from laboratory.evaluation.haystack import KINDS
from laboratory.evaluation.models import open_target
from laboratory.training.calibration_text import gather
from laboratory.training.capture import output_projections
from laboratory.training.divergence import (
    Divergence,
    Restore,
    measure_divergence,
    nothing,
    through,
)
from laboratory.training.entropy import code_length
from laboratory.training.latent import collect
from laboratory.training.refine import STEP_SIZE, Refinement, refine
from laboratory.training.sensitivity import measure_sensitivity
from laboratory.training.taps import fit_tap_codec, fit_taps

logger = logging.getLogger(__name__)

SINK, WINDOW, GROUP_LAYERS = 4, 64, 15
SEQUENCE, BATCH, SENSITIVITY_TOKENS = 1024, 4, 512
TAPS = 6
EMBEDDING, TAPPED = "token embedding only", "taps"
DEFAULT = "sensitivity"
# Codecs of the same statistics: importances, basis, bits, quantiser.
VARIANTS = {
    DEFAULT: ("sensitivity", "fitted", "variance", "trellis"),
    "projections": ("projections", "fitted", "variance", "trellis"),
    "plain PCA": ("none", "fitted", "variance", "trellis"),
    "uniform bits": ("sensitivity", "fitted", "uniform", "trellis"),
    "no trellis": ("sensitivity", "fitted", "variance", "alone"),
    "random basis": ("sensitivity", "random", "variance", "trellis"),
}


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    model = resolve(
        ModelConfig,
        flags={"model": arguments.model, "device": arguments.device, "dtype": arguments.dtype, "latent": "none"},
    )
    try:
        payload = compare(model, arguments)
    except KakeyaError as error:
        raise SystemExit(f"error: {error}") from error
    name = f"latent_variants_{payload['config']['model']}"
    path = record.write_record(
        name,
        {"commit": arguments.commit, "command": record.command_line(without=("--results", "--commit")), **payload},
        **({"results_dir": arguments.results} if arguments.results else {}),
    )
    draw(payload["tables"]["kl"], path.parent)
    for value_name, value in payload["values"].items():
        print(f"{value_name}: {value['median']:g} {value['unit']}")
    print(path)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=ModelConfig().model, help="as for `kakeya serve`")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=75_000, help="of calibration text")
    parser.add_argument("--calibrated-on", type=int, nargs="*", default=[], metavar="N", help="of those tokens")
    parser.add_argument("--sensitivity-sequences", type=int, default=16, help=f"of {SENSITIVITY_TOKENS} tokens")
    parser.add_argument("--rates", type=int, nargs="+", help="bytes a token (default: 1/10, 1/20, 1/40 of bfloat16)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[kind for kind in KINDS if kind != "looped"])
    parser.add_argument("--texts", type=int, default=4, help="of each kind")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a text")
    parser.add_argument(
        "--variants", nargs="*", choices=(*VARIANTS, EMBEDDING, TAPPED), default=[*VARIANTS, EMBEDDING, TAPPED]
    )
    parser.add_argument("--refine-steps", type=int, default=0, help="of gradient; 0: none")
    parser.add_argument("--step-size", type=float, default=STEP_SIZE, help="of refining")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default=record.commit(), help="what runs, where there is no repository to ask")
    parser.add_argument("--results", type=Path, help="where records are kept (default: results)")
    return parser.parse_args(words)


def compare(model: ModelConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """Calibrate, make every variant, measure them. Returns the record's payload."""
    with open_target(model, EngineConfig()) as target:
        geometry = target.forward.geometry(page_tokens=16, segment_tokens=256)
        described = target.describe()
        sequence = min(SEQUENCE, geometry.trained_positions)
        own = gather(target, tokens=arguments.tokens, length=sequence, files=(), seed=arguments.seed)
        texts = {
            kind: torch.tensor(
                [target.texts.filler(kind, arguments.length, f"{arguments.seed}/{n}") for n in range(arguments.texts)]
            )
            for kind in arguments.kinds
        }
        digests = {kind: target.texts.digest(kind) for kind in arguments.kinds}
    layers = latent_layers(geometry)
    default = default_bytes_per_token(geometry)
    rates = sorted(arguments.rates or (2 * default, default, default // 2), reverse=True)
    if arguments.length <= SINK + WINDOW:
        raise InvalidArgument("length", f"must be more than {SINK + WINDOW}, got {arguments.length}")
    sequences = own.sequences(arguments.tokens, sequence)
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(arguments.seed))
    held_out = max(1, len(sequences) // 20)
    test, calibration = sequences[order[:held_out]], sequences[order[held_out:]]
    if beyond := [count for count in arguments.calibrated_on if not sequence <= count <= calibration.numel()]:
        raise InvalidArgument(
            "calibrated_on", f"must be from {sequence} to the {calibration.numel()} tokens that are read, got {beyond}"
        )
    loaded = load_model(
        model.model, cache=model.cache_path, device=model.torch_device, dtype=model.dtype, attention="sdpa"
    ).model
    variants, codec = make(loaded, calibration, layers, rates, arguments)
    values: dict[str, dict[str, Any]] = {}
    lines = report(loaded, variants, layers, texts, values)
    lengths = {
        rate: code_length(loaded, codec.at(rate), torch.split(calibration, BATCH), torch.split(test, BATCH))
        for rate in rates
    }
    for rate, one in lengths.items():
        values[f"bits an entropy coder would save, {rate} bytes"] = record.exact(one.saving, "share")
    tables = {
        "kl": lines,
        "entropy": [
            {"bytes": rate, "bits": one.packed, "ideal bits": one.ideal, "saving": one.saving}
            for rate, one in lengths.items()
        ],
    }
    if arguments.refine_steps:
        refined, reported = refined_codec(loaded, codec, calibration, test, rates, arguments)
        more = {f"refined, {rate} bytes": through(refined.at(rate)) for rate in rates}
        lines += report(loaded, more, layers, texts, values)
        values["gain of refining on text held out"] = record.exact(reported.gain, "share")
        tables["refining"] = [
            {"bytes": rate, "kl before": reported.start[rate], "kl after": reported.best[rate], "steps": reported.steps}
            for rate in reported.start
        ]
    return {
        "what": "Variants of a latent at equal bytes: KL to exact with every entry beyond sink and window restored.",
        "config": {
            **described,
            "sink": SINK,
            "window": WINDOW,
            "group_layers": GROUP_LAYERS,
            "rates": rates,
            "length": arguments.length,
            "texts": arguments.texts,
            "calibration_tokens": own.tokens(),
            "calibrated_on": calibration.numel(),
            "sensitivity_sequences": arguments.sensitivity_sequences,
            "refine_steps": arguments.refine_steps,
            "step_size": arguments.step_size,
            "texts_sha256": digests,
        },
        "seeds": [arguments.seed],
        "values": values,
        "headlines": [name for name in values if "worst kind" in name or "entropy" in name or "gain" in name],
        "baseline": "the model's own predictions; the default variant is `sensitivity`",
        "tables": tables,
    }


def make(
    model: PreTrainedModel,
    calibration: Tensor,
    layers: Sequence[int],
    rates: Sequence[int],
    arguments: argparse.Namespace,
) -> tuple[dict[str, Restore], LatentCodec]:
    """Every variant by name, and the codec of the default one."""
    batches = torch.split(calibration, BATCH)
    clock = _Clock()
    measured = measure_sensitivity(
        model,
        [calibration[: arguments.sensitivity_sequences, :SENSITIVITY_TOKENS]],
        layers=layers,
        sink=SINK,
        window=WINDOW,
        seed=arguments.seed,
    )
    clock.report("sensitivity")
    statistics = collect(model, batches, layers=layers, group_layers=GROUP_LAYERS)
    clock.report("statistics")
    importances = {
        "sensitivity": measured,
        "projections": from_projections(statistics, output_projections(model, layers=layers)),
        "none": unweighted(statistics),
    }
    variants: dict[str, Restore] = {"nothing": nothing}
    codecs: dict[str, LatentCodec] = {}
    for name, (importance, basis, bits, quantiser) in VARIANTS.items():
        if name not in (DEFAULT, *arguments.variants):
            continue
        codecs[name] = fit(
            statistics,
            importances[importance],
            bytes_per_token=rates[0],
            basis=basis,
            bits=bits,
            quantiser=quantiser,
        )
        variants |= {f"{name}, {rate} bytes": through(codecs[name].at(rate)) for rate in rates}
        clock.report(name)
    del statistics
    for count in sorted(arguments.calibrated_on):
        some = calibration[: count // calibration.shape[1]]
        fewer = collect(model, torch.split(some, BATCH), layers=layers, group_layers=GROUP_LAYERS)
        codec = fit(fewer, measured, bytes_per_token=rates[0])
        variants |= {f"{DEFAULT}, {some.numel()} tokens, {rate} bytes": through(codec.at(rate)) for rate in rates}
        del fewer
        clock.report(f"{some.numel()} tokens")
    if layers[0] == 0 and EMBEDDING in arguments.variants:
        joint = collect(model, batches, layers=layers, group_layers=len(layers))
        least = min(rates[-1], 8 * joint.shapes[0].width // 8)
        first = fit(joint, measured, bytes_per_token=least, basis="first-layer")
        variants[f"{EMBEDDING}, {least} bytes"] = through(first)
        del joint
        clock.report(EMBEDDING)
    if TAPPED not in arguments.variants:
        return variants, codecs[DEFAULT]
    count = len(layers)
    tap_layers = [layers[round(1 + place * (count - 4) / (TAPS - 1))] for place in range(TAPS)]
    taps = fit_taps(model, batches, tap_layers=tap_layers, layers=layers)
    variants[f"{TAPS} taps, uncoded"] = taps.uncoded(model)
    coded = fit_tap_codec(model, batches, taps, measured, bytes_per_token=rates[0], group_layers=GROUP_LAYERS)
    variants |= {f"{TAPS} taps, {rate} bytes": taps.through(model, coded.at(rate)) for rate in rates}
    clock.report("taps")
    return variants, codecs[DEFAULT]


def report(
    model: PreTrainedModel,
    variants: Mapping[str, Restore],
    layers: Sequence[int],
    texts: Mapping[str, Tensor],
    values: dict[str, dict[str, Any]],
) -> list[dict[str, Any]]:
    """A line for each method and kind of text; the worst kind and the mean go to `values`."""
    clock = _Clock()
    found: dict[str, dict[str, Divergence]] = {name: {} for name in variants}
    for kind, sequences in texts.items():
        for name, one in measure_divergence(
            model, sequences, variants, layers=layers, sink=SINK, window=WINDOW
        ).items():
            found[name][kind] = one
        clock.report(f"KL on {kind}")
    for name, by_kind in found.items():
        worst = max(by_kind, key=lambda kind: by_kind[kind].mean)
        values[f"KL, worst kind ({worst}), {name}"] = record.exact(by_kind[worst].mean, "nats")
        values[f"KL, mean of kinds, {name}"] = record.exact(
            sum(one.mean for one in by_kind.values()) / len(by_kind), "nats"
        )
    return [
        {"variant": name, "kind": kind, "kl": one.mean, "kl p99": one.p99, "top-1 agreement": one.agreement}
        for name, by_kind in found.items()
        for kind, one in by_kind.items()
    ]


def refined_codec(
    model: PreTrainedModel,
    codec: LatentCodec,
    calibration: Tensor,
    test: Tensor,
    rates: Sequence[int],
    arguments: argparse.Namespace,
) -> tuple[LatentCodec, Refinement]:
    clock = _Clock()
    short = [part.reshape(-1, part.shape[1] // 2) for part in (calibration, test)]
    refined, reported = refine(
        model,
        codec,
        short[0],
        short[1][:8],
        rates=rates,
        steps=arguments.refine_steps,
        sink=SINK,
        window=WINDOW,
        step_size=arguments.step_size,
        seed=arguments.seed,
    )
    clock.report(f"refining: {reported}")
    return refined, reported


def draw(lines: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """KL over bytes a token, the mean of all kinds of text: a line for each method of making a latent."""

    found: dict[str, dict[int, list[float]]] = {}
    for line in lines:
        variant, _, size = str(line["variant"]).rpartition(", ")
        if size.endswith(" bytes"):
            found.setdefault(variant, {}).setdefault(int(size.removesuffix(" bytes")), []).append(line["kl"])
    courses = {
        variant: (sorted(by_bytes), [sum(by_bytes[size]) / len(by_bytes[size]) for size in sorted(by_bytes)])
        for variant, by_bytes in found.items()
    }
    record.plot_lines(
        folder / "kl.png",
        title="KL with every old entry restored",
        x_label="bytes a token",
        y_label="nats a token, mean of kinds",
        lines=courses,
        is_log=True,
    )


class _Clock:
    """Says how long things took."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def report(self, what: str) -> None:
        now = time.perf_counter()
        logger.info("%.1f s: %s", now - self._since, what)
        self._since = now


if __name__ == "__main__":
    main()
