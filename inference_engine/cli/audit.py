"""`kakeya audit`: does a server give the same tokens for a history, however it was split into appends? (INV-3)

    in one piece    append 37         generate    append 5      generate    append 64              generate
    in pieces       append 11, 0, 26  generate    append 2, 3   generate    append 9, 30, 1, 24    generate

The same ids, split at random, are appended to many sessions, several at a time, so that their batches differ, too.
Every session also reports the invariants it found violated. In fixed-shape mode, tokens and log-probabilities must be
bit-identical. In batched mode, tokens must be equal; a difference between two tokens whose log-probabilities are within
0.001 is reported as a near-tie, not as a violation.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING

from rich.console import Console

from inference_engine.cli import process
from inference_engine.cli.answers import refuse_longer
from inference_engine.cli.connection import add_connection, connect_async
from inference_engine.cli.settings import add_config_file, add_settings, refuse_without_effect, settings
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.errors import ConfigError

if TYPE_CHECKING:
    from kakeya import AsyncClient, AsyncSession, Strategy

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

NEAR_TIE = 1e-3  # of log-probability
CUTS_AT_MOST = 5  # of one turn
TEMPERATURE = 0.8
MISSING = (-1, math.nan)  # for a stream that ended earlier

Stream = list[list[tuple[int, float]]]  # by turn, each token with its log-probability


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditedTurns:
    """The ids appended in each turn, and how tokens are generated. seed: None for greedy decoding."""

    turns: tuple[tuple[int, ...], ...]
    generate_tokens: int
    seed: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first difference between two streams of one history; after it, their histories differ."""

    history: int
    turn: int
    token: int
    whole: tuple[int, float]  # the token and its log-probability, in one piece
    split: tuple[int, float]
    pieces: tuple[int, ...]  # sizes of this turn's appends
    is_near_tie: bool

    def __str__(self) -> str:
        (token, logprob), (other, other_logprob) = self.whole, self.split
        return (
            f"history {self.history}, turn {self.turn}, token {self.token}: {token} ({logprob!r}) in one piece, "
            f"{other} ({other_logprob!r}) when appended in {', '.join(map(str, self.pieces))}"
        )


