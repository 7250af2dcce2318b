"""Every benchmark by its name, and what all have in common: arguments, the record, what is printed.

A benchmark is a module with `add_arguments(parser)` and `main(arguments, save)`, which returns the payload of a record;
`experiment` in it is the record's name; `wrong`, what makes the command fail after all; `is_shown`, that the values
are shown already. What takes minutes hands `save` what it has as it goes: a run that is cut off
keeps that. `left_out` says what was not measured, and why.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from inference_engine.cli.lazy_commands import LateParser
from inference_engine.config import configure_threads_environment, forbid_model_hub, writable
from inference_engine.errors import ConfigError, KakeyaError

Save = Callable[[dict[str, Any]], Path]


@dataclass(frozen=True, slots=True)
class Experiment:
    module: str
    help: str


EXPERIMENTS = {
    "batch": Experiment("laboratory.bench.batch", "many sessions that decode at once, beside each alone"),
    "codecs": Experiment("laboratory.bench.codecs", "error, bytes and time of every compressor of entries"),
    "constraint": Experiment("laboratory.bench.constraint", "constrained output: its validity, cost and gain"),
    "cpu": Experiment("laboratory.bench.cpu", "decode, appends and prefill on a CPU beside llama.cpp"),
    "decode": Experiment("laboratory.bench.decode", "prefill and decode beside transformers' generate"),
    "draw": Experiment("laboratory.bench.draw", "sampling a token beside transformers' logits warpers"),
    "first-token": Experiment("laboratory.bench.first_token", "a short turn's first token: over gRPC, in the engine"),
    "first-use": Experiment("laboratory.bench.first_use", "a start that calibrates beside the next one"),
    "fresh-clone": Experiment("laboratory.bench.fresh_clone", "the first `make demo` with empty caches"),
    "gpu-ops": Experiment("laboratory.bench.gpu_ops", "attention, exact Top-K and MAC beside the best kernels"),
    "gpu-products": Experiment("laboratory.bench.gpu_products", "products of few tokens beside torch's, on a GPU"),
    "gpu-ranks": Experiment("laboratory.bench.gpu_ranks", "one model over several GPUs beside the same over one"),
    "gpu-steps": Experiment("laboratory.bench.gpu_steps", "steps and prefills of real shapes beside a compiled step"),
    "gpu-vllm": Experiment("laboratory.bench.gpu_vllm", "steps, prefills and turns beside vLLM on the same GPU"),
    "gpu-weights": Experiment("laboratory.bench.gpu_weights", "steps with weights in bfloat16, fp8 and int4, on a GPU"),
    "gateway": Experiment("laboratory.bench.gateway", "one conversation over other APIs, beside a stateless server"),
    "growth": Experiment("laboratory.bench.growth", "memory granted as histories grow, beside memory reserved"),
    "hibernation": Experiment("laboratory.bench.hibernation", "a first token from a session's file, beside a prefill"),
    "host": Experiment("laboratory.bench.host", "what a decode step takes on the host beside its native call"),
    "hostile": Experiment("tests.hostile.bench", "what a victim notices of attacks on its server"),
    "hybrids": Experiment("laboratory.bench.hybrids", "recurrent states natively and by modules, beside transformers"),
    "journal": Experiment("laboratory.bench.journal", "what it costs that sessions outlive the process"),
    "kept-sessions": Experiment("laboratory.bench.kept_sessions", "more sessions than there is room for, kept in turn"),
    "expanded-attention": Experiment(
        "laboratory.bench.expanded_attention", "a long prompt in latent attention, absorbed and expanded"
    ),
    "latent-attention": Experiment(
        "laboratory.bench.latent_attention", "latent attention beside transformers, which expands what it reads"
    ),
    "load": Experiment("laboratory.bench.load", "many streams at once, and up to ten times too much load"),
    "long-session": Experiment(
        "laboratory.bench.long_session", "one agent's session, turn after turn, beside fresh ones"
    ),
    "open-chunk": Experiment("laboratory.bench.open_chunk", "recurrent states by the tokens that are folded together"),
    "serve": Experiment("laboratory.bench.serve", "a server of ours, or a given one, under the load of many agents"),
    "server": Experiment("laboratory.bench.server", "what RPCs cost beside a bare echo"),
    "start": Experiment("laboratory.bench.start", "start of a server beside a bare from_pretrained: time and memory"),
    "tools": Experiment("laboratory.bench.tools", "tool calls that parse, validate and are right, beside free ones"),
}
# What says where things are on this machine, or which code runs, is no part of the command that makes a record again.
_NOT_SHOWN = (
    *("--results", "--commit", "--items", "--target", "--api-key-file", "--tls-ca-file", "--cache-dir"),
    *("--folder", "--llama", "--vllm", "--log", "--openvino", "--tries"),
)


_CLONE = Path(__file__).resolve().parents[2]


class NotingParser(LateParser):
    """Notes what was typed."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, rest = super().parse_known_args(args, namespace)
        parsed.typed = tuple(args or ())
        return parsed, rest


