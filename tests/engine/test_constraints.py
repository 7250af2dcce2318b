"""Constraints of Generates: what is refused and when, what is loaded when, what one owner may take of the others."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from inference_engine.decode import matching
from inference_engine.decode.automata import TextAutomaton
from inference_engine.decode.constraints import (
    MOST_COMPILING_PER_OWNER,
    MOST_PER_OWNER,
    MOST_SOURCE_BYTES_PER_OWNER,
    Constraints,
)
from inference_engine.engine import Engine
from inference_engine.errors import (
    ConstraintFailed,
    ConstraintUnavailable,
    InvalidConstraint,
    ModelError,
    QuotaExceeded,
)
from inference_engine.kernels.sampler import bits_of
from inference_engine.types import (
    Constraint,
    ConstraintKind,
    Finished,
    GenerateParams,
    Sampling,
    StopReason,
    TokenBytes,
    TokenCommitted,
)
from tests.constraints import CHOICES, END, KINDS, TOKENS, text
from tests.laws.variants import drain, tokens
from tests.laws.variants import text as history
from tests.tiny import VOCABULARY
from tests.tiny_native import served_engine

REGEX, CHOICE = KINDS[1].constraint, KINDS[3].constraint


def nested(depth: int, width: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [{"type": "object", "properties": {f"k{at}": schema}} for at in range(width)]}
    return schema


ENDLESS = {
    "$defs": {"one": {"type": "object", "properties": {"next": {"$ref": "#/$defs/one"}}, "required": ["next"]}},
    "$ref": "#/$defs/one",
}
REFUSED = {
    "no schema": (ConstraintKind.JSON_SCHEMA, {"type": "wrong"}),
    "no JSON": (ConstraintKind.JSON_SCHEMA, "{"),
    "recursive without an end": (ConstraintKind.JSON_SCHEMA, {"$ref": "#"}),
    "endless, since each object needs one more": (ConstraintKind.JSON_SCHEMA, ENDLESS),
    "more choices than a place may have": (
        ConstraintKind.JSON_SCHEMA,
        {"enum": [{"n": f"v{at}"} for at in range(6000)]},
    ),
    "a choice that is too dear, behind a long text that must follow": (
        ConstraintKind.JSON_SCHEMA,
        {
            "type": "array",
            "prefixItems": [
                {"const": "x" * 3000},
                {"anyOf": [{"type": "string", "pattern": f"^[a-z]{{{at},900}}x{at}$"} for at in range(600)]},
            ],
            "minItems": 2,
        },
    ),
    "exponential": (ConstraintKind.JSON_SCHEMA, nested(9, 3)),
    "a text that an array repeats": (
        ConstraintKind.JSON_SCHEMA,
        {"type": "array", "minItems": 100_000, "items": {"const": "x" * 1000}},
    ),
    "a text of too many characters": (ConstraintKind.JSON_SCHEMA, {"items": {"anyOf": [{"const": "x" * 4097}, {}]}}),
    "a rule that doubles a text": (
        ConstraintKind.LARK,
        "start: r20\n" + "".join(f"r{at + 1}: r{at} r{at}\n" for at in range(20)) + f'r0: "{"x" * 4000}"',
    ),
    "a regex that multiplies a text": (ConstraintKind.REGEX, f"(({'x' * 2000}){{20}}){{20}}"),
    "deep": (ConstraintKind.JSON_SCHEMA, '{"items":' * 3000 + "{}" + "}" * 3000),
    "of a reference that is not there": (ConstraintKind.JSON_SCHEMA, {"$ref": "#/$defs/none"}),
    "no regex": (ConstraintKind.REGEX, "("),
    "a regex that matches nothing": (ConstraintKind.REGEX, r"[^\s\S]"),
    "a regex whose line breaks are no text": (ConstraintKind.REGEX, "(?x) a b # two letters\n c"),
    "a regex of the empty text alone": (ConstraintKind.REGEX, "()"),
    "no grammar": (ConstraintKind.LARK, "start"),
    "a grammar that names nothing": (ConstraintKind.LARK, "start: missing"),
    "a grammar that cannot be taken back": (ConstraintKind.LARK, 'start: a "."\na[stop="x"]: /[a-z]+/'),
    "a grammar that counts tokens": (ConstraintKind.LARK, 'start: a "."\na[max_tokens=2]: /[a-z]+/'),
    "a least number beyond 64 bits": (ConstraintKind.JSON_SCHEMA, {"type": "integer", "minimum": 10**22}),
    "a least number of more digits": (ConstraintKind.JSON_SCHEMA, {"minimum": 2**62 + 1, "maximum": 2**62 + 9}),
    "a largest number of more digits": (ConstraintKind.JSON_SCHEMA, {"exclusiveMaximum": 2**54 + 3}),
    "a constant of more digits": (ConstraintKind.JSON_SCHEMA, {"properties": {"enum": {"enum": [{"a": [2**53 + 1]}]}}}),
    "a constant of no float": (ConstraintKind.JSON_SCHEMA, {"items": {"const": 10**400}}),
    "a bound that would be allowed": (ConstraintKind.JSON_SCHEMA, {"exclusiveMinimum": 0, "maximum": 0.5}),
    "another bound that would be": (ConstraintKind.JSON_SCHEMA, {"minimum": -5.5, "exclusiveMaximum": -5}),
    "a bound that would be beside another schema's": (
        ConstraintKind.JSON_SCHEMA,
        {
            "anyOf": [{"allOf": [{"maximum": 0.5}]}, {}],
            "$ref": "#/$defs/a~1b",
            "$defs": {"a/b": {"exclusiveMinimum": 0}},
        },
    ),
    "a pattern whose line breaks are no text": (ConstraintKind.JSON_SCHEMA, {"pattern": "^(?x) a # one\n b$"}),
    "names by such a pattern": (ConstraintKind.JSON_SCHEMA, {"items": {"patternProperties": {"^(?ix)a\nb$": {}}}}),
    "names that may come again": (
        ConstraintKind.JSON_SCHEMA,
        {"required": ["a"], "minProperties": 3, "patternProperties": {"^[bc]$": {}}},
    ),
}


@pytest.fixture(scope="module")
def constraints() -> Iterator[Constraints]:
    made = Constraints(VOCABULARY, lambda: TOKENS)
    yield made
    made.close()


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_compiled_is_refused_with_the_reason(constraints: Constraints, what: str) -> None:
    kind, source = REFUSED[what]
    with pytest.raises(InvalidConstraint, match=f"^constraint: {kind.value}: .") as refused:
        constraints.compile(text(kind, source), "owner").result(timeout=30)
    assert refused.value.reason == "INVALID_CONSTRAINT" and len(refused.value.message) < 500


def test_what_is_read_as_it_is_meant_is_not_refused(constraints: Constraints) -> None:
    schemas: list[dict[str, Any]] = [
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        {"type": "integer", "exclusiveMinimum": 2**53, "maximum": 2**53 + 4},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 2.5},
        {"type": "object", "minProperties": 2, "required": ["a"], "additionalProperties": {"const": 1}},
        {"properties": {"minimum": {"const": 10**22}, "minProperties": {"enum": [1e300, 0.1, 7]}}},
        {"properties": {"rate": {"exclusiveMinimum": 0}, "share": {"maximum": 0.5}, "pattern": {"const": "(?x)\n"}}},
    ]
    for schema in schemas:
        constraints.compile(text(ConstraintKind.JSON_SCHEMA, schema), "reader").result(timeout=30)


def test_constraints_have_a_size() -> None:
    with pytest.raises(InvalidConstraint, match="at most 262144 bytes, got 4194304"):
        text(ConstraintKind.REGEX, "a" * 2**22)
    with pytest.raises(InvalidConstraint, match="it is empty"):
        text(ConstraintKind.LARK, "")
    for choices, reason in (
        ((), "got 0"),
        (((),), "is empty"),
        (((1,),) * 1025, "got 1025"),
        (((1,) * 16385,), "16385"),
    ):
        with pytest.raises(InvalidConstraint, match=reason):
            Constraint(kind=ConstraintKind.CHOICE, choices=choices)


def test_nothing_is_loaded_before_the_first_constraint_about_text() -> None:
    read = list[int]()

    def read_tokens() -> TokenBytes:
        read.append(1)
        return TOKENS

    before = {thread.name for thread in threading.enumerate()}
    with served_engine(read_tokens=read_tokens) as engine:
        session = engine.create_session(eos_token_ids=[END]).session_id
        engine.append(session, history(20))
        drain(engine.generate(session, GenerateParams(max_tokens=3)))
        new = {thread.name for thread in threading.enumerate()} - before
        assert not [name for name in new if name.startswith(("kakeya-grammar", "kakeya-mask"))]
        drain(engine.generate(session, GenerateParams(max_tokens=9, constraint=CHOICE)))
        assert read == []
        for _ in range(2):
            drain(engine.generate(session, GenerateParams(max_tokens=9, constraint=REGEX)))
        assert read == [1]


def unreadable() -> TokenBytes:
    raise ModelError("the folder holds no tokenizer")


@pytest.mark.parametrize(("read_tokens", "reason"), [
    (None, "no files"), (unreadable, "holds no tokenizer"), (lambda: TokenBytes(specification="{}"), "cannot"),
])  # fmt: skip
def test_without_the_bytes_of_tokens_only_a_choice_is_possible(read_tokens: Any, reason: str) -> None:
    with served_engine(read_tokens=read_tokens) as engine:
        session = engine.create_session(eos_token_ids=[END]).session_id
        engine.append(session, history(20))
        with pytest.raises(ConstraintUnavailable, match=reason):
            engine.generate(session, GenerateParams(max_tokens=9, constraint=REGEX))
        end = drain(engine.generate(session, GenerateParams(max_tokens=9, constraint=CHOICE)))[-1]
        assert isinstance(end, Finished) and end.fits_constraint


class Waiting(Constraints):
    """Compiles once it may."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, lambda: TOKENS)
        self.may = threading.Event()
        self.compiled = list[str]()

    def _compiled(self, constraint: Constraint) -> Any:
        if constraint.source != "quick":
            assert self.may.wait(30)
        self.compiled.append(constraint.source)
        return super()._compiled(constraint)


