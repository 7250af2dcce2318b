"""All settings. The only place that reads files, flags or the environment.

A setting is looked up in this order, first hit wins: command-line flag, environment (`KAKEYA_<NAME>` in capitals),
TOML file (`--config`, or `KAKEYA_CONFIG`), the default below. Unknown keys in the file are refused, so that a typo
cannot pass silently.

Sizes are bytes and accept a suffix in text (`512MiB`, `4GB`); durations are seconds; lengths are tokens.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from inference_engine.errors import ConfigError
from inference_engine.types import Durability, Mode

logger = logging.getLogger(__name__)

T = TypeVar("T", bound="EngineConfig | ModelConfig | ServerConfig")

_SIZE = re.compile(r"(\d+)\s*(|B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)", re.ASCII)
_BELOW_ZERO = re.compile(r"-\d+", re.ASCII)
_LARGEST = 2.0**50  # of anything: bytes, seconds, tokens
_LONGEST_SECONDS = 10.0 * 365 * 86_400
_LEASE_SECONDS = 5.0
_MOST_THREADS = 1024  # with more than a system lets a process have, OpenMP ends it
_MOST_RANKS = 64
_WIRE_LARGEST = 2**31 - 1  # the range of gRPC and the wire contract
_BOOLEANS = {"true": True, "false": False}
# Settings of sessions in a state_dir, which say nothing without one.
_OF_KEPT_SESSIONS = (
    "kept_sessions_per_owner",
    "kept_tokens_per_owner",
    "session_keep_seconds",
    "copies_dir",
    "replica",
    "lease_seconds",
    "hibernate",
    "hibernate_after_seconds",
    "state_bytes",
    "state_bytes_per_owner",
)
_MODES = {"off": Mode.BATCHED, "batch-invariant": Mode.FIXED_SHAPE}  # by `determinism`
# What was called otherwise before, and is read until 0.2.0: setting and value of then, and of now.
OLD_NAMES = {
    ("mode", "batched"): ("determinism", "off"),
    ("mode", "fixed-shape"): ("determinism", "batch-invariant"),
    ("numerics", "exact"): ("numerics", "auto"),
    ("numerics", "invariant"): ("determinism", "batch-invariant"),
}
_OLD = {name for name, _ in OLD_NAMES}
# As vLLM names them, which pickers read by default.
PICKER_METRICS = "vllm:num_requests_waiting,vllm:num_requests_running,vllm:kv_cache_usage_perc"
# Where nothing is and nothing can be made, by any user: a cache for who has none.
NO_CACHE = Path(os.devnull, "no-cache")
_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _at_least(config: object, **floors: float) -> None:
    """And none is larger than anything is."""
    for name, floor in floors.items():
        value = getattr(config, name)
        if not value >= floor:  # not a number, either
            raise ConfigError(f"{name} must be at least {_typed(name, floor)}, got {value}")
    _at_most(config, **dict.fromkeys(floors, _LARGEST))


_DEVICES = re.compile(r"cpu|cuda(:\d+)?|mlx")


def _at_most(config: object, **ceilings: float) -> None:
    for name, ceiling in ceilings.items():
        value = getattr(config, name)
        if value > ceiling:
            raise ConfigError(f"{name} must be at most {_typed(name, ceiling)}, got {value}")


def _typed(name: str, bound: float | str) -> str:
    """As people type it: sizes in a unit where it is a multiple of one, other numbers in full."""
    if isinstance(bound, str):
        return bound
    sizes = reversed(_UNITS.items()) if "bytes" in name else ()
    unit = next((unit for unit, size in sizes if bound and bound % size == 0), "")
    return f"{bound / _UNITS[unit]:.10g}{unit}" if unit else f"{bound:.0f}" if bound == int(bound) else str(bound)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Limits and behaviour of the engine."""

    strategy: str = "full"
    kv_bytes: int = 0  # 0: a quarter of the device's free memory when the engine starts
    # "best_effort": memory is granted as histories grow; "guaranteed": all at creation; "auto": the former on a CPU
    growth: str = "auto"
    default_limit_tokens: int = 0  # of sessions that ask for none; 0: as long as their strategy and the model allow
    tier_bytes: int = 0  # host memory for K/V off the device; 0: a quarter of what is free, or on a CPU none
    max_sessions: int = 1024
    max_running: int = 128  # Generates in progress; others wait, but one of each owner never does
    max_queued: int = 256  # Generates that wait
    # A Generate whose first token would wait longer for other owners' is refused; 0: no limit. At least two steps of
    # this machine; one owner's Generates alone are never refused. Two seconds: a person still waits, retrying would
    # cost an agent more, and the queue is long enough to keep the batch full.
    max_first_token_seconds: float = 2.0
    # For one owner; 0: only the server's limits apply.
    max_sessions_per_owner: int = 0
    kv_bytes_per_owner: int = 0
    max_running_per_owner: int = 0
    max_queued_per_owner: int = 0
    # A token id takes ten bytes of host memory under every strategy; 0: no limit. At 100 tokens per second, a session
    # lasts two days.
    history_tokens_per_session: int = 2**24
    history_tokens_per_owner: int = 2**26  # in all sessions of one owner; what forks share counts once
    share_prefixes: str = "owner"  # what sessions of one owner begin with is prefilled once; "off": of forks alone
    # K/V of closed sessions that new ones of their owner may begin with; at most, and only while nothing else needs the
    # memory. 0: a quarter of kv_bytes; fewer than a session takes: none
    prefix_bytes: int = 0
    # Choices of entries that a session of `mode=select` keeps restored, awake_bytes among them, while nothing needs the
    # memory; more while a quarter of kv_bytes is free. Where memory is granted as histories grow. 0: awake_bytes alone,
    # for a Generate
    restore_cache_choices: int = 4
    share_forks: bool = True  # forks read common KV entries from the session that holds them, where possible
    # Targets for the size of prefill chunks beside decoding sessions; 0: one segment each.
    first_token_target_seconds: float = 0.0
    inter_token_target_seconds: float = 0.0
    max_batch: int = 64  # Generates in one forward
    # Launch a decode step before the tokens of the one before have reached the host; "auto": on a GPU.
    overlap: str = "auto"
    draft_tokens: int = 0  # in each draft, if there is a drafter; 0: chosen by cost, possibly none
    step_tokens: int = 0  # tokens in one forward, of prefills and decodes; 0: 512 on a CPU, 4096 elsewhere
    segment_tokens: int = 256
    page_tokens: int = 16
    max_append_tokens: int = 65_536
    max_generate_tokens: int = 32_768
    session_idle_ttl_seconds: float = 1800.0
    session_evictable_seconds: float = 60.0
    # What sessions are kept in, of this server and model alone, as KIND:PLACE: sqlite:FOLDER, postgres:DSN; "": nothing
    journal: str = ""
    state_dir: str = ""  # FOLDER is short for journal=sqlite:FOLDER
    # What a history survives: "none"; "process": the process, however it ends; "power": a loss of power, too; "auto":
    # power with a journal, else none
    durability: str = "auto"
    # Of one owner's sessions in the journal, in memory or not, each fork counted whole; 0: no limit
    kept_sessions_per_owner: int = 0
    kept_tokens_per_owner: int = 0
    session_keep_seconds: float = 2_592_000.0  # sessions unused for longer are deleted from it; 0: none is
    # Of servers that share a journal in a database: the name of this one, "": the machine's. Others take over its
    # sessions once it was not heard of for so long.
    replica: str = ""
    lease_seconds: float = _LEASE_SECONDS
    # With a journal in a database, where copies of K/V are; "": nowhere. One in a folder has them there.
    copies_dir: str = ""
    # Copies of idle sessions' K/V beside the journal: "always", "never", or "auto": where reading one is faster than a
    # prefill
    hibernate: str = "auto"
    hibernate_after_seconds: float = 15.0  # a session idle for longer is copied
    state_bytes: int = 0  # of copies; 0: half of the space that is free when the engine starts
    state_bytes_per_owner: int = 0  # of one owner's sessions; 0: only state_bytes applies
    stall_seconds: float = 60.0  # the engine counts as stalled if a step takes longer

    def __post_init__(self) -> None:
        _at_least(
            self,
            kv_bytes=0,
            default_limit_tokens=0,
            tier_bytes=0,
            max_sessions=1,
            max_running=1,
            max_queued=1,
            max_first_token_seconds=0,
            max_sessions_per_owner=0,
            kv_bytes_per_owner=0,
            max_running_per_owner=0,
            max_queued_per_owner=0,
            history_tokens_per_session=0,
            history_tokens_per_owner=0,
            prefix_bytes=0,
            restore_cache_choices=0,
            first_token_target_seconds=0,
            inter_token_target_seconds=0,
            max_batch=1,
            draft_tokens=0,
            page_tokens=1,
            max_append_tokens=1,
            max_generate_tokens=1,
            session_idle_ttl_seconds=0.001,
            session_evictable_seconds=0,
            kept_sessions_per_owner=0,
            kept_tokens_per_owner=0,
            session_keep_seconds=0,
            hibernate_after_seconds=0,
            lease_seconds=1,
            state_bytes=0,
            state_bytes_per_owner=0,
            stall_seconds=2,  # an idle loop iterates every second
        )
        _at_most(
            self,
            stall_seconds=_LONGEST_SECONDS,
            max_append_tokens=_WIRE_LARGEST,
            max_generate_tokens=_WIRE_LARGEST,
            segment_tokens=_WIRE_LARGEST,
            session_idle_ttl_seconds=_LONGEST_SECONDS,
            session_keep_seconds=_LONGEST_SECONDS,
            hibernate_after_seconds=_LONGEST_SECONDS,
            lease_seconds=60,
        )
        if self.overlap not in ("auto", "on", "off"):
            raise ConfigError(f"overlap must be auto, on or off, got {self.overlap!r}")
        if self.share_prefixes not in ("owner", "off"):
            raise ConfigError(f"share_prefixes must be owner or off, got {self.share_prefixes!r}")
        if self.growth not in ("auto", "best_effort", "guaranteed"):
            raise ConfigError(f"growth must be auto, best_effort or guaranteed, got {self.growth!r}")
        if self.durability not in ("auto", "none", "process", "power"):
            raise ConfigError(f"durability must be auto, none, process or power, got {self.durability!r}")
        self._check_journal()
        if self.hibernate not in ("auto", "always", "never"):
            raise ConfigError(f"hibernate must be auto, always or never, got {self.hibernate!r}")
        if not self.journal_place:
            self._refuse_settings_of_kept_sessions()
        if self.segment_tokens < self.page_tokens or self.segment_tokens % self.page_tokens:
            raise ConfigError(
                f"segment_tokens must be a multiple of page_tokens ({self.page_tokens}), got {self.segment_tokens}"
            )
        if self.step_tokens and self.step_tokens < self.segment_tokens:
            raise ConfigError(
                f"step_tokens must be 0 or hold a segment ({self.segment_tokens} tokens), got {self.step_tokens}"
            )

    def _check_journal(self) -> None:
        if self.journal and self.state_dir:
            raise ConfigError("journal and state_dir are both set: state_dir=FOLDER is short for journal=sqlite:FOLDER")
        kind, colon, place = self.journal_place.partition(":")
        if self.journal and not (kind and colon and place):
            raise ConfigError("journal must be KIND:PLACE, such as sqlite:FOLDER; state_dir takes a folder alone")
        if kind == "sqlite" and self.copies_dir:
            raise ConfigError("copies_dir: a journal in a folder has its copies of K/V there; leave copies_dir empty")
        if kind == "sqlite" and (self.replica or self.lease_seconds != _LEASE_SECONDS):
            raise ConfigError("replica, lease_seconds: a journal in a folder is one server's; leave them out")
        if kind == "postgres" and not self.copies_dir and self.hibernate == "always":
            raise ConfigError("hibernate=always needs a folder for copies of K/V: set copies_dir to one")
        if self.durability in ("process", "power") and not self.journal_place:
            raise ConfigError(f"durability={self.durability} needs a state_dir to keep sessions in")
        if self.durability == "none" and self.journal_place:
            given = "journal" if self.journal else "state_dir"
            raise ConfigError(f"durability=none keeps no sessions: leave {given} empty, or choose process or power")

    @property
    def journal_place(self) -> str:
        """What sessions are kept in, as KIND:PLACE; "": nothing."""
        return self.journal or (f"sqlite:{self.state_dir}" if self.state_dir else "")

    def _refuse_settings_of_kept_sessions(self) -> None:
        """What was asked for and cannot be would be noticed only when a session is lost."""
        defaults = {spec.name: spec.default for spec in fields(self)}
        given = [name for name in _OF_KEPT_SESSIONS if getattr(self, name) not in (defaults[name], "never")]
        if given:
            typed = ", ".join(f"{name}={_typed(name, getattr(self, name))}" for name in given)
            raise ConfigError(
                f"{typed}: without effect, because sessions are kept in a state_dir only; set state_dir to a folder, "
                f"or leave out {', '.join(given)}"
            )

    @property
    def kept(self) -> Durability:
        """What sessions survive, `auto` resolved."""
        if self.durability == "auto":
            return Durability.POWER if self.journal_place else Durability.NONE
        return Durability(self.durability)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which model, and where it runs."""

    model: str = "smollm2-135m"
    # "auto": "mlx" on a Mac with Apple silicon where the package mlx is installed, else "cpu"
    device: str = "auto"
    dtype: str = "float32"
    # "native": kernels in C++ for the CPU; "torch"; "auto": native where the model and the other settings allow it
    backend: str = "auto"
    # "auto", as they are stored; on the native backend floating-point numbers can be made "int8", "int4" or "bfloat16"
    # when they are loaded, on CUDA "fp8" or "int4"
    weights: str = "auto"
    # "off": the fastest there is, where neighbours in a batch may change a token's last bits; "batch-invariant": equal
    # histories have equal bits, whatever else is in a batch
    determinism: str = "off"
    # Of the native backend: "int8" rounds activations, 32 to a scale, where weights are quantised, which is faster;
    # "auto" leaves them in float32
    numerics: str = "auto"
    # K and V of the native backend: "float32", "float16", or "bfloat16" for models whose keys or values exceed 65,504;
    # "auto" is float16. On torch they have the dtype of its activations
    kv_dtype: str = "auto"
    kernels: str = "auto"  # "triton" on a GPU; "plain": plain torch everywhere
    graphs: str = "auto"  # CUDA graphs for decode steps on a GPU; "off": never
    linear: str = "auto"  # weights packed for oneDNN where supported (on a CPU); "packed": required; "plain": never
    threads: int = 0  # 0: one for each core that this process may use
    # Ranks that have a part of the model's heads and weights each, one to a GPU, in processes of their own; 1: none
    tensor_parallel: int = 1
    cache_dir: str = ""  # "": the user's cache folder
    latent: str = "auto"  # the latent codec: a folder, "auto" for the one in the cache if there is one, or "none"
    drafter: str = "auto"  # "ngram", "trained", a drafter's folder, "auto", or "none"; see `compose.py`

    def __post_init__(self) -> None:
        _at_least(self, threads=0, tensor_parallel=1)
        _at_most(self, threads=_MOST_THREADS, tensor_parallel=_MOST_RANKS)
        if not self.model:
            raise ConfigError("model must be a name, a folder or a file, got an empty string")
        if self.device == "auto":
            object.__setattr__(self, "device", default_device())
        if not _DEVICES.fullmatch(self.device):
            more = "; mlx is for Apple's GPUs" if self.device.startswith("mps") else ""
            raise ConfigError(f"device must be cpu, cuda, cuda:N, mlx or auto, got {self.device!r}{more}")
        if not self.latent:
            raise ConfigError("latent must be auto, none or a folder, got an empty string")
        if not self.drafter:
            raise ConfigError("drafter must be auto, none, ngram, trained or a folder, got an empty string")
        if self.backend not in ("auto", "native", "torch"):
            raise ConfigError(f"backend must be auto, native or torch, got {self.backend!r}")
        if self.weights not in ("auto", "float32", "bfloat16", "fp8", "int8", "int4"):
            raise ConfigError(f"weights must be auto, float32, bfloat16, fp8, int8 or int4, got {self.weights!r}")
        if self.determinism not in _MODES:
            raise ConfigError(f"determinism must be {' or '.join(_MODES)}, got {self.determinism!r}")
        if self.numerics not in ("auto", "int8"):
            raise ConfigError(f"numerics must be auto or int8, got {self.numerics!r}")
        if self.kv_dtype not in ("auto", "float32", "float16", "bfloat16"):
            raise ConfigError(f"kv_dtype must be auto, float32, float16 or bfloat16, got {self.kv_dtype!r}")
        if self.kernels not in ("auto", "plain", "triton"):
            raise ConfigError(f"kernels must be auto, plain or triton, got {self.kernels!r}")
        if self.graphs not in ("auto", "on", "off"):
            raise ConfigError(f"graphs must be auto, on or off, got {self.graphs!r}")
        if self.linear not in ("auto", "packed", "plain"):
            raise ConfigError(f"linear must be auto, packed or plain, got {self.linear!r}")
        if self.dtype not in ("float32", "bfloat16", *(("float16",) if self.device == "mlx" else ())):
            more = "" if self.device == "mlx" else ", or float16 with device=mlx"
            raise ConfigError(f"dtype must be float32 or bfloat16{more}, got {self.dtype!r}")

    @property
    def mode(self) -> Mode:
        """What equal histories promise."""
        return _MODES[self.determinism]

    @property
    def torch_device(self) -> str:
        """Where torch computes beside the model: MLX shares its memory with the CPU."""
        return "cpu" if self.device == "mlx" else self.device

    @property
    def cache_path(self) -> Path:
        """NO_CACHE if none is named, and this user has no home folder or may not enter it.

        Raises ConfigError for a folder that is named and cannot be entered.
        """
        if not self.cache_dir:
            return _own_cache()[0]
        cache = in_full(self.cache_dir)
        if failed := _locked(cache):
            raise ConfigError(f"cache_dir {cache} cannot be read ({failed.strerror}); name another folder")
        return cache


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Where the server listens, its access control and its limits."""

    bind: str = "127.0.0.1:50051"
    # What is made before the server is ready, if the cache lacks it: "auto", what the default strategy needs, for small
    # models; "all", the latent and the components of keys; "never", nothing. See `cli/auto_calibration.py`
    calibrate: str = "auto"
    metrics_bind: str = ""  # "": no metrics port
    metrics_token_file: str = ""  # what readers of metrics show, needed beyond loopback; "": nothing
    allow_open_metrics: bool = False  # beyond loopback without a token
    picker_metrics: str = ""  # names of gauges that a picker of endpoints reads: queued,running,kv; "": none
    trace_endpoint: str = ""  # OTLP collector over gRPC, such as http://127.0.0.1:4317; "": no traces
    log_format: str = "text"  # or "json", an object a line
    http_bind: str = ""  # chat completions over HTTP, deprecated; "": none
    api_key_file: str = ""  # as `kakeya keys` writes it; "": no key needed (loopback, or with tls_client_ca_file)
    tls_cert_file: str = ""
    tls_key_file: str = ""
    tls_client_ca_file: str = ""  # client certificates must be signed by one of these; "": none required
    allow_plaintext: bool = False  # beyond loopback without TLS, behind a proxy that terminates it
    max_connections: int = 0  # 0: as many as file descriptors allow, 10,000 at most
    max_connections_per_address: int = 0  # 0: half of max_connections beyond loopback, no limit on it
    max_connection_calls: int = (
        256  # on one connection at the same time; further ones wait in the client's gRPC library
    )
    max_connection_idle_seconds: float = 300.0  # without a call; clients reconnect with the next one; 0: never
    max_connection_age_seconds: float = 0.0  # then clients reconnect, and certificates are checked; 0: never
    max_owner_calls: int = 1024  # of one owner at the same time, including calls whose message has not arrived
    owner_calls_per_second: float = 0.0  # starts of one owner; 0: 1,000 beyond loopback, else no limit
    max_header_bytes: int = 4096  # of one call, and 32 for each header, as HTTP/2 counts them
    max_message_bytes: int = 4 * 2**20  # upper limit for all methods; see `server/message_limits.py`
    busy_wait_seconds: float = 2.0
    drain_seconds: float = 30.0
    stall_exit_seconds: float = 120.0  # the process ends if the engine stalls for so long; 0: never
    watch_weights: bool = True  # the process ends if files of weights in use are overwritten

    def __post_init__(self) -> None:
        _at_least(
            self,
            max_message_bytes=1024,
            max_connections=0,
            max_connections_per_address=0,
            max_connection_calls=1,
            max_connection_idle_seconds=0,
            max_header_bytes=1024,
            max_connection_age_seconds=0,
            max_owner_calls=1,
            owner_calls_per_second=0,
            busy_wait_seconds=0,
            drain_seconds=0,
            stall_exit_seconds=0,
        )
        _at_most(
            self,
            max_message_bytes=_WIRE_LARGEST,
            max_connections=_WIRE_LARGEST,
            max_connections_per_address=_WIRE_LARGEST,
            max_connection_calls=_WIRE_LARGEST,
            max_connection_idle_seconds=_WIRE_LARGEST / 1000,  # milliseconds for gRPC
            max_header_bytes=_WIRE_LARGEST,
            max_connection_age_seconds=_WIRE_LARGEST / 1000,  # milliseconds for gRPC
            max_owner_calls=_WIRE_LARGEST,
            stall_exit_seconds=_LONGEST_SECONDS,
            busy_wait_seconds=_LONGEST_SECONDS,
            drain_seconds=_LONGEST_SECONDS,
        )
        if self.calibrate not in ("auto", "all", "never"):
            raise ConfigError(f"calibrate must be auto, all or never, got {self.calibrate!r}")
        if self.picker_metrics:
            names = self.picker_metric_names
            if len(set(names)) != 3 or not all(re.fullmatch("[a-zA-Z_:][a-zA-Z0-9_:]*", name) for name in names):
                raise ConfigError(
                    "picker_metrics must be three names of metrics, for the queue, what runs and the share of K/V, "
                    f"such as {PICKER_METRICS}; got {self.picker_metrics!r}"
                )
        if self.log_format not in ("text", "json"):
            raise ConfigError(f"log_format must be text or json, got {self.log_format!r}")
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ConfigError("only one of tls_cert_file and tls_key_file is set; set both or none")
        if self.tls_client_ca_file and not self.tls_cert_file:
            raise ConfigError("tls_client_ca_file needs tls_cert_file and tls_key_file; set them or leave it unset")

    @property
    def picker_metric_names(self) -> list[str]:
        return [name.strip() for name in self.picker_metrics.split(",")] if self.picker_metrics else []


