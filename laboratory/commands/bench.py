"""`kakeya bench serve`: a server under the load of many agents, open loop, with percentiles, refusals and plots.

The load is that of agents: sessions of dozens of turns, long inputs, short outputs, time to think in between. It comes
when it is due, however slow the answers are. With several `--loads` the same server gets it once, twice, five times
over, so that one sees what it does when it has too much.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.util
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from inference_engine.cli import first_use, process
from inference_engine.cli.connection import add_connection, connect_async
from inference_engine.cli.settings import add_config_file, add_settings, refuse_without_effect, settings
from inference_engine.config import EngineConfig, ModelConfig, ServerConfig, writable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kakeya import ServerInfo
    from laboratory.load.phases import Plan, Played
    from laboratory.load.schedule import Shape

EXPERIMENT = "serve_load"
TURN_SECONDS = 120.0  # the deadline of a turn's Generate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    serve = commands.add_parser(
        "serve",
        help="many agents at once, open loop",
        description="Measure a server under the load of many agents.\n\n" + __doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_file(serve)
    add_connection(serve)
    add_settings(serve, ModelConfig)
    add_settings(serve, EngineConfig)
    load = serve.add_argument_group("load")
    load.add_argument("--agents", type=int, default=8, metavar="N", help="at any time, under a load of 1 (default: 8)")
    load.add_argument("--loads", type=float, nargs="+", default=[1.0], metavar="X", help="one phase each (default: 1)")
    load.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of each phase (default: 60)")
    load.add_argument("--warm-seconds", type=float, default=5.0, metavar="S", help="not counted (default: 5)")
    load.add_argument("--turns", type=int, metavar="N", help="of an agent")
    load.add_argument("--prompt-tokens", type=int, metavar="N", help="of an agent's first turn, median")
    load.add_argument("--append-tokens", type=int, metavar="N", help="of its other turns, median")
    load.add_argument("--generate-tokens", type=int, metavar="N", help="of each turn, median")
    load.add_argument("--interval-seconds", type=float, metavar="S", help="between an agent's turns, mean")
    load.add_argument("--fork-share", type=float, metavar="X", help="of turns that are tried on a fork first")
    load.add_argument("--limit-tokens", type=int, metavar="N", help="of a session; a smaller one takes less memory")
    load.add_argument("--seed", type=int, default=0, metavar="N", help="of the schedule (default: 0)")
    scripted = serve.add_argument_group("scripted model", "instead of a model: what serving costs without one")
    scripted.add_argument("--scripted", action="store_true", help="start the server on a model that costs nothing")
    scripted.add_argument("--step-seconds", type=float, default=0.0, metavar="S", help="the least a step takes then")
    scripted.add_argument("--token-seconds", type=float, default=0.0, metavar="S", help="what each token adds to that")
    serve.add_argument("--name", default=EXPERIMENT, metavar="NAME", help=f"of the record (default: {EXPERIMENT})")
    serve.add_argument("--results", type=Path, metavar="FOLDER", help="where records go (default: results/)")
    serve.add_argument("--no-record", action="store_true", help="only show")
    serve.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Play the load, show and record what came of it. Status 1 if a turn failed otherwise than by a refusal."""
    from inference_engine.cli.child import child_server
    from inference_engine.cli.conversation import sdk_strategy
    from laboratory.commands.scripted_server import scripted_child
    from laboratory.evaluation import record
    from laboratory.load import report
    from laboratory.load.phases import Plan

    refuse_without_effect(args, used=("strategy",))
    model, engine = settings(args, ModelConfig), settings(args, EngineConfig)
    results = args.results or record.RESULTS
    if not args.no_record:
        writable(results, "--results")
    console = Console(highlight=False)
    plan = Plan(
        shape=shape_of(args),
        agents=args.agents,
        loads=tuple(args.loads),
        seconds=args.seconds,
        warm_seconds=args.warm_seconds,
        seed=args.seed,
        strategy=sdk_strategy(engine.strategy),
        limit_tokens=args.limit_tokens,
    )
    with ExitStack() as stack:
        target = args.target
        if target is None:
            if not args.scripted:
                first_use.before_start(model, engine)
            with process.progress().status("starting a server"):
                server_config = ServerConfig(bind="127.0.0.1:0", drain_seconds=5.0)
                child = stack.enter_context(
                    scripted_child(
                        engine, server_config, step_seconds=args.step_seconds, token_seconds=args.token_seconds
                    )
                    if args.scripted
                    else child_server(model, engine)
                )
                target = child.wait_ready()
        with process.progress().status(f"{len(plan.loads)} phases of {plan.seconds:g} s"):
            server, played = asyncio.run(_play(args, plan, target))
    console.print(report.shown(played), soft_wrap=True)
    if not args.no_record:
        payload = {
            "command": record.command_line(without=("--target", "--api-key-file", "--tls-ca-file", "--results")),
            "config": {
                "server": "its own" if args.target is None else "given",
                "model": server.model_id,
                "device": server.device,
                "mode": server.mode.value,
                "strategy": engine.strategy,
                "max_batch": engine.max_batch if args.target is None else None,
                "max_queued": engine.max_queued if args.target is None else None,
                "step_seconds": args.step_seconds if args.scripted else None,
                "row_seconds": args.token_seconds if args.scripted else None,
                "agents": plan.agents,
                "seconds": plan.seconds,
                "warm_seconds": plan.warm_seconds,
                "limit_tokens": plan.limit_tokens,
                **dataclasses.asdict(plan.shape),
            },
            "seeds": [plan.seed],
            "values": report.values(played),
            "baseline": f"the load of {plan.loads[0]:g} in the same run",
            "tables": report.tables(played),
        }
        path = record.write_record(args.name, payload, results_dir=results)
        if importlib.util.find_spec("matplotlib"):
            report.draw(path.parent, played, server.model_id)
        console.print(path.parent.name + "/" + path.name, soft_wrap=True)
    failed = sum(phase.samples.failed.total() for phase in played)
    if failed:
        print(f"{failed} turns failed", file=sys.stderr)
    return 1 if failed else 0


async def _play(args: argparse.Namespace, plan: Plan, target: str) -> tuple[ServerInfo, Sequence[Played]]:
    from laboratory.load.driver import NO_RETRIES
    from laboratory.load.phases import play

    async with connect_async(args, target, retry=NO_RETRIES, generate_timeout=TURN_SECONDS) as client:
        return await play(plan, client)


def shape_of(args: argparse.Namespace) -> Shape:
    """How the agents are, of what was given. Raises ConfigError."""
    from laboratory.load.schedule import Shape

    given = {spec.name: getattr(args, spec.name) for spec in dataclasses.fields(Shape)}
    return Shape(**{name: value for name, value in given.items() if value is not None})
