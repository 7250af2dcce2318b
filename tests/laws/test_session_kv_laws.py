"""The laws of KV entries: on SessionKV and the step's plan, with given keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Self

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.errors import NoCapacity
from inference_engine.kernels.by_session import attend_by_session
from inference_engine.kernels.components import KeyComponents, encode
from inference_engine.kernels.ops import DeviceOps
from inference_engine.kernels.ragged_attention import attend_ragged
from inference_engine.kernels.reads import OffloadedBlockRead
from inference_engine.kv.compressors import make_compressor
from inference_engine.kv.context import KVContext, WholeTokens
from inference_engine.kv.geometry import Geometry, LayerGeometry
from inference_engine.kv.layout import LayerRule, Positions
from inference_engine.kv.memory.pool import Pool
from inference_engine.kv.memory.tier import Tier
from inference_engine.kv.parts.component_index import TokenSelector
from inference_engine.kv.parts.layer_entries import LayerEntries
from inference_engine.kv.parts.scored import Candidates, EntryScorer
from inference_engine.kv.plan import StepPlan
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy
from inference_engine.metrics import KV_KINDS
from inference_engine.types import Footprint
from tests.further import further
from tests.laws.variants import all_strategies, each_strategy, each_strategy_with, mechanism
from tests.tiny import LATENT_BYTES

D, HKV, GROUP = 8, 2, 3
LIMIT = 200
SEGMENT = 16
QUANTA = [(1, 1), (4, 32)]  # exact shapes, padded shapes
ENDS = [(15, 16, 17), (3, 64, 65, 100)]
IN_TURN = {"quanta": QUANTA, "ends": ENDS}
# One of each mechanism, and as a further case the others of them.
FIRST = tuple({mechanism(strategy): strategy for strategy in reversed(all_strategies())}.values())
OTHERS = tuple(strategy for strategy in all_strategies() if strategy not in FIRST)
each_part = pytest.mark.parametrize("strategies", [FIRST, further(OTHERS)], ids=["each mechanism", "the others"])
# Layers that differ: native windows narrower and wider than a segment, other head counts and sizes.
LAYERS = (
    LayerGeometry(query_heads=HKV * GROUP, kv_heads=HKV, head_dim=D),
    LayerGeometry(query_heads=HKV * GROUP, kv_heads=HKV, head_dim=D, native_window=12),
    LayerGeometry(query_heads=4, kv_heads=1, head_dim=16),
    LayerGeometry(query_heads=4, kv_heads=1, head_dim=16, native_window=40),
)


def _components(layer: LayerGeometry) -> KeyComponents:
    generator = torch.Generator().manual_seed(layer.head_dim)
    basis = torch.randn(layer.kv_heads, layer.head_dim, layer.head_dim, generator=generator)
    ones = torch.ones(layer.kv_heads, layer.head_dim)
    return KeyComponents(mean=0.1 * ones, basis=torch.linalg.qr(basis).Q, deviations=ones)


COMPONENTS = {index: _components(layer) for index, layer in enumerate(LAYERS) if layer.native_window is None}


def turn(keys: Tensor, shift: Tensor | int) -> Tensor:
    """A rotation of our own for these tests: pairs of channels turn by 0.1 radian a position."""
    angle = torch.as_tensor(shift, dtype=torch.float64) * 0.1
    cos, sin = angle.cos().float()[..., None], angle.sin().float()[..., None]
    left, right = keys.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def zeros(count: int) -> Tensor:
    return torch.zeros(count)


class HalfTokens(WholeTokens):
    """A token codec for these layers: each number in bfloat16, the layers with a window of their own left out."""

    geometries: Sequence[LayerGeometry] = LAYERS
    layers = tuple(index for index, layer in enumerate(LAYERS) if layer.native_window is None)
    bytes_per_token = least_bytes_per_token = LATENT_BYTES

    def at(self, bytes_per_token: int) -> Self:
        assert bytes_per_token == LATENT_BYTES
        return self

    def encode(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        vectors = torch.cat([states.bfloat16().flatten(1) for states in (*keys, *values)], dim=1)
        codes = vectors.contiguous().view(torch.uint8)
        return torch.nn.functional.pad(codes, (0, LATENT_BYTES - codes.shape[1]))

    def decode(self, codes: Tensor, layers: Sequence[int] | None = None) -> tuple[list[Tensor], list[Tensor]]:
        own = [self.geometries[layer] for layer in self.layers]
        shapes = [(layer.kv_heads, layer.head_dim) for layer in own]
        sizes = [heads * dim for heads, dim in shapes] * 2
        numbers = codes[:, : 2 * sum(sizes)].contiguous().view(torch.bfloat16).float()
        vectors = [
            part.view(-1, *shape) for part, shape in zip(torch.split(numbers, sizes, dim=1), shapes * 2, strict=True)
        ]
        places = [self.layers.index(layer) for layer in (self.layers if layers is None else layers)]
        return [vectors[place] for place in places], [vectors[len(shapes) + place] for place in places]


class HalfTaps(HalfTokens):
    """A codec of taps that are the token's entries themselves."""

    tap_layers, digest = (0,), ""

    def encode_taps(self, taps: Tensor) -> Tensor:
        own = [self.geometries[layer] for layer in self.layers] * 2
        parts = torch.split(taps[:, 0], [layer.kv_heads * layer.head_dim for layer in own], dim=1)
        states = [part.view(-1, layer.kv_heads, layer.head_dim) for part, layer in zip(parts, own, strict=True)]
        return self.encode(states[: len(self.layers)], states[len(self.layers) :])