def in_full(path: str | Path) -> Path:
    """The path with its `~`. Raises ConfigError if there is no such home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: {_why_homeless(Path(path).parts[0])}; write the path in full") from error


def require_cache(cache: Path) -> Path:
    """`cache`, for what only a folder can hold. Raises ConfigError if there is none."""
    if cache == NO_CACHE:
        raise ConfigError(f"there is no cache folder, because {why_no_cache()}; name one with --cache-dir")
    return cache


def why_no_cache() -> str:
    """Why NO_CACHE is a user's own."""
    return _own_cache()[1]


def writable(folder: Path, option: str) -> Path:
    """`folder`, to hold what takes long to make. Raises ConfigError that names `option` if it cannot be written."""
    if NO_CACHE in folder.parents:
        require_cache(NO_CACHE)
    place = folder.absolute()
    try:
        while not place.exists():
            place = place.parent
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror}); name another folder with {option}"
        ) from error
    return folder


def _own_cache() -> tuple[Path, str]:
    """This user's cache folder, or NO_CACHE and the reason."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kakeya"
    except RuntimeError:
        return NO_CACHE, _why_homeless("~")
    failed = _locked(cache)
    return (NO_CACHE, f"{cache} cannot be read ({failed.strerror})") if failed else (cache, "")


def _locked(folder: Path) -> PermissionError | None:
    """The error of a folder that cannot be entered, if it is there."""
    try:
        folder.joinpath("models").exists()
    except PermissionError as error:
        return error
    return None


def _why_homeless(home: str) -> str:
    return "HOME is not set and this user has no home folder" if home == "~" else f"{home} is no user here"


def default_device() -> str:
    """`mlx` on a Mac with Apple silicon where the package is installed, else `cpu`."""
    is_apple_silicon = sys.platform == "darwin" and platform.machine() == "arm64"
    return "mlx" if is_apple_silicon and has_mlx() else "cpu"


def has_mlx() -> bool:
    """Is the package mlx installed? It is not imported. Folders of that name are not the package."""
    try:
        return importlib.util.find_spec("mlx.core") is not None
    except ModuleNotFoundError:
        return False


def configure_threads_environment() -> None:
    """Make idle OpenMP threads block instead of spin. Call it before torch is imported.

    Two processes with spinning OpenMP threads slow each other down 3 to 15 times on two cores. A value set by the user
    is kept.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def multiply_float32_in_full() -> None:
    """Have MLX multiply float32 as float32. Call it before its first product: it looks once.

    Where a GPU multiplies matrices in a unit of its own, MLX lets it round such numbers to some eleven bits (TF32).
    """
    if (given := os.environ.get("MLX_ENABLE_TF32", "0")) not in ("", "0"):
        logger.warning("MLX_ENABLE_TF32 was %s and is 0 from now on: float32 is multiplied as float32", given)
    os.environ["MLX_ENABLE_TF32"] = "0"