def add_parsers(parser: argparse.ArgumentParser) -> None:
    """A command for each benchmark, whose module is imported when its arguments are asked for."""
    commands = parser.add_subparsers(dest="bench", required=True, metavar="BENCH", parser_class=NotingParser)
    for name, experiment in EXPERIMENTS.items():
        one = commands.add_parser(name, help=experiment.help, description=experiment.help)
        one.learn = _learn(experiment)
        one.set_defaults(run=run)


def _learn(experiment: Experiment) -> Callable[[LateParser], None]:
    def learn(parser: LateParser) -> None:
        parser.add_argument("--name", metavar="NAME", help="the record's (default: the experiment's)")
        parser.add_argument("--results", type=Path, metavar="DIR", help="where records are kept (default: results)")
        parser.add_argument("--no-record", action="store_true", help="only show what was measured")
        parser.add_argument("--commit", metavar="HASH", help="what runs, where there is no repository to ask")
        module_of(experiment).add_arguments(parser)

    return learn


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the record, show its values. Raises KakeyaError for what is refused, or is wrong after all."""
    from laboratory.evaluation import record

    results = arguments.results or record.RESULTS
    if not arguments.no_record:
        writable(results, "--results")
    commit = "" if arguments.no_record else record.running_commit(arguments.commit)

    def save(payload: dict[str, Any]) -> Path:
        name = arguments.name or payload["experiment"]
        made = {key: value for key, value in payload.items() if key not in ("experiment", "is_shown", "wrong")}
        made |= {"command": command(arguments.bench, arguments.typed), "commit": commit}
        if arguments.no_record:
            return results
        return record.write_record(name, made, results_dir=results, items=getattr(arguments, "items", None))

    module = module_of(EXPERIMENTS[arguments.bench])
    payload = module.main(arguments, save)
    for where, why in payload.get("left_out", {}).items():
        print(f"left out: {where}: {why}")
    if not payload["values"]:
        raise KakeyaError("nothing was measured")
    path = save(payload)
    for name, value in payload["values"].items() if not payload.get("is_shown") else ():
        spread = "" if value["count"] == 1 else f" ({value['low']:.4g} to {value['high']:.4g})"
        print(f"{name}: {shown(value['median'])}{spread} {value['unit']}")
    if not arguments.no_record:
        if draw := getattr(module, "draw", None):
            draw(payload, path.parent)
        print(path.relative_to(record.ROOT) if path.is_relative_to(record.ROOT) else path)
    if wrong := payload.get("wrong"):
        raise KakeyaError(wrong)
    return 0


def shown(value: float) -> str:
    """Six digits, and all of a large number: of bytes, every one is known."""
    return f"{value:g}" if abs(value) < 1e6 else f"{value:,.0f}"


def command(name: str, typed: Sequence[str]) -> str:
    """As typed, but for this machine's folders."""
    from laboratory.evaluation import record

    return shlex.join(("kakeya", "bench", name, *record.shown(typed, without=_NOT_SHOWN)))


def module_of(experiment: Experiment) -> Any:
    # Both before anything imports torch or transformers.
    configure_threads_environment()
    forbid_model_hub()
    if experiment.module.startswith("tests."):
        if not (_CLONE / "tests").is_dir():
            raise ConfigError(
                "this benchmark's attacks are those of the tests: run it in a clone of the repository, by the `kakeya` "
                "that `make` installs there"
            )
        if str(_CLONE) not in sys.path:  # a command's own folder is there instead
            sys.path.insert(0, str(_CLONE))
    return import_module(experiment.module)