def taps_of(entries: Entries, positions: NDArray[np.int64]) -> Tensor:
    """[n, 1, numbers of the entries that a latent covers]."""
    states = [part[layer][:, positions] for part in (entries.k, entries.v) for layer in HalfTaps.layers]
    return torch.cat([state.transpose(0, 1).flatten(1) for state in states], dim=1)[:, None]


def context(
    *,
    token_quantum: int = 1,
    key_quantum: int = 1,
    capacity_entries: int = 4 * LIMIT,
    layers: tuple[LayerGeometry, ...] = LAYERS,
    segments_at_once: int = 1,
) -> KVContext:
    geometry = Geometry(
        layers=layers,
        itemsize=4,
        trained_positions=10_000,
        page_tokens=4,
        segment_tokens=SEGMENT,
        token_quantum=token_quantum,
        key_quantum=key_quantum,
        segments_at_once=segments_at_once,
    )
    pool = Pool(geometry, capacity_entries * geometry.entry_bytes, zeros)
    return KVContext(
        geometry=geometry,
        pool=pool,
        rotate=lambda keys, shifts, _: turn(keys, shifts),
        device=torch.device("cpu"),
        latent=HalfTokens(),
        f_theta=HalfTaps(),
        components=COMPONENTS,
        tier=Tier(2**24),
    )


class Entries:
    """Given queries, keys and values of every layer and position [H, length, D]; keys and queries unrotated."""

    def __init__(self, length: int, seed: int = 0, layers: tuple[LayerGeometry, ...] = LAYERS) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(heads: int, head_dim: int) -> Tensor:
            return torch.randn(heads, length, head_dim, generator=generator)

        self.q = [random(layer.query_heads, layer.head_dim) for layer in layers]
        self.k = [random(layer.kv_heads, layer.head_dim) for layer in layers]
        self.v = [random(layer.kv_heads, layer.head_dim) for layer in layers]


def active(strategy: KVStrategy, ctx: KVContext) -> SessionKV:
    kv = SessionKV(strategy, ctx, LIMIT)
    assert kv.wake(LIMIT)
    return kv


def step(
    kv: SessionKV, entries: Entries, count: int, *, commit: int | None = None, generated: bool = False
) -> list[Tensor]:
    """Stage `count` tokens, attend in every layer, commit all (or up to `commit`); the outputs [T, Hq, D] by layer."""
    kv.stage(count, np.full(count, generated))
    plan = StepPlan([kv], kv.context.geometry, kv.context.pool, mask_dtype=torch.float32, ops=kv.context.ops)
    positions = torch.from_numpy(plan.positions)
    outs = []
    for layer in range(len(entries.q)):
        # Padding tokens take the values of a position that exists.
        index = positions.clamp_max(entries.k[layer].shape[1] - 1)
        q, k = (turn(states[layer][:, index], positions) for states in (entries.q, entries.k))
        out = plan.attend(layer, q[None], k[None], entries.v[layer][None, :, index], scaling=0.35)
        outs.append(out[0, plan.spans[0].real])
    commit_to(kv, entries, kv.next_position + count if commit is None else commit)
    return outs


