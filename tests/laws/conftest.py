"""What runs TinyModel in the laws: what serves on a CPU, EXECUTORS; and MLX, which has batched mode alone.

In fixed-shape mode torch runs the first case of each law, and all further ones.

On MLX `make test` has each law with SOME of the strategies, which take turns. `--executor mlx` runs all cases on it
alone: `make laws-mlx`, which continuous integration runs. `--executor hybrid` runs them on a model of its own on torch,
whose layers have recurrent states, `--executor hybrid-native` on one of the native backend, `--executor ranks` on a
model in two parts; `make test` has some of those cases, `make test-further` one of each law and strategy.
`--strategies` leaves the laws of the strategies it names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inference_engine.backends.ranks.loading import STRATEGIES
from inference_engine.config import has_mlx
from inference_engine.engine import Engine
from inference_engine.engine.results import SessionOpened
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Mode
from tests import tiny
from tests.further import UNREAD, make_further
from tests.laws import variants
from tests.laws.variants import by_turns
from tests.parallel.in_threads import tiny_ranks
from tests.tiny_native import EXECUTORS, run_on, tiny_native_hybrid

HERE = Path(__file__).parent
# About plans and attention of torch, those of MLX are in tests/mlx; and about identities of the native backend, and
# entries that stay restored there.
WITHOUT_EXECUTOR = (
    "test_identity_laws.py",
    "test_latent_attention_laws.py",
    "test_ragged_laws.py",
    "test_restore_cache_laws.py",
    "test_session_kv_laws.py",
    "test_shared_numbers_laws.py",
    "test_variants.py",
)
# Changes the masks of torch's plan: what reads by numbers asks for none.
OF_MASKS = "test_restored_from_latents_without_what_comes_back_equals_sink_window"
# About entries alone, which can go back where a recurrent state cannot.
OF_ENTRIES = ("test_what_is_held_and_what_is_to_prefill_are_said_also_before_the_rest_is_dropped",)
# Of the hybrid model's cases, those that are no further ones: of each law here, SOME.
WITH_STATES = tuple(f"test_{name}_laws.py" for name in ("drop", "fork", "hibernation", "kept", "rewind"))
# In fixed-shape mode alone, which MLX refuses.
OF_FIXED_SHAPES = (
    "test_a_session_that_dropped_its_entries_goes_on_as_one_that_did_not",
    "test_a_stop_id_within_a_draft_ends_the_stream_there",
    "test_a_drafter_that_fails_costs_nothing_but_its_drafts",
)
# They run long, and are about what the engine draws and counts, whatever runs the model.
OF_THE_ENGINE = (
    "test_sampled_tokens_follow_the_targets_distribution_with_drafts",
    "test_drafts_that_never_pay_are_switched_off",
)
# Memory that is granted as a session grows: MLX gives it all at once.
GROWING = {"guaranteed": False, "growth": "best_effort"}
MLX = "mlx"
HYBRID, HYBRID_NATIVE = "hybrid", "hybrid-native"
HYBRIDS = (HYBRID, HYBRID_NATIVE)
RANKS = "ranks"
# A rank has one pool: laws that compare engines side by side are not for them.
ON_RANKS = ("test_drop_laws.py", "test_engine_laws.py", "test_forgetting_laws.py")
BATCHED = (MLX, *HYBRIDS, RANKS)  # they have batched mode alone
SOME = 1
# With every variant, whose other values take turns. In the others, mechanisms and variants do, too.
WITH_ALL = ("test_a_session_in_a_batch_equals_the_session_alone", "test_a_query_sees_what_the_mask_law_says")
ON_TORCH = pytest.StashKey[bool]()


@pytest.fixture
def executor(request: pytest.FixtureRequest) -> str:
    """One of BATCHED, or "" for EXECUTORS."""
    return str(getattr(request, "param", ""))


@pytest.fixture(autouse=True)
def _on_its_executor(executor: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.stash.get(ON_TORCH, False):
        monkeypatch.setitem(EXECUTORS, Mode.FIXED_SHAPE, tiny.tiny_forward)
    if executor == HYBRID:
        run_on(tiny.tiny_hybrid, monkeypatch)
        # A token alone and in a chunk give states that differ by rounding, and of two numbers at the edge of a code
        # one may be coded otherwise. A state that is wrong makes a difference near 1.
        monkeypatch.setattr(variants, "ROUNDING", 1e-2)
    if executor == HYBRID_NATIVE:
        run_on(tiny_native_hybrid, monkeypatch)
    if executor == RANKS:
        run_on(tiny_ranks, monkeypatch)
    if executor == MLX:
        from tests.mlx.tiny import tiny_mlx

        create = Engine.create_session

        def at_once(engine: Engine, *, guaranteed: bool | None = None, **words: Any) -> SessionOpened:
            if guaranteed is False:
                pytest.skip("it is about memory that is granted as a session grows; MLX gives it all at once")
            return create(engine, guaranteed=guaranteed, **words)

        monkeypatch.setattr(Engine, "create_session", at_once)
        run_on(tiny_mlx, monkeypatch)
        # Memory of MLX is written once when an engine opens.
        monkeypatch.setitem(tiny.SMALL, "kv_bytes", 12 * 2**20)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every law is there once more on each of BATCHED. The names of the others stay as they are."""
    law = metafunc.definition
    if law.path.name in WITHOUT_EXECUTOR or law.originalname in (OF_MASKS, *OF_FIXED_SHAPES):
        return
    executors = [pytest.param("", id=pytest.HIDDEN_PARAM), *(pytest.param(name, id=name) for name in _asked(metafunc))]
    metafunc.parametrize("executor", executors, indirect=True)


