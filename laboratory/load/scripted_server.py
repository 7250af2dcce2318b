"""A server on the scripted model, as a process of its own: what the machinery around a model can do, without a model.

    python -m laboratory.load.scripted_server --step-seconds 0.033 --max-batch 128

It takes the engine's and the server's settings as `kakeya serve` does, and stops as it does.
"""

from __future__ import annotations

import argparse
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from inference_engine.cli import process
from inference_engine.cli.child import ChildServer, start_child
from inference_engine.cli.serve import ready_line, stop_at_eof
from inference_engine.cli.settings import add_config_file, add_settings, as_flags, settings
from inference_engine.config import EngineConfig, ServerConfig, configure_threads_environment
from inference_engine.engine import Engine
from inference_engine.metrics import EngineMetrics
from inference_engine.server.http.chat_text import load_chat_text
from inference_engine.server.run import ServerHandle, serve
from inference_engine.session.journals import open_journal
from inference_engine.types import TokenBytes
from laboratory.scripted import Script, ScriptedForward, ScriptedModel

# Small, and on one core: what stands in for a device shall leave the processor to what is measured.
VOCABULARY = 256
WEIGHTS = "scripted"  # whose state folder it is
MODULE = "laboratory.load.scripted_server"


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until a signal stops it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_config_file(parser)
    parser.add_argument("--step-seconds", type=float, default=0.0, metavar="S", help="the least a step takes")
    parser.add_argument("--token-seconds", type=float, default=0.0, metavar="S", help="what each token adds to that")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="what renders messages at --http-bind")
    add_settings(parser, EngineConfig)
    add_settings(parser, ServerConfig)
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    script = Script(step_seconds=args.step_seconds, token_seconds=args.token_seconds)
    forward = ScriptedForward(ScriptedModel(vocab_size=VOCABULARY), script)
    config, metrics = settings(args, EngineConfig), EngineMetrics()
    journal = open_journal(config, weights=WEIGHTS, metrics=metrics)
    chat = load_chat_text(Path(args.tokenizer), name=args.tokenizer) if args.tokenizer else None
    # Ids stand for bytes, as far as there are any, so that output can be constrained.
    tokens = TokenBytes(
        tokens=tuple(bytes([at % 256]) for at in range(VOCABULARY)), specials=(0, *range(256, VOCABULARY))
    )
    with Engine(forward, config, journal=journal, metrics=metrics, read_tokens=lambda: tokens) as engine:

        def ready(handle: ServerHandle) -> None:
            process.announce(ready_line(handle, engine))
            threading.Thread(target=stop_at_eof, name="until-eof", daemon=True).start()

        serve(engine, settings(args, ServerConfig), chat=chat, on_ready=ready)


@contextmanager
def scripted_child(
    engine: EngineConfig,
    server: ServerConfig,
    *,
    step_seconds: float,
    token_seconds: float = 0.0,
    tokenizer: Path | None = None,
) -> Iterator[ChildServer]:
    """Such a server as a child process, gone at the end. tokenizer: the folder of one, for `http_bind`."""
    flags = [flag for config in (engine, server) for flag in as_flags(config)]
    script = [f"--step-seconds={step_seconds}", f"--token-seconds={token_seconds}"]
    if tokenizer is not None:
        script.append(f"--tokenizer={tokenizer}")
    with start_child(MODULE, *script, *flags) as process:
        child = ChildServer(process)
        try:
            yield child
        finally:
            child.stop()


if __name__ == "__main__":
    configure_threads_environment()
    main()
