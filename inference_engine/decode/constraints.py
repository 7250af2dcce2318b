"""The grammars of an engine: compiled once, by owner and content, on threads of low priority; what is too dear is
refused. What a Generate does with one is in `matching.py`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from inference_engine.decode.automata import (
    MOST_FORCED_BYTES,
    MOST_ROLLED_BACK,
    ChoiceGrammar,
    Grammar,
    TextGrammar,
    first_line,
)
from inference_engine.decode.literals import longest_literal, misread
from inference_engine.decode.matching import Matching
from inference_engine.errors import ConstraintUnavailable, InvalidConstraint, ModelError, QuotaExceeded
from inference_engine.types import Constraint, ConstraintKind, ReadTokenBytes, TokenBytes

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._lib import JsonCompileOptions  # types only: the package does not name it

MOST_GRAMMARS, MOST_PER_OWNER = 256, 16  # compiled ones that are kept
# Of what those were compiled from: a schema takes up to a hundred times its size.
MOST_SOURCE_BYTES, MOST_SOURCE_BYTES_PER_OWNER = 2**21, 2**18
MOST_COMPILING_PER_OWNER = 4  # one at a time; the others wait
_COMPILERS, _WORKERS = 4, 2
_COMPILER_PRIORITY = 5  # of its threads: a quarter of what a step's get, where both want the processor
_RETRY_SECONDS = 1.0
_NOTHING_FOLLOWS = "NoExtensionBias"  # as llguidance says it
_LONGEST_LITERAL = 4096  # characters of one text that a constraint writes out
# Of llguidance: work and memory of one grammar. A mask takes a few milliseconds at most.
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 50_000,
    "step_lexer_fuel": 60_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 50_000,
    "verbose_errors": False,
}
# Of the items of a step; what a schema of sixty optional properties needs is less than the fewest.
_MOST_ITEMS, _FEWEST_ITEMS = 30_000, 300
_MOST_STEP_CHARACTERS = 2**17  # items of a step times the longest literal, unless they would be too few

# As Python's json.dumps writes it: a model knows that, and nothing is left open that a schema does not leave open.
# What a schema says in "x-guidance" comes before it.
_JSON: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Constraints:
    """The grammars of one engine, by owner and content, and the threads that compile and match them. Any thread.

    Nothing is loaded and no thread is started before the first constraint.
    """

    def __init__(self, vocab_size: int, read_tokens: ReadTokenBytes | None) -> None:
        self._vocab_size = vocab_size
        self._read_tokens = read_tokens
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._loaded: tuple[LLTokenizer, tuple[int, ...]] | None = None
        self._grammars: OrderedDict[tuple[str, Constraint], Grammar] = OrderedDict()  # used longest ago first
        self._asked: dict[str, OrderedDict[Constraint, Future[Grammar]]] = {}  # by owner, the first one under way
        self._compilers = ThreadPoolExecutor(_COMPILERS, "kakeya-grammar", initializer=_yield_the_processor)
        self._workers = ThreadPoolExecutor(_WORKERS, "kakeya-mask")

    def close(self) -> None:
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._workers.shutdown(wait=False, cancel_futures=True)

    def start(
        self,
        grammar: Grammar,
        before: Sequence[int],
        stop_ids: frozenset[int],
        *,
        permitted: NDArray[np.bool_] | None = None,
        min_tokens: int = 0,
    ) -> Matching:
        """permitted: [vocab_size]; see `Matching`."""
        packed = None if permitted is None else np.packbits(permitted, bitorder="little")
        return Matching(grammar, before, stop_ids, self._workers.submit, permitted=packed, min_tokens=min_tokens)

    def find(self, constraint: Constraint, owner: str) -> Grammar | None:
        """The compiled grammar, if it is there."""
        with self._lock:
            found = self._grammars.get((owner, constraint))
            if found is not None:
                self._grammars.move_to_end((owner, constraint))
            return found

    def compile(self, constraint: Constraint, owner: str) -> Future[Grammar]:
        """Compile it, one after another of each owner. The result raises InvalidConstraint or ConstraintUnavailable.

        Raises QuotaExceeded if so many of the owner's are being compiled already.
        """
        with self._lock:
            if (found := self._grammars.get((owner, constraint))) is not None:
                there: Future[Grammar] = Future()
                there.set_result(found)
                return there
            asked = self._asked.setdefault(owner, OrderedDict())
            if (same := asked.get(constraint)) is not None:
                return same
            if len(asked) >= MOST_COMPILING_PER_OWNER:
                raise QuotaExceeded(
                    "constraints",
                    MOST_COMPILING_PER_OWNER,
                    f"{len(asked)} constraints of yours are being compiled, as many as one owner's may; retry later",
                    retry_after_seconds=_RETRY_SECONDS,
                )
            future = asked[constraint] = Future()
            if len(asked) == 1:
                self._compilers.submit(self._compile_next, owner)
            return future

    def _compile_next(self, owner: str) -> None:
        with self._lock:
            constraint, future = next(iter(self._asked[owner].items()))
        grammar: Grammar | None = None
        error: BaseException | None = None
        try:
            grammar = self._compiled(constraint)
        except BaseException as raised:  # noqa: BLE001 - raised where it is waited for; a panic of the library, too
            error = raised
        with self._lock:
            if grammar is not None:
                self._keep(owner, constraint, grammar)
            del self._asked[owner][constraint]
            if self._asked[owner]:
                with contextlib.suppress(RuntimeError):  # the engine is closed
                    self._compilers.submit(self._compile_next, owner)
            else:
                del self._asked[owner]
        if grammar is None:
            assert error is not None
            future.set_exception(error)
        else:
            future.set_result(grammar)

    def _keep(self, owner: str, constraint: Constraint, grammar: Grammar) -> None:
        self._grammars[owner, constraint] = grammar
        self._drop([key for key in self._grammars if key[0] == owner], MOST_PER_OWNER, MOST_SOURCE_BYTES_PER_OWNER)
        self._drop(list(self._grammars), MOST_GRAMMARS, MOST_SOURCE_BYTES)

    def _drop(self, kept: list[tuple[str, Constraint]], most: int, most_bytes: int) -> None:
        """The first of them, until they are no more than that; the last one stays."""
        held = sum(len(key[1].source) for key in kept)
        for at, key in enumerate(kept[:-1]):
            if len(kept) - at <= most and held <= most_bytes:
                break
            held -= len(key[1].source)
            del self._grammars[key]

    def _compiled(self, constraint: Constraint) -> Grammar:
        grammar: Grammar
        if constraint.kind is ConstraintKind.CHOICE:
            grammar = ChoiceGrammar(constraint.choices, self._vocab_size)
        else:
            grammar = self._compiled_text(constraint)
        automaton = grammar.start()
        mask = None if automaton.broken or automaton.is_over else automaton.mask()
        if automaton.broken and automaton.broken != _NOTHING_FOLLOWS:
            raise InvalidConstraint(f"{constraint.kind.value}: its beginning is too dear: {automaton.broken}")
        if automaton.broken or mask is None or not mask.any():
            raise InvalidConstraint(f"{constraint.kind.value}: no output of one token or more fits it")
        try:  # what is drafted may have to be taken back
            automaton.roll_back(int(automaton.consume(int(np.unpackbits(mask, bitorder="little").argmax()))))
        except RuntimeError as error:
            raise InvalidConstraint(f"{constraint.kind.value}: {first_line(str(error))}") from error
        # To the first place that leaves something open: what must follow is known a part at a time.
        for _ in range(MOST_FORCED_BYTES // MOST_ROLLED_BACK):
            if not (forced := automaton.forced()) or not all(map(automaton.consume, forced)):
                break
        if not automaton.is_over and not automaton.broken:
            automaton.mask()
        if automaton.broken:
            raise InvalidConstraint(
                f"{constraint.kind.value}: what follows its beginning is too dear: {automaton.broken}"
            )
        return grammar

    def _compiled_text(self, constraint: Constraint) -> TextGrammar:
        from llguidance import LLMatcher, LLParserLimits

        tokenizer, ends = self._tokenizer()
        grammar_from: dict[ConstraintKind, Callable[[str], str]] = {
            ConstraintKind.JSON_SCHEMA: lambda schema: LLMatcher.grammar_from_json_schema(schema, defaults=_JSON),
            ConstraintKind.REGEX: LLMatcher.grammar_from_regex,
            ConstraintKind.LARK: LLMatcher.grammar_from_lark,
        }
        try:
            source = grammar_from[constraint.kind](constraint.source)
        except ValueError as error:
            raise InvalidConstraint(f"{constraint.kind.value}: {first_line(str(error))}") from error
        try:
            longest = longest_literal(constraint.kind, constraint.source)
            reason = misread(constraint.kind, constraint.source)
        except (ValueError, RecursionError) as error:
            raise InvalidConstraint(f"{constraint.kind.value}: {first_line(str(error))}") from error
        if reason:
            raise InvalidConstraint(f"{constraint.kind.value}: {reason}")
        if longest > _LONGEST_LITERAL:
            raise InvalidConstraint(
                f"{constraint.kind.value}: a text that it writes out may have {_LONGEST_LITERAL:,} characters, one has "
                f"{longest:,}"
            )
        items = min(max(_MOST_STEP_CHARACTERS // max(longest, 1), _FEWEST_ITEMS), _MOST_ITEMS)
        limits = LLParserLimits(**_LIMITS, step_max_items=items)
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidConstraint(f"{constraint.kind.value}: {first_line(matcher.get_error())}")
        return TextGrammar(matcher, ends, -(-self._vocab_size // 8))

    def _tokenizer(self) -> tuple[LLTokenizer, tuple[int, ...]]:
        """llguidance's view of the vocabulary, and the ids that it takes for an end. Loaded when it is used first."""
        with self._loading:
            if self._loaded is None:
                if self._read_tokens is None:
                    raise ConstraintUnavailable("it has no files that say the bytes of its model's tokens")
                try:
                    tokenizer = _made(self._read_tokens(), self._vocab_size)
                except (ModelError, ValueError) as error:
                    raise ConstraintUnavailable(first_line(str(error))) from error
                self._loaded = tokenizer, tuple(tokenizer.eos_tokens)
            return self._loaded


def _made(tokens: TokenBytes, vocab_size: int) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    if tokens.specification:
        return LLTokenizer(tokens.specification, n_vocab=vocab_size)
    return LLTokenizer(TokenizerWrapper(_ByBytes(tokens)), n_vocab=vocab_size)


class _ByBytes:
    """What TokenizerWrapper asks of a tokenizer. It spells what must follow by the longest tokens."""

    bos_token_id = None

    def __init__(self, tokens: TokenBytes) -> None:
        specials = {*tokens.specials}
        self.tokens = tokens.tokens
        self.special_token_ids = list(tokens.specials)
        self.eos_token_id = min(specials, default=0)
        self._ids = {of: at for at, of in reversed([*enumerate(tokens.tokens)]) if of and at not in specials}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        ids, place = [], 0
        while place < len(text):
            lengths = range(min(self._longest, len(text) - place), 0, -1)
            length = next((one for one in lengths if text[place : place + one] in self._ids), 0)
            if not length:
                break
            ids.append(self._ids[text[place : place + length]])
            place += length
        return ids


def _yield_the_processor() -> None:
    """Of the calling thread, where the system has priorities of threads."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _COMPILER_PRIORITY)
