"""`kakeya train`: calibrate what restores evicted rows, from text on disk and from the model's own conversations.

kakeya train latent                          for the default model, into the cache, where `kakeya serve` finds it
kakeya train latent --text notes/*.md        with text like that of the sessions to come
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress

from inference_engine.cli.settings import add_config_file, add_settings, settings
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from inference_engine.evaluation.models import Target

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_SEQUENCE = 1024
# Rows further back than this count as restored when it is measured where their errors are felt.
_SENSITIVITY_TOKENS, _SINK, _WINDOW = 512, 4, 64
_BATCH_SEQUENCES = 4
# Of the calibration tokens: how much is conversation, tool calls, and, where no files are given, prose and code.
_CONVERSATION, _TOOL_CALLS = 0.25, 0.1
_TURNS = 6


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("train", help="calibrate what restores evicted rows")
    commands = parser.add_subparsers(dest="stage", required=True, metavar="STAGE")
    latent = commands.add_parser(
        "latent",
        help="the code that keeps one thin latent per evicted token",
        description="Runs the model over text, measures where errors are felt, and works out a code for its K and V.",
    )
    add_config_file(latent)
    latent.add_argument("--tokens", type=int, default=75_000, metavar="N", help="of calibration text (default: 75000)")
    latent.add_argument(
        "--bytes-per-token",
        type=int,
        metavar="N",
        help="the most that sessions can ask for; they may ask for less (default: a tenth of the rows in bfloat16)",
    )
    latent.add_argument("--group-layers", type=int, default=15, metavar="N", help="layers that share a basis")
    latent.add_argument(
        "--sensitivity-sequences",
        type=int,
        default=16,
        metavar="N",
        help=f"of {_SENSITIVITY_TOKENS} tokens, to measure by gradient where errors are felt; 0: guess it from weights",
    )
    latent.add_argument("--text", nargs="+", type=Path, default=[], metavar="FILE", help="calibration text of your own")
    latent.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the order of text and of the conversations"
    )
    latent.add_argument("--out", type=Path, metavar="FOLDER", help="default: the cache, where servers look")
    add_settings(latent, ModelConfig)
    latent.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Calibrate, measure on other text, save. Raises KakeyaError; nothing is written then."""
    if args.tokens < _SEQUENCE:
        raise ConfigError(f"--tokens must be at least {_SEQUENCE}, got {args.tokens}")
    model = settings(args, ModelConfig)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    console = Console(stderr=True)

    import torch

    from inference_engine.evaluation.models import open_target
    from inference_engine.kv.latent_rows import default_bytes_per_token, latent_layers
    from inference_engine.models import check_model, load_model, weights_digest
    from kv_cache_proposer.f_theta.store import LatentManifest, save_codec
    from kv_cache_proposer.latents import latent_folder
    from kv_cache_proposer.training.latent import calibrate, measure
    from kv_cache_proposer.training.sensitivity import measure_sensitivity

    with open_target(model, EngineConfig()) as target:
        geometry = target.forward.geometry(mode=EngineConfig().mode, page_tokens=16, segment_tokens=256)
        layers = latent_layers(geometry)
        sequence = min(_SEQUENCE, geometry.trained_positions)
        bytes_per_token = args.bytes_per_token or 2 * default_bytes_per_token(geometry)
        with console.status("letting the model talk with itself"):
            shares = _corpus(args, target, sequence)
    sequences = _sequences([ids for part in shares.values() for ids in part], args.tokens, sequence)
    held_out = max(1, len(sequences) // 20)
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(args.seed))
    test, calibration = sequences[order[:held_out]], sequences[order[held_out:]]
    checked = check_model(model.model, cache=model.cache_path)
    loaded = load_model(model.model, cache=model.cache_path, device=model.device, dtype=model.dtype, attention="sdpa")
    with Progress(console=console) as progress:
        importances = None
        if args.sensitivity_sequences:
            some = calibration[: args.sensitivity_sequences, :_SENSITIVITY_TOKENS]
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
        codec = calibrate(
            loaded.model,
            torch.split(calibration, _BATCH_SEQUENCES),
            layers=layers,
            bytes_per_token=bytes_per_token,
            group_layers=args.group_layers,
            importances=importances,
            advance=partial(progress.advance, task),
        )
    loss = measure(loaded.model, torch.split(test, _BATCH_SEQUENCES), codec)
    folder = args.out or latent_folder(checked.model_id, model.cache_path)
    manifest = LatentManifest(
        target_digest=weights_digest(checked),
        calibration_tokens=calibration.numel(),
        recipe={
            "group_layers": args.group_layers,
            "tokens": {name: sum(map(len, part)) for name, part in shares.items()},
            "own_text": bool(args.text),
            "sensitivity_sequences": args.sensitivity_sequences,
        },
        seeds={"text": args.seed},
        metrics={"weighted_error": loss.overall},
    )
    save_codec(codec, folder, manifest)
    print(
        f"{folder}: {codec.bytes_per_token} bytes a token for {len(layers)} layers, weighted error {loss.overall:.4f} "
        f"on {test.numel()} tokens held out; {decimal(codec.shared_bytes)} shared by all sessions"
    )
    return 0


def _corpus(args: argparse.Namespace, target: Target, sequence: int) -> dict[str, list[list[int]]]:
    """Token ids by kind, each kind about as long as its share."""
    from inference_engine.evaluation.haystack import calibration_texts
    from kv_cache_proposer.training.conversations import converse
    from kv_cache_proposer.training.tool_calls import tool_calls

    tokenizer = target.tokenizer
    found: dict[str, list[list[int]]] = {}
    if target.can_chat:
        wanted = int(args.tokens * _CONVERSATION)
        found["conversation"] = converse(
            target.engine,
            tokenizer,
            stop_ids=target.stop_ids,
            count=max(1, wanted // sequence),
            turns=_TURNS,
            tokens=sequence,
            seed=args.seed,
        )
    found["tool calls"] = _take(tokenizer, tool_calls(args.seed), int(args.tokens * _TOOL_CALLS))
    rest = args.tokens - sum(len(ids) for part in found.values() for ids in part)
    if args.text:
        found["files"] = _take(tokenizer, _read(args.text), rest)
    else:
        for kind in ("prose", "code"):
            found[kind] = _take(tokenizer, iter(_mixed(calibration_texts(kind), args.seed)), rest // 2)
    return found


def _mixed(texts: tuple[str, ...], seed: int) -> list[str]:
    import random

    mixed = list(texts)
    random.Random(seed).shuffle(mixed)
    return mixed


def _read(files: list[Path]) -> Iterator[str]:
    for file in files:
        try:
            yield file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {file}: cannot be read as UTF-8 text: {error}") from error


def _take(tokenizer: Any, texts: Iterator[str], count: int) -> list[list[int]]:
    """Token ids of the texts until there are `count`, or no more texts. Long texts give a stretch of their middle."""
    found: list[list[int]] = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        start = max(0, (len(ids) - 2 * _SEQUENCE) // 2)
        found.append(ids[start : start + 2 * _SEQUENCE])
        count -= len(found[-1])
        if count <= 0:
            break
    return found


def _sequences(texts: list[list[int]], tokens: int, length: int) -> Tensor:
    """[n, length]: the texts one after another. Raises ConfigError if they do not fill two sequences."""
    import torch

    ids = [token for text in texts for token in text][:tokens]
    count = len(ids) // length
    if count < 2:
        raise ConfigError(f"the text has {len(ids)} tokens, at least {2 * length} are needed")
    return torch.tensor(ids[: count * length]).view(count, length)