def _asked(metafunc: pytest.Metafunc) -> tuple[str, ...]:
    """Those of BATCHED whose cases may run: of the others none is made."""
    if alone := metafunc.config.getoption("--executor"):
        return (alone,)
    if metafunc.config.option.markexpr != UNREAD:
        return BATCHED
    return BATCHED if metafunc.definition.path.name in WITH_STATES else (MLX,)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if wanted := config.getoption("--strategies"):
        others = [item for item in items if getattr(_given(item).get("strategy"), "name", None) not in wanted]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
    laws = [item for item in items if HERE in item.path.parents]
    on = {name: {item for item in laws if _given(item).get("executor") == name} for name in BATCHED}
    elsewhere = set().union(*on.values())
    for item in _waiting([item for item in laws if item not in elsewhere]):
        make_further(item)
    for item in _on_torch(item for item in laws if item not in elsewhere):
        item.stash[ON_TORCH] = True
    able = {name: [item for item in laws if item in on[name] and _can_be(item)] for name in BATCHED}
    kept: set[pytest.Item] = {*laws}.difference(elsewhere)
    if (alone := config.getoption("--executor")) is not None:
        kept = {*able[alone]}
    else:
        for name in BATCHED:
            selected = list(_selected(able[name]))
            unchosen = set(_others(selected))
            if name == MLX:
                kept.update(item for item in selected if item not in unchosen)
                continue
            kept.update(selected)
            for item in selected:
                if item in unchosen or item.path.name not in WITH_STATES:
                    make_further(item)
    if not has_mlx():
        for item in kept.intersection(able[MLX]):
            item.add_marker(pytest.mark.skip(reason="the package mlx is not installed"))
    left_out = {item for item in laws if item not in kept}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[item for item in laws if item in left_out])


