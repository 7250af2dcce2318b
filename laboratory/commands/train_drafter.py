"""`kakeya train drafter`: a drafter that learns what its target says.

kakeya train drafter --model FOLDER --device cuda --dtype bfloat16 --total-seconds 660 --seconds 540
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference_engine.cli.settings import add_config_file, add_settings, settings
from inference_engine.config import ModelConfig, in_full, writable
from inference_engine.errors import ConfigError
from laboratory.commands.train_corpus import corpus_folder
from laboratory.evaluation import pictures
from laboratory.evaluation.pictures import Course, Panel

if TYPE_CHECKING:
    from kv_cache_proposer.dflash.drafter_config import DFlashConfig
    from kv_cache_proposer.dflash.network import DFlashNetwork
    from laboratory.training.corpus_store import CorpusManifest, Text
    from laboratory.training.drafter import DrafterPlan, Reading

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

# Under the drafter's own folder: where its training stands.
TRAINING = "training"

# Kept for saving and measuring before a call's time is up.
_LAST_SECONDS = 20.0
_MEASURED_AT_ONCE = 4
_BEGIN_RANDOM = "random"


def add_parser(commands: Subparsers) -> None:
    drafter = commands.add_parser(
        "drafter",
        help="a small network that drafts what the model says next",
        description="Trains a DFlash drafter on a corpus of the model's own words; the model does not change.",
    )
    add_config_file(drafter)
    drafter.add_argument(
        "--corpus", nargs="+", type=Path, metavar="FOLDER",
        help="one or more of this model's (default: in the cache, by the model's name)",
    )  # fmt: skip
    drafter.add_argument("--out", type=Path, metavar="FOLDER", help="default: the cache, where servers look")
    for name, default, what in (
        ("layers", 3, "of the drafter"),
        ("taps", 5, "layers of the model that it reads"),
        ("block-size", 8, "of a block: the last token and the draft tokens after it"),
        ("context-window", 512, "positions before a block that it looks at"),
        ("chain", 256, "width of what a draft token makes of the one before it; 0: nothing"),
        ("steps", 20_000, "of training, if time does not end it before"),
        ("batch", 32, "texts a step"),
        ("anchors", 128, "blocks a text"),
        ("measured-texts", 64, "of each kind held out, to measure on"),
        ("seed", 0, "of weights, texts and blocks"),
    ):
        drafter.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    drafter.add_argument("--mask-token-id", type=int, metavar="ID", help="default: the lowest that no text contains")
    drafter.add_argument("--total-seconds", type=float, default=math.inf, metavar="S", help="of training, all calls")
    drafter.add_argument(
        "--seconds", type=float, default=540.0, metavar="S", help="of this call; the next goes on (default: 540)"
    )
    drafter.add_argument("--rate", type=float, default=6e-4, metavar="R", help="of learning, at its top")
    drafter.add_argument(
        "--decay", type=float, default=4.0, metavar="N", help="places over which a draft token's weight falls to 1/e"
    )
    drafter.add_argument("--teacher-share", type=float, default=0.5, metavar="P", help="learnt from the distribution")
    drafter.add_argument(
        "--begin", default=_BEGIN_RANDOM, metavar="random|FOLDER",
        help="weights to begin with; FOLDER: those of a drafter of this model, of the same shape or with fewer layers "
        "(default: random)",
    )  # fmt: skip
    drafter.add_argument("--commit", metavar="HASH", help="where there is no repository to ask")
    add_settings(drafter, ModelConfig)
    drafter.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train for this call's time, save, measure. Raises KakeyaError."""
    started = time.monotonic()
    _check(args)
    model = settings(args, ModelConfig)

    import torch

    from inference_engine.backends.base import use_threads
    from inference_engine.compose import drafter_folder
    from inference_engine.models import check_model, load_model, weights_digest
    from kv_cache_proposer.dflash.drafter_files import load_drafter, save_drafter
    from kv_cache_proposer.dflash.target import words_of
    from kv_cache_proposer.stored import StoredManifest
    from laboratory.evaluation.record import running_commit
    from laboratory.training.corpus_store import read_manifest, read_texts
    from laboratory.training.drafter import DrafterPlan, read_log, train
    from laboratory.training.drafter_data import text_set, unused_id
    from laboratory.training.drafter_init import config_for, new_network
    from laboratory.training.drafter_measure import acceptance_length

    commit = running_commit(args.commit)
    use_threads(model.threads)
    checked = check_model(model.model, cache=model.cache_path)
    digest = weights_digest(checked)
    folders: list[Path] = args.corpus or [corpus_folder(checked.model_id, model.cache_path)]
    out = writable(args.out or drafter_folder(checked.model_id, model.cache_path), "--out or --cache-dir")
    corpora = [read_manifest(folder, target_digest=digest) for folder in folders]
    texts = [text for folder, corpus in zip(folders, corpora, strict=True) for text in read_texts(folder, corpus)]
    mask = unused_id(texts, corpora[0].vocab_size) if args.mask_token_id is None else args.mask_token_id
    loaded = load_model(
        model.model, cache=model.cache_path, device=model.torch_device, dtype=model.dtype, attention="sdpa"
    )
    config = config_for(
        loaded.model,
        layers=args.layers,
        taps=args.taps,
        block_size=args.block_size,
        mask_token_id=mask,
        context_window=args.context_window,
        chain=args.chain,
    )
    network, began = new_network(config, seed=args.seed), args.begin
    if args.begin != _BEGIN_RANDOM:
        network, began = _stored(in_full(args.begin), config, digest, seed=args.seed)
    plan = DrafterPlan(
        steps=args.steps,
        total_seconds=args.total_seconds,
        batch=args.batch,
        anchors=args.anchors,
        rate=args.rate,
        decay=args.decay,
        teacher_share=args.teacher_share,
        seed=args.seed,
    )
    progress = train(
        loaded.model,
        network.to(loaded.device),
        text_set(text for text in texts if not text.is_held_out),
        plan,
        out / TRAINING,
        seconds=args.seconds - _LAST_SECONDS - (time.monotonic() - started),
        report=_report,
        begins_ready=args.begin != _BEGIN_RANDOM,
    )
    made = StoredManifest(
        target_digest=digest,
        recipe={
            **_recipe(plan, began, progress.steps, sum(corpus.tokens for corpus in corpora)),
            "dtype": loaded.dtype,
        },
        seeds={"training": args.seed, **_corpus_seeds(corpora)},
        commit=commit,
    )
    save_drafter(network, out, made)
    stored, _ = load_drafter(out, target_digest=digest, device=loaded.device, dtype=getattr(torch, loaded.dtype))
    words = words_of(loaded.model)
    metrics = {}
    for kind, held_out in _held_out(texts, args.measured_texts, args.seed).items():
        length = acceptance_length(loaded.model, stored, words, text_set(held_out).batches(_MEASURED_AT_ONCE))
        metrics[f"acceptance_length_{kind}"] = round(length, 3)
    save_drafter(network, out, StoredManifest(**{**asdict(made), "metrics": metrics}))
    _draw(read_log(out / TRAINING), out / TRAINING / "progress.svg")
    state = "finished" if progress.is_finished else "not finished; run the same command again to go on"
    print(f"{out}: {progress.steps} steps in {progress.seconds:.0f} s, {state}")
    for name, value in metrics.items():
        print(f"{name}: {value:.3f}")
    return 0