def test_an_owner_compiles_one_at_a_time_and_leaves_the_others_theirs() -> None:
    constraints = Waiting()
    asked = [text(ConstraintKind.REGEX, f"a{at}") for at in range(MOST_COMPILING_PER_OWNER + 1)]
    futures = [constraints.compile(one, "many") for one in asked[:-1]]
    with pytest.raises(QuotaExceeded, match="4 constraints of yours are being compiled") as refused:
        constraints.compile(asked[-1], "many")
    assert refused.value.retry_after_seconds is not None
    assert constraints.compile(asked[0], "many") is futures[0]
    constraints.compile(text(ConstraintKind.REGEX, "quick"), "other").result(timeout=30)
    assert constraints.compiled == ["quick"]
    constraints.may.set()
    for future in futures:
        future.result(timeout=30)
    assert constraints.compiled == ["quick", "a0", "a1", "a2", "a3"]
    constraints.close()


def test_grammars_are_kept_by_owner_and_those_used_longest_ago_are_dropped() -> None:
    constraints = Waiting()
    constraints.may.set()
    asked = [text(ConstraintKind.REGEX, f"a{at}") for at in range(MOST_PER_OWNER + 1)]
    for one in asked:
        constraints.compile(one, "owner").result(timeout=30)
    constraints.compile(asked[0], "other").result(timeout=30)
    count = len(constraints.compiled)
    for one in asked[1:]:
        constraints.compile(one, "owner").result(timeout=30)
    assert len(constraints.compiled) == count
    constraints.compile(asked[0], "owner").result(timeout=30)
    assert len(constraints.compiled) == count + 1
    constraints.close()