@dataclass
class Found:
    """The result of an audit."""

    is_exact: bool  # bit-identical results are promised
    is_shared: bool  # what one stream of a history computed, others may take over
    streams: int = 0
    tokens: int = 0
    broken: int = 0  # invariants violated, as counted by the server
    differences: list[Difference] = field(default_factory=list)

    @property
    def near_ties(self) -> int:
        return sum(difference.is_near_tie for difference in self.differences)

    @property
    def violations(self) -> int:
        return len(self.differences) - self.near_ties + self.broken


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "audit",
        usage="%(prog)s [OPTION ...]",
        help="check that a server's tokens depend on the history alone",
        description="Check that a server's tokens depend on the history alone.\n\n" + __doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_file(parser)
    add_connection(parser)
    add_settings(parser, ModelConfig)
    add_settings(parser, EngineConfig)
    audit = parser.add_argument_group("audit")
    audit.add_argument("--histories", type=int, default=2, metavar="N", help="to try (default: 2)")
    audit.add_argument("--splits", type=int, default=10, metavar="N", help="of each history (default: 10)")
    audit.add_argument("--at-once", type=int, default=4, metavar="N", help="splits at a time (default: 4)")
    audit.add_argument("--turns", type=int, default=3, metavar="N", help="of a history (default: 3)")
    audit.add_argument("--turn-tokens", type=int, default=96, metavar="N", help="at most, of a turn (default: 96)")
    audit.add_argument("--generate-tokens", type=int, default=8, metavar="N", help="after each turn (default: 8)")
    audit.add_argument("--seed", type=int, default=0, metavar="N", help="of ids and cuts (default: 0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Audit, print the result, and return 1 if there are violations."""
    from inference_engine.cli import auto_calibration as first_use
    from inference_engine.cli.child import child_server
    from inference_engine.cli.conversation import sdk_strategy

    for name in ("histories", "splits", "at_once", "turns", "turn_tokens", "generate_tokens"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    refuse_without_effect(args, used=("strategy",))
    model, engine = settings(args, ModelConfig), settings(args, EngineConfig)
    console = Console(highlight=False)
    with ExitStack() as stack:
        target = args.target
        if target is None:
            refuse_longer(args.generate_tokens, engine.max_generate_tokens, flag="--generate-tokens")
            first_use.before_start(model, engine)
            with process.progress().status("starting a server"):
                # Each stream has to compute its history.
                target = stack.enter_context(child_server(model, replace(engine, share_prefixes="off"))).wait_ready()
        with process.progress().status(f"{args.histories} histories, {args.splits} splits of each"):
            found = asyncio.run(_audit(args, target, sdk_strategy(engine.strategy)))
    for difference in found.differences:
        kind = "near-tie" if difference.is_near_tie else "INV-3 violated"
        console.print(f"{kind}: {difference}", markup=False, soft_wrap=True)
    mode = "equal to the bit" if found.is_exact else "equal tokens"
    console.print(
        f"{engine.strategy}, {mode}: {found.streams} streams of {args.histories} histories, "
        f"{found.tokens} tokens: {found.violations} violations, {found.broken} of them reported by the server, "
        f"{found.near_ties} near-ties",
        markup=False,
        soft_wrap=True,
    )
    if found.is_shared:
        console.print(
            "This server shares prefixes: streams of one history took over what others of them had computed. Start it "
            "with --share-prefixes off to have each computed by itself.",
            markup=False,
            soft_wrap=True,
        )
    return 1 if found.violations else 0


async def _audit(args: argparse.Namespace, target: str, strategy: Strategy | None) -> Found:
    from kakeya import Mode

    rng = random.Random(args.seed)
    async with connect_async(args, target) as client:
        info = await client.server_info()
        refuse_longer(args.generate_tokens, info.max_generate_tokens, flag="--generate-tokens")
        found = Found(is_exact=info.mode is Mode.FIXED_SHAPE, is_shared=info.shares_prefixes)
        for number in range(args.histories):
            history = _some_history(args, rng, info.vocab_size, is_sampled=found.is_exact and number % 2 == 1)
            uncut = [(len(turn),) for turn in history.turns]
            whole = await _stream(client, strategy, history, uncut, found)
            if whole is None:
                continue
            cuts = [_cut(history, rng) for _ in range(args.splits)]
            for first in range(0, args.splits, args.at_once):
                some = cuts[first : first + args.at_once]
                streams = await asyncio.gather(*(_stream(client, strategy, history, cut, found) for cut in some))
                for stream, cut in zip(streams, some, strict=True):
                    if stream is None:
                        continue
                    if (difference := compare(whole, stream, cut, history=number, is_exact=found.is_exact)) is not None:
                        found.differences.append(difference)
    return found


def _some_history(args: argparse.Namespace, rng: random.Random, vocab_size: int, *, is_sampled: bool) -> AuditedTurns:
    """Random ids. Sampled only in fixed-shape mode: in batched mode rounding may change a draw."""
    turns = tuple(
        tuple(rng.randrange(vocab_size) for _ in range(rng.randint(1, args.turn_tokens))) for _ in range(args.turns)
    )
    seed = rng.getrandbits(63) if is_sampled else None
    return AuditedTurns(turns=turns, generate_tokens=args.generate_tokens, seed=seed)


def _cut(history: AuditedTurns, rng: random.Random) -> list[tuple[int, ...]]:
    """The sizes of the appends of every turn; some are empty."""
    cut = []
    for turn in history.turns:
        inner = sorted(rng.randint(0, len(turn)) for _ in range(rng.randint(1, CUTS_AT_MOST)))
        cut.append(tuple(stop - start for start, stop in pairwise([0, *inner, len(turn)])))
    return cut


async def _stream(
    client: AsyncClient, strategy: Strategy | None, history: AuditedTurns, cut: Sequence[tuple[int, ...]], found: Found
) -> Stream | None:
    """Run the history in these pieces, in a new session. None if the server found an invariant violated."""
    from kakeya import InvariantViolated

    async with await client.create_session(strategy, label="audit") as session:
        try:
            stream = await _played(session, history, cut)
        except InvariantViolated:
            stream = None
        info = await session.info()
    found.streams += 1
    found.tokens += 0 if stream is None else sum(map(len, stream))
    found.broken += info.inv1_violations + info.inv2_violations + info.inv3_violations
    return stream


async def _played(session: AsyncSession, history: AuditedTurns, cut: Sequence[tuple[int, ...]]) -> Stream:
    stream: Stream = []
    for turn, pieces in zip(history.turns, cut, strict=True):
        start = 0
        for piece in pieces:
            await session.append(turn[start : start + piece])
            start += piece
        generated = session.generate(
            history.generate_tokens,
            logprobs=True,
            temperature=None if history.seed is None else TEMPERATURE,
            seed=history.seed,
        )
        result = await generated.result()
        assert result.logprobs is not None, "logprobs were requested"
        stream.append(list(zip(result.token_ids, result.logprobs, strict=True)))
    return stream


def compare(
    whole: Stream, split: Stream, cut: Sequence[tuple[int, ...]], *, history: int, is_exact: bool
) -> Difference | None:
    """The first difference, or None. In batched mode, log-probabilities may differ where tokens are equal."""
    for turn, (one, other, pieces) in enumerate(zip(whole, split, cut, strict=True)):
        pairs = zip_longest(one, other, fillvalue=MISSING)
        for token, (expected, given) in enumerate(pairs):
            if expected == given or (not is_exact and expected[0] == given[0]):
                continue
            return Difference(
                history=history,
                turn=turn,
                token=token,
                whole=expected,
                split=given,
                pieces=pieces,
                is_near_tie=not is_exact and abs(expected[1] - given[1]) < NEAR_TIE,
            )
    return None
