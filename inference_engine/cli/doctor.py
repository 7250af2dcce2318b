"""`kakeya doctor`: checks an installation and suggests fixes. One line for each check: ok, warn or fail."""

from __future__ import annotations

import argparse
import enum
import errno
import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil
from rich.console import Console
from rich.filesize import decimal

from inference_engine import __version__
from inference_engine.cli import process
from inference_engine.cli.ports import bind_error
from inference_engine.cli.settings import CONVERSATION, add_config_file, add_settings, settings
from inference_engine.config import EngineConfig, ModelConfig, ServerConfig
from inference_engine.errors import KakeyaError, ModelError
from inference_engine.kv.memory.host import free_host_bytes
from inference_engine.native.cores import usable_cores
from inference_engine.server.address import resolve_bind
from inference_engine.server.metrics_port import read_token, refuse_open_metrics
from inference_engine.server.trace_export import check_exporter

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

PACKAGES = ("torch", "transformers", "tokenizers", "grpcio", "protobuf", "kakeya")
PROMPT = (1, 2, 3)


class Level(enum.Enum):
    OK = "green"
    WARN = "yellow"
    FAIL = "red"


# What decides who may read them.
OF_METRICS = ("metrics_token_file", "allow_open_metrics", "tls_cert_file", "tls_key_file", "allow_plaintext")


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings that a server started now would use."""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "doctor",
        usage="%(prog)s [OPTION ...]",
        help="check this installation, down to a token from the model",
        description="Check versions, device, model and port, then generate one token. Status 1 if a check fails.",
    )
    add_config_file(parser)
    add_settings(parser, ModelConfig)
    add_settings(parser, EngineConfig, only=CONVERSATION)
    add_settings(parser, ServerConfig, only=("bind", "metrics_bind", *OF_METRICS, "trace_endpoint"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print every finding as it is made. Raises ConfigError if the settings themselves cannot be read."""
    found = Settings(
        model=settings(args, ModelConfig), engine=settings(args, EngineConfig), server=settings(args, ServerConfig)
    )
    console = Console(highlight=False)
    has_failed = False
    for name, finding in examine(found):
        has_failed = has_failed or finding.level is Level.FAIL
        console.print(f"[{finding.level.value}]{finding.level.name.lower():4}[/]  {name:9} ", end="")
        console.print(finding.text, markup=False, soft_wrap=True)
    return 1 if has_failed else 0


def examine(found: Settings) -> Iterator[tuple[str, Finding]]:
    """Every check with its finding, one at a time. An error that a check raises becomes its finding.

    Without the model, checks of it would all say that it is not there: they are left out. So are those that come after
    one to which the system refused something: libraries are loaded then as far as they came.
    """
    left_out: tuple[str, ...] = ()
    for name, check in CHECKS.items():
        if name in left_out:
            continue
        try:
            yield name, check(found)
        except (KakeyaError, OSError, MemoryError) as error:
            is_known = isinstance(error, KakeyaError)
            text = str(error) if is_known else process.explained(error)
            if name == "model" or (name in OF_THE_MODEL[:-1] and not is_known):
                left_out = OF_THE_MODEL[OF_THE_MODEL.index(name) + 1 if name in OF_THE_MODEL else 0 :]
                text += f"; not checked without it: {', '.join(left_out)}"
            yield name, Finding(Level.FAIL, text)


def _versions(_: Settings) -> Finding:
    versions = {name: _version(name) for name in PACKAGES}
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    text = f"kakeya-runtime {__version__}, python {platform.python_version()}, {text}"
    if all(versions.values()):
        return Finding(Level.OK, text)
    return Finding(Level.FAIL, f"{text}; install what is missing with `make setup`")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plugins(_: Settings) -> Finding:
    from inference_engine.kv.compressors import COMPRESSORS
    from inference_engine.kv.strategies import STRATEGIES

    registries = (STRATEGIES, COMPRESSORS)
    added = [
        f"{one.what} {name} of {one.package(name)}" for one in registries for name in one.all() if one.package(name)
    ]
    text = ", ".join(added) or "no installed package adds strategies or codecs"
    if clashes := [why for one in registries for why in one.problems]:
        return Finding(Level.FAIL, "; ".join(clashes))
    if broken := [why for one in registries for why in one.broken.values()]:
        return Finding(Level.WARN, "; ".join([text, *broken]))
    return Finding(Level.OK, text)


def _machine(found: Settings) -> Finding:
    cores = usable_cores()
    here = psutil.cpu_count() or cores
    text = (
        f"{platform.system()} {platform.machine()}, {cores if cores == here else f'{cores} of {here}'} cores, "
        f"{decimal(free_host_bytes())} of {decimal(psutil.virtual_memory().total)} memory free"
    )
    if found.model.threads > cores:
        return Finding(
            Level.WARN, f"{text}; threads is {found.model.threads}, more than the cores; set 0 for one per core"
        )
    return Finding(Level.OK, text)


