"""`kakeya train recall`: a small model that recalls what it was given, from nothing, in minutes on a GPU.

kakeya train recall FOLDER --device cuda                 a decoder of Qwen3's layers
kakeya train recall FOLDER --device cuda --hybrid        with states in three of four layers, as Qwen3.5
kakeya evaluate ladder --model FOLDER
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from inference_engine.config import configure_threads_environment, forbid_model_hub, writable
from inference_engine.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from laboratory.training.recall import Reading

_REPORTED_SECONDS = 5.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    recall = commands.add_parser(
        "recall",
        help="a small model that finds facts in 100,000 tokens, from nothing; minutes on a GPU",
        description="Trains a model of 11 million parameters to recall what stands in its text, and nothing else.",
    )
    recall.add_argument("folder", type=Path, help="to be made; its last part names the model in records")
    recall.add_argument("--hybrid", action="store_true", help="layers of Qwen3.5 in place of Qwen3's")
    recall.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="to train on (default: cuda)")
    recall.add_argument("--seconds", type=float, default=180.0, metavar="S", help="of training (default: 180)")
    recall.add_argument("--rate", type=float, metavar="R", help="of the matrices' learning")
    recall.add_argument("--layers", type=int, metavar="N", help="default: 14, of a hybrid 12")
    recall.add_argument("--hidden", type=int, default=256, metavar="N", help="width of the model (default: 256)")
    recall.add_argument("--heads", type=int, default=4, metavar="N", help="that share half as many of K and V")
    recall.add_argument("--most", type=int, metavar="N", help="ids of the longest rows (default: all positions)")
    recall.add_argument("--batch", type=int, default=2**16, metavar="N", help="ids of a step, at least a row")
    recall.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and rows")
    recall.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train and save. Raises ConfigError for what cannot be made; nothing is written then."""
    if args.heads < 2 or args.heads % 2 or args.hidden % (2 * args.heads):
        raise ConfigError("--heads must be even, and --hidden a multiple of twice as many")
    layers = (12 if args.hybrid else 14) if args.layers is None else args.layers
    if layers < 1 or args.seconds <= 0 or (args.most is not None and args.most < 128) or args.batch < 1:
        raise ConfigError("--layers and --batch must be at least 1, --most at least 128, --seconds above 0")
    folder = writable(args.folder, "FOLDER")
    configure_threads_environment()
    forbid_model_hub()

    import torch

    from laboratory.training.recall import (
        POSITIONS,
        RATE,
        STAGES,
        VOCABULARY,
        dense_config,
        hybrid_config,
        new_model,
        save,
        train,
    )
    from laboratory.training.recall_text import RecallText, train_tokenizer

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here; a GPU takes minutes, --device cpu hours")
    most = args.most or POSITIONS
    if most > POSITIONS:
        raise ConfigError(f"--most {most}: the model has {POSITIONS} positions")
    # The first stage that is too long is as long as it may be, and the last.
    kept = [*(stage for stage in STAGES if stage.length < most), next(each for each in STAGES if each.length >= most)]
    stages = [
        replace(stage, length=length, rows=max(1, min(stage.rows, args.batch // length)))
        for stage in kept
        for length in [min(stage.length, most)]
    ]
    tokenizer = train_tokenizer(VOCABULARY)
    text = RecallText(tokenizer, positions=POSITIONS)
    config = (hybrid_config if args.hybrid else dense_config)(layers=layers, hidden=args.hidden, heads=args.heads)
    model = new_model(config, seed=args.seed)
    count = sum(one.numel() for one in model.parameters())
    print(f"{folder}: {count / 1e6:.1f} million parameters", flush=True)
    processes = min(12, max(1, (os.cpu_count() or 1) - 2)) if args.device == "cuda" else 0
    last = train(
        model,
        text,
        stages,
        seconds=args.seconds,
        seed=args.seed,
        processes=processes,
        device=args.device,
        rate=args.rate or RATE,
        report=_Report(),
    )
    if not last.learns:
        raise ModelError(
            f"it has not learned to recall in {last.seconds:.0f} s: give it more --seconds, or another --seed"
        )
    save(model, tokenizer, folder)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    print(f"{folder}: {last.steps} steps in {last.seconds:.0f} s, sha256 {digest}")
    return 0


class _Report:
    """A line at the first step, and then every few seconds."""

    def __init__(self) -> None:
        self._at = 0.0

    def __call__(self, reading: Reading) -> None:
        if (now := time.monotonic()) - self._at >= _REPORTED_SECONDS:
            self._at = now
            kinds = "  ".join(f"{name} {share:.2f}" for name, share in reading.kinds.items())
            print(
                f"step {reading.steps}  {reading.seconds:.0f} s  {reading.length} ids  loss {reading.loss:.3f}  "
                f"right {reading.right:.3f}  {kinds}",
                flush=True,
            )
