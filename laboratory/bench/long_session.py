"""One session for hundreds of turns, through the SDK: time, bytes and quality from the first turn to the last.

A turn appends prose that comes with Python and generates greedily. Every few turns the same turn is run on a fresh
session, too, that was given the tokens the long one can still read. One passage is scored when eviction has begun and
again at the end, there on a fresh session too: what was read before it differs between the first time and the last, but
not between the last two. Each of its tokens is forced through `logit_bias`, so the log-probabilities are the model's.

With `--facts` the first turns say who has which pass key, and each is asked for at that conversation's end; also on a
fresh session that read the last of the history alone, which must not know one.

A session that keeps every position has a limit. When the next turn would pass it, the conversation is over: the passage
is scored, the session is closed, and the next conversation begins in a new session of the same server and connection.
The last full conversation is held once more at the end, on a fresh session, with the passage after it. So each of its
tokens is read as it was: one that was generated selects, one that was appended does not. SIGTERM ends the run like
Ctrl-C, and what was measured until then is recorded, as it is after an error.
"""

from __future__ import annotations

import argparse
import itertools
import pydoc_data.topics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from inference_engine.cli.child import child_server
from inference_engine.cli.connection import add_connection, connect
from inference_engine.cli.conversation import sdk_strategy
from inference_engine.cli.settings import CONVERSATION, add_config_file, add_settings, settings
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.errors import KakeyaError
from inference_engine.kv.strategies import parse_strategy
from inference_engine.models import tokenizer_folder
from kakeya import Client, GenerateResult, ServerInfo, Session, SinkWindow, Strategy
from kakeya import KakeyaError as ClientError
from kakeya.tokenization import ChatTokenizer, load_tokenizer
from laboratory.bench.experiments import Save
from laboratory.evaluation import pictures, record
from laboratory.evaluation.interrupts import ended_as_interrupted
from laboratory.evaluation.long_session import TurnSample, buckets, perplexity, values
from laboratory.evaluation.pictures import Course
from laboratory.evaluation.tasks import TASKS, Grade, Question

CONTEXT_TOKENS = 64  # what the scored passage begins with, unscored
HEADLINES = ("turn_last_over_first_same_place", "turn_last_over_first_paired")
_ANSWER_TOKENS = TASKS["multi"].answer_tokens
FORCE = 1000.0  # the largest logit_bias there is: the token it is for is the one that comes


@dataclass(kw_only=True)
class Run:
    """What happened, as it happens."""

    samples: list[TurnSample] = field(default_factory=list)
    first_scores: list[float] = field(default_factory=list)  # log-probabilities of the passage
    last_scores: list[float] = field(default_factory=list)
    fresh_scores: list[float] = field(default_factory=list)  # on a fresh session that can read the same as the last
    errors: list[str] = field(default_factory=list)
    history_tokens: int = 0  # of all conversations
    facts: dict[str, int] = field(default_factory=dict)  # found, by the session that was asked
    facts_said_at: float = 0.0  # seconds: the last one
    full_conversations: int = 0
    repeated_turns: int = 0  # of the last full conversation, on a fresh session
    server: ServerInfo | None = None
    process_cores: float | None = None  # how many the server kept busy