def _given(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _can_be(item: pytest.Item) -> bool:
    """Not about what its executor refuses."""
    given = _given(item)
    grows = given.get("executor") == MLX and any(given.get(name) == value for name, value in GROWING.items())
    is_about_entries = given.get("executor") in HYBRIDS and getattr(item, "originalname", "") in OF_ENTRIES
    has_edges = given.get("executor") == HYBRID and _has_edges(given.get("strategy"))
    is_refused = given.get("executor") == RANKS and not _runs_on_ranks(item, given.get("strategy"))
    refused = grows or is_about_entries or has_edges or is_refused
    return not refused and Mode.FIXED_SHAPE not in given.values()


def _runs_on_ranks(item: pytest.Item, strategy: object) -> bool:
    if not isinstance(strategy, KVStrategy) or strategy.calibrated:
        return False
    return item.path.name in ON_RANKS and strategy.name in STRATEGIES


def _has_edges(strategy: object) -> bool:
    """Can a rounding of what it reads change much of what it answers? A latent's few levels have edges, and so has a
    threshold. A token alone and in a chunk give recurrent states that differ by rounding, so laws that compare the two
    cannot hold; that such strategies serve a hybrid is tried at its admission."""
    is_of_package = not type(strategy).__module__.startswith("inference_engine.")
    return isinstance(strategy, KVStrategy) and (is_of_package or strategy.restorer().is_calibrated)


def _on_torch(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Of those in fixed-shape mode."""
    seen: set[str] = set()
    for item in items:
        law = item.nodeid.partition("[")[0]
        if Mode.FIXED_SHAPE in _given(item).values() and (_is_further(item) or law not in seen):
            yield item
            if not _is_further(item):
                seen.add(law)


def _is_further(item: pytest.Item) -> bool:
    return item.get_closest_marker("further") is not None


def _waiting(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Whose turn it is not. What a module names in IN_TURN takes turns as modes do: values of a parameter."""
    cases: dict[bool, list[tuple[tuple[str, ...], KVStrategy, tuple[str, ...]]]] = {True: [], False: []}
    of: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        values = dict(_given(item))
        strategy, in_turn = values.pop("strategy", None), [str(values.pop("mode", None))]
        for name, some in getattr(getattr(item, "module", None), "IN_TURN", {}).items():
            if values.get(name) in some:
                in_turn.append(str(values.pop(name)))
        law = str(getattr(item, "originalname", ""))
        if isinstance(strategy, KVStrategy) and not _is_further(item):
            group, has_all = (law, str(values)), law in WITH_ALL
            if has_all:
                in_turn.extend(str(value) for value in values.values())
                group = (law, str(strategy))
            cases[has_all].append((group, strategy, tuple(in_turn)))
            of[has_all].append(item)
    stay = {True: by_turns(cases[True], few=1), False: by_turns(cases[False])}
    yield from (item for each in of for item, stays in zip(of[each], stay[each], strict=True) if not stays)


def _law_and_name(item: pytest.Item) -> tuple[str, str]:
    return str(getattr(item, "originalname", item.name)), getattr(_given(item).get("strategy"), "name", "")


def _selected(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """One of each law and strategy by name; of the options and other values, those that had fewest turns before."""
    groups: dict[tuple[str, str], list[tuple[pytest.Item, list[str]]]] = {}
    for item in items:
        values = _given(item)
        law, name = _law_and_name(item)
        # What strategies are like counts over all laws, other values within theirs.
        known = [str(one) if key == "strategy" else f"{law} {key} {one}" for key, one in values.items()]
        groups.setdefault((law, name), []).append((item, known))
    turns: Counter[str] = Counter()
    for cases in groups.values():
        item, known = min(cases, key=lambda case: (_is_further(case[0]), sum(turns[value] for value in case[1])))
        turns.update(known)
        yield item


def _others(selected: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """All but SOME of each law: those whose strategies had fewest turns before stay."""
    laws: dict[str, list[tuple[pytest.Item, str]]] = {}
    for item in selected:
        law, name = _law_and_name(item)
        laws.setdefault(law, []).append((item, name))
    turns: Counter[str] = Counter()
    for law, cases in laws.items():
        cases.sort(key=lambda case: turns[case[1]])
        some = 0 if law in OF_THE_ENGINE else SOME
        turns.update(name for _, name in cases[:some])
        yield from (item for item, _ in cases[some:])
