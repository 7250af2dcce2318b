"""The laws with activations rounded to 8 bits: within that numeric identity as within `exact`, never across the two.

One variant of every mechanism: what a token's bits depend on is decided in the products, which know no strategy.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy
from inference_engine.native.library import KVType, ProductIdentity
from inference_engine.session.journal import MemoryJournal
from inference_engine.session.sqlite_journal import COPIES
from inference_engine.types import GenerateParams, Sampling
from kv_cache_proposer.ngram import NgramDrafter
from tests.facade import rebuild_session, save_copies
from tests.kept import after_a_kill, keeping, saved
from tests.laws.drafters import Knowing
from tests.laws.test_engine_laws import opened
from tests.laws.test_hibernation_laws import go_on, reads
from tests.laws.variants import all_strategies, drain, generate, mechanism, reads_by_views, text
from tests.tiny import EXTRAS, SMALL, tiny_components, tiny_f_theta, tiny_latent
from tests.tiny_native import tiny_native

SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=7)
# The first variant of each mechanism whose queries read regions, in one native call. Where torch attends, its sums
# depend on the step.
STRATEGIES = {mechanism(each): each for each in reversed(all_strategies()) if not reads_by_views(each)}
each_mechanism = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))


def engine_in(identity: ProductIdentity, **settings: Any) -> Engine:
    forward = tiny_native(identity=identity, weights="int8", kv_type=KVType.FLOAT16)
    extras = {name: settings.pop(name) for name in EXTRAS if name in settings}
    extras = {"latent": tiny_latent(), "components": tiny_components(), "f_theta": tiny_f_theta(), **extras}
    return Engine(forward, EngineConfig(**{**SMALL, **settings}), **extras)


in_int8 = partial(engine_in, ProductIdentity.QUANTISED)
in_exact = partial(engine_in, ProductIdentity.EXACT)


def test_every_mechanism_that_reads_regions_is_here() -> None:
    assert {"full", "sink_window", "layer_window", "restored", "gather"} <= {each.name for each in STRATEGIES.values()}


def test_the_two_identities_differ() -> None:
    with in_int8() as rounded, in_exact() as exact:
        one, other = (generate(engine, opened(engine, Full(), text())) for engine in (rounded, exact))
    assert one != other


@each_mechanism
def test_a_session_cut_into_other_chunks_or_beside_others_is_the_same_to_the_bit(strategy: KVStrategy) -> None:
    with in_int8() as engine:
        alone = generate(engine, opened(engine, strategy, text()), sampling=SAMPLED)
        cut = opened(engine, strategy)
        for start, stop in ((0, 1), (1, 50), (50, 53), (53, len(text()))):
            engine.append(cut, text()[start:stop])
        beside = [opened(engine, Full(), text(77, seed=1)), opened(engine, SinkWindow(sink=2, window=9), text(9))]
        running = [engine.generate(each, GenerateParams(max_tokens=30)) for each in beside]
        assert generate(engine, cut, sampling=SAMPLED) == alone
        for generation in running:
            drain(generation)


@each_mechanism
def test_drafts_change_no_bit(strategy: KVStrategy) -> None:
    with in_int8() as engine:
        plain = generate(engine, opened(engine, strategy, text()), 24)
    said = [*text(), *(token for token, _ in plain)]
    for drafter in (Knowing(text=said, errs=5), NgramDrafter(min_ngram=1)):
        with in_int8(drafter=drafter, draft_tokens=4) as engine:
            assert generate(engine, opened(engine, strategy, text()), 24) == plain, drafter


@each_mechanism
def test_a_fork_and_a_session_from_the_journal_go_on_to_the_bit(strategy: KVStrategy) -> None:
    journal = MemoryJournal()
    with in_int8(journal=journal) as engine:
        session = opened(engine, strategy, text())
        generate(engine, session)
        fork = engine.fork_session(session).session_id
        rebuilt = rebuild_session(engine, *journal.read(session)).session_id
        goes_on = generate(engine, session)
        assert generate(engine, fork) == goes_on
        assert generate(engine, rebuilt) == goes_on


@each_mechanism
def test_a_file_is_used_in_the_identity_that_wrote_it_and_in_no_other(tmp_path: Path, strategy: KVStrategy) -> None:
    """A server that is started again with other numerics computes such a session anew, as one without files does."""
    with keeping(tmp_path / "state", make=partial(in_exact, hibernate="always")) as engine:
        session = opened(engine, strategy, text())
        generate(engine, session)
        assert len(save_copies(engine, tmp_path / "state")) == 1
        saved(engine)
        left = {name: after_a_kill(tmp_path / "state").rename(tmp_path / name) for name in ("same", "other", "none")}
        never_saved = go_on(engine, session)
    shutil.rmtree(left["none"] / COPIES)
    found = {}
    outcomes = {"same": "used", "other": "foreign"}
    for name, make in (("same", in_exact), ("other", in_int8), ("none", in_int8)):
        with keeping(left[name], make=partial(make, hibernate="always")) as engine:
            engine.recall(session)
            found[name] = go_on(engine, session)
            assert all(reads(engine, outcome) == (outcomes.get(name) == outcome) for outcome in outcomes.values())
    assert found["same"] == never_saved
    assert found["other"] == found["none"]
    assert found["other"][1] == 0, "nothing of the file is used"
    assert found["other"] != found["same"]
