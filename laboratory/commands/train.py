"""`kakeya train`: calibrate the codec that restores evicted KV entries, from text and from the model's own
conversations.

kakeya train latent                          for the default model, into the cache, where `kakeya serve` finds it
kakeya train latent --text notes/*.md        with text like that of the sessions to come
kakeya train latent --quick                  as servers do at first use (`inference_engine/cli/auto_calibration.py`)

Components of keys, by which `gather` chooses: `train_components.py` beside this file. Drafters: `train_corpus.py` and
`train_drafter.py`.
"""

from __future__ import annotations

import argparse
import logging
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress

from inference_engine.cli.settings import add_config_file, add_settings, settings
from inference_engine.config import EngineConfig, ModelConfig, writable
from inference_engine.errors import ConfigError
from laboratory.commands import train_components, train_corpus, train_drafter, train_f_theta, train_recall
from laboratory.training.calibration_text import conversations_in, gather, gather_plain, read

if TYPE_CHECKING:
    from kv_cache_proposer.f_theta.codec import LatentCodec

_SEQUENCE = 1024
# Entries further back than this count as restored when it is measured where their errors are felt.
_SENSITIVITY_TOKENS, _SINK, _WINDOW = 512, 4, 64
_BATCH_SEQUENCES = 4
_TOKENS, _SENSITIVITY_SEQUENCES, _GROUP_LAYERS = 75_000, 16, 15
# Of `--quick`. Importances of half as many sequences are surer when they are pulled further towards equal ones.
_QUICK_TOKENS, _QUICK_SENSITIVITY_SEQUENCES = 16_384, 8
_SHRINKAGE, _QUICK_SHRINKAGE = 0.1, 0.3
_DIVERGENCE_SEQUENCES, _QUICK_DIVERGENCE_SEQUENCES = 4, 1  # of _SENSITIVITY_TOKENS: what is lost is printed as KL, too


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="stage", required=True, metavar="STAGE")
    for stage in (train_components, train_corpus, train_drafter, train_f_theta, train_recall):
        stage.add_parser(commands)
    latent = commands.add_parser(
        "latent",
        help="the code that keeps one thin latent per evicted token",
        description="Runs the model over text, measures where errors are felt, and works out a code for its K and V.",
    )
    add_config_file(latent)
    latent.add_argument(
        "--quick",
        action="store_true",
        help="what a server does at first use: text that is installed, no conversations; the other options' defaults "
        f"are {_QUICK_TOKENS} tokens and {_QUICK_SENSITIVITY_SEQUENCES} sequences",
    )
    latent.add_argument("--tokens", type=int, metavar="N", help=f"of calibration text (default: {_TOKENS})")
    latent.add_argument(
        "--bytes-per-token",
        type=int,
        metavar="N",
        help="the most that sessions can ask for; they may ask for less (default: a tenth of the entries in bfloat16)",
    )
    latent.add_argument(
        "--group-layers",
        type=int,
        default=_GROUP_LAYERS,
        metavar="N",
        help=f"layers that share a basis (default: {_GROUP_LAYERS})",
    )
    latent.add_argument(
        "--sensitivity-sequences",
        type=int,
        metavar="N",
        help=f"of {_SENSITIVITY_TOKENS} tokens, to measure by gradient where errors are felt "
        f"(default: {_SENSITIVITY_SEQUENCES})",
    )
    latent.add_argument(
        "--importance",
        choices=("sensitivity", "projections", "none"),
        default="sensitivity",
        help="where errors count: measured by gradient (default), estimated from weights, or everywhere alike",
    )
    latent.add_argument("--text", nargs="+", type=Path, default=[], metavar="FILE", help="calibration text of your own")
    latent.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the order of text and of the conversations"
    )
    latent.add_argument("--out", type=Path, metavar="FOLDER", help="default: the cache, where servers look")
    latent.add_argument("--commit", metavar="HASH", help="where there is no repository to ask")
    add_settings(latent, ModelConfig)
    latent.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Say what it costs, calibrate, measure on other text, save. Raises KakeyaError; nothing is written then."""
    _fill_defaults(args)
    if args.tokens < _SEQUENCE:
        raise ConfigError(f"--tokens must be at least {_SEQUENCE}, got {args.tokens}")
    for name, floor in (("sensitivity_sequences", 1), ("bytes_per_token", 1), ("group_layers", 1)):
        if (given := getattr(args, name)) is not None and given < floor:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {floor}, got {given}")
    for _ in read(args.text):
        pass  # one that cannot be read is refused at once, and not behind the model's load
    model = settings(args, ModelConfig)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    console = Console(stderr=True)

    import torch

    from inference_engine.compose import latent_folder, open_backend
    from inference_engine.kv.archives.latent import default_bytes_per_token, latent_layers
    from inference_engine.models import check_model, load_model, tokenizer_folder, weights_digest
    from kv_cache_proposer.f_theta.codec_files import save_codec
    from kv_cache_proposer.f_theta.fit import components_sought
    from kv_cache_proposer.stored import CalibrationManifest
    from laboratory.evaluation.models import load_tokenizer, open_target
    from laboratory.evaluation.record import running_commit
    from laboratory.training.calibration_cost import CalibrationCost
    from laboratory.training.capture import require_stored_keys
    from laboratory.training.divergence import measure_divergence, nothing, through
    from laboratory.training.latent import calibrate, measure
    from laboratory.training.sensitivity import measure_sensitivity

    commit = running_commit(args.commit)
    checked = check_model(model.model, cache=model.cache_path)
    folder = writable(args.out or latent_folder(checked.model_id, model.cache_path), "--out or --cache-dir")
    loaded = load_model(
        model.model,
        cache=model.cache_path,
        device=model.torch_device,
        # Statistics and gradients are torch's, whatever serves; in float16 it takes none on a CPU.
        dtype="float32" if model.dtype == "float16" else model.dtype,
        attention="sdpa",
        unpacks_groups=True,
    )
    with ExitStack() as opened:
        target = None if args.quick else opened.enter_context(open_target(model, EngineConfig(share_prefixes="off")))
        # Text that is installed needs no engine, nor the memory that one takes for K and V.
        forward = open_backend(model) if target is None else target.forward
        tokenizer: Any = load_tokenizer(tokenizer_folder(model.model, model.cache_path))
        geometry = forward.geometry(page_tokens=16, segment_tokens=256)
        layers = latent_layers(geometry)
        require_stored_keys(loaded.model, layers=layers)
        sequence = min(_SEQUENCE, geometry.trained_positions)
        bytes_per_token = args.bytes_per_token or 2 * default_bytes_per_token(geometry)
        cost = CalibrationCost.measured(
            loaded.model,
            geometry,
            layers=layers,
            tokens=args.tokens,
            tokens_at_once=min(args.tokens, _BATCH_SEQUENCES * sequence),
            sensitivity_tokens=args.sensitivity_sequences * _SENSITIVITY_TOKENS,
            conversations=conversations_in(args.tokens, sequence) if target is not None and target.can_chat else 0,
            conversation_tokens=sequence,
            group_layers=args.group_layers,
            components=components_sought(bytes_per_token, -(-len(layers) // args.group_layers)) if args.quick else None,
        )
        console.print(f"a latent for {checked.model_id}: {cost}", highlight=False)
        began = time.monotonic()
        if target is None:
            text = gather_plain(tokenizer, tokens=args.tokens, files=args.text, seed=args.seed)
        else:
            with console.status("letting the model talk with itself"):
                text = gather(target, tokens=args.tokens, length=sequence, files=args.text, seed=args.seed)
    sequences = text.sequences(args.tokens, sequence)
    held_out = max(1, len(sequences) // 20)
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(args.seed))
    test, calibration = sequences[order[:held_out]], sequences[order[held_out:]]
    length = min(_SENSITIVITY_TOKENS, sequence)
    with Progress(console=console) as progress:
        importances = args.importance
        if args.importance == "sensitivity":
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
        codec = calibrate(
            loaded.model,
            torch.split(calibration, _BATCH_SEQUENCES),
            layers=layers,
            bytes_per_token=bytes_per_token,
            group_layers=args.group_layers,
            importances=importances,
            kernels=model.kernels,
            shrinkage=_QUICK_SHRINKAGE if args.quick else _SHRINKAGE,
            is_rough=args.quick,
            advance=partial(progress.advance, task),
        )
        far = [ids for ids in test.unfold(1, length, length).flatten(0, 1) if len(ids) > _SINK + _WINDOW]
        far = far[: _QUICK_DIVERGENCE_SEQUENCES if args.quick else _DIVERGENCE_SEQUENCES]
        rates = {rate: through(codec.at(rate)) for rate in _rates(codec)}
        task = progress.add_task("measuring on text held out", total=sum(map(len, far)))
        kl = measure_divergence(
            loaded.model,
            far,
            {**{f"{rate} bytes a token": restore for rate, restore in rates.items()}, "nothing of it": nothing},
            layers=layers,
            sink=_SINK,
            window=_WINDOW,
            advance=partial(progress.advance, task),
        )
    loss = measure(loaded.model, torch.split(test, _BATCH_SEQUENCES), codec)
    manifest = CalibrationManifest(
        target_digest=weights_digest(checked),
        calibration_tokens=calibration.numel(),
        recipe={
            "group_layers": args.group_layers,
            "tokens": text.tokens(),
            "own_text": bool(args.text),
            "quick": args.quick,
            "importance": args.importance,
            "shrinkage": _QUICK_SHRINKAGE if args.quick else _SHRINKAGE,
            "sensitivity_sequences": args.sensitivity_sequences if args.importance == "sensitivity" else 0,
        },
        seeds={"text": args.seed},
        commit=commit,
        metrics={"weighted_error": loss.overall},
    )
    save_codec(codec, folder, manifest)
    print(
        f"{folder}: {codec.bytes_per_token} bytes a token for {len(layers)} layers, weighted error {loss.overall:.4f} "
        f"on {test.numel()} tokens held out; {decimal(codec.shared_bytes)} shared by all sessions"
    )
    kept = ", ".join(f"{one.mean:.2g} with {name}" for name, one in kl.items())
    print(f"KL to the model's own predictions beyond a window of {_WINDOW}, on text held out: {kept}")
    print(f"calibrated in {time.monotonic() - began:.0f} s")
    return 0


def _fill_defaults(args: argparse.Namespace) -> None:
    quick = (_QUICK_TOKENS, _QUICK_SENSITIVITY_SEQUENCES)
    defaults = quick if args.quick else (_TOKENS, _SENSITIVITY_SEQUENCES)
    for name, default in zip(("tokens", "sensitivity_sequences"), defaults, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, default)


def _rates(codec: LatentCodec) -> tuple[int, ...]:
    """What sessions are likely to ask for: the most, and half of it, which is the default."""
    rates = (codec.bytes_per_token, codec.bytes_per_token // 2)
    return tuple(rate for rate in rates if rate >= codec.least_bytes_per_token)
