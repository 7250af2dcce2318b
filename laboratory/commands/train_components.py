"""`kakeya train components`: calibrate the directions by which `gather` chooses what to read, in seconds.

kakeya train components                      for the default model, into the cache, where `kakeya serve` finds them
kakeya train components --text notes/*.md    with text like that of the sessions to come
"""

from __future__ import annotations

import argparse
import time
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
_TOKENS = 16_384


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    components = commands.add_parser(
        "components",
        help="the directions of keys by which gather chooses what to read; takes about a minute",
        description="Runs the model over text and works out the leading components of its keys before rotation.",
    )
    add_config_file(components)
    components.add_argument(
        "--tokens", type=int, default=_TOKENS, metavar="N", help=f"of calibration text (default: {_TOKENS})"
    )
    components.add_argument(
        "--text", nargs="+", type=Path, default=[], metavar="FILE", help="calibration text of your own"
    )
    components.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of text")
    components.add_argument("--commit", metavar="HASH", help="where there is no repository to ask")
    add_settings(components, ModelConfig)
    components.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Calibrate and save. Raises KakeyaError; nothing is written then."""
    if args.tokens < 2 * _SEQUENCE:
        raise ConfigError(f"--tokens must be at least {2 * _SEQUENCE}, got {args.tokens}")
    model = settings(args, ModelConfig)
    configure_threads_environment()
    forbid_model_hub()
    console = Console(stderr=True)

    from inference_engine.models import check_model, tokenizer_folder, weights_digest
    from laboratory.evaluation.record import running_commit

    commit = running_commit(args.commit)
    checked = check_model(model.model, cache=model.cache_path)

    # They import torch, which a model that is not there does not wait for.
    from inference_engine.compose import components_folder, open_backend
    from kv_cache_proposer.components import save_components
    from kv_cache_proposer.stored import CalibrationManifest
    from laboratory.evaluation.models import load_tokenizer
    from laboratory.training.calibration_text import gather_plain
    from laboratory.training.components import fit_components

    folder = writable(components_folder(checked.model_id, model.cache_path), "--cache-dir")
    with console.status("reading text"):
        tokenizer: Any = load_tokenizer(tokenizer_folder(model.model, model.cache_path))
        text = gather_plain(tokenizer, tokens=args.tokens, files=args.text, seed=args.seed)
    forward = open_backend(model)
    length = min(_SEQUENCE, forward.facts.trained_positions)
    sequences = text.sequences(args.tokens, length)
    began = time.monotonic()
    with Progress(console=console) as progress:
        task = progress.add_task(f"prefilling {sequences.numel():,} tokens", total=sequences.numel())
        components = fit_components(forward, sequences, advance=partial(progress.advance, task))
    manifest = CalibrationManifest(
        target_digest=weights_digest(checked),
        calibration_tokens=sequences.numel(),
        recipe={"tokens": text.tokens(), "own_text": bool(args.text)},
        seeds={"text": args.seed},
        commit=commit,
    )
    save_components(components, folder, manifest)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: components of {len(components)} layers, {decimal(size)}, in {time.monotonic() - began:.0f} s")
    return 0