def _device(found: Settings) -> Finding:
    import torch

    if found.model.device == "mlx":
        from inference_engine.backends.mlx import why_missing

        if reason := why_missing():
            return Finding(Level.FAIL, f"mlx cannot be used: {reason}; or use --device cpu")
        from inference_engine.backends.mlx.device import describe

        return Finding(Level.OK, f"{describe()}, {found.model.dtype}")
    try:
        device = torch.zeros(1, device=found.model.device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        return Finding(Level.FAIL, f"{found.model.device} cannot be used: {reason}; use --device cpu")
    if device.type != "cuda":
        return Finding(Level.OK, f"{device}, {found.model.dtype}")
    from inference_engine.kernels.flash3 import why_absent

    absent = why_absent(device, getattr(torch, found.model.dtype))
    text = f"{device}, {torch.cuda.get_device_name(device)}, {found.model.dtype}"
    return Finding(Level.OK, f"{text}; FlashAttention-3 for long prompts: {absent or 'installed'}")


def _native(_: Settings) -> Finding:
    from inference_engine.native.library import load, why_missing

    library = load()
    if library is None:
        return Finding(Level.WARN, f"none, torch computes on the CPU: {why_missing()}")
    best, *others = library.levels()
    return Finding(Level.OK, f"{best} runs on this processor" + (f", also {', '.join(others)}" if others else ""))


def _executor(found: Settings) -> Finding:
    from inference_engine.compose import executor

    name, reason = executor(found.model)
    return Finding(Level.OK, f"{name}: {reason}") if name else Finding(Level.FAIL, f"nothing runs this model: {reason}")


def _family(found: Settings) -> Finding:
    from inference_engine.compose import admit, forget_admission

    forget_admission(found.model)
    refused = dict(admit(found.model).refused)
    if not refused:
        return Finding(Level.OK, "served with every strategy that its layers support")
    return Finding(Level.WARN, f"served, but not with {', '.join(refused)}: {next(iter(refused.values()))}")


def _model(found: Settings) -> Finding:
    from inference_engine.models import check_model, remarks
    from inference_engine.models.folder import describe_ignored

    checked = check_model(found.model.model, cache=found.model.cache_path, thorough=True)
    if checked.manifest is None:
        ignored = describe_ignored(checked.ignored)
        more = "".join(f"; {line}" for line in (*([ignored] if ignored else []), *remarks(checked)))
        return Finding(
            Level.WARN, f"{checked.model_id} in {checked.stored}: no manifest to verify these files by{more}"
        )
    size = decimal(checked.manifest.total_bytes)
    return Finding(Level.OK, f"{checked.model_id}: {size} in {checked.folder}, every byte checked")


def _tokenizer(found: Settings) -> Finding:
    from inference_engine.cli.conversation import why_no_chat
    from inference_engine.models import find_model, read_config, sizes, tokenizer_folder
    from inference_engine.models.tokenizer_ids import check_tokenizer_ids

    unfit = "`kakeya chat` and `kakeya demo` cannot use this model: "
    try:
        folder = tokenizer_folder(found.model.model, found.model.cache_path)
    except ModelError as error:
        return Finding(Level.WARN, f"{unfit}{error}")
    if why := why_no_chat(folder, name=found.model.model):
        return Finding(Level.WARN, f"{unfit}{why}")
    model = find_model(found.model.model, cache=found.model.cache_path)
    if said := check_tokenizer_ids(model, folder, sizes(read_config(model), model.folder)[1]):
        return Finding(Level.WARN, f"present, with a chat template; {said}")
    return Finding(Level.OK, "present, with a chat template")


def _port(found: Settings) -> Finding:
    return _bindable("bind", found.server.bind)


def _metrics(found: Settings) -> Finding:
    if not found.server.metrics_bind:
        return Finding(Level.OK, "metrics and the dashboard are off; --metrics-bind turns them on")
    refuse_open_metrics(resolve_bind("metrics_bind", found.server.metrics_bind), found.server)
    read_token(found.server)
    return _bindable("metrics-bind", found.server.metrics_bind)


def _traces(found: Settings) -> Finding:
    check_exporter(found.server.trace_endpoint)
    return Finding(Level.OK, f"go to {found.server.trace_endpoint}" if found.server.trace_endpoint else "off")


def _bindable(flag: str, bind: str) -> Finding:
    address = resolve_bind(flag.replace("-", "_"), bind)
    match bind_error(address):
        case None:
            return Finding(Level.OK, f"{address} is free")
        case OSError(errno=errno.EADDRINUSE):
            return Finding(Level.WARN, f"{address} is in use; a server may be running, or choose another --{flag}")
        case error:
            return Finding(Level.FAIL, f"{address} cannot be used: {error.strerror}; choose another --{flag}")


def _self_test(found: Settings) -> Finding:
    """Generate one token, in this process, with a server's settings."""
    from inference_engine.compose import open_backend
    from inference_engine.engine import Engine
    from inference_engine.types import GenerateParams, TokenCommitted

    began = time.perf_counter()
    with Engine(open_backend(found.model), found.engine) as engine:
        loaded = time.perf_counter()
        session = engine.create_session(limit_tokens=2 * len(PROMPT), label="doctor")
        engine.append(session.session_id, PROMPT)
        events = list(engine.generate(session.session_id, GenerateParams(max_tokens=1, logprobs=True)))
        tokens = [event for event in events if isinstance(event, TokenCommitted)]
        assert len(tokens) == 1
        capacity = engine.info().kv_capacity_bytes
    ended = time.perf_counter()
    return Finding(
        Level.OK,
        f"id {tokens[0].token_id} after {', '.join(map(str, PROMPT))}; loaded in {loaded - began:.1f} s, "
        f"generated in {ended - loaded:.2f} s, {decimal(capacity)} for K/V",
    )


CHECKS: dict[str, Callable[[Settings], Finding]] = {
    "versions": _versions,
    "plugins": _plugins,
    "machine": _machine,
    "device": _device,
    "native": _native,
    "model": _model,
    "executor": _executor,
    "family": _family,
    "tokenizer": _tokenizer,
    "port": _port,
    "metrics": _metrics,
    "traces": _traces,
    "self test": _self_test,
}
# Those that need its files, and come after the check that they are there.
OF_THE_MODEL = ("executor", "family", "tokenizer", "self test")
