"""A DFlash drafter as lists of operations, for the executor that runs its target.

    observe   taps ── fc ── norm ── K, V of every layer, written
    propose   [last token, MASK, …] ── embedding ── layers ── norm ── head: states and logits of the places asked for
    chain     each place's likely ids: what the head says of the state after each, and of which states

Names are those of published checkpoints (`network.py` has the same network on torch); the embedding and the head are
the target's, under the target's names.
"""

from __future__ import annotations

from inference_engine.kv.geometry import LayerGeometry
from inference_engine.models.families.list_writer import EMBEDDING
from inference_engine.models.operations import (
    Add,
    Attend,
    Embed,
    Gated,
    Given,
    Norm,
    Operation,
    Product,
    Rotate,
    Select,
    StepList,
    Tap,
    Write,
)
from kv_cache_proposer.dflash.drafter_config import DFlashConfig

ROTARY = "drafter"
# Which vectors a run gives besides logits, by their numbers as taps.
STATES, AFTER, WORDS = 0, 0, 1


def observe_list(config: DFlashConfig) -> StepList:
    """From the taps of tokens to their entries in the ring buffer."""
    entries = 2 * config.kv_heads * config.head_dim
    operations: list[Operation] = [
        Given(output="taps"),
        Product(input="taps", output="vector", matrices=("fc.weight",)),
        _norm(config, "hidden_norm", "vector", "vector"),
    ]
    for layer in range(config.layers):
        attention = f"layers.{layer}.self_attn."
        operations += [
            Product(
                input="vector", output="entries", matrices=(f"{attention}k_proj.weight", f"{attention}v_proj.weight")
            ),
            _norm(config, f"{attention}k_norm", "entries", "entries", heads=config.kv_heads),
            Rotate(register="entries", rotary=ROTARY, heads=config.kv_heads, width=config.head_dim),
            Write(input="entries", layer=layer),
        ]
    widths = {"taps": len(config.tap_layers) * config.hidden, "vector": config.hidden, "entries": entries}
    return _list(config, operations, widths, vocabulary=0)


def propose_list(config: DFlashConfig, *, vocabulary: int, head: str) -> StepList:
    """From ids of blocks to the states of the queries asked for, and their logits. head: the target's."""
    dim, queries, keys = config.head_dim, config.query_heads, config.kv_heads
    operations: list[Operation] = [Embed(output="hidden", matrix=EMBEDDING, factor=config.embedding_scale)]
    for layer in range(config.layers):
        prefix = f"layers.{layer}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        operations += [
            _norm(config, f"{prefix}input_layernorm", "hidden", "normed"),
            Product(input="normed", output="heads", matrices=tuple(f"{attention}{name}_proj.weight" for name in "qkv")),
            _norm(config, f"{attention}q_norm", "heads", "heads", heads=queries),
            _norm(config, f"{attention}k_norm", "heads", "heads", heads=keys, offset=queries * dim),
            Rotate(register="heads", rotary=ROTARY, heads=queries + keys, width=dim),
            Attend(input="heads", output="mixed", layer=layer, scaling=dim**-0.5),
            Product(input="mixed", output="delta", matrices=(f"{attention}o_proj.weight",)),
            Add(input="delta", output="hidden"),
            _norm(config, f"{prefix}post_attention_layernorm", "hidden", "normed"),
            Product(input="normed", output="gates", matrices=(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight")),
            Gated(input="gates", output="inner", activation="silu"),
            Product(input="inner", output="delta", matrices=(f"{mlp}down_proj.weight",)),
            Add(input="delta", output="hidden"),
        ]
    operations += [
        Select(input="hidden", output="last"),
        _norm(config, "norm", "last", "last"),
        Tap(input="last", layer=STATES),
        Product(input="last", output=None, matrices=(head,)),
    ]
    widths = dict.fromkeys(("hidden", "normed", "delta", "last"), config.hidden)
    widths |= {"heads": (queries + 2 * keys) * dim, "mixed": queries * dim}
    widths |= {"gates": 2 * config.intermediate, "inner": config.intermediate}
    return _list(config, operations, widths, vocabulary=vocabulary)


def chain_list(config: DFlashConfig, *, vocabulary: int, head: str) -> StepList:
    """From ids, each beside the state of the place after it, to that state after the id, and to the head's row of it.

    The head's score of a pair of neighbours is the product of the first one's state and the second one's row.
    """
    part = config.chain
    operations: list[Operation] = [
        Given(output="after"),
        Product(input="after", output="gates", matrices=("chain.gate_proj.weight",), count=part),
        Embed(output="words", matrix=EMBEDDING, factor=config.embedding_scale),
        Product(input="words", output="gates", matrices=("chain.word_proj.weight",), offset=part, count=part),
        Gated(input="gates", output="inner", activation="silu"),
        Product(input="inner", output="delta", matrices=("chain.out_proj.weight",)),
        Add(input="delta", output="after"),
        Tap(input="after", layer=AFTER),
        Embed(output="words", matrix=head),
        Tap(input="words", layer=WORDS),
    ]
    widths = dict.fromkeys(("after", "words", "delta"), config.hidden) | {"gates": 2 * part, "inner": part}
    return _list(config, operations, widths, vocabulary=vocabulary)


def _list(config: DFlashConfig, operations: list[Operation], widths: dict[str, int], *, vocabulary: int) -> StepList:
    layer = LayerGeometry(
        query_heads=config.query_heads, kv_heads=config.kv_heads, head_dim=config.head_dim, rotary=ROTARY
    )
    return StepList(
        operations=tuple(operations),
        widths=widths,
        layers=(layer,) * config.layers,
        hidden=config.hidden,
        vocabulary=vocabulary,
    )


def _norm(config: DFlashConfig, name: str, register: str, output: str, *, heads: int = 0, offset: int = 0) -> Norm:
    """heads: of each head by itself; 0: of the whole."""
    return Norm(
        input=register,
        output=output,
        weights=f"{name}.weight",
        epsilon=config.norm_eps,
        width=config.head_dim if heads else config.hidden,
        heads=heads or 1,
        offset=offset,
    )
