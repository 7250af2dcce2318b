"""`kakeya serve`: one model, served until SIGTERM, SIGHUP or Ctrl-C, which let running Generates end first.

Standard output gets one line, once clients can connect; `ready_target` reads it. All else goes to standard error.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import re
import signal
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.filesize import decimal

from inference_engine import logs
from inference_engine.cli import auto_calibration as first_use
from inference_engine.cli import process
from inference_engine.cli.ports import bind_error
from inference_engine.cli.settings import USUAL_TITLE, add_config_file, add_settings, settings
from inference_engine.config import (
    NO_CACHE,
    EngineConfig,
    ModelConfig,
    ServerConfig,
    misspelled_variables,
    why_no_cache,
)
from inference_engine.models import find_model, tokenizer_folder
from inference_engine.models.mapped import MappedWeights
from inference_engine.native.cores import usable_cores
from inference_engine.server.address import cannot_bind, refuse_open_doors, resolve_bind
from inference_engine.server.metrics_port import read_token, refuse_open_metrics
from inference_engine.server.trace_export import check_exporter, exported

if TYPE_CHECKING:
    from inference_engine.engine import Engine
    from inference_engine.server.run import ServerHandle

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

logger = logging.getLogger(__name__)

_DESCRIPTION = """\
Serve a model over gRPC until SIGTERM or Ctrl-C.
`kakeya models fetch NAME` downloads it before.

    kakeya serve
    kakeya serve --model FILE.gguf --kv-bytes 4GB
    kakeya serve --device cuda --state-dir FOLDER"""
_THREADS = 24  # beside those that compute
_STANDARD_ERROR = 2  # the descriptor: Python's file object cannot be used in a fault
_READY = re.compile(r"ready at (\S+): ")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a model until SIGTERM or Ctrl-C",
        usage="%(prog)s [OPTION ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
    )
    usual = parser.add_argument_group(USUAL_TITLE)
    add_config_file(usual)
    parser.add_argument("--until-eof", action="store_true", help="stop also when standard input ends")
    for kind in (ModelConfig, EngineConfig, ServerConfig):
        add_settings(parser, kind, usual=usual)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises ConfigError, ModelError or BackendError."""
    server = settings(args, ServerConfig)
    with logs.written(server.log_format):
        return _serve(args, settings(args, ModelConfig), settings(args, EngineConfig), server)


def _serve(args: argparse.Namespace, model: ModelConfig, engine_config: EngineConfig, server: ServerConfig) -> int:
    if misspelled := misspelled_variables():
        logger.warning("no settings, and without effect: %s", ", ".join(misspelled))
    # Cheap checks first, before libraries and weights are loaded.
    process.need_threads(_THREADS + usable_cores())
    check_exporter(server.trace_endpoint)
    found = find_model(model.model, cache=model.cache_path)
    if model.cache_path == NO_CACHE:
        logger.warning("nothing is cached, because %s; name a folder with --cache-dir", why_no_cache())
    optional = (("http_bind", server.http_bind), ("metrics_bind", server.metrics_bind))
    for setting, bind in (("bind", server.bind), *(one for one in optional if one[1])):
        if bind_error(address := resolve_bind(setting, bind)):
            raise cannot_bind(setting, address)
        if setting == "metrics_bind":
            refuse_open_metrics(address, server)
            read_token(server)
        elif not address.is_loopback:
            refuse_open_doors(f"{setting} {bind}", server, has_keys=bool(server.api_key_file))

    # A truncated file of weights (SIGBUS) or a fault in a library ends the process, with a stack on standard error.
    if not faulthandler.is_enabled():
        faulthandler.enable(_STANDARD_ERROR)
    with MappedWeights(*found.weights) if server.watch_weights else nullcontext() as weights:
        return _serve_model(args, model, engine_config, server, weights)


def _serve_model(
    args: argparse.Namespace,
    model: ModelConfig,
    engine_config: EngineConfig,
    server: ServerConfig,
    weights: MappedWeights | None,
) -> int:
    with process.progress().status(f"loading {model.model} on {model.device}"):
        from inference_engine.compose import admit, open_parts
        from inference_engine.kv.strategies import parse_strategy
        from inference_engine.server.http.turn_ends import find_end_ids
        from inference_engine.server.run import serve

        parse_strategy(engine_config.strategy)
        admitted = admit(model)
        chat = None
        if server.http_bind:
            from inference_engine.server.http.chat_text import load_chat_text

            chat = load_chat_text(tokenizer_folder(model.model, model.cache_path), name=model.model)
        parts = open_parts(model, admitted)
    parts = first_use.with_calibrations(parts, model, engine_config, server.calibrate)
    parts = replace(parts, end_ids=find_end_ids(model, parts.forward.facts.vocab_size))

    def ready(handle: ServerHandle) -> None:
        process.announce_aside(
            ready_line(handle, engine),
            lambda failed: logger.info("the ready line cannot be written to standard output: %s", failed.strerror),
        )
        if args.until_eof:
            threading.Thread(target=stop_at_eof, name="until-eof", daemon=True).start()

    with (
        exported(server.trace_endpoint) as tracing,
        parts.engine(engine_config, tracing=tracing) as engine,
    ):
        info = engine.info()
        longest = info.default_limit_tokens
        if longest is not None and longest < engine_config.default_limit_tokens:
            logger.warning(
                "default_limit_tokens is %d; with %s the model allows %d, which sessions that ask for no limit get",
                engine_config.default_limit_tokens,
                info.default_strategy,
                longest,
            )
        process.end_if_stopped()
        serve(engine, server, chat=chat, weights=weights, on_ready=ready)
    return 0


def ready_line(handle: ServerHandle, engine: Engine) -> str:
    info = engine.info()
    metrics = f", metrics at {handle.metrics_url}/metrics" if handle.metrics_url else ""
    http = f", chat completions at {handle.http_url}" if handle.http_url else ""
    facts = info.facts
    numerics = [facts.backend, facts.numerics] if facts.numerics != "torch" else []
    if facts.weights and "weights" not in facts.numerics:
        numerics.append(f"{' and '.join(facts.weights)} weights")
    said = f" ({', '.join(numerics)})" if numerics else ""
    return (
        f"ready at {handle.target}: {facts.model_id} in {facts.dtype} on {facts.device}{said}, "
        f"strategy {info.default_strategy}, {decimal(info.kv_capacity_bytes)} for K/V{http}{metrics}"
    )


def ready_target(line: str) -> str | None:
    """The address in a line of `ready_line`; None for any other line."""
    match = _READY.match(line)
    return match[1] if match else None


def stop_at_eof() -> None:
    # Not through sys.stdin, whose lock this thread would still hold when the interpreter ends.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