def test_grammars_are_kept_by_the_bytes_that_they_were_compiled_from() -> None:
    constraints = Waiting()
    constraints.may.set()
    sizes = (2, 4, 4, 1)
    asked = [
        text(
            ConstraintKind.REGEX,
            f"[{at}{('a|' * MOST_SOURCE_BYTES_PER_OWNER)[: MOST_SOURCE_BYTES_PER_OWNER // part - 3]}]",
        )
        for at, part in enumerate(sizes)
    ]
    for one in asked[:3]:
        constraints.compile(one, "owner").result(timeout=30)
    assert all(constraints.find(one, "owner") for one in asked[:3])
    constraints.compile(asked[3], "owner").result(timeout=30)
    assert [constraints.find(one, "owner") is not None for one in asked] == [False, False, False, True]
    constraints.close()


def test_a_mask_that_comes_late_delays_its_own_generate_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second mask of one waits until another's Generate is over; its tokens are those without a delay."""
    plain, slowed = GenerateParams(max_tokens=30), GenerateParams(max_tokens=30, constraint=KINDS[0].constraint)
    monkeypatch.setattr(matching, "SLOW_SECONDS", -1.0)  # all of its places are left to workers
    go_on = threading.Event()
    with served_engine(read_tokens=lambda: TOKENS) as engine:
        expected = tokens(drain(engine.generate(opened(engine), slowed)))
        free = tokens(drain(engine.generate(opened(engine), plain)))
        mask, calls = TextAutomaton.mask, list[int]()

        def late(automaton: Any) -> Any:
            calls.append(1)
            if len(calls) % 2 == 0:
                assert go_on.wait(30)
            return mask(automaton)

        monkeypatch.setattr(TextAutomaton, "mask", late)
        waiting = engine.generate(opened(engine), slowed)
        assert tokens(drain(engine.generate(opened(engine), plain))) == free
        assert not go_on.is_set()
        go_on.set()
        assert tokens(drain(waiting)) == expected