class Long:
    """A session together with every id of its history, so that a fresh one can be brought to the same fill."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.history: list[int] = []
        self.turns: list[tuple[Sequence[int], tuple[int, ...]]] = []  # appended, generated

    def append(self, ids: Sequence[int]) -> None:
        self.session.append(ids)
        self.history += ids

    def generate(self, tokens: int, **options: Any) -> tuple[GenerateResult, float]:
        """The result, and when the first token came."""
        stream = self.session.generate(tokens, logprobs=True, **options)
        first_token_at = 0.0
        for token_id in stream:
            first_token_at = first_token_at or time.perf_counter()
            self.history.append(token_id)
        return stream.result(), first_token_at

    def force(self, token_id: int) -> float:
        """Make `token_id` the next token, as if it had been generated. Returns its log-probability."""
        result, _ = self.generate(1, logit_bias={token_id: FORCE})
        assert result.token_ids == (token_id,) and result.logprobs is not None
        return result.logprobs[0]

    def turn(self, ids: Sequence[int], tokens: int) -> tuple[GenerateResult, float, float]:
        """Append and generate. Returns the result, the seconds it all took, and those to the first token."""
        began = time.perf_counter()
        self.append(ids)
        result, first_token_at = self.generate(tokens)
        self.turns.append((ids, result.token_ids))
        return result, time.perf_counter() - began, first_token_at - began


class Bench:
    """Drives one long session, or conversation after conversation."""

    def __init__(self, client: Client, strategy: Strategy, tokenizer: ChatTokenizer, args: argparse.Namespace) -> None:
        self._client = client
        self._strategy = strategy
        self._tokenizer = tokenizer
        self._prose = prose_ids(tokenizer)
        self._facts = [TASKS["multi"].make(number, 0) for number in range(args.facts)]
        self._args = args
        self._server = client.server_info()
        self._passage = self._take(CONTEXT_TOKENS + args.passage_tokens)

    def run(self, process: psutil.Process | None, run: Run, show: Progress) -> None:
        """Fill `run` until the turns or the seconds are over. What is in it stays if an error ends the session."""
        run.server = self._server
        began = time.monotonic()
        busy = _cpu_seconds(process)
        last_full: Long | None = None
        task = show.add_task("turns", total=None if self._args.seconds else self._args.turns)
        for conversation in itertools.count():
            with self._client.create_session(self._strategy, eos_token_ids=(), label="long session") as session:
                long = Long(session)
                scored_at = 0
                tokens_before = run.history_tokens
                while not (is_over := self._is_over(run, began)) and self._has_room(long):
                    sample = replace(self._sample(long, process, len(run.samples)), conversation=conversation)
                    run.samples.append(replace(sample, at_seconds=time.monotonic() - began))
                    run.history_tokens = tokens_before + len(long.history)
                    if len(run.samples) == len(self._facts):
                        run.facts_said_at = run.samples[-1].at_seconds
                    if busy is not None and (now := _cpu_seconds(process)) is not None:
                        run.process_cores = (now - busy) / run.samples[-1].at_seconds
                    if session.limit_tokens is None and sample.evicted_positions and not run.first_scores:
                        run.first_scores = self._score(long)
                        scored_at = len(long.history)
                    show.advance(task)
                if not is_over:
                    run.last_scores = self._score(long)
                    run.first_scores = run.first_scores or run.last_scores
                    run.full_conversations += 1
                    last_full = long
                # A window's end: only a passage that can no longer be read is as new as it was the first time.
                elif session.limit_tokens is None and run.first_scores and self._is_forgotten(scored_at, long, run):
                    fill = self._equal_fill(long.history)
                    run.last_scores = self._score(long)
                    run.fresh_scores = self._score_on_fresh(fill)
                if self._facts and conversation == 0:
                    run.facts["long"] = self._found(long)
                    run.facts["fresh"] = self._found_on_fresh(long.history[-self._args.append_tokens :])
                run.history_tokens = tokens_before + len(long.history)
            if is_over:
                break
        if last_full is not None:
            run.repeated_turns, run.fresh_scores = self._hold_again(last_full.turns)

    def _is_forgotten(self, scored_at: int, long: Long, run: Run) -> bool:
        return len(long.history) > scored_at + run.samples[-1].attended_positions

    def _is_over(self, run: Run, began: float) -> bool:
        if self._args.seconds:
            return time.monotonic() - began >= float(self._args.seconds)
        return len(run.samples) >= int(self._args.turns)

    def _has_room(self, long: Long) -> bool:
        """For one more turn, and the passage after it. Raises KakeyaError if a new session has none."""
        limit = long.session.limit_tokens
        if limit is None:
            return True
        needed: int = len(self._passage) + self._args.append_tokens + self._args.generate_tokens
        needed += sum(len(ids) + _ANSWER_TOKENS for ids in map(self._asking, self._facts))
        if needed > limit:
            raise KakeyaError(
                f"a turn and the passage take {needed} tokens, and a session has {limit} at most: take fewer with "
                "--append-tokens, --generate-tokens or --passage-tokens"
            )
        return len(long.history) + needed <= limit

    def _sample(self, long: Long, process: psutil.Process | None, number: int) -> TurnSample:
        said = self._encode(f"\n\n{self._facts[number].facts[number]}\n\n") if number < len(self._facts) else []
        ids = [*said, *self._take(self._args.append_tokens - len(said))]
        history_tokens = len(long.history)
        is_paired = number % self._args.pair_every == self._args.pair_every - 1
        fill = self._equal_fill(long.history) if is_paired and long.history else None
        # Neither half of a pair always comes first.
        fresh_first = fill is not None and number // self._args.pair_every % 2 == 0
        fresh = self._on_fresh(fill, ids) if fill is not None and fresh_first else None
        place = len(long.turns)
        time.sleep(self._args.pause)
        busy = _cpu_seconds(process)
        result, seconds, first_token_seconds = long.turn(ids, self._args.generate_tokens)
        now = _cpu_seconds(process)
        info = long.session.info()
        process_bytes = process.memory_info().rss if process else None
        if fill is not None and not fresh_first:
            fresh = self._on_fresh(fill, ids)
        assert result.logprobs is not None
        sample = TurnSample(
            history_tokens=history_tokens,
            seconds=seconds,
            first_token_seconds=first_token_seconds,
            kv_bytes=info.kv_live_bytes,
            process_bytes=process_bytes,
            attended_positions=result.attended_positions,
            evicted_positions=info.evicted_tokens,
            violations=info.inv1_violations + info.inv2_violations + info.inv3_violations,
            logprob=sum(result.logprobs) / len(result.logprobs),
            place=place,
            cpu_seconds=None if busy is None or now is None else now - busy,
        )
        if fresh is None:
            return sample
        fresh_result, fresh_seconds = fresh
        if fresh_result.attended_positions != result.attended_positions:
            raise KakeyaError(
                f"a pair is unequal: the long session reads {result.attended_positions} positions, "
                f"the fresh one {fresh_result.attended_positions}"
            )
        return replace(sample, fresh_seconds=fresh_seconds)

    def _on_fresh(self, fill: Sequence[int], ids: Sequence[int]) -> tuple[GenerateResult, float]:
        with self._fresh(fill) as fresh:
            # A turn after a pause finds cold caches and sleeping threads: both halves of a pair have the same pause.
            time.sleep(self._args.pause)
            result, seconds, _ = fresh.turn(ids, self._args.generate_tokens)
            return result, seconds

    def _score_on_fresh(self, fill: Sequence[int]) -> list[float]:
        with self._fresh(fill) as fresh:
            return self._score(fresh)

    def _hold_again(self, turns: Sequence[tuple[Sequence[int], tuple[int, ...]]]) -> tuple[int, list[float]]:
        """A conversation on a fresh session: how many turns generate the same ids, and the passage's scores after it.

        If one generates others, rounding has decided between two ids. Then the whole history is appended instead.
        """
        repeated = 0
        with self._client.create_session(self._strategy, eos_token_ids=(), label="fresh session") as session:
            fresh = Long(session)
            for ids, generated in turns:
                result, _, _ = fresh.turn(ids, len(generated))
                if result.token_ids != generated:
                    break
                repeated += 1
            else:
                return repeated, self._score(fresh)
        return repeated, self._score_on_fresh([token_id for turn in turns for ids in turn for token_id in ids])

    @contextmanager
    def _fresh(self, fill: Sequence[int]) -> Iterator[Long]:
        with self._client.create_session(self._strategy, eos_token_ids=(), label="fresh session") as session:
            fresh = Long(session)
            if len(fill) > 1:
                fresh.append(fill[:-1])
                # As after a turn: everything is computed but the last token.
                fresh.force(fill[-1])
            else:
                fresh.append(fill)
            yield fresh

    def _equal_fill(self, history: Sequence[int]) -> list[int]:
        """A shorter history of which as much can be read, with its segments cut at the same places."""
        match self._strategy:
            case SinkWindow(sink=int(sink), window=int(window)):
                segment = self._server.segment_tokens
                enough = sink + window + 2 * segment
                length = enough + (len(history) - enough) % segment
                if length < len(history):
                    return [*history[:sink], *history[len(history) - length + sink :]]
        return list(history)

    def _found(self, long: Long) -> int:
        """How many of the facts it answers with, asked one after another."""
        found = 0
        for fact in self._facts:
            long.append(self._asking(fact))
            result, _ = long.generate(_ANSWER_TOKENS)
            found += fact.grade(self._tokenizer.decode(result.token_ids)) is Grade.EXACT
        return found

    def _found_on_fresh(self, fill: Sequence[int]) -> int:
        with self._fresh(fill) as fresh:
            return self._found(fresh)

    def _asking(self, fact: Question) -> list[int]:
        return self._encode(f"\n\n{fact.question} {fact.opening}")

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _score(self, long: Long) -> list[float]:
        long.append(self._passage[:CONTEXT_TOKENS])
        return [long.force(token_id) for token_id in self._passage[CONTEXT_TOKENS:]]

    def _take(self, count: int) -> list[int]:
        return list(itertools.islice(self._prose, count))


def _cpu_seconds(process: psutil.Process | None) -> float | None:
    if process is None:
        return None
    times = process.cpu_times()
    return times.user + times.system


def prose_ids(tokenizer: Any) -> Iterator[int]:
    """The language reference that comes with Python, as ids, over and over."""
    text = "\n\n".join(pydoc_data.topics.topics.values())
    return itertools.cycle(tokenizer.encode(text, add_special_tokens=False))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_file(parser)
    add_connection(parser)
    add_settings(parser, ModelConfig)
    add_settings(parser, EngineConfig, only=CONVERSATION)
    parser.set_defaults(strategy="sink_window")
    parser.add_argument("--turns", type=int, default=200, metavar="N", help="default: 200")
    parser.add_argument("--seconds", type=float, metavar="S", help="run for so long instead")
    parser.add_argument("--append-tokens", type=int, default=70, metavar="N", help="of a turn (default: 70)")
    parser.add_argument("--generate-tokens", type=int, default=32, metavar="N", help="of a turn (default: 32)")
    parser.add_argument("--pair-every", type=int, default=5, metavar="N", help="turns from pair to pair (default: 5)")
    parser.add_argument(
        "--pause", type=float, default=0.0, metavar="S", help="before a turn, as for tools (default: 0)"
    )
    parser.add_argument(
        "--facts", type=int, default=0, choices=range(TASKS["multi"].facts + 1), metavar="N",
        help="that the first turns say, asked for at the end (default: 0)",
    )  # fmt: skip
    record.add_items(parser)
    parser.add_argument("--passage-tokens", type=int, default=256, metavar="N", help="scored twice (default: 256)")


def main(args: argparse.Namespace, save: Save) -> dict[str, Any]:
    # A fresh session of an equal history has to compute it.
    model, engine = settings(args, ModelConfig), replace(settings(args, EngineConfig), share_prefixes="off")
    run = Run()
    try:
        with ended_as_interrupted():
            _drive(args, model, engine, run)
    except (KakeyaError, ClientError, psutil.Error) as error:
        run.errors.append(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        run.errors.append("interrupted")
    except BaseException as error:
        run.errors.append(f"{type(error).__name__}: {error}")
        if run.server is not None and run.samples:  # hours of turns are not lost with a mistake of ours
            save(_payload(run, args, engine, run.server))
        raise
    if run.server is None or not run.samples:
        raise KakeyaError("; ".join(run.errors) or "no turn was held")
    return _payload(run, args, engine, run.server)


def _drive(args: argparse.Namespace, model: ModelConfig, engine: EngineConfig, run: Run) -> None:
    with ExitStack() as stack:
        child = None if args.target else stack.enter_context(child_server(model, engine))
        tokenizer = load_tokenizer(tokenizer_folder(model.model, model.cache_path))
        target = args.target if child is None else child.wait_ready()
        client = stack.enter_context(connect(args, target))
        process = None if child is None else psutil.Process(child.pid)
        columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
        show = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
        Bench(client, sdk_strategy(engine.strategy), tokenizer, args).run(process, run, show)


def _payload(run: Run, args: argparse.Namespace, engine: EngineConfig, server: ServerInfo) -> dict[str, Any]:
    found = values(run.samples)
    found["history"] = record.exact(run.history_tokens, "tokens")
    found["errors"] = record.exact(len(run.errors), "errors")
    if run.process_cores is not None:
        found["process_cores"] = record.exact(run.process_cores, "cores")
    scored = {"first": run.first_scores, "last": run.last_scores, "last_on_fresh": run.fresh_scores}
    for name, scores in scored.items():
        if scores:
            found[f"passage_perplexity_{name}"] = record.exact(perplexity(scores), "perplexity")
    if run.fresh_scores:
        ratio = perplexity(run.last_scores) / perplexity(run.fresh_scores)
        found["passage_perplexity_last_over_fresh"] = record.exact(ratio, "ratio")
    if run.facts:
        found["facts_found"] = record.exact(run.facts["long"], f"of {args.facts}")
        found["facts_found_on_fresh"] = record.exact(run.facts["fresh"], f"of {args.facts}")
        found["facts_said"] = record.exact(run.facts_said_at, "s")
    if run.full_conversations:
        found["conversations_full"] = record.exact(run.full_conversations, "conversations")
        if run.fresh_scores:
            found["last_full_conversation_repeated"] = record.exact(run.repeated_turns, "turns")
    wrong = [*run.errors, *["a session held more than it may"][: any(sample.violations for sample in run.samples)]]
    if run.facts.get("fresh"):
        wrong.append("a session knew facts that it never read")
    return {
        "experiment": "long_session",
        "config": {
            "model": server.model_id,
            "device": server.device,
            "dtype": server.dtype,
            "mode": server.mode.value,
            "trained_positions": server.trained_positions,
            "segment_tokens": server.segment_tokens,
            "strategy": str(parse_strategy(engine.strategy)),
            "threads": args.threads or "auto",
            "append_tokens": args.append_tokens,
            "generate_tokens": args.generate_tokens,
            "pair_every": args.pair_every,
            "passage_tokens": args.passage_tokens,
            "pause_seconds": args.pause,
            **({"facts": args.facts} if args.facts else {}),
        },
        "seeds": [],  # greedy, and the prose comes with Python
        "values": found,
        "headlines": [name for name in HEADLINES if name in found] or list(found),
        "baseline": "the same turn on a fresh session at equal fill (turn_over_fresh_…, …_paired)",
        "course": buckets(run.samples),
        "items": {"turns": [asdict(sample) for sample in run.samples]},
        "errors": run.errors,
        "wrong": "\n".join(wrong),
    }


def draw(payload: Mapping[str, Any], folder: Path) -> None:
    """Seconds a turn, over a session; or over the conversations that one session after another had."""
    parts = payload["course"]
    turns, done = [], 0
    for part in parts:
        turns.append(done + part["turns"] / 2)
        done += part["turns"]
    courses = []
    for name, key in (
        ("turn", "turn_seconds"),
        ("first token", "first_token_seconds"),
        ("the same turn on a fresh session", "fresh_seconds"),
    ):
        own = [(at, part[key]) for at, part in zip(turns, parts, strict=True) if part.get(key)]
        spread = [(one["low"], one["high"]) for _, one in own]
        courses.append(Course(name, [at for at, _ in own], [one["median"] for _, one in own], spread))
    about = payload["config"]
    pictures.lines(
        folder / "turns.svg",
        title=f"{about['model']}, {pictures.plain(about['strategy'])}: {done} turns",
        x_label="turn",
        y_label="seconds, median and quartiles",
        courses=courses,
    )
