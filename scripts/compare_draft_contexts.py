"""A drafter that reads its context from the latents of a session, beside one that keeps hidden states of its own.

    python scripts/compare_draft_contexts.py --model smollm2-135m --device cuda --corpus FOLDER

The drafter is the trained one; what it is given changes:

    taps, window N     hidden states of the target, as it was trained on, of the last N positions alone
    latent, B bytes    what a linear map makes of each token's latent, at B bytes a token, for every position
    exact components   the same of the latent's components without codes: what coding costs
    … from N on        latents of tokens further than N, taps of nearer ones: entries near by have no latent yet
    nothing            no context but the block: the control, which must be worse

Measured are tokens a step (`laboratory/training/drafter_measure.py`) on texts of the model's own that were held out.
With --train-seconds the drafter is trained further on taps and on latents, each so long: a map of its own kind may need
another network behind it. The bytes are what a session keeps for its drafter. Latents cost none, but entries of each
draft layer are then made of them for each draft: the multiplications are in the record.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inference_engine.config import ModelConfig, configure_threads_environment, forbid_model_hub, resolve

configure_threads_environment()
forbid_model_hub()

import torch
from transformers import PreTrainedModel

from inference_engine.compose import SHIPPED, drafter_folder, find_latent, latent_identity
from inference_engine.errors import InvalidArgument, KakeyaError
from inference_engine.models import check_model, load_model, weights_digest
from kv_cache_proposer.dflash.drafter_files import load_drafter, stored_digest
from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.dflash.target import words_of
from kv_cache_proposer.f_theta.codec import LatentCodec
from laboratory.evaluation import record
from laboratory.training.corpus_store import Text, read_manifest, read_texts
from laboratory.training.drafter import DrafterPlan, train
from laboratory.training.drafter_data import TextSet, text_set
from laboratory.training.drafter_measure import Context, acceptance_length
from laboratory.training.drafter_taps import ReadTaps, read_taps
from laboratory.training.latent_taps import fit_latent_taps

logger = logging.getLogger(__name__)

TAPS, NOTHING = "taps", "nothing"
_AT_ONCE = 8  # texts


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    model = resolve(
        ModelConfig,
        flags={
            "model": arguments.model,
            "device": arguments.device,
            "dtype": arguments.dtype,
            **({"cache_dir": arguments.cache_dir} if arguments.cache_dir else {}),
        },
    )
    try:
        payload = compare(model, arguments)
    except KakeyaError as error:
        raise SystemExit(f"error: {error}") from error
    path = record.write_record(
        f"draft_contexts_{payload['config']['model']}",
        {
            "commit": arguments.commit,
            "command": record.command_line(without=("--results", "--commit", "--corpus", "--cache-dir")),
            **payload,
        },
        **({"results_dir": arguments.results} if arguments.results else {}),
    )
    for name, value in payload["values"].items():
        print(f"{name}: {value['median']:g} {value['unit']}")
    print(path)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=ModelConfig().model, help="as for `kakeya serve`")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cache-dir", help="where models and latents lie (default: as for `kakeya serve`)")
    parser.add_argument("--corpus", type=Path, required=True, help="of `kakeya train corpus`, other texts than trained")
    parser.add_argument("--drafter", type=Path, help="default: the model's own")
    parser.add_argument("--rates", type=int, nargs="+", help="bytes a token (default: all and half of the latent's)")
    parser.add_argument(
        "--windows", type=int, nargs="*", default=[64, 128, 256], help="of taps alone, and near latents"
    )
    parser.add_argument("--texts", type=int, default=48, help="of each kind, held out")
    parser.add_argument("--fitted-on", type=int, default=256, help="texts that the maps are fitted on")
    parser.add_argument("--train-seconds", type=float, default=0.0, help="of training further, on each; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default=record.commit(), help="what runs, where there is no repository to ask")
    parser.add_argument("--results", type=Path, help="where records are kept (default: results)")
    return parser.parse_args(words)


def compare(model: ModelConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    checked = check_model(model.model, cache=model.cache_path)
    digest = weights_digest(checked)
    loaded = load_model(model.model, cache=model.cache_path, device=model.device, dtype=model.dtype, attention="sdpa")
    folder = arguments.drafter or _drafter_folder(checked.model_id, model.cache_path)
    network, _ = load_drafter(folder, target_digest=digest, device=loaded.device, dtype=getattr(torch, loaded.dtype))
    stored = find_latent(model)
    if stored is None:
        raise InvalidArgument("latent", "there is no latent for this model; make one with `kakeya train latent`")
    codec = stored.load()
    corpus = read_manifest(arguments.corpus, target_digest=digest)
    texts = list(read_texts(arguments.corpus, corpus))
    learnt = text_set(text for text in texts if not text.is_held_out)
    held_out = _by_kind(texts, arguments.texts)
    rates = arguments.rates or [codec.bytes_per_token, codec.bytes_per_token // 2]
    tap_layers, window = network.config.tap_layers, network.config.context_window
    some = [batch.token_ids for batch in learnt.batches(_AT_ONCE)][: max(1, arguments.fitted_on // _AT_ONCE)]
    some = [ids.to(loaded.model.device) for ids in some]
    readers: dict[str, ReadTaps] = {}
    for rate in rates:
        at = codec.at(rate)
        readers[f"latent, {rate} bytes"] = fit_latent_taps(loaded.model, some, at, tap_layers=tap_layers, is_coded=True)
    readers[f"exact components, of {rates[0]} bytes"] = fit_latent_taps(
        loaded.model, some, codec.at(rates[0]), tap_layers=tap_layers, is_coded=False
    )
    contexts = _contexts(readers, arguments.windows, window)
    found = {
        name: _lengths(loaded.model, network, held_out, given) for name, given in contexts.items() if name != NOTHING
    }
    found[NOTHING] = _lengths(loaded.model, network, held_out, contexts[NOTHING])
    if arguments.train_seconds:
        smallest = f"latent, {rates[-1]} bytes"
        for name, read in ((TAPS, read_taps), (smallest, readers[smallest])):
            further, _ = load_drafter(folder, target_digest=digest, device=loaded.device, dtype=torch.float32)
            trained = _trained(loaded.model, further.train().requires_grad_(True), learnt, read, arguments)
            given = (Context(read, 1, window),)
            found[f"{name}, trained further"] = _lengths(
                loaded.model, trained.to(getattr(torch, loaded.dtype)).eval(), held_out, given
            )
    return {
        "what": "Tokens a step of a drafter whose context is hidden states, or made of the session's latents.",
        "config": {
            "model": checked.model_id,
            "weights_sha256": digest,
            "device": torch.cuda.get_device_name() if loaded.device.startswith("cuda") else loaded.device,
            "dtype": loaded.dtype,
            "drafter": stored_digest(folder),
            "latent": dict(latent_identity(model)),
            "context_window": window,
            "windows": arguments.windows,
            "rates": rates,
            "texts": {kind: len(some) for kind, some in held_out.items()},
            "fitted_on": len(some) * _AT_ONCE,
            "train_seconds": arguments.train_seconds,
            "corpus": {"tokens": corpus.tokens, "seed": corpus.seed},
        },
        "seeds": [arguments.seed],
        "values": _values(found),
        "headlines": [f"tokens a step ÷ {TAPS}, mean of kinds, {name}" for name in found if name != TAPS],
        "baseline": f"{TAPS}: the drafter as it is served",
        "tables": {
            "tokens a step": [
                {"context": name, "kind": kind, "tokens a step": length}
                for name, by_kind in found.items()
                for kind, length in by_kind.items()
            ],
            "what a session keeps, what a draft costs": _costs(network, codec, rates, arguments.windows),
        },
    }


def _drafter_folder(model_id: str, cache: Path) -> Path:
    own = drafter_folder(model_id, cache)
    return own if own.is_dir() else SHIPPED / model_id


def _contexts(readers: Mapping[str, ReadTaps], windows: Sequence[int], window: int) -> dict[str, tuple[Context, ...]]:
    found: dict[str, tuple[Context, ...]] = {TAPS: (Context(read_taps, 1, window),)}
    found |= {f"{TAPS}, window {near}": (Context(read_taps, 1, near),) for near in windows}
    found |= {name: (Context(read, 1, window),) for name, read in readers.items()}
    for near in windows:
        found |= {
            f"{name}, from {near} on": (Context(read_taps, 1, near), Context(read, near + 1, window))
            for name, read in readers.items()
        }
    found[NOTHING] = (Context(read_taps, window + 1, window),)
    return found


def _lengths(
    model: PreTrainedModel, network: DFlashNetwork, held_out: Mapping[str, Sequence[Text]], given: Sequence[Context]
) -> dict[str, float]:
    words = words_of(model)
    found = {
        kind: acceptance_length(model, network, words, text_set(some).batches(_AT_ONCE), given)
        for kind, some in held_out.items()
    }
    logger.info("%s", found)
    return found


def _trained(
    model: PreTrainedModel, network: DFlashNetwork, texts: TextSet, read: ReadTaps, arguments: argparse.Namespace
) -> DFlashNetwork:
    plan = DrafterPlan(
        steps=10**6, total_seconds=arguments.train_seconds, rate=2e-4, batch=32, anchors=96, decay=3.0,
        seed=arguments.seed,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        train(
            model,
            network,
            texts,
            plan,
            Path(folder),
            seconds=arguments.train_seconds,
            report=lambda reading, speed: logger.info("%s, %.0f tokens/s", reading, speed),
            begins_ready=True,
            read=read,
        )
    return network


def _by_kind(texts: Sequence[Text], count: int) -> dict[str, list[Text]]:
    found: dict[str, list[Text]] = {}
    for text in texts:
        if text.is_held_out and text.answers.any() and len(found.setdefault(text.kind, [])) < count:
            found[text.kind].append(text)
    return {kind: some for kind, some in sorted(found.items()) if some}


def _values(found: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {}
    for name, by_kind in found.items():
        values |= {f"tokens a step, {kind}, {name}": record.exact(length, "tokens") for kind, length in by_kind.items()}
        if name != TAPS:
            ratios = [length / found[TAPS][kind] for kind, length in by_kind.items()]
            values[f"tokens a step ÷ {TAPS}, mean of kinds, {name}"] = record.exact(sum(ratios) / len(ratios), "ratio")
    return values


def _costs(
    network: DFlashNetwork, codec: LatentCodec, rates: Sequence[int], windows: Sequence[int]
) -> list[dict[str, Any]]:
    """Bytes are in 16 bits. Products: multiplications to make the entries of a context anew, for one draft."""
    config = network.config
    each = 2 * config.elements_per_position * 2
    entries = config.hidden * config.elements_per_position * 2
    lines = [
        {"context": f"taps, window {near}", "bytes": near * each, "products a draft": 0}
        for near in (config.context_window, *windows)
    ]
    for rate in rates:
        components = sum(len(part.packing.widths) for part in codec.at(rate).coders)
        products = config.context_window * (components * config.hidden + entries)
        lines.append({"context": f"latent, {rate} bytes", "bytes": 0, "products a draft": products})
    return lines


if __name__ == "__main__":
    main()
