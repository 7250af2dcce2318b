"""`kakeya train corpus`: what the model itself says, for a drafter to learn from.

kakeya train corpus --model FOLDER --device cuda --dtype bfloat16 --texts-at-once 2048 --tokens 16000000 --seconds 540
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference_engine.cli.settings import add_config_file, add_settings, settings
from inference_engine.config import ModelConfig, writable
from inference_engine.errors import ConfigError

if TYPE_CHECKING:
    from laboratory.training.corpus_store import CorpusManifest

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DOCUMENT_KINDS = ("prose", "code")

_SHORTEST_TEXT = 160
# Of each kind of document, to cut beginnings from.
_DOCUMENT_TOKENS, _DOCUMENT_LENGTH = 400_000, 4096


def add_parser(commands: Subparsers) -> None:
    corpus = commands.add_parser(
        "corpus",
        help="text that the model writes, for a drafter to learn from",
        description="Lets the model talk with itself, and go on with pieces of installed prose and code.",
    )
    add_config_file(corpus)
    corpus.add_argument("--tokens", type=int, default=1_000_000, metavar="N", help="to write (default: 1000000)")
    corpus.add_argument(
        "--texts-at-once", type=int, default=64, metavar="N", help="texts written at once (default: 64)"
    )
    corpus.add_argument("--length", type=int, default=768, metavar="N", help="tokens of a text (default: 768)")
    corpus.add_argument("--turn-tokens", type=int, default=320, metavar="N", help="of a turn, at most (default: 320)")
    corpus.add_argument(
        "--text", nargs="+", type=Path, default=[], metavar="FILE", help="to cut beginnings from, not installed text"
    )
    corpus.add_argument(
        "--seconds", type=float, default=540.0, metavar="S", help="stop before; the next call goes on (default: 540)"
    )
    corpus.add_argument("--seed", type=int, default=0, metavar="N", help="of beginnings and of what is sampled")
    corpus.add_argument("--out", type=Path, metavar="FOLDER", help="default: in the cache, by the model's name")
    add_settings(corpus, ModelConfig)
    corpus.set_defaults(run=run)


def corpus_folder(model_id: str, cache: Path) -> Path:
    return cache / "corpora" / model_id


def run(args: argparse.Namespace) -> int:
    """Write batches of texts until there are enough or time is up. Raises KakeyaError."""
    if args.length < _SHORTEST_TEXT:
        raise ConfigError(f"--length must be at least {_SHORTEST_TEXT}, got {args.length}")
    for name in ("tokens", "texts_at_once", "turn_tokens"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    started = time.monotonic()
    model = settings(args, ModelConfig)

    from inference_engine.backends.base import use_threads
    from inference_engine.models import check_model, load_model, tokenizer_folder, weights_digest
    from laboratory.evaluation.models import load_tokenizer, stop_ids
    from laboratory.training.corpus import CorpusPlan, write_corpus
    from laboratory.training.corpus_lockstep import ATTENTION
    from laboratory.training.corpus_prompts import PromptSource, read_chat

    checked = check_model(model.model, cache=model.cache_path)
    out = writable(args.out or corpus_folder(checked.model_id, model.cache_path), "--out or --cache-dir")
    folder = tokenizer_folder(model.model, model.cache_path)
    tokenizer = load_tokenizer(folder)
    source = PromptSource(
        documents={kind: _encoded(tokenizer, texts) for kind, texts in _documents(args.text)},
        chat=read_chat(tokenizer, longest=args.length // 2) if tokenizer.chat_template else None,
        seed=args.seed,
    )
    use_threads(model.threads)
    loaded = load_model(
        model.model, cache=model.cache_path, device=model.torch_device, dtype=model.dtype, attention=ATTENTION
    )
    if args.length > loaded.trained_positions:
        raise ConfigError(f"--length must be at most {loaded.trained_positions} for this model, got {args.length}")
    plan = CorpusPlan(
        tokens=args.tokens, texts_at_once=args.texts_at_once, length=args.length, turn_tokens=args.turn_tokens
    )

    def report(manifest: CorpusManifest, tokens_per_second: float) -> None:
        print(f"{manifest.tokens} of {plan.tokens} tokens, {tokens_per_second:.0f} tokens/s", flush=True)

    manifest = write_corpus(
        loaded.model,
        source,
        plan,
        out,
        target_digest=weights_digest(checked),
        stop_ids=stop_ids(folder, tokenizer),
        seconds=args.seconds - (time.monotonic() - started),
        report=report,
    )
    state = "complete" if manifest.tokens >= plan.tokens else "not complete; run the same command again to go on"
    print(f"{out}: {manifest.tokens} tokens in {manifest.texts} texts and {len(manifest.files)} files, {state}")
    return 0


def _documents(files: list[Path]) -> Iterator[tuple[str, Iterable[str]]]:
    """Texts by kind: the given files, or else installed ones that nothing is evaluated on."""
    from laboratory.evaluation.haystack import calibration_texts

    if not files:
        yield from ((kind, calibration_texts(kind)) for kind in DOCUMENT_KINDS)
        return
    try:
        yield "files", [file.read_text(encoding="utf-8") for file in files]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text: cannot be read as UTF-8 text: {error}") from error


def _encoded(tokenizer: Any, texts: Iterable[str]) -> list[list[int]]:
    """Token ids of the texts, until there are enough; the start of long ones."""
    found: list[list[int]] = []
    for text in texts:
        found.append(tokenizer.encode(text[: 6 * _DOCUMENT_LENGTH], add_special_tokens=False)[:_DOCUMENT_LENGTH])
        if sum(map(len, found)) > _DOCUMENT_TOKENS:
            break
    return found
