"""Settings as command-line flags, one for each field of config.py (`--kv-bytes` for `kv_bytes`), and back.

Flags hold the unparsed text; `config.resolve` parses it and has the defaults. A field without a line in HELP gets a
flag, too.
"""

from __future__ import annotations

import argparse
import enum
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import TypeAlias, TypeVar

from inference_engine.config import EngineConfig, ModelConfig, ServerConfig, resolve
from inference_engine.errors import ConfigError

Config: TypeAlias = EngineConfig | ModelConfig | ServerConfig
T = TypeVar("T", bound=Config)

TITLES: dict[type[Config], str] = {ModelConfig: "model", EngineConfig: "engine", ServerConfig: "server"}

# What most people set, which the help of `serve` shows first.
USUAL_TITLE = "usual"
USUAL = ("model", "device", "dtype", "strategy", "kv_bytes", "state_dir", "bind", "metrics_bind", "api_key_file")

# The engine settings of commands that start a server for one conversation.
CONVERSATION = ("strategy", "kv_bytes")

HELP = {
    "model": (
        "NAME|PATH",
        "a known name (`kakeya models list`), a folder of safetensors, a GGUF file, or org/name[@revision] of the hub",
    ),
    "device": ("DEVICE", "cpu, cuda, cuda:1, mlx, or auto: mlx on a Mac with Apple silicon, if installed; else cpu"),
    "dtype": ("DTYPE", "of activations, and of weights on torch: float32 or bfloat16; with device mlx float16, too"),
    "backend": ("NAME", "native (kernels in C++ for the CPU), torch, or auto: native where it runs the model"),
    "weights": (
        "TYPE",
        "auto (as stored), or floats made, on a CPU, int8, int4, bfloat16 or float32; on CUDA, fp8 or int4",
    ),
    "determinism": (
        "LEVEL",
        "off: the fastest; batch-invariant: equal histories give equal bits, whatever else is in a batch",
    ),
    "numerics": ("NAME", "native: int8 rounds activations to 8 bits, which is faster; auto: they are float32"),
    "kv_dtype": (
        "TYPE",
        "of K and V on the native backend: float32, float16, bfloat16 (larger range), or auto: float16",
    ),
    "kernels": ("KIND", "triton, plain torch (plain), or auto: triton on a GPU"),
    "graphs": ("WHEN", "on, off, or auto: CUDA graphs for decode steps, where the device supports them"),
    "linear": (
        "KIND",
        "packed: weights laid out for this CPU; plain: as stored; auto: packed where supported",
    ),
    "threads": ("N", "CPU threads; 0: one for each core that this process may use"),
    "cache_dir": ("FOLDER", "where fetched models are kept; empty: the user's cache folder"),
    "latent": (
        "FOLDER",
        "latent codec from `kakeya train latent`; auto: the one in the cache, if there is one; none: no codec",
    ),
    "drafter": (
        "NAME|FOLDER",
        "drafter: ngram, trained, the output of `kakeya train drafter`, a published one, auto or none",
    ),
    "strategy": (
        "SPEC",
        "what sessions keep: full, sink_window:sink=4,window=1024, layer_window:full_layers=5+11, restored",
    ),
    "kv_bytes": ("SIZE", "memory for K/V, such as 4GiB; 0: a quarter of the free memory"),
    "growth": (
        "WHEN",
        "best_effort: sessions get memory as they grow; guaranteed: all of it at creation; auto: by device",
    ),
    "default_limit_tokens": (
        "N",
        "for sessions without limit_tokens of their own; 0: as long as strategy and model allow",
    ),
    "tier_bytes": (
        "SIZE",
        "host memory for K/V off the device; 0: a quarter of what is free, or on a CPU none",
    ),
    "journal": (
        "KIND:PLACE",
        "what keeps this model's sessions when the server ends: sqlite:FOLDER, postgres:DSN; empty: they end with it",
    ),
    "state_dir": ("FOLDER", "short for --journal sqlite:FOLDER"),
    "durability": (
        "MODE",
        "what a history survives: none, process (a kill), power (a loss of power), auto: power with a journal",
    ),
    "kept_sessions_per_owner": ("N", "sessions of one owner in the journal, in memory or not; 0: no limit"),
    "kept_tokens_per_owner": (
        "N",
        "token ids in their histories, those of each fork counted, about four bytes each on the disk; 0: no limit",
    ),
    "session_keep_seconds": ("SECONDS", "kept sessions unused for longer are deleted; 0: none is"),
    "replica": ("NAME", "of this server among those that share a journal in a database; empty: the machine's name"),
    "lease_seconds": ("S", "after so long without a sign of this server others take over its sessions"),
    "copies_dir": ("FOLDER", "for copies of K/V, with a journal in a database; empty: none are made"),
    "hibernate": (
        "WHEN",
        "copy K/V of idle sessions into files: always, never, auto: where reading is faster than a prefill",
    ),
    "hibernate_after_seconds": ("S", "a session idle for longer is copied into a file"),
    "state_bytes": ("SIZE", "for copies of K/V; 0: half of the free space there"),
    "state_bytes_per_owner": ("SIZE", "for copies of one owner's sessions; 0: only state_bytes applies"),
    "tensor_parallel": (
        "N",
        "GPUs that have a part of the model's heads and weights each, see growing; 1: one has all",
    ),
    "max_sessions": ("N", "sessions open at the same time"),
    "max_running": ("N", "Generates at the same time; others wait, but one of each owner begins at once"),
    "max_queued": ("N", "Generates that may wait for their turn"),
    "max_first_token_seconds": (
        "S",
        "Generates whose first token would wait longer for other owners' are refused; 0: no limit",
    ),
    "max_sessions_per_owner": ("N", "sessions of one owner; 0: no limit"),
    "kv_bytes_per_owner": ("SIZE", "memory for K/V of one owner's sessions; 0: no limit"),
    "history_tokens_per_session": ("N", "token ids in the history of one session, whatever its strategy; 0: no limit"),
    "history_tokens_per_owner": (
        "N",
        "token ids in the histories of one owner's sessions, what forks share counted once; 0: no limit",
    ),
    "max_running_per_owner": ("N", "Generates of one owner at the same time, others wait; 0: no limit"),
    "max_queued_per_owner": ("N", "Generates of one owner that may wait; 0: no limit"),
    "share_prefixes": ("WHO", "owner: what sessions of one owner begin with is prefilled once; off: of forks alone"),
    "prefix_bytes": (
        "SIZE",
        "K/V of closed sessions for new ones that begin so, while nothing needs the memory; 0: a quarter of kv_bytes",
    ),
    "restore_cache_choices": (
        "N",
        "choices of entries that a session of mode select keeps restored while memory is free; 0: awake_bytes alone",
    ),
    "share_forks": ("BOOL", "forks read common KV entries from the first session; false: every fork copies them"),
    "first_token_target_seconds": (
        "S",
        "target for the first token: prefills that would miss it get larger chunks; 0: no target",
    ),
    "inter_token_target_seconds": (
        "S",
        "longest step with prefills beside decoding sessions; 0: one segment each",
    ),
    "max_batch": ("N", "Generates in one forward"),
    "overlap": ("WHEN", "on, off, or auto: on a GPU, launch a decode step before the tokens of the last are here"),
    "draft_tokens": ("N", "draft tokens in each draft; 0: chosen by cost, possibly none"),
    "step_tokens": ("N", "tokens in one forward, of prefills and decodes; 0: 512 on a CPU, 4096 elsewhere"),
    "segment_tokens": ("N", "the unit of prefill and eviction; a multiple of page_tokens"),
    "page_tokens": ("N", "the unit of allocation"),
    "max_append_tokens": ("N", "maximum ids in one append"),
    "max_generate_tokens": ("N", "maximum tokens of one Generate"),
    "session_idle_ttl_seconds": ("S", "a session idle for longer is evicted"),
    "stall_seconds": ("S", "the engine counts as stalled if a step takes longer"),
    "session_evictable_seconds": ("S", "a session idle for longer may be evicted for a new one of its owner"),
    "bind": ("HOST:PORT", "where to listen; port 0: any free one; beyond loopback, API keys and TLS are required"),
    "calibrate": (
        "WHEN",
        "first calibrate what the cache lacks: auto, what --strategy needs, if the model is small; all; never",
    ),
    "metrics_bind": (
        "HOST:PORT",
        "where to serve Prometheus metrics and the dashboard; empty: nowhere; beyond loopback, a token is required",
    ),
    "metrics_token_file": ("FILE", "a token that readers of metrics show; empty: none required"),
    "allow_open_metrics": ("BOOL", "true: metrics may be read beyond loopback without a token"),
    "picker_metrics": (
        "NAMES",
        "of three gauges for a picker of endpoints: queued and running Generates, share of K/V; empty: none",
    ),
    "trace_endpoint": ("URL", "an OTLP collector for traces, such as http://127.0.0.1:4317; empty: none"),
    "log_format": ("KIND", "text, or json: one object per line"),
    "http_bind": ("HOST:PORT", "where to serve chat completions over HTTP (deprecated); empty: nowhere"),
    "api_key_file": ("FILE", "accepted API keys, see `kakeya keys`; empty: none required"),
    "tls_cert_file": ("FILE", "certificate chain in PEM format"),
    "tls_key_file": ("FILE", "its private key"),
    "tls_client_ca_file": ("FILE", "authorities of client certificates; empty: clients need none"),
    "allow_plaintext": ("BOOL", "true: allow no TLS beyond loopback, behind a proxy that terminates it"),
    "max_connections": ("N", "connections at the same time; 0: as many as file descriptors allow, 10000 at most"),
    "max_connections_per_address": (
        "N",
        "connections of one address; 0: half of max_connections beyond loopback, no limit on it",
    ),
    "max_connection_calls": ("N", "calls on one connection at the same time; further ones wait in the client"),
    "max_connection_idle_seconds": ("S", "a connection without a call is closed after this; 0: never"),
    "max_connection_age_seconds": ("S", "clients reconnect after this; running calls are completed; 0: never"),
    "max_owner_calls": ("N", "calls of one owner at the same time"),
    "owner_calls_per_second": (
        "N",
        "calls that one owner may start per second; 0: 1000 beyond loopback, else no limit",
    ),
    "max_header_bytes": ("SIZE", "headers of one call, plus 32 bytes for each header"),
    "max_message_bytes": ("SIZE", "largest message sent, or received where a method takes as much; body over HTTP"),
    "busy_wait_seconds": ("S", "how long a call waits for a busy session"),
    "drain_seconds": ("S", "how long running Generates may continue after SIGTERM"),
    "stall_exit_seconds": ("S", "the process ends if the engine stalls for so long; 0: never"),
    "watch_weights": ("BOOL", "true: the process ends if files of weights in use are overwritten"),
}