class OneText:
    """A matcher that lets these ids follow, and nothing else."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids, self._at, self.asked = ids, 0, 0

    def compute_ff_bytes(self) -> bytes:
        return bytes(self._ids[self._at :])

    def compute_ff_tokens(self) -> Sequence[int]:
        self.asked += 1
        return self._ids[self._at :]

    def consume_token(self, token_id: int) -> bool:
        follows = self._ids[self._at] == token_id
        self._at += follows
        return follows

    def rollback(self, count: int) -> bool:
        self._at -= count
        return True


def test_a_long_text_that_must_follow_is_spelt_once() -> None:
    """Spelling it takes as long as it is, and holds up all threads."""
    ids = [1 + at * at % 100 for at in range(2000)]
    matcher: Any = OneText(ids)
    automaton = TextAutomaton(matcher, (END,), VOCABULARY // 8)
    for place, token_id in enumerate(ids):
        assert bits_of(automaton.mask(), VOCABULARY).nonzero()[0].tolist() == [token_id]
        assert list(automaton.forced()[:7]) == ids[place : place + 7]
        drafted = ids[place : place + 5]
        assert all(map(automaton.consume, drafted)) and not automaton.consume(END)
        automaton.roll_back(len(drafted))
        assert automaton.consume(token_id)
    assert matcher.asked <= 5


def test_a_text_that_is_too_long_behind_a_choice_breaks_that_way_alone(constraints: Constraints) -> None:
    lark = f'start: "n" | "y" long\nlong: part part part part part\npart: "{"x" * 4000}"'
    automaton = constraints.compile(text(ConstraintKind.LARK, lark), "owner").result(timeout=30).start()
    assert set(bits_of(automaton.mask(), VOCABULARY).nonzero()[0]) == {b"n"[0], b"y"[0]}
    assert automaton.consume(b"y"[0]) and not automaton.forced()
    assert "20,000 bytes must follow" in automaton.broken
    automaton.roll_back(1)
    assert not automaton.broken and automaton.consume(b"n"[0]) and automaton.is_over


@pytest.mark.parametrize("permitted", [None, np.arange(VOCABULARY) != 9], ids=["an id that ends it", "a banned id"])
def test_what_fails_names_the_ids_that_would_do(constraints: Constraints, permitted: Any) -> None:
    following = END if permitted is None else 9
    choice = Constraint(kind=ConstraintKind.CHOICE, choices=((5, following, 6),))
    grammar = constraints.compile(choice, "owner").result(timeout=30)
    place = constraints.start(grammar, (5,), frozenset({END}), permitted=permitted)
    with pytest.raises(
        ConstraintFailed, match=rf"ids that may not be drawn here, or end the Generate: \[{following}\]"
    ):
        place.look(1)


def test_masks_along_a_draft_leave_the_one_before_it_as_it_was(constraints: Constraints) -> None:
    """Of its first place, which a worker found before."""
    grammar = constraints.compile(REGEX, "owner").result(timeout=30)
    alone, drafted = (constraints.start(grammar, (), frozenset({END})) for _ in range(2))
    (before,) = (alone.look(0), alone.along(()))[1]
    assert before is not None
    draft = [next(each for each in range(VOCABULARY) if before[each >> 3] >> (each & 7) & 1)]
    drafted.look(0)
    assert drafted.cut(draft) == 1
    first, behind = drafted.along(draft)
    assert first is not None and behind is not None
    assert first.tolist() == before.tolist() != behind.tolist()


def opened(engine: Engine) -> str:
    session = engine.create_session(eos_token_ids=[END]).session_id
    engine.append(session, history(40))
    return session


def test_a_generate_that_is_cancelled_while_its_mask_is_late_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    is_asked, go_on = threading.Event(), threading.Event()
    with served_engine(read_tokens=lambda: TOKENS) as engine:
        session = opened(engine)
        mask = TextAutomaton.mask
        engine.compile_constraint(GenerateParams(max_tokens=9, constraint=REGEX)).result()

        def late(automaton: TextAutomaton) -> Any:
            is_asked.set()
            assert go_on.wait(30)
            return mask(automaton)

        monkeypatch.setattr(TextAutomaton, "mask", late)
        generation = engine.generate(session, GenerateParams(max_tokens=9, constraint=REGEX))
        assert is_asked.wait(30)
        generation.cancel()
        end = drain(generation)[-1]
        go_on.set()
        assert isinstance(end, Finished) and end.stop_reason is StopReason.CANCELLED and end.fits_constraint is False
        drain(engine.generate(session, GenerateParams(max_tokens=2)))


def test_a_choice_is_drawn_from_all_its_lists() -> None:
    found = set()
    with served_engine() as engine:
        parent = opened(engine)
        for seed in range(40):
            session = engine.fork_session(parent).session_id
            params = GenerateParams(max_tokens=9, constraint=CHOICE, sampling=sampled(seed))
            events = drain(engine.generate(session, params))
            found.add(tuple(e.token_id for e in events if isinstance(e, TokenCommitted) and e.token_id != END))
            engine.close_session(session)
    assert found == set(CHOICES)


def sampled(seed: int) -> Sampling:
    return Sampling(temperature=100.0, seed=seed)


def test_schemas_are_read_as_they_are_written() -> None:
    """x-guidance in the schema comes before the separators that are ours."""
    schema = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    constraints = Constraints(VOCABULARY, lambda: TOKENS)
    for given, spelled in (({}, b"[1, 1]"), ({"x-guidance": {"item_separator": ";"}}, b"[1;1]")):
        grammar = constraints.compile(text(ConstraintKind.JSON_SCHEMA, json.dumps({**schema, **given})), "").result()
        automaton = grammar.start()
        assert all(map(automaton.consume, spelled)) and automaton.is_over
    constraints.close()
