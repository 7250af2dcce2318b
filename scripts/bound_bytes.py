"""The most bytes that sessions may hold, by strategy, length and number: what admission reserves, without a model.

    python -m scripts.bound_bytes               of a 7B shape on a GPU
    python -m scripts.bound_bytes --on-cpu      of SmolLM2-135M on the native backend: what restored entries take

A cell is SESSIONSxTOKENS: in GB what all of its sessions may hold, and in how many sessions of the first strategy, of
as many tokens, as many bytes are. K and V are in 16 bits. Nothing is run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from inference_engine.config import configure_threads_environment, forbid_model_hub

configure_threads_environment()
forbid_model_hub()

from inference_engine.errors import ConfigError, InvalidArgument
from inference_engine.kv.geometry import Geometry, LayerGeometry
from inference_engine.kv.strategies import parse_strategy
from laboratory.evaluation.made_models import SHAPES

SELECT = "restored:source=latent,mode=select"
STRATEGIES = (
    "full",
    "gather:scorer=components",
    SELECT,
    f"{SELECT},appended=select",
    f"{SELECT},window=1024,budget=2048",
    f"{SELECT},window=512",
    f"{SELECT},window=256",
)
CELLS = ("1x131072", "1x1000000", "64x32768")
# On a CPU restored entries stay between steps: as many as two choices have, or as `awake_bytes` says.
ON_CPU = (
    "full",
    *(
        f"{SELECT},sink=16,window=256,{more}"
        for more in (
            "budget=912",
            "budget=912,awake_bytes=11796480",
            "budget=784",
            "budget=784,awake_bytes=8847360",
            "budget=528",
        )
    ),
)
CELLS_ON_CPU = ("1x2048", "1x7900")
_ITEM_BYTES = 2


def geometry_of(shape: str, *, on_cpu: bool, segment_tokens: int = 256) -> Geometry:
    """As a GPU has it in half precision, or the native backend."""
    config = SHAPES[shape]()
    heads, count = config.num_attention_heads, config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * count
    layer = {
        "query_heads": heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    found = Geometry(
        layers=tuple(LayerGeometry(**layer, native_window=window) for window in windows),
        itemsize=_ITEM_BYTES,
        trained_positions=2**20,
        segment_tokens=segment_tokens,
    )
    return found if on_cpu else replace(found, holds_restored=False, segments_at_once=4, segments_in_a_chunk=16)


def peak_bytes(name: str, geometry: Geometry, tokens: int) -> int:
    """Of one session, at any time. Raises InvalidArgument for a strategy that cannot be had."""
    strategy = parse_strategy(name).resolved(geometry, has_components=True)
    strategy.check(geometry)
    return strategy.bound(geometry, tokens).peak_bytes


def table(geometry: Geometry, strategies: Sequence[str], cells: Sequence[tuple[int, int]]) -> list[str]:
    head = [f"{sessions} x {tokens:,}" if sessions > 1 else f"{tokens:,}" for sessions, tokens in cells]
    lines = ["| strategy | " + " | ".join(f"{each}, GB | ÷ one of `{strategies[0]}`" for each in head) + " |"]
    lines.append("|---|" + "---:|" * (2 * len(cells)))
    for name in strategies:
        row = [f"`{name}`"]
        for sessions, tokens in cells:
            one, whole = peak_bytes(strategies[0], geometry, tokens), sessions * peak_bytes(name, geometry, tokens)
            row += [f"{whole / 1e9:.3g}", f"{whole / one:.3g}"]
        lines.append("| " + " | ".join(row) + " |")
    return lines


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The most bytes that sessions may hold.")
    parser.add_argument("--on-cpu", action="store_true", help="as the native backend holds them")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="qwen2.5-7b, or on a CPU smollm2-135m")
    parser.add_argument("--strategies", nargs="+", help="bytes are given in sessions of the first")
    parser.add_argument("--cells", nargs="+", metavar="SESSIONSxTOKENS")
    parser.add_argument("--segment-tokens", type=int, default=256)
    arguments = parser.parse_args(words)
    on_cpu = arguments.on_cpu
    shape = arguments.shape or ("smollm2-135m" if on_cpu else "qwen2.5-7b")
    geometry = geometry_of(shape, on_cpu=on_cpu, segment_tokens=arguments.segment_tokens)
    strategies = arguments.strategies or (ON_CPU if on_cpu else STRATEGIES)
    sizes = [cell.partition("x") for cell in arguments.cells or (CELLS_ON_CPU if on_cpu else CELLS)]
    cells = [(int(sessions), int(tokens)) for sessions, _, tokens in sizes]
    try:
        print("\n".join(table(geometry, strategies, cells)))
    except (ConfigError, InvalidArgument) as refusal:
        parser.error(str(refusal))


if __name__ == "__main__":
    main()
