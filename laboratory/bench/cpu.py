"""The native CPU backend beside llama.cpp, which runs the very file that the model was fetched as, and beside others.

Each contender is a process of its own (`cpu_contenders.py`), on the same cores, with as many threads. All stay loaded
and take turns at each kind of work, so a slow minute of the machine hits all of them; ratios are taken within a round.
Ours goes through the engine, without a server. There is no drafter.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inference_engine.config import ModelConfig, child_environment, resolve
from inference_engine.errors import ConfigError
from inference_engine.models import CheckedFolder, check_model, convert_for_torch, tokenizer_folder, weights_digest
from inference_engine.models.checksums import sha256_of
from inference_engine.models.folder import GGUF
from inference_engine.models.open_checkpoint import open_checkpoint
from laboratory.bench.experiments import Save
from laboratory.evaluation import record
from laboratory.evaluation.models import load_tokenizer
from laboratory.evaluation.sessions import turned

LLAMA, OPENVINO = "llama-cpp-python==0.3.36", "openvino-genai==2026.4.1.0"
LENGTHS = (32, 128, 1024, 4096, 8000)
NEAR = 1024  # histories up to here are computed anew for each round
APPENDED, PREFILLED, SESSIONS, EACH = 18, 512, 8, 128
MOST_ROUNDS = 16  # a history of 8,000 grows in each, and has 8,192 positions
STRATEGIES = ("gather:budget=800,block=16,sink=16,window=256", "sink_window:sink=4,window=256")
# Files, and how many characters from where: two of English and code, three of a language the model hardly knows.
TEXTS = (
    ("docs/architecture.md", 2000),
    ("inference_engine/types.py", 0),
    ("laboratory/evaluation/texts/polish_bread.txt", 0),
    ("laboratory/evaluation/texts/polish_bridge.txt", 0),
    ("laboratory/evaluation/texts/polish_council.txt", 0),
)
TEXT_CHARACTERS, TEXT_TOKENS = 4000, 400
INT8, EXACT, TORCH, FILE = "kakeya int8", "kakeya exact", "kakeya torch", "llama.cpp Q4_1"
CONTENDERS = Path(__file__).with_name("cpu_contenders.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """Its Python, its kind, what `cpu_contenders.py` makes it with besides threads, and what it is measured at.

    is_slow: takes a fraction of the steps. beside: whose times its own are divided by.
    """

    name: str
    python: str
    kind: str
    arguments: Mapping[str, Any]
    lengths: tuple[int, ...] = LENGTHS
    is_slow: bool = False
    is_together: bool = True
    first_ids: tuple[int, ...] = (APPENDED, PREFILLED)
    has_divergence: bool = False
    beside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of work: the request, and how often it is made in a round."""

    name: str
    request: str
    arguments: Mapping[str, Any]
    times: int = 1


@dataclass(slots=True)
class Found:
    """Milliseconds of each kind of work and contender, one number for each round; counts; what was found once."""

    rounds: dict[tuple[int, str, str], list[float]] = field(default_factory=dict)
    memory: dict[tuple[int, str], dict[str, float]] = field(default_factory=dict)
    divergence: dict[str, dict[str, float]] = field(default_factory=dict)
    spins: bool = False


# -- environments -----------------------------------------------------------------------------------------------------