def forbid_model_hub() -> None:
    """Keep model libraries from using a network. Call it before they are imported."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def hub_cache() -> Path:
    """The cache folder of huggingface_hub, from the same environment variables. Raises ConfigError if it has none."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{home}/huggingface"
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    try:
        return Path(os.path.expandvars(cache)).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"there is no folder for models of the hub, because {_why_homeless('~')}; name one with HF_HOME, and one "
            "for what is made of them with --cache-dir"
        ) from error


def quiet_grpc() -> None:
    """Suppress gRPC's own log lines, one for each client that disconnects.

    Call it before grpc is imported. A value set by the user is kept.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def child_environment(**overrides: str) -> dict[str, str]:
    """The environment for a child process: this one's, changed by `overrides`."""
    return {**os.environ, **overrides}


_VARIABLE = "KAKEYA_"
_FILE_VARIABLE = "KAKEYA_CONFIG"


def resolve(kind: type[T], flags: Mapping[str, Any] | None = None, *, file: str | None = None) -> T:
    """One settings object from flags, environment, file and defaults. A flag that is None counts as not given.

    Raises ConfigError for a value that does not parse, an unknown key in the file, or a file that cannot be read.
    """
    path = file or os.environ.get(_FILE_VARIABLE)
    variables = {name: os.environ.get(f"{_VARIABLE}{name.upper()}") for name in {*_names(), *_OLD}}
    sources: list[Mapping[str, Any]] = [flags or {}, variables, _read_file(Path(path)) if path else {}]
    if kind is ModelConfig:
        sources = [_as_called_now(each) for each in sources]
    given, in_variables, from_file = sources
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for spec in fields(kind):
        for source, value in (
            (f"flag --{spec.name.replace('_', '-')}", given.get(spec.name)),
            (f"environment {_VARIABLE}{spec.name.upper()}", in_variables.get(spec.name)),
            (f"{path}: {spec.name}", from_file.get(spec.name)),
        ):
            if value is not None:
                values[spec.name] = _parse(source, value, hints[spec.name])
                break
        else:
            assert spec.default is not MISSING
            values[spec.name] = spec.default
    return kind(**values)