def commit_to(kv: SessionKV, entries: Entries, length: int) -> None:
    kv.commit(length, taps_of(entries, np.arange(kv.length, length)) if kv.reads_taps else None)


def feed(
    kv: SessionKV, entries: Entries, length: int, chunk: int = SEGMENT, *, generated: bool = False
) -> list[Tensor]:
    """Run positions from kv.length to `length`, those that have to be computed again first; outputs by layer."""
    while kv.pending_replay:
        step(kv, entries, min(chunk, kv.room()))
    outs: list[list[Tensor]] = []
    while kv.length < length:
        room = min(chunk, kv.room(generated=generated), length - kv.length)
        outs.append(step(kv, entries, room, generated=generated))
    return [torch.cat([out[layer] for out in outs]) for layer in range(len(entries.q))]


def is_latent(strategy: KVStrategy) -> bool:
    """Are all entries of a position coded together?"""
    return strategy.options().get("source") in ("latent", "drafter")


def close(strategy: KVStrategy) -> float:
    """Sums in another order. Coded, a number that rounding moved over an edge comes back a step away."""
    options = strategy.options()
    return 2e-5 if options.get("codec") is None and not is_latent(strategy) else 2e-2


def coded(codec: str, rule: LayerRule, vectors: Tensor) -> Tensor:
    """Vectors [Hkv, length, D] as a codec gives them back, coded around the mean of the first ones after the sink."""
    if codec == "latent":
        return vectors.bfloat16().float()
    if not codec or rule.exact is None:
        return vectors
    compressor = make_compressor(codec)
    first_end = -(-(rule.exact + rule.sink + 1) // SEGMENT) * SEGMENT
    mean = vectors[:, rule.sink : first_end].mean(dim=1, keepdim=True)
    return compressor.decode(compressor.encode(vectors - mean), vectors.shape[-1]) + mean


def as_indexed(chooser: TokenSelector, layer: int, keys: Tensor) -> Tensor:
    """Unrotated keys [Hkv, length, D] as an index of them has them."""
    assert chooser.shape.run == 1, "each key is weighed at its own position"
    rows = COMPONENTS[layer].rows(chooser.shape)
    return encode(keys, COMPONENTS[layer], chooser.shape).float() @ rows[:, :-1] + rows[:, -1:]


def read_by_choice(chooser: TokenSelector, i: int, scores: Tensor, estimated: Tensor) -> Tensor:
    """[Hkv, i + 1]: what the query at i reads by its scores, [Hkv, group, i + 1]: sink, window, and of the others those
    of largest weight, where these scores are estimated. The first ones among equals."""
    tile, places = chooser.shape.tile, torch.arange(i + 1)
    near = (places < chooser.sink) | (places >= max(0, (i - chooser.window) // tile * tile))
    weights = torch.where(near, scores, estimated).softmax(dim=-1).sum(dim=1).masked_fill(near, -1)
    chosen = weights.argsort(dim=-1, descending=True, stable=True)[:, : chooser.count]
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, chosen, value=True) | near


def kept_by_hand(scorer: EntryScorer, rule: LayerRule, layer: int, entries: Entries, length: int) -> list[Tensor]:
    """By segment, the positions whose entries hold the places of each KV head, [Hkv, sink]."""
    assert rule.window is not None
    at = torch.arange(length)
    q, k = (turn(states[layer], at).transpose(0, 1) for states in (entries.q, entries.k))
    v, heads = entries.v[layer].transpose(0, 1), torch.arange(LAYERS[layer].kv_heads)
    held = torch.arange(rule.sink).repeat(len(heads), 1)
    kept, first = [held], rule.sink
    for b in range(SEGMENT, length, SEGMENT):
        if b - rule.window > first:
            among = torch.cat((held, torch.arange(first, b - rule.window).repeat(len(heads), 1)), dim=1)
            own = [states[among, heads[:, None]].transpose(0, 1)[None] for states in (k, v)]
            given = Candidates(keys=own[0], values=own[1], query=q[None, b - 1], scaling=0.35, softcap=None)
            best = scorer.scores(given)[0].argsort(dim=-1, descending=True, stable=True)[:, : rule.sink]
            held, first = among.gather(1, best.sort(dim=-1).values), b - rule.window
        kept.append(held)
    return kept


@lru_cache(maxsize=64)
def by_hand(rule: LayerRule, codec: str, layer: int, length: int) -> Tensor:
    """Attention token by token from the words of the law, with what a strategy says of this layer:

    sink ∪ [b(i) − window, i], the model's own window, capped sinks; entries before b(i) − exact as they are given back;
    where appended tokens choose, of all that the choice of each KV head; where entries are scored, those of the highest
    scores in place of the sink.
    """
    native, entries = LAYERS[layer].native_window, Entries(length)
    is_coded = rule.exact is not None and native is None
    given_back = [coded(codec, rule, states[layer]) if is_coded else states[layer] for states in (entries.k, entries.v)]
    all_choose = [each for each in rule.mechanisms if isinstance(each, TokenSelector) and each.appended]
    chooser = all_choose[0] if native is None and all_choose else None
    indexed = None if chooser is None else as_indexed(chooser, layer, entries.k[layer])
    scorer = next((each for each in rule.mechanisms if isinstance(each, EntryScorer)), None)
    places = kept_by_hand(scorer, rule, layer, entries, length) if scorer is not None and native is None else []
    outs = []
    for i in range(length):
        b = i - i % SEGMENT
        sink, window = rule.sink, i if rule.window is None or scorer is not None else rule.window
        seen = [j for j in range(i + 1) if (j < sink or j >= b - window) and (native is None or i - j < native)]
        old = torch.tensor([is_coded and sink <= j < b - (rule.exact or 0) for j in seen])
        raw_k, v = (
            torch.where(old[:, None], back[:, seen], states[layer][:, seen])
            for back, states in zip(given_back, (entries.k, entries.v), strict=True)
        )
        shift = 0 if rule.window is None or scorer is not None else max(0, b - window - sink)
        k = turn(raw_k, torch.tensor([j + shift if j < sink else j for j in seen]))
        q = turn(entries.q[layer][:, [i]], torch.tensor([i])).view(LAYERS[layer].kv_heads, -1, LAYERS[layer].head_dim)
        scores = q @ k.transpose(-1, -2) * 0.35
        if chooser is not None and indexed is not None:
            estimated = q @ turn(indexed[:, : i + 1], torch.arange(i + 1)).transpose(-1, -2) * 0.35
            read = read_by_choice(chooser, i, scores, estimated)
            scores = scores.masked_fill(~read[:, None], -torch.inf)
        if places:
            read = (torch.arange(i + 1) >= b - (rule.window or 0)).repeat(len(k), 1)
            read |= torch.zeros_like(read).scatter_(1, places[b // SEGMENT].clamp_max(i), value=True)
            scores = scores.masked_fill(~read[:, None], -torch.inf)
        weights = scores.softmax(dim=-1)
        outs.append((weights @ v).reshape(-1, LAYERS[layer].head_dim))
    return torch.stack(outs)


def expected_by_hand(strategy: KVStrategy, length: int) -> list[Tensor]:
    """Of all layers, of the same entries each time. Strategies that say the same of a layer share what it gives."""
    options, geometry = strategy.options(), context().geometry
    codec = "latent" if is_latent(strategy) else str(options.get("codec") or "")
    rules = [strategy.rule(layer, geometry) for layer in range(len(LAYERS))]
    # What generated tokens alone choose by is left out.
    seen = [
        LayerRule(
            sink=rule.sink,
            window=rule.window,
            exact=rule.exact if codec else None,
            mechanisms=tuple(mechanism for mechanism in rule.mechanisms if mechanism.appended),
        )
        for rule in rules
    ]
    return [by_hand(rule, codec, layer, length) for layer, rule in enumerate(seen)]


@each_strategy_with(chunk=[1, 5, SEGMENT], quanta=QUANTA)
def test_a_query_sees_what_the_mask_law_says(strategy: KVStrategy, chunk: int, quanta: tuple[int, int]) -> None:
    """Mask and segment: a function of absolute positions and the strategy, never of how the tokens arrived."""
    length = 90
    entries = Entries(length)
    kv = active(strategy, context(token_quantum=quanta[0], key_quantum=quanta[1]))
    outs = feed(kv, entries, length, chunk)
    for out, expected in zip(outs, expected_by_hand(strategy, length), strict=True):
        torch.testing.assert_close(out, expected, atol=close(strategy), rtol=0)


def test_a_model_that_looks_no_further_back_takes_several_segments_in_a_step() -> None:
    """As many as a fast device takes at once, up to its window; where a strategy evicts what it would see, one."""
    layers = tuple(replace(layer, native_window=layer.native_window and 40) for layer in LAYERS)
    entries = Entries(150, layers=layers)
    short, long = (active(Full(), context(layers=layers, segments_at_once=count)) for count in (1, 4))
    assert (short.room(), long.room()) == (SEGMENT, 2 * SEGMENT)
    for at, chunk in ((100, 2 * SEGMENT), (105, 1), (150, 40)):
        for ours, theirs in zip(feed(long, entries, at, chunk), feed(short, entries, at), strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    assert short.evicted == long.evicted
    for strategy, own in ((SinkWindow(sink=4, window=24), layers), (Full(), LAYERS)):
        same = [active(strategy, context(layers=own, segments_at_once=count)) for count in (1, 4)]
        assert same[0].room() == same[1].room() == SEGMENT
        assert same[0].bound == same[1].bound


@each_strategy
def test_a_rejected_draft_leaves_no_trace(strategy: KVStrategy, subtests: pytest.Subtests) -> None:
    """Rejection: every byte of the buffers, the slot tables and the footprint, before eviction and long after."""
    for length, each in ((13, (0, 1, 3)), (30, (0, 3)), (94, (1,))):
        with subtests.test(length=length):
            check_rejected_drafts(strategy, length, each)


def check_rejected_drafts(strategy: KVStrategy, length: int, each: Sequence[int]) -> None:
    """Of a draft after `length` tokens so many are accepted. each: in ascending order."""
    entries, drafts = Entries(length + 4), Entries(length + 4, seed=1)
    clean = fed(strategy, entries, length)  # it goes on from case to case
    for accepted in each:
        speculative = fed(strategy, entries, length)
        count = min(4, speculative.room())
        kept = min(accepted, count)
        if missing := length + kept - clean.length:
            step(clean, drafts, missing, generated=True)
        step(speculative, drafts, count, commit=length + kept, generated=True)
        assert (clean.length, clean.footprint()) == (speculative.length, speculative.footprint()), accepted
        for one, other in zip(clean.groups, speculative.groups, strict=True):
            assert np.array_equal(one.held, other.held), accepted
        for ours, theirs in zip(clean.context.pool.buffers, speculative.context.pool.buffers, strict=True):
            # Vector 0 takes the writes of padding and is never read.
            # Compared as bytes, for codes read as numbers may be NaN.
            assert torch.equal(ours.vectors[1:].view(torch.uint8), theirs.vectors[1:].view(torch.uint8)), accepted


def fed(strategy: KVStrategy, entries: Entries, length: int) -> SessionKV:
    kv = active(strategy, context())
    feed(kv, entries, length - 9)
    feed(kv, entries, length, generated=True)
    return kv


@each_strategy_with(quanta=QUANTA)
def test_a_block_of_generated_tokens_equals_its_tokens_one_by_one(
    strategy: KVStrategy, quanta: tuple[int, int]
) -> None:
    """Grouping, with appended tokens in between."""
    entries, length = Entries(110), 110
    outs: list[list[Tensor]] = []
    for chunk in (1, 13):
        kv = active(strategy, context(token_quantum=quanta[0], key_quantum=quanta[1]))
        for end, generated in ((41, False), (69, True), (73, False), (length, True)):
            outs.append(feed(kv, entries, end, chunk, generated=generated))
    for one_by_one, in_blocks in zip(outs[:4], outs[4:], strict=True):
        for ours, theirs in zip(one_by_one, in_blocks, strict=True):
            torch.testing.assert_close(ours, theirs, atol=close(strategy), rtol=0)


@each_strategy
def test_entries_leave_only_when_the_history_reaches_a_segment_boundary(strategy: KVStrategy) -> None:
    entries = Entries(100)
    kv = active(strategy, context())
    for _ in range(100):
        before = [set(group.held[group.held >= 0].tolist()) for group in kv.groups]
        step(kv, entries, 1)
        after = [set(group.held[group.held >= 0].tolist()) for group in kv.groups]
        if kv.length % SEGMENT:
            assert all(old <= new for old, new in zip(before, after, strict=True))
        kv.check()


@each_strategy
def test_the_footprint_counts_every_entry_that_was_written(strategy: KVStrategy) -> None:
    """Honesty: bytes reported cover the bytes in use, and the allocation never reaches beyond what was reserved."""
    ctx = context()
    kv = active(strategy, ctx)
    assert ctx.pool.reserved_bytes == kv.bound.peak_bytes
    for length in (1, 17, 60, 199):
        feed(kv, Entries(LIMIT), length, generated=length > 17)
        memory = ctx.pool.memory  # given entries hold no zeros
        used = int(torch.count_nonzero(memory)) * memory.itemsize
        held = kv.footprint().total_bytes
        assert used <= held <= kv.bound.peak_bytes
        # What is held beyond that: entries evicted within the last segment, page rounding, the values beside sink
        # copies, rings with room for more.
        kinds = kv.footprint().by_kind
        slack = (SEGMENT + 2 * ctx.geometry.page_tokens) * ctx.geometry.entry_bytes + kinds["sink_copy"]
        slack += sum(held for kind, held in kinds.items() if kind not in KV_KINDS)  # of other packages, as a whole
        slack += kinds.get("restored", 0)  # room that is held as a whole
        slack += SEGMENT * LATENT_BYTES * kv.reads_taps  # codes of the open segment, which are made together
        assert held - used <= slack


def one_by_one(strategy: KVStrategy) -> list[tuple[list[Tensor], Footprint, int, int]]:
    """Generated tokens, of each its outputs and what the session holds then; a draft is rejected among them."""
    kv, entries, found = active(strategy, context()), Entries(LIMIT), []
    feed(kv, entries, 13)
    while kv.length < 4 * SEGMENT + 4:
        if kv.length == 2 * SEGMENT + 3:
            step(kv, entries, 3, commit=kv.length + 1, generated=True)
        outs = step(kv, entries, 1, generated=True)
        kv.check()
        found.append((outs, kv.footprint(), kv.length, kv.evicted))
    kv.release()
    return found


@each_strategy
def test_a_token_that_is_only_entered_in_the_tables_leaves_what_any_other_leaves(
    strategy: KVStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = one_by_one(strategy)
    stage = LayerEntries.stage

    def each_may_change_more(self: LayerEntries, positions: Positions, generated: NDArray[np.bool_]) -> int:
        stage(self, positions, generated)
        return int(positions[0])

    monkeypatch.setattr(LayerEntries, "stage", each_may_change_more)

    for (wanted, *said), (got, *says) in zip(one_by_one(strategy), found, strict=True):
        assert says == said
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, wanted, strict=True))


@pytest.mark.parametrize(
    ("strategy", "reads_offloaded"),
    [(one, reads) for one in all_strategies() for reads in (False, True)[: 1 + (one.name == "tiered")]],
    ids=str,
)
def test_the_plan_of_a_step_behind_another_is_the_plan_made_anew(strategy: KVStrategy, reads_offloaded: bool) -> None:
    """Beside sessions of other lengths and strategies, and a fork."""
    attention = attend_ragged if reads_offloaded else attend_by_session
    together = DeviceOps(attends_together=True, attend_ragged=attention)
    ctx, entries = replace(context(capacity_entries=6 * LIMIT), ops=together), Entries(LIMIT)
    parent = active(Full(), ctx)
    feed(parent, entries, SEGMENT + 5)
    fork = SessionKV(Full(), ctx, LIMIT, parent.share(parent.length))
    assert fork.wake(LIMIT)
    kvs = [active(strategy, ctx), fork, active(SinkWindow(sink=3, window=9), ctx)]
    for kv, length in zip(kvs, (1, SEGMENT + 5, 30), strict=True):
        feed(kv, entries, length)

    def planned() -> StepPlan:
        return StepPlan(kvs, ctx.geometry, ctx.pool, mask_dtype=torch.float32, ops=together)

    plan: StepPlan | None = None
    followed, reads = 0, False
    for _ in range(LIMIT - 45):
        for kv in kvs:
            kv.stage(1, np.ones(1, dtype=np.bool_))
        anew = planned()
        if plan is not None and plan.is_numbers_only:
            plan = plan.following()
            assert plan.is_numbers_only == anew.is_numbers_only
            if plan.is_numbers_only:
                followed += 1
                assert (plan.numbers.all == anew.numbers.all).all()
                assert plan.positions.tolist() == anew.positions.tolist()
                assert plan.records == anew.records
                reads |= any(isinstance(record, OffloadedBlockRead) for record in plan.records)
        else:
            plan = anew
        if plan.spans[0].views and not reads_offloaded:  # what it reads may decide what stays
            for layer, shape in enumerate(LAYERS):
                plan.attend(layer, torch.ones(1, shape.query_heads, len(kvs), shape.head_dim), None, None, scaling=1.0)
        for kv in kvs:
            commit_to(kv, entries, kv.next_position + 1)
    assert plan is not None and (followed or not plan.is_numbers_only)
    assert reads == reads_offloaded and (plan.is_numbers_only or not reads_offloaded)
    for kv in (*kvs, parent):
        kv.release()


@each_part
def test_an_idle_session_holds_no_more_than_is_sustained(
    strategies: Sequence[KVStrategy], subtests: pytest.Subtests
) -> None:
    for strategy in strategies:
        with subtests.test(str(strategy)):
            ctx = context()
            kv = SessionKV(strategy, ctx, LIMIT)
            for length in (1, 17, 60, 199):
                assert ctx.pool.reserved_bytes == kv.bound.sustained_bytes
                kv.wake(length)
                feed(kv, Entries(LIMIT), length)
                assert ctx.pool.reserved_bytes <= kv.bound.peak_bytes
                kv.idle()
                assert kv.footprint().total_bytes <= kv.bound.sustained_bytes


@each_strategy_with(ends=ENDS)
def test_a_session_that_was_idle_reads_what_one_that_stayed_active_reads(
    strategy: KVStrategy, ends: tuple[int, ...]
) -> None:
    """Waking: the entries are the same, whether the session was idle in between or not."""
    entries, length = Entries(120), 120
    expected = feed(active(strategy, context()), entries, length)
    kv = active(strategy, context())
    outs = []
    for end in [*ends, length]:
        outs.append(feed(kv, entries, end))
        kv.idle()
        assert kv.wake(LIMIT)
    for layer in range(len(LAYERS)):
        ours = torch.cat([out[layer] for out in outs])
        torch.testing.assert_close(ours, expected[layer], atol=close(strategy), rtol=0)


@each_part
def test_a_session_of_any_limit_gives_back_what_it_took(
    strategies: Sequence[KVStrategy], subtests: pytest.Subtests
) -> None:
    """Also where the limit leaves nothing to code, and where no other session holds memory."""
    for strategy in strategies:
        with subtests.test(str(strategy)):
            for limit in (1, SEGMENT - 1, SEGMENT + 3, 3 * SEGMENT):
                ctx = context()
                kv = SessionKV(strategy, ctx, limit)
                assert kv.wake(limit)
                feed(kv, Entries(limit), limit)
                kv.idle()
                kv.release()
                assert ctx.pool.reserved_bytes == 0, limit
                assert SessionKV(Full(), ctx, LIMIT).bound.peak_bytes == ctx.pool.reserved_bytes, limit


def test_a_session_that_does_not_fit_is_refused_and_takes_nothing() -> None:
    one = Full().bound(context().geometry, LIMIT).peak_bytes
    ctx = context(capacity_entries=one * 3 // 2 // context().geometry.entry_bytes)
    kv = SessionKV(Full(), ctx, LIMIT)
    with pytest.raises(NoCapacity, match="limit_tokens") as refusal:
        SessionKV(Full(), ctx, LIMIT)
    assert int(refusal.value.metadata["needed_bytes"]) == kv.bound.peak_bytes
    assert ctx.pool.reserved_bytes == kv.bound.peak_bytes
    assert SessionKV(SinkWindow(sink=1, window=8), ctx, LIMIT).bound.peak_bytes < kv.bound.peak_bytes