def python_with(package: str, module: str, announced: str, *options: str) -> str:
    """The Python of an environment under build/ that has `package`; made once, `announced` if it is."""
    folder = record.ROOT / "build" / package.partition("==")[0]
    python = folder / "bin" / "python"
    if python.is_file() and _says(str(python), f"import {module}") is not None:
        return str(python)
    print(f"{package}: {announced}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    quiet = ("--disable-pip-version-check", "--no-input", "--quiet")
    began = time.perf_counter()
    subprocess.run([str(python), "-m", "pip", "install", *quiet, *options, package], check=True)
    print(f"{package}: {time.perf_counter() - began:.0f} s", flush=True)
    return str(python)


def version_of(python: str, package: str) -> str:
    name = package.partition("==")[0]
    return _says(python, f"import importlib.metadata as m; print(m.version({name!r}))") or "unknown"


def _says(python: str, program: str) -> str | None:
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


# -- processes --------------------------------------------------------------------------------------------------------


class Process:
    """A contender that runs."""

    def __init__(self, contender: Contender, threads: int, *, spins: bool = False) -> None:
        """spins: OpenMP's threads wait for each other as they do by default: they spin for a moment, then block."""
        arguments = {**contender.arguments, "threads": threads}
        self._name = contender.name
        environment = child_environment(OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE")
        if spins:
            del environment["OMP_WAIT_POLICY"]
        self._process = subprocess.Popen(
            [contender.python, str(CONTENDERS), contender.kind, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        if hasattr(os, "sched_setaffinity"):
            # Threads take over what their process has when they start, and an interpreter has not started any yet.
            os.sched_setaffinity(self._process.pid, cores(threads))

    def ask(self, request: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({request: arguments}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"{self._name} ended at {request} {arguments}; run {CONTENDERS.name} to see why")
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


def cores(threads: int) -> set[int]:
    """Those that all contenders run on: the last, because the first one takes most interrupts."""
    return set(sorted(os.sched_getaffinity(0))[-threads:])


@contextmanager
def running(contender: Contender, threads: int, *, spins: bool = False) -> Iterator[Process]:
    process = Process(contender, threads, spins=spins)
    try:
        yield process
    finally:
        process.close()


# -- what is measured -------------------------------------------------------------------------------------------------


def works(contender: Contender, lengths: Sequence[int], *, is_first: bool, has_time: bool) -> list[Work]:
    """The work of one round. The first round warms up and computes the long histories, and is not kept.

    has_time: for the long histories of slow contenders.
    """
    found = []
    for length in lengths:
        if length in contender.lengths and (has_time or length <= NEAR or not contender.is_slow):
            count = 6 if contender.is_slow else 24 if length <= NEAR else 10
            arguments = {"length": length, "count": 2 if is_first else count}
            found.append(Work(f"decode at {length}", "decode", arguments))
    if contender.is_together:
        count = 2 if is_first else 4 if contender.is_slow else 10
        arguments = {"sessions": SESSIONS, "length": EACH, "count": count}
        found.append(Work(f"decode of {SESSIONS} sessions at {EACH}", "together", arguments))
    for count in contender.first_ids:
        name = f"append of {count}" if count == APPENDED else f"prefill of {count}"
        found.append(Work(name, "first_id", {"count": count}, times=1 if is_first or count == PREFILLED else 3))
    return found


def measure(processes: Mapping[str, Process], work: Mapping[str, Sequence[Work]], number: int) -> Iterator[Any]:
    """One round: each kind of work by all contenders in turn. Yields work, contender, milliseconds."""
    for name in dict.fromkeys(one.name for each in work.values() for one in each):
        able = [contender for contender, each in work.items() if any(one.name == name for one in each)]
        for contender in turned(able, number):
            one = next(one for one in work[contender] if one.name == name)
            answers = [processes[contender].ask(one.request, **one.arguments) for _ in range(one.times)]
            steps = [step for answer in answers for step in (answer if isinstance(answer, list) else [answer])]
            yield name, contender, statistics.median(steps)


def is_faster_spinning(contenders: Sequence[Contender], threads: int) -> bool:
    """Is llama.cpp faster here if its threads spin for a moment while they wait for each other?"""
    contender = next((each for each in contenders if each.kind == "llama"), None)
    if contender is None:
        return False
    with ExitStack() as stack:
        tried = {spins: stack.enter_context(running(contender, threads, spins=spins)) for spins in (False, True)}
        found: dict[bool, list[float]] = {spins: [] for spins in tried}
        for number in range(4):
            for spins, process in tried.items():
                milliseconds = process.ask("decode", length=EACH, count=12)
                if number:
                    found[spins].append(statistics.median(milliseconds))
    return statistics.median(found[True]) < statistics.median(found[False])


def contest(
    contenders: Sequence[Contender], args: argparse.Namespace, texts: Sequence[Sequence[int]], work_folder: Path
) -> Found:
    """All rounds, the most threads first; each count of threads has an equal part of the minutes."""
    found = Found()
    end = time.monotonic() + 60 * args.minutes
    by_name = {each.name: each for each in contenders}
    found.spins = is_faster_spinning(contenders, max(args.threads))
    counts = sorted(args.threads, reverse=True)
    for place, threads in enumerate(counts):
        until = time.monotonic() + (end - time.monotonic()) / (len(counts) - place)
        with ExitStack() as stack:
            processes = {
                name: stack.enter_context(running(each, threads, spins=found.spins and each.kind == "llama"))
                for name, each in by_name.items()
            }
            for name, process in processes.items():
                process.ask("decode", length=PREFILLED, count=4 if args.quick else 32)
                found.memory[threads, name] = process.ask("memory")
                print(f"{_threads(threads)}: {name} is loaded", flush=True)
            if not args.files:
                share_history(processes, by_name, max(args.lengths), work_folder / "history")
            if not place and "transformers" in by_name:
                found.divergence = divergence(processes, by_name, texts, work_folder)
            seconds = 0.0
            for number in range(args.rounds + 1):
                # Two rounds at least: one says nothing of the spread.
                if number > 2 and time.monotonic() + seconds > until:
                    break
                began = time.monotonic()
                work = {
                    name: works(each, args.lengths, is_first=not number, has_time=not place)
                    for name, each in by_name.items()
                }
                for kind, name, milliseconds in measure(processes, work, number):
                    if number:
                        found.rounds.setdefault((threads, kind, name), []).append(milliseconds)
                seconds = time.monotonic() - began
                print(f"{_threads(threads)}: round {number} of at most {args.rounds}, {seconds:.0f} s", flush=True)
    return found


def share_history(
    processes: Mapping[str, Process], contenders: Mapping[str, Contender], length: int, file: Path
) -> None:
    """llama.cpp computes a long history once, from the file with which it is fastest, and loads it elsewhere."""
    llamas = [process for name, process in processes.items() if contenders[name].kind == "llama"]
    if not file.exists():
        llamas[-1].ask("save_history", length=length, file=str(file))
    for process in llamas:
        process.ask("load_history", file=str(file))


def divergence(
    processes: Mapping[str, Process],
    contenders: Mapping[str, Contender],
    texts: Sequence[Sequence[int]],
    work_folder: Path,
) -> dict[str, dict[str, float]]:
    """From the file's weights in float32, which transformers computes with."""
    reference = work_folder / "logits.npy"
    processes["transformers"].ask("write_logits", texts=texts, file=str(reference))
    found = {
        name: processes[name].ask("divergence", texts=texts, file=str(reference))
        for name, each in contenders.items()
        if each.has_divergence
    }
    reference.unlink()
    return found


# -- the record -------------------------------------------------------------------------------------------------------


def values_of(found: Found, contenders: Sequence[Contender]) -> dict[str, Any]:
    """Ratios to what each is beside first, in the order in which these are named, then what is absolute."""
    ours = [each.name for each in contenders if each.kind == "ours"]
    full = (INT8, EXACT, TORCH)
    cells = list(dict.fromkeys((threads, kind) for threads, kind, _ in found.rounds))
    ratios: dict[str, Any] = {}
    for other in dict.fromkeys(other for each in contenders for other in each.beside):
        for threads, kind in cells:
            for name in (each.name for each in contenders if other in each.beside):
                over, under = found.rounds.get((threads, kind, name)), found.rounds.get((threads, kind, other))
                if over and under:
                    samples = [one / two for one, two in zip(over, under, strict=True)]
                    ratios[f"{kind}, {name} ÷ {other}, {_threads(threads)}"] = record.summarize(samples, "ratio")
    for threads, kind in cells:
        for name in ours:
            short, later = (
                found.rounds.get((threads, f"decode at {NEAR}", name)),
                found.rounds.get((threads, kind, name)),
            )
            if name not in full and kind == f"decode at {LENGTHS[-1]}" and short and later:
                samples = [one / two for one, two in zip(later, short, strict=True)]
                ratios[f"{kind} ÷ at {NEAR}, {name}, {_threads(threads)}"] = record.summarize(samples, "ratio")
    values = ratios
    for name, each in found.divergence.items():
        values[f"KL to the weights in float32, mean, {name}"] = record.exact(each["kl"], "nats")
        values[f"same likeliest token as the weights in float32, {name}"] = record.exact(each["same"], "share")
        values[f"cross-entropy − that of the weights in float32, {name}"] = record.exact(each["loss"], "nats")
    for (threads, kind, name), samples in found.rounds.items():
        values[f"{kind}, {name}, {_threads(threads)}"] = record.summarize(samples, "ms")
    for (threads, name), sizes in found.memory.items():
        for what, size in sizes.items():
            values[f"memory {what}, {name}, {_threads(threads)}"] = record.exact(round(size, 1), "MiB")
    return values


def tables_of(found: Found, contenders: Sequence[Contender]) -> dict[str, list[dict[str, Any]]]:
    """The medians of each count of threads, one row for each kind of work."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for threads, kind in dict.fromkeys((threads, kind) for threads, kind, _ in found.rounds):
        row: dict[str, Any] = {"ms": kind}
        for each in contenders:
            if samples := found.rounds.get((threads, kind, each.name)):
                row[each.name] = round(statistics.median(samples), 2)
        tables.setdefault(_threads(threads), []).append(row)
    return tables


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def contenders_of(args: argparse.Namespace, folder: Path, work_folder: Path) -> list[Contender]:
    """Ours, llama.cpp on the file and on two others that it makes of it, and what else runs the model."""
    file = str(folder / GGUF)

    def ours(name: str, backend: str, numerics: str, strategy: str = "full", **options: Any) -> Contender:
        arguments = {"backend": backend, "numerics": numerics, "strategy": strategy}
        beside = {"beside": (FILE,), **options}
        return Contender(name=name, python=sys.executable, kind="ours", arguments=arguments, **beside)

    def llama(name: str, path: str) -> Contender:
        return Contender(name=name, python=args.llama, kind="llama", arguments={"file": path}, has_divergence=True)

    far = tuple(length for length in LENGTHS if length >= NEAR)
    near = tuple(length for length in LENGTHS if length <= NEAR)
    made = {kind: str(work_folder / f"{kind}.gguf") for kind in ("Q8_0", "Q4_0")}
    quantizer = Contender(name="llama.cpp", python=args.llama, kind="quantizer", arguments={"file": file})
    with running(quantizer, max(args.threads)) as process:
        for kind, path in made.items():
            process.ask("write", kind=kind, into=path)
        args.system = process.ask("system")
    others = [*(f"llama.cpp {kind}" for kind in made), "transformers", *["OpenVINO"][: args.openvino != "none"]]
    found = [
        ours(INT8, "native", "int8", has_divergence=True, beside=(FILE, *others)),
        ours(EXACT, "native", "auto", has_divergence=True),
        ours(TORCH, "torch", "auto", is_slow=True, has_divergence=True),
        *(
            ours(f"{INT8}, {each}", "native", "int8", each, lengths=far, is_together=False, first_ids=())
            for each in args.strategies
        ),
        llama(FILE, file),
        *(llama(f"llama.cpp {kind}", path) for kind, path in made.items()),
        Contender(
            name="transformers", python=sys.executable, kind="transformers", arguments={"folder": str(folder)},
            lengths=near, is_slow=True,
        ),
    ]  # fmt: skip
    if args.openvino != "none":
        found.append(
            Contender(
                name="OpenVINO", python=args.openvino, kind="openvino", arguments={"file": file},
                lengths=near, is_slow=True, is_together=False, first_ids=(PREFILLED,),
            )
        )  # fmt: skip
    return found


def contenders_of_files(args: argparse.Namespace) -> list[Contender]:
    """Of each file ours on the native backend in both identities, and llama.cpp, or without it ours on torch; the first
    file is what others are beside.
    """

    def ours(kind: str, path: Path, backend: str, numerics: str, **options: Any) -> Contender:
        arguments = {"model": str(path), "backend": backend, "numerics": numerics, "strategy": "full"}
        return Contender(name=f"{kind} {path.stem}", python=sys.executable, kind="ours", arguments=arguments, **options)

    found = []
    for path in args.files:
        if args.llama == "none":
            other = ours(TORCH, path, "torch", "auto", is_slow=True)
        else:
            other = Contender(
                name=f"llama.cpp {path.stem}", python=args.llama, kind="llama", arguments={"file": str(path)}
            )
        others = (other.name, *[f"{EXACT} {args.files[0].stem}"][: path != args.files[0]])
        found += [
            ours(EXACT, path, "native", "auto", beside=others),
            ours(INT8, path, "native", "int8", beside=others),
            other,
        ]
    return found


def read_texts(folder: Path, count: int, tokens: int) -> list[list[int]]:
    tokenizer = load_tokenizer(folder)
    found = []
    for name, start in TEXTS[:count]:
        text = (record.ROOT / name).read_text(encoding="utf-8")[start : start + TEXT_CHARACTERS]
        found.append(list(tokenizer.encode(text))[:tokens])
    return found


def said_of_published(
    args: argparse.Namespace, checked: CheckedFolder, found: Found, texts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """What the record of the published file says besides its values."""
    return {
        "what": "Milliseconds of decode steps, appends and prefills, memory, and what the numbers lose, beside "
        "llama.cpp on the same cores.",
        "config": {
            "model": checked.model_id,
            "weights_sha256": weights_digest(checked),
            "threads": args.threads,
            "rounds": args.rounds,
            "kakeya": "the file's blocks as they are (torch: the same weights in float32); the engine without a "
            "server, full unless named, no drafter",
            "llama.cpp": f"{LLAMA.partition('==')[0]} {version_of(args.llama, LLAMA)} from source, flash "
            "attention, float16 K/V; Q4_1 is the file as published",
            "llama.cpp, threads that wait": f"{'spin' if found.spins else 'sleep'}, which is faster here",
            "llama.cpp Q8_0, Q4_0": "made of the file by llama.cpp, so they say something else: a bound of speed only",
            "llama.cpp, histories": "computed once, from Q4_0, and loaded for decode steps",
            "llama.cpp, compiled with": args.system,
            "transformers": "float32, sdpa, at histories up to 1,024 tokens",
            "kakeya torch": "at longer histories only on the most threads",
            "OpenVINO": "not measured"
            if args.openvino == "none"
            else f"GenAI {version_of(args.openvino, OPENVINO)} on the same file, its own defaults; histories up to "
            "1,024 tokens; its prefill has no tokens before it",
            "onnxruntime": "not measured: it does not read the file",
            "texts": [name for name, _ in TEXTS],
            "text_tokens": TEXT_TOKENS,
            "texts_sha256": hashlib.sha256(json.dumps(texts).encode()).hexdigest(),
        },
        "baseline": "llama.cpp on the model's GGUF file as published, in turns with ours",
    }


def said_of_files(args: argparse.Namespace, found: Found) -> dict[str, Any]:
    """What the record of named files says: the types of each, most bytes first, and its digest."""
    files = {}
    for path in args.files:
        shares = open_checkpoint(path).shares()
        types = sorted(shares, key=lambda name: -shares[name].stored_bytes)
        sizes = ", ".join(f"{name} {shares[name].stored_bytes / 1e6:.1f} MB" for name in types)
        files[path.stem] = f"{sizes}; sha256 {sha256_of(path)}"
    llama = "not measured"
    if args.llama != "none":
        version = version_of(args.llama, LLAMA)
        llama = f"{LLAMA.partition('==')[0]} {version} from source, threads that spin: {found.spins}"
    return {
        "what": "Milliseconds of decode steps, appends and prefills, and memory, of named files: the native backend "
        "beside another, and beside the first file.",
        "config": {
            "files": files,
            "threads": args.threads,
            "rounds": args.rounds,
            "kakeya": "the engine without a server, full, no drafter; torch: the same weights in float32",
            "llama.cpp": llama,
        },
        "baseline": f"{'torch' if args.llama == 'none' else 'llama.cpp'} on the same file, in turns with ours",
    }


def measure_files(args: argparse.Namespace, work: Path) -> tuple[list[Contender], Found, dict[str, Any]]:
    """The contenders, what was found of them, and what the record says besides."""
    contenders = contenders_of_files(args)
    found = contest(contenders, args, [], work)
    return contenders, found, said_of_files(args, found)


def measure_published(args: argparse.Namespace, work: Path) -> tuple[list[Contender], Found, dict[str, Any]]:
    """As `measure_files`, of the file that the model was fetched as."""
    args.openvino = args.openvino or python_with(OPENVINO, "openvino_genai", "installed; half a minute, once")
    config = resolve(ModelConfig, {})
    convert_for_torch(config.model, config.cache_path)
    checked = check_model(config.model, cache=config.cache_path)
    count, tokens = (1, 64) if args.quick else (len(TEXTS), TEXT_TOKENS)
    texts = read_texts(tokenizer_folder(config.model, config.cache_path), count, tokens)
    contenders = contenders_of(args, checked.folder, work)
    found = contest(contenders, args, texts, work)
    return contenders, found, said_of_published(args, checked, found, texts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--llama", metavar="PYTHON", help=f"one that has {LLAMA}, or with --files none; else it is built under build/"
    )
    parser.add_argument(
        "--files", type=Path, nargs="+", default=[], metavar="GGUF", help="of any types, in place of the published one"
    )
    parser.add_argument(
        "--openvino", metavar="PYTHON", help=f"one that has {OPENVINO}, or none; else it is installed under build/"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=8, help="at most")
    parser.add_argument("--minutes", type=float, default=11.0, help="after these no round begins, beyond the second")
    parser.add_argument("--lengths", type=int, nargs="+", choices=LENGTHS, default=list(LENGTHS), metavar="N")
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES), metavar="SPEC", help="decoded at 1,024 on")
    parser.add_argument("--quick", action="store_true", help="one round, one short text: does it run?")


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError."""
    if not 1 <= args.rounds <= MOST_ROUNDS:
        raise ConfigError(f"--rounds must be at least 1 and at most {MOST_ROUNDS}, got {args.rounds}")
    if hasattr(os, "sched_getaffinity") and not 1 <= min(args.threads) <= max(args.threads) <= len(
        os.sched_getaffinity(0)
    ):
        raise ConfigError(
            f"--threads must be at least 1 and at most {len(os.sched_getaffinity(0))}, got {args.threads}"
        )
    if missing := [str(path) for path in args.files if not path.is_file()]:
        raise ConfigError(f"--files: {', '.join(missing)} is not there")
    if len({path.stem for path in args.files}) < len(args.files):
        raise ConfigError("--files: two have the same name")
    if args.llama == "none" and not args.files:
        raise ConfigError("--llama none is for --files: without them everything is compared with llama.cpp")


def main(args: argparse.Namespace, _save: Save) -> dict[str, Any]:
    check(args)
    args.llama = args.llama or python_with(
        LLAMA, "llama_cpp", "compiled from its source; three minutes on two cores, once", "--no-binary", LLAMA
    )
    args.rounds = 1 if args.quick else args.rounds
    with tempfile.TemporaryDirectory(prefix="kakeya-bench-") as work:
        measured = measure_files if args.files else measure_published
        contenders, found, said = measured(args, Path(work))
    values = values_of(found, contenders)
    first = FILE
    if args.files:
        first = f"{EXACT} {args.files[0].stem}" if len(args.files) > 1 else contenders[0].beside[0]
    return {
        **said,
        "experiment": "cpu_types" if args.files else "cpu",
        "seeds": [],
        "values": values,
        "tables": tables_of(found, contenders),
        "headlines": [name for name in values if name.endswith(f"÷ {first}, {_threads(max(args.threads))}")],
    }