def add_settings(
    parser: argparse.ArgumentParser,
    kind: type[Config],
    *,
    only: Sequence[str] = (),
    usual: argparse._ArgumentGroup | None = None,
) -> None:
    """Give `parser` a flag for every field of `kind`, or for those of `only`. usual: takes those of USUAL."""
    group = parser.add_argument_group(TITLES[kind])
    for field in fields(kind):
        if not only or field.name in only:
            metavar, text = HELP.get(field.name, ("VALUE", ""))
            default = "" if field.default == "" else f" (default: {_text(field.default)})"
            place = usual if usual is not None and field.name in USUAL else group
            place.add_argument(_flag(field.name), metavar=metavar, help=f"{text}{default}".strip().replace("%", "%%"))
    if kind is ModelConfig:
        group.add_argument("--mode", help=argparse.SUPPRESS)  # what `determinism` was called: config.OLD_NAMES


def add_config_file(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--config", metavar="FILE", help="a TOML file of settings; flags and KAKEYA_… variables win")


def settings(args: argparse.Namespace, kind: type[T]) -> T:
    """The settings of `kind` from flags, environment, file and defaults. Raises ConfigError."""
    if has_password(getattr(args, "journal", None) or ""):
        raise ConfigError(
            "--journal has a password, which others on this machine can read there: set KAKEYA_JOURNAL instead, or a "
            "--config file, or leave it to libpq (PGPASSFILE)"
        )
    return resolve(kind, vars(args), file=args.config)


def refuse_without_effect(args: argparse.Namespace, *, used: Sequence[str]) -> None:
    """Raise ConfigError for flags of a server that the command would start, if --target names one that runs.

    used: settings of the command itself. Files and variables may have others, which are for other commands.
    """
    names = ["mode", *(field.name for kind in (ModelConfig, EngineConfig) for field in fields(kind))]
    given = [_flag(name) for name in names if name not in used and getattr(args, name, None) is not None]
    if args.target and given:
        raise ConfigError(
            f"{', '.join(given)}: without effect with --target, whose server has its own settings; leave out either"
        )


def has_password(journal: str) -> bool:
    return bool(re.search(r"//[^/@]*:[^/@]+@|\bpassword\s*=", journal))


def as_flags(config: Config) -> list[str]:
    """Flags that reproduce `config` in any environment, but for what `secret_variables` has."""
    left_out = {name.removeprefix("KAKEYA_").lower() for name in secret_variables(config)}
    return [
        f"{_flag(field.name)}={_text(getattr(config, field.name))}"
        for field in fields(config)
        if field.name not in left_out
    ]


def secret_variables(config: Config) -> dict[str, str]:
    """What others may not see, which flags are not for, as variables of the environment."""
    journal = config.journal if isinstance(config, EngineConfig) else ""
    return {"KAKEYA_JOURNAL": journal} if has_password(journal) else {}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _text(value: object) -> str:
    return str(value.value if isinstance(value, enum.Enum) else value)
