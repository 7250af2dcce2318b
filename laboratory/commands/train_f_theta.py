"""`kakeya train f-theta`: fit f_theta, which restores evicted K and V from what the drafter reads of a token.

kakeya train f-theta                          of the default model's trained drafter, into the cache
kakeya train f-theta --text notes/*.md        with text like that of the sessions to come

A server that drafts with that drafter then has sessions with `restored:source=drafter`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress

from inference_engine.cli.settings import add_config_file, add_settings, settings
from inference_engine.config import ModelConfig, configure_threads_environment, forbid_model_hub, writable
from inference_engine.errors import ConfigError

_SEQUENCE = 1024
_TOKENS, _SENSITIVITY_SEQUENCES, _GROUP_LAYERS = 32_768, 8, 15
_SHRINKAGE = 0.3  # as `train latent --quick`, which measures importances on as many sequences
# Entries further back than this count as restored when it is measured where their errors are felt.
_FELT_TOKENS, _SINK, _WINDOW = 512, 4, 64
_BATCH_SEQUENCES, _DIVERGENCE_SEQUENCES = 4, 2


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    f_theta = commands.add_parser(
        "f-theta",
        help="the map from what the drafter reads of a token to its K and V; takes minutes",
        description="Runs the model over text, measures where errors are felt, and fits K and V of all layers to the "
        "hidden states that the drafter reads.",
    )
    add_config_file(f_theta)
    f_theta.add_argument(
        "--tokens", type=int, default=_TOKENS, metavar="N", help=f"of calibration text (default: {_TOKENS})"
    )
    f_theta.add_argument(
        "--bytes-per-token",
        type=int,
        metavar="N",
        help="the most that sessions can ask for; they may ask for less (default: a tenth of the entries in bfloat16)",
    )
    f_theta.add_argument(
        "--group-layers",
        type=int,
        default=_GROUP_LAYERS,
        metavar="N",
        help=f"layers that share numbers (default: {_GROUP_LAYERS})",
    )
    f_theta.add_argument(
        "--sensitivity-sequences",
        type=int,
        default=_SENSITIVITY_SEQUENCES,
        metavar="N",
        help=f"of {_FELT_TOKENS} tokens, to measure by gradient where errors are felt "
        f"(default: {_SENSITIVITY_SEQUENCES}); 0: errors count everywhere alike",
    )
    f_theta.add_argument(
        "--text", nargs="+", type=Path, default=[], metavar="FILE", help="calibration text of your own"
    )
    f_theta.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of text")
    f_theta.add_argument("--commit", metavar="HASH", help="where there is no repository to ask")
    add_settings(f_theta, ModelConfig)
    f_theta.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fit, measure on other text, beside controls, and save. Raises KakeyaError; nothing is written then."""
    for name, floor in (
        ("tokens", 2 * _SEQUENCE),
        ("bytes_per_token", 1),
        ("group_layers", 1),
        ("sensitivity_sequences", 0),
    ):
        if (given := getattr(args, name)) is not None and given < floor:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {floor}, got {given}")
    model = settings(args, ModelConfig)
    if model.drafter == "auto":
        model = replace(model, drafter="trained")
    configure_threads_environment()
    forbid_model_hub()
    console = Console(stderr=True)

    from inference_engine.models import check_model, load_model, tokenizer_folder, weights_digest
    from laboratory.evaluation.record import running_commit

    commit = running_commit(args.commit)
    checked = check_model(model.model, cache=model.cache_path)

    # They import torch, which a model that is not there does not wait for.
    import torch

    from inference_engine.compose import drafter_digest, f_theta_folder, find_drafter, open_backend
    from inference_engine.kv.archives.latent import default_bytes_per_token, latent_layers
    from kv_cache_proposer.drafter_errors import DrafterError
    from kv_cache_proposer.f_theta.tap_codec_files import save_tap_codec
    from kv_cache_proposer.stored import CalibrationManifest
    from laboratory.evaluation.models import load_tokenizer
    from laboratory.training.calibration_text import gather_plain
    from laboratory.training.capture import require_stored_keys
    from laboratory.training.divergence import measure_divergence, nothing
    from laboratory.training.f_theta import calibrate_taps, from_taps, with_random_map
    from laboratory.training.sensitivity import measure_sensitivity

    folder = writable(f_theta_folder(checked.model_id, model.cache_path), "--cache-dir")
    forward = open_backend(model)
    drafter = find_drafter(model, forward)
    if drafter is None or not drafter.tap_layers:
        raise DrafterError(f"drafter={model.drafter} reads no hidden states; name one that does, or `trained`")
    geometry = forward.geometry(page_tokens=16, segment_tokens=256)
    layers = latent_layers(geometry)
    loaded = load_model(
        model.model,
        cache=model.cache_path,
        device=model.torch_device,
        dtype="float32" if model.dtype == "float16" else model.dtype,
        attention="sdpa",
        unpacks_groups=True,
    )
    require_stored_keys(loaded.model, layers=layers)
    tokenizer: Any = load_tokenizer(tokenizer_folder(model.model, model.cache_path))
    text = gather_plain(tokenizer, tokens=args.tokens, files=args.text, seed=args.seed)
    sequences = text.sequences(args.tokens, min(_SEQUENCE, geometry.trained_positions))
    held_out = max(1, min(_DIVERGENCE_SEQUENCES, len(sequences) // 2))
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(args.seed))
    test, calibration = sequences[order[:held_out]], sequences[order[held_out:]]
    length = min(_FELT_TOKENS, sequences.shape[1])
    began = time.monotonic()
    with Progress(console=console) as progress:
        importances = None
        if args.sensitivity_sequences:
            some = calibration[: args.sensitivity_sequences, :length]
            task = progress.add_task("measuring where errors are felt", total=some.numel())
            importances = measure_sensitivity(
                loaded.model,
                [some],
                layers=layers,
                sink=_SINK,
                window=_WINDOW,
                seed=args.seed,
                advance=partial(progress.advance, task),
            )
        task = progress.add_task("reading", total=calibration.numel())
        codec = calibrate_taps(
            loaded.model,
            torch.split(calibration, _BATCH_SEQUENCES),
            tap_layers=drafter.tap_layers,
            layers=layers,
            bytes_per_token=args.bytes_per_token or 2 * default_bytes_per_token(geometry),
            group_layers=args.group_layers,
            importances=importances,
            kernels=model.kernels,
            shrinkage=_SHRINKAGE,
            advance=partial(progress.advance, task),
        )
        rates = [
            rate for rate in (codec.bytes_per_token, codec.bytes_per_token // 2) if rate >= codec.least_bytes_per_token
        ]
        variants = {f"{rate} bytes a token": from_taps(loaded.model, codec.at(rate)) for rate in rates}
        controls = {
            "a random f_theta": from_taps(loaded.model, with_random_map(codec, args.seed)),
            "taps of another text": from_taps(loaded.model, codec, of=calibration[0]),
            "nothing of it": nothing,
        }
        far = [ids[:length] for ids in test]
        task = progress.add_task("measuring on text held out", total=sum(map(len, far)))
        kl = measure_divergence(
            loaded.model,
            far,
            {**variants, **controls},
            layers=layers,
            sink=_SINK,
            window=min(_WINDOW, length // 2),
            advance=partial(progress.advance, task),
        )
    manifest = CalibrationManifest(
        target_digest=weights_digest(checked),
        calibration_tokens=calibration.numel(),
        recipe={
            "group_layers": args.group_layers,
            "tokens": text.tokens(),
            "own_text": bool(args.text),
            "shrinkage": _SHRINKAGE,
            "sensitivity_sequences": args.sensitivity_sequences,
        },
        seeds={"text": args.seed},
        commit=commit,
        metrics={name: one.mean for name, one in kl.items()},
    )
    save_tap_codec(codec, folder, manifest, drafter_digest=drafter_digest(model, forward))
    print(
        f"{folder}: {codec.bytes_per_token} bytes a token for {len(layers)} layers, from hidden states of layers "
        f"{', '.join(map(str, drafter.tap_layers))}; {decimal(codec.shared_bytes)} shared by all sessions"
    )
    measured = ", ".join(f"{one.mean:.2g} with {name}" for name, one in kl.items())
    print(f"KL to the model's own predictions beyond a window of {_WINDOW}, on text held out: {measured}")
    print(f"fitted in {time.monotonic() - began:.0f} s; a server with --drafter {model.drafter} now has source drafter")
    return 0