def _check(args: argparse.Namespace) -> None:
    positive = ("layers", "taps", "context_window", "steps", "batch", "anchors", "measured_texts")
    floors = {**dict.fromkeys(positive, 1), "block_size": 2, "chain": 0, "seed": 0}
    for name, floor in floors.items():
        if getattr(args, name) < floor:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {floor}, got {getattr(args, name)}")
    folders = [one.resolve() for one in args.corpus or ()]
    if twice := sorted({str(one) for one in folders if folders.count(one) > 1}):
        raise ConfigError(f"--corpus names {', '.join(twice)} more than once; name each corpus once")
    if not 0 <= args.teacher_share <= 1:
        raise ConfigError(f"--teacher-share must be from 0 to 1, got {args.teacher_share}")
    for name in ("rate", "decay", "total_seconds"):
        if not getattr(args, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {getattr(args, name)}")


def _stored(folder: Path, config: DFlashConfig, target_digest: str, *, seed: int) -> tuple[DFlashNetwork, str]:
    """The drafter in `folder`, with the layers it lacks, ready to learn, and what a recipe calls it.

    Raises DrafterError if its shape is not `config` otherwise.
    """
    from kv_cache_proposer.dflash.drafter_files import load_drafter, stored_digest
    from kv_cache_proposer.drafter_errors import DrafterError
    from laboratory.training.drafter_init import deepened

    network, _ = load_drafter(folder, target_digest=target_digest)
    if network.config.layers < config.layers:
        network = deepened(network, config.layers, seed=seed)
    asked, stored = asdict(config), asdict(network.config)
    if others := {name: (stored[name], asked[name]) for name in asked if asked[name] != stored[name]}:
        reported = ", ".join(f"{name} is {has}, asked for is {wanted}" for name, (has, wanted) in others.items())
        raise DrafterError(f"{folder}: cannot be begun with: {reported}; ask for its shape, or begin with another")
    return network.train().requires_grad_(True), stored_digest(folder)


def _report(reading: Reading, tokens_per_second: float) -> None:
    print(
        f"step {reading.steps}  {reading.seconds:.0f} s  loss {reading.loss:.3f}  "
        f"accepted {reading.accepted:.2f}  rate {reading.rate:.2e}  {tokens_per_second:.0f} tokens/s",
        flush=True,
    )


def _recipe(plan: DrafterPlan, begin: str, steps: int, corpus_tokens: int) -> Mapping[str, Any]:
    stated = {**asdict(plan), "steps": steps, "begin": begin, "corpus_tokens": corpus_tokens}
    stated["total_seconds"] = None if math.isinf(plan.total_seconds) else plan.total_seconds
    del stated["seed"]
    return stated


def _corpus_seeds(corpora: Sequence[CorpusManifest]) -> dict[str, int]:
    return {f"corpus {place}" if place > 1 else "corpus": one.seed for place, one in enumerate(corpora, start=1)}


def _held_out(texts: list[Text], count: int, seed: int) -> dict[str, list[Text]]:
    """Up to `count` texts of each kind that have some, from anywhere among all."""
    found: dict[str, list[Text]] = {}
    for text in random.Random(seed).sample(texts, len(texts)):
        if text.is_held_out and text.answers.any() and len(found.setdefault(text.kind, [])) < count:
            found[text.kind].append(text)
    return {kind: some for kind, some in sorted(found.items()) if some}


def _draw(readings: list[Reading], path: Path) -> None:
    tokens = [reading.tokens / 1e6 for reading in readings]
    shown = [
        Panel("million tokens read", words, [Course("", tokens, values, has_dots=False, has_label=False)])
        for words, values in (
            ("loss", [reading.loss for reading in readings]),
            ("acceptance length, on blocks it learns from", [reading.accepted + 1 for reading in readings]),
        )
    ]
    pictures.panels(path, title="Training of the drafter", shown=shown)
