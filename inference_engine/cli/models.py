"""`kakeya models`: list, fetch and inspect models.

    kakeya models list
    kakeya models fetch NAME                      a known name, or org/name[@revision] from the Hugging Face hub: a
                                                  model, or a drafter of DFlash or EAGLE-3
    kakeya models show NAME|PATH [--verify]

Exit status: 0 done, 1 an error of the model or the settings (in one line), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from inference_engine.config import ModelConfig, hub_cache, in_full, resolve
from inference_engine.errors import KakeyaError, ModelError
from inference_engine.models import (
    CheckedFolder,
    check_fetched,
    check_model,
    fetch,
    fetch_from_hub,
    find_model,
    hub_model,
    is_known,
    known_model,
    known_names,
    model_folder,
    read_config,
    remarks,
    sizes,
    tokenizer_folder,
)
from inference_engine.models.folder import GGUF, gguf_parts, grouping_of, layout_of
from inference_engine.models.hub import hub_names
from inference_engine.models.registry import KnownModel

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

MOST_NAMES = 20  # of ignored files
PROCESS_BYTES = 300_000_000  # of a server beside weights and K/V, most of it libraries
READ_BYTES = 2**26  # more than a processor's caches hold


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("models", help="list, fetch and inspect models")
    commands = parser.add_subparsers(dest="models_command", required=True, metavar="COMMAND")
    list_ = commands.add_parser("list", help="the models known by name, and whether they are downloaded")
    fetch_ = commands.add_parser("fetch", help="download a model, and check it")
    fetch_.add_argument(
        "name", metavar="NAME", help=f"{', '.join(known_names())}, or org/name[@revision] from the Hugging Face hub"
    )
    show = commands.add_parser("show", help="facts of a model, after checking its folder")
    show.add_argument(
        "model", metavar="NAME|PATH", help="a known name, a folder with safetensors, a GGUF file, org/name"
    )
    show.add_argument("--verify", action="store_true", help="hash the weights again, even if they look unchanged")
    for command in (list_, fetch_, show):
        command.add_argument("--config", metavar="FILE", help="settings file (TOML)")
        command.add_argument("--cache-dir", help="where models are kept (default: the user's cache folder)")
        command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command of `args`, print to standard output, return the exit status."""
    console, errors = Console(), Console(stderr=True)
    try:
        cache = resolve(ModelConfig, {"cache_dir": args.cache_dir}, file=args.config).cache_path
        match args.models_command:
            case "list":
                console.print(_list(cache), markup=False, highlight=False)
            case "fetch":
                console.print(fetch_named(args.name, cache, errors), soft_wrap=True, markup=False, highlight=False)
            case "show":
                checked = check_model(args.model, cache=cache, thorough=args.verify)
                config = resolve(ModelConfig, {"cache_dir": args.cache_dir, "model": args.model}, file=args.config)
                console.print(_show(checked, config, verified=args.verify))
            case unknown:
                raise AssertionError(unknown)
    except KakeyaError as error:
        errors.print(f"kakeya models {args.models_command}: {error}", soft_wrap=True, markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        errors.print("interrupted; no partial file is left")
        return 130
    return 0


def fetch_named(name: str, cache: Path, errors: Console, *, to_serve: bool = False) -> str:
    """to_serve: a drafter is refused, before its weights are fetched."""
    named = None if is_known(name) else hub_model(name)
    if named is None:
        folder = fetch(name, cache, console=errors)
        with errors.status(f"trying {name}"):
            from inference_engine.compose import try_out

            try_out(ModelConfig(model=name, cache_dir=str(cache)))
        return f"{name} ({known_model(name).licence}) is ready in {folder}"

    from kv_cache_proposer.published_drafters import check_published, is_published_drafter

    def used(folder: Path) -> Callable[[Path], object] | None:
        if is_published_drafter(folder) and to_serve:
            raise ModelError(f"{named} is a drafter, and no model: name its target, with --drafter {named}")
        if is_published_drafter(folder):
            check_published(folder, has_weights=False)
            return partial(check_published, has_weights=True)
        from inference_engine.compose import admit

        admit(ModelConfig(model=str(folder), cache_dir=str(cache)))
        return None

    folder = fetch_from_hub(named, cache, admit=used, console=errors)
    use = f"; its target is served with --drafter {named}" if is_published_drafter(folder) else ""
    return f"{named} is ready in {folder}{use}"


def fetched(config: ModelConfig, errors: Console) -> str:
    """Fetch what is named and is not here. Returns a line that says what it is. Raises ModelError."""
    name, cache = config.model, config.cache_path
    if is_known(name):
        if not model_folder(name, cache).exists():
            errors.print(_expected(known_model(name)), soft_wrap=True, markup=False, highlight=False)
        return fetch_named(name, cache, errors)
    try:
        find_model(name, cache=cache)
    except ModelError:
        if hub_model(name) is None or in_full(name).exists():
            raise
        return fetch_named(name, cache, errors, to_serve=True)
    return f"{name} is here"


def _expected(known: KnownModel) -> str:
    """What it takes on this machine. A decode step reads every weight once, and cannot be faster than that."""
    tokens = reading_speed() / known.gguf_bytes
    return (
        f"downloads {decimal(known.download_bytes)}; serves in about {decimal(known.gguf_bytes + PROCESS_BYTES)} and "
        f"K/V; decodes at most about {tokens:.0f} tokens/s without a drafter, as fast as this CPU reads memory"
    )


@cache
def reading_speed() -> float:
    """Bytes of memory that this machine's cores read in a second, together, if nothing else runs."""
    import numpy as np

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    array = np.ones(READ_BYTES // 4, np.float32)

    def seconds() -> float:
        began = time.thread_time()  # what others take of the processor does not count
        array.max()
        return time.thread_time() - began

    return cores * array.nbytes / min(seconds() for _ in range(5))


def _list(cache: Path) -> str:
    """A paragraph each: a table of so much is not read on a narrow screen."""
    models = [known_model(name) for name in known_names()]
    lines = []
    for known in models:
        kind = "" if known.has_chat_template else ", which goes on with a text and does not chat"
        lines += [f"{known.name}: {known.title}{kind}; {known.licence}", f"  here: {_state(known.name, cache)}"]
        lines += [f"  {_expected(known)}"]
    lines += [f"{name}: of the hub, here" for name in hub_names(hub_cache())]
    lines.append("Any org/name of the Hugging Face hub, folder of safetensors or GGUF file: `kakeya run NAME|PATH`.")
    return "\n".join(lines)


def _state(name: str, cache: Path) -> str:
    if not model_folder(name, cache).exists():
        return "no"
    try:
        check_fetched(known_model(name), cache)
    except ModelError:
        return "damaged, fetch it again"
    return "yes" if (model_folder(name, cache) / GGUF).is_file() else "yes, without its GGUF file; fetch adds it"


def _show(checked: CheckedFolder, settings: ModelConfig, *, verified: bool) -> Table:
    from inference_engine.compose import executor

    table = Table(show_header=False)
    name, reason = executor(settings)
    facts = _facts(checked, settings, name, verified=verified)
    facts.insert(2, ("runs on", f"{name or 'nothing'}: {reason}"))
    facts.append(("tokenizer", _tokenizer(checked, settings)))
    for label, value in facts:
        table.add_row(label, Text(value))  # text, not markup: paths may hold brackets
    return table


def _tokenizer(checked: CheckedFolder, settings: ModelConfig) -> str:
    from inference_engine.cli.conversation import why_no_chat
    from inference_engine.models.tokenizer_ids import check_tokenizer_ids
    from inference_engine.server.http.turn_ends import model_end_ids

    rows = sizes(read_config(checked), checked.folder)[1]
    try:
        folder = tokenizer_folder(settings.model, settings.cache_path)
        said = check_tokenizer_ids(checked, folder, rows)
    except ModelError as error:
        return f"none that can be used: {error}"
    ends = ", ".join(map(str, model_end_ids(checked, folder, rows))) or "none"
    why = why_no_chat(folder, name=settings.model)
    made = "" if folder == checked.folder else f"made in {folder}; "
    return f"{made}{said or 'its ids are rows of the model'}; ends of a turn, by the files: {ends}" + (
        f"\n`kakeya chat` cannot use it: {why}" if why else ""
    )


def _facts(checked: CheckedFolder, settings: ModelConfig, runs_on: str, *, verified: bool) -> list[tuple[str, str]]:
    from inference_engine.models.layer_types import has_attention, has_state, layer_types

    config: Any = read_config(checked)
    text = config.get_text_config()
    heads = text.num_attention_heads
    layers = text.num_hidden_layers
    kinds = layer_types(text)
    windowed = kinds.count("sliding_attention")
    reading = getattr(text, "num_kv_shared_layers", 0)
    keeping = [number for number, kind in enumerate(kinds) if has_attention(kind)]
    kept = [kept_of(text, kinds, number) for number in keeping[: len(keeping) - reading]]
    entry_values = sum(count for count, _ in kept)
    keep = dict.fromkeys(said for _, said in kept)
    depth = f"{layers}, {windowed} of them see {text.sliding_window} positions" if windowed else str(layers)
    if stateful := sum(map(has_state, kinds)):
        depth += f", {stateful} keep a recurrent state and {len(keeping)} K and V"

    facts = [
        ("model", checked.model_id),
        ("file", str(checked.stored)) if checked.only_gguf else ("folder", str(checked.folder)),
        ("type", text.model_type),
        ("layers", f"{depth}, the last {reading} read K and V of earlier ones" if reading else depth),
        ("heads", f"{heads} for queries, {'; in other layers '.join(keep)}"),
        ("trained positions", f"{text.max_position_embeddings:,}"),
        ("vocabulary", f"{text.vocab_size:,}"),
        ("K/V per token", f"{2 * entry_values:,} bytes in 16 bits, {4 * entry_values:,} in float32"),
    ]
    if checked.gguf is not None:
        size = sum(path.stat().st_size for path in gguf_parts(checked.gguf))
        facts.append(("GGUF", f"{decimal(size)}; {_encodings(checked, settings, runs_on)}"))
    elif grouping_of(checked.folder) is not None:
        facts.append(("MLX's layout", _encodings(checked, settings, runs_on)))
    elif (layout := layout_of(checked.folder)) is not None:
        facts.append(("matrices", f"stored in {layout}"))
    if notes := remarks(checked):
        facts.append(("remarks", "\n".join(notes)))
    if (manifest := checked.manifest) is None:
        if checked.ignored:
            facts.append(("ignored", _in_lines(checked.ignored)))
        facts.append(("manifest", "none: these files cannot be verified"))
        return facts
    return [
        *facts,
        ("parameters", f"{manifest.parameters:,}"),
        ("stored as", f"{manifest.dtype}, {decimal(manifest.total_bytes)}"),
        ("licence", manifest.licence),
        ("from", "\n".join(manifest.source) or "unknown"),
        ("checked", "every byte, just now" if verified else "yes (--verify hashes the weights again)"),
    ]


def kept_of(text: Any, kinds: Sequence[str], number: int) -> tuple[int, str]:
    """How many numbers a layer keeps of a token, and of which heads. kinds: the types of all layers."""
    layer, kind = text.per_layer_config[number], kinds[number]
    heads = layer.num_attention_heads
    if rank := getattr(layer, "kv_lora_rank", None):
        indexers = getattr(text, "indexer_types", None)
        has_indexer = kind == "indexed_attention" and (indexers is None or indexers[number] == "full")
        index = layer.index_head_dim if has_indexer else 0
        width = rank + layer.qk_rope_head_dim + index
        return width, f"1 for K and V in one, of {width} values"
    kv_heads = getattr(layer, "num_key_value_heads", None) or heads
    head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    if getattr(text, "attention_k_eq_v", False) and kind == "full_attention":  # as `models/keyed_values.py` has it
        part = text.rope_parameters[kind].get("partial_rotary_factor", 1.0)
        width = head_dim + 2 * int(part * head_dim // 2)
        return kv_heads * width, f"{kv_heads} for K and V in one, of {width} values"
    return 2 * kv_heads * head_dim, f"{kv_heads} for K and V, of {head_dim} values"


def _encodings(checked: CheckedFolder, settings: ModelConfig, runs_on: str) -> str:
    """How its numbers are stored, the most frequent first, and what is made of them."""
    from inference_engine.models.open_checkpoint import open_checkpoint

    checkpoint = open_checkpoint(checked.stored)
    tensors = ", ".join(f"{share.tensors} in {encoding}" for encoding, share in checkpoint.shares().items())
    unpacking = checkpoint.unpacking(runs_on, settings.dtype, 4 if settings.dtype == "float32" else 2)
    return f"tensors: {tensors}" + (f"\n{unpacking}" if unpacking else "")


def _in_lines(names: Sequence[str]) -> str:
    more = [f"and {len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return "\n".join([*names[:MOST_NAMES], *more])
