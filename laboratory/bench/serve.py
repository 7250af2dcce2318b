"""A server under the load of many agents, open loop, with percentiles and refusals.

The load is that of agents: sessions of dozens of turns, long inputs, short outputs, time to think in between. It comes
when it is due, however slow the answers are. With several `--loads` the same server gets it once, twice, five times
over, so that one sees what it does when it has too much.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from inference_engine.cli import auto_calibration as first_use
from inference_engine.cli import process
from inference_engine.cli.child import child_server
from inference_engine.cli.connection import add_connection, connect_async
from inference_engine.cli.conversation import sdk_strategy
from inference_engine.cli.settings import add_config_file, add_settings, refuse_without_effect, settings
from inference_engine.config import EngineConfig, ModelConfig, ServerConfig
from kakeya import ServerInfo
from laboratory.bench.experiments import Save
from laboratory.load import report
from laboratory.load.driver import NO_RETRIES
from laboratory.load.phases import Plan, Played, play
from laboratory.load.schedule import Shape
from laboratory.load.scripted_server import scripted_child

TURN_SECONDS = 120.0  # the deadline of a turn's Generate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_file(parser)
    add_connection(parser)
    add_settings(parser, ModelConfig)
    add_settings(parser, EngineConfig)
    load = parser.add_argument_group("load")
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
    scripted = parser.add_argument_group("scripted model", "instead of a model: what serving costs without one")
    scripted.add_argument("--scripted", action="store_true", help="start the server on a model that costs nothing")
    scripted.add_argument("--step-seconds", type=float, default=0.0, metavar="S", help="the least a step takes then")
    scripted.add_argument("--token-seconds", type=float, default=0.0, metavar="S", help="what each token adds to that")


def main(args: argparse.Namespace, _save: Save) -> dict[str, Any]:
    """Play the load. Turns that failed otherwise than by a refusal are wrong."""
    refuse_without_effect(args, used=("strategy",))
    model, engine = settings(args, ModelConfig), settings(args, EngineConfig)
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
    Console(highlight=False).print(report.shown(played), soft_wrap=True)
    failed = sum(phase.samples.failed.total() for phase in played)
    return {
        "experiment": "serve_load",
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
        "is_shown": True,
        "wrong": f"{failed} turns failed" if failed else "",
    }


async def _play(args: argparse.Namespace, plan: Plan, target: str) -> tuple[ServerInfo, Sequence[Played]]:
    async with connect_async(args, target, retry=NO_RETRIES, generate_timeout=TURN_SECONDS) as client:
        return await play(plan, client)


def shape_of(args: argparse.Namespace) -> Shape:
    """How the agents are, of what was given. Raises ConfigError."""
    given = {spec.name: getattr(args, spec.name) for spec in dataclasses.fields(Shape)}
    return Shape(**{name: value for name, value in given.items() if value is not None})
