"""`kakeya evaluate`: what a strategy costs and what it forgets, measured on this machine; a record for each run.

    kakeya evaluate needle --strategies sink_window:window=256 --lengths 512 1024
    kakeya evaluate report
    kakeya evaluate report --show needle_smollm2-135m

Every experiment is a module of `laboratory/evaluation` that offers `add_arguments(parser)`, `main(arguments,
target)`, which returns the payload of a record, and perhaps `draw(payload, folder)`. A new one is a line in the table.
One that takes hours may save what it has as it goes: its `main` gets a third argument, to call with a payload.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from inference_engine.cli.lazy_commands import LateParser
from inference_engine.cli.settings import add_config_file, add_settings, settings
from inference_engine.config import EngineConfig, ModelConfig, writable
from inference_engine.errors import ConfigError
from inference_engine.models import find_model
from laboratory.bench.experiments import EXPERIMENTS as BENCHMARKS
from laboratory.bench.experiments import Experiment as Benchmark
from laboratory.bench.experiments import NotingParser, module_of, shown

logger = logging.getLogger(__name__)

# Of the engine's settings, those that answers, speed or memory may depend on.
ENGINE = (
    "mode", "kv_bytes", "tier_bytes", "max_sessions", "max_batch", "step_tokens", "segment_tokens",
    "page_tokens",
)  # fmt: skip
# What says where things are on this machine is no part of the command that makes a record again.
_PLACES = ("--results", "--config", "--cache-dir", "--disk", "--items")
# What says which code runs stands in the record by itself.
_NOT_SHOWN = (*_PLACES, "--commit")


@dataclass(frozen=True, slots=True)
class Experiment(Benchmark):
    """needs_model: whether `main` gets a running target, or None. saves_parts: whether it gets what saves a payload."""

    needs_model: bool = True
    saves_parts: bool = False


EXPERIMENTS = {
    "needle": Experiment("laboratory.evaluation.needle", "planted facts found, against full, with a control"),
    "fidelity": Experiment("laboratory.evaluation.fidelity", "perplexity, KL and agreement, against full"),
    "cost": Experiment("laboratory.evaluation.cost", "time to first token, tokens/s and bytes"),
    "ladder": Experiment(
        "laboratory.evaluation.ladder",
        "recall, KL, bytes, first token and decode, length by length",
        saves_parts=True,
    ),
    "backstop": Experiment("laboratory.evaluation.backstop", "the fewest layers that must be kept full"),
    "waking": Experiment("laboratory.evaluation.waking", "what idle sessions hold, and how soon they go on"),
    "restore-cache": Experiment("laboratory.evaluation.restore_cache", "what room for restored entries gains"),
    "forks": Experiment("laboratory.evaluation.forks", "what forks hold and take, against prefilling anew"),
    "rewind": Experiment("laboratory.evaluation.rewind", "the first token after going back, against prefilling anew"),
    "restoration": Experiment(
        "laboratory.evaluation.restoration",
        "the latent beside everything else that holds as many bytes",
        saves_parts=True,
    ),
    "drafting": Experiment(
        "laboratory.evaluation.drafting", "what drafters get right, what that gains, and that it changes no token"
    ),
    "pareto": Experiment(
        "laboratory.evaluation.pareto", "bytes a token against error, KL, facts and calls", needs_model=False
    ),
    "families": Experiment(
        "laboratory.evaluation.families",
        "which model families are served, with which strategies, and how exactly",
        needs_model=False,
    ),
    "growing": Experiment(
        "laboratory.evaluation.growing", "what saturates first when servers share a database", needs_model=False
    ),
    "regime-map": Experiment("laboratory.evaluation.regime_map", "which strategy pays where", needs_model=False),
}


def experiments() -> dict[str, Experiment]:
    """Ours, and those that installed packages add by entry points `kakeya.experiments`, which name a module."""
    added = {
        point.name: Experiment(point.value, f"of the package {'' if point.dist is None else point.dist.name}")
        for point in entry_points(group="kakeya.experiments")
    }
    return added | EXPERIMENTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT", parser_class=NotingParser)
    for name, experiment in experiments().items():
        one = commands.add_parser(name, help=experiment.help, description=experiment.help)
        one.learn = _learn(experiment)
        _add_results(one)
        one.add_argument("--name", metavar="NAME", help="the record's folder (default: experiment and model)")
        one.add_argument("--commit", metavar="HASH", help="the commit that runs, where there is no repository to ask")
        one.add_argument("--quick", action="store_true", help="few trials: does it work, and roughly what comes out")
        add_config_file(one)
        if experiment.needs_model:
            add_settings(one, ModelConfig)
            add_settings(one, EngineConfig, only=ENGINE)
        one.set_defaults(run=run)
    report = commands.add_parser(
        "report",
        help="make the index of records and their pictures again, or show records",
    )
    _add_results(report)
    report.add_argument(
        "--show",
        nargs="?",
        const="",
        metavar="EXPERIMENT",
        help="print the records of this experiment in full, without a name those of all; the index stays as it is",
    )
    report.add_argument("--pictures", type=Path, metavar="DIR", help="draw every picture of every record into a folder")
    report.set_defaults(run=run_report)


def _log_what_is_found() -> None:
    """On standard error, without the line that each Generate leaves: an experiment has hundreds, and theirs are few."""
    handler = logging.StreamHandler()
    handler.addFilter(lambda line: line.name != "inference_engine.scheduler.lifecycle" or line.levelno > logging.INFO)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=[handler]
    )


def run(args: argparse.Namespace) -> int:
    """Run one experiment and write its record. Raises KakeyaError for what is refused or void; nothing is written."""
    experiment = experiments()[args.experiment]
    _check_name(args.name)

    from laboratory.evaluation.interrupts import ended_as_interrupted
    from laboratory.evaluation.record import RESULTS, running_commit, write_record

    results = writable(args.results or RESULTS, "--results")
    commit = running_commit(args.commit)
    _log_what_is_found()
    module = module_of(experiment)

    def save(payload: dict[str, Any]) -> Path:
        model_id = payload["config"].get("model", "").replace("/", "--")
        name = args.name or "_".join(filter(None, (args.experiment.replace("-", "_"), model_id)))
        payload = {"command": command(args.experiment, args.typed), "commit": commit, **payload}
        return write_record(name, payload, results_dir=results, items=getattr(args, "items", None))

    if experiment.needs_model:
        # What is measured of a session is not taken from another one: experiments on that say so.
        model, engine = settings(args, ModelConfig), replace(settings(args, EngineConfig), share_prefixes="off")
        with (
            _opened(args, model, engine) as target,
            ended_as_interrupted(),
        ):
            payload = module.main(args, target, *([save] if experiment.saves_parts else []))
    else:
        payload = module.main(args, None)
    path = save(payload)
    if draw := getattr(module, "draw", None):
        draw(payload, path.parent)
    for value_name, value in payload["values"].items():
        print(f"{value_name}: {shown(value['median'])} {value['unit']}")
    print(path)
    return 0


def _opened(args: argparse.Namespace, model: ModelConfig, engine: EngineConfig) -> AbstractContextManager[Any]:
    """The model that the settings name; or, where an experiment takes a shape, one that is made."""
    if shape := getattr(args, "random", None):
        if any(word.partition("=")[0] == "--model" for word in args.typed):
            raise ConfigError("--random makes a model: leave --model out")

        from laboratory.training.made_target import open_made_target

        return open_made_target(shape, model, engine, args.strategies)
    find_model(model.model, cache=model.cache_path)

    from inference_engine.compose import components_identity, find_components, find_latent, latent_identity
    from laboratory.evaluation.models import open_target

    return open_target(
        model,
        engine,
        latent=find_latent(model),
        latent_identity=latent_identity(model),
        components=find_components(model),
        components_identity=components_identity(model),
    )


def run_report(args: argparse.Namespace) -> int:
    """Write the index page, draw pictures, or print records. Raises KakeyaError for a record that cannot be read."""
    from laboratory.evaluation.record import RESULTS
    from laboratory.evaluation.report import rebuild, shown

    results = args.results or RESULTS
    if args.show is not None:
        print(shown(results, args.show or None))
        return 0
    if args.pictures:
        for path in sorted(results.glob("*/*/record.json")):
            for picture in pictures_of(path, args.pictures / path.parent.relative_to(results)):
                print(picture)
    else:
        for place in sorted({picture.parent for picture in results.glob("*/*/*.svg")}):
            _draw_again(place)
        print(rebuild(results))
    return 0


def pictures_of(path: Path, folder: Path) -> list[Path]:
    """Draw what the record of this path can draw, into a folder. Returns the pictures, of some kinds of records none.

    What draws is the module that measured it, named by the record's command; where that has another name today, by its
    folder's name.
    """
    from laboratory.evaluation.record import load

    record = load(path)
    kind, name = [*record["command"].split(), "", ""][1:3]
    if path.parent.parent.name.startswith("long_session"):
        kind, name = "bench", "long-session"
    known: dict[str, dict[str, Any]] = {"evaluate": {**experiments()}, "bench": {**BENCHMARKS}}
    measured = known.get(kind, {}).get(name)
    if measured and not measured.module.startswith("tests.") and (draw := getattr(module_of(measured), "draw", None)):
        draw(record, folder)
    return sorted(folder.glob("*.svg"))


def _draw_again(place: Path) -> None:
    """Of the pictures that a record's folder has, each anew; others are left out."""
    with tempfile.TemporaryDirectory() as folder:
        for picture in pictures_of(place / "record.json", Path(folder)):
            if (place / picture.name).exists():
                shutil.copyfile(picture, place / picture.name)


def command(name: str, typed: Sequence[str]) -> str:
    """The command as typed, but for this machine's folders: files of the repository are named from its root."""
    from laboratory.evaluation.record import shown

    return shlex.join(("kakeya", "evaluate", name, *shown(typed, without=_NOT_SHOWN, without_absolute=("--latent",))))


def _add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, metavar="DIR", help="where records are kept (default: results)")


def _check_name(name: str | None) -> None:
    if name is not None and (Path(name).name != name or name in ("", ".", "..")):
        raise ConfigError(f"--name must be the name of a folder, not a path, got {name!r}")


def _learn(experiment: Experiment) -> Callable[[LateParser], None]:
    return lambda parser: module_of(experiment).add_arguments(parser)