def _as_called_now(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, with today's names and values for those of OLD_NAMES."""
    now = {name: value for name, value in given.items() if value is not None}
    for (name, value), (new, meant) in OLD_NAMES.items():
        if now.get(name) == value:
            del now[name]
            if now.setdefault(new, meant) != meant:
                raise ConfigError(f"{name}={value} is {new}={meant} now, and {new} is {now[new]}; leave out {name}")
            _say_once(f"{name}={value}", f"{new}={meant}")
    if "mode" in now:
        raise ConfigError(f"mode={now['mode']}: the setting is determinism now, {' or '.join(_MODES)}")
    return now


@cache
def _say_once(before: str, now: str) -> None:
    logger.warning("%s is called %s now, and read until 0.2.0 only", before, now)


def _names() -> set[str]:
    return {spec.name for kind in (EngineConfig, ModelConfig, ServerConfig) for spec in fields(kind)}


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """What a misspelled name may have been, as the end of an error; empty if nothing is near."""
    close = [f"{prefix}{each}" for each in get_close_matches(name, known, n=2, cutoff=0.75)]
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def misspelled_variables() -> tuple[str, ...]:
    """Variables of the environment that are no setting and read like one, each with the setting's own."""
    known = {name.upper() for name in _names()} | {_FILE_VARIABLE.removeprefix(_VARIABLE)}
    given = sorted(name.removeprefix(_VARIABLE) for name in os.environ if name.startswith(_VARIABLE))
    others = [name for name in given if name not in known and name.lower() not in _OLD]
    meant = {name: did_you_mean(name, known, prefix=_VARIABLE) for name in others}
    return tuple(f"{_VARIABLE}{name}{others}" for name, others in meant.items() if others)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the settings file {path}: {error}") from error
    known = _names()
    if tables := sorted(name for name, value in content.items() if isinstance(value, dict)):
        named = ", ".join(f"[{name}]" for name in tables)
        raise ConfigError(f"{path}: it has tables ({named}); the file is flat, a line `name = value` for each setting")
    if unknown := sorted(set(content) - known - _OLD):
        named = ", ".join(f"{name}{did_you_mean(name, known)}" for name in unknown)
        every = "" if "did you mean" in named else f"; the settings are {', '.join(sorted(known))}"
        raise ConfigError(f"{path}: unknown settings {named}{every}")
    return content


def _parse(source: str, value: Any, kind: Any) -> Any:
    try:
        if kind is int and isinstance(value, str):
            if _BELOW_ZERO.fullmatch(value.strip()):
                return int(value)  # each setting says what is the least
            match = _SIZE.fullmatch(value.strip())
            if match is None:
                raise ValueError(f"{value!r} is not a whole number or a size such as 512MiB")
            return int(match[1]) * _UNITS[match[2]]
        if kind is float and isinstance(value, (str, int)) and not isinstance(value, bool):
            return float(value)
        if kind is bool and isinstance(value, str):
            if value.strip().lower() not in _BOOLEANS:
                raise ValueError(f"{value!r} is neither true nor false")
            return _BOOLEANS[value.strip().lower()]
        if isinstance(value, bool) is not (kind is bool) or not isinstance(value, kind):
            raise ValueError(f"expected {kind.__name__}, got {value!r}")
        return value
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error
