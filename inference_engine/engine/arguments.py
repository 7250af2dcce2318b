"""Checks of the arguments of engine calls. Each error names the field, the value given, and the values allowed."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from inference_engine.config import EngineConfig
from inference_engine.errors import AppendTooLarge, HistoryLengthMismatch, InvalidArgument, TokenOutOfRange
from inference_engine.kernels.sampler import permitted_by
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.strategies import parse_strategy, strategy_names
from inference_engine.kv.strategy import KVStrategy, check_strategy
from inference_engine.session.history import TokenIds
from inference_engine.types import GenerateParams, ModelFacts, TokenSet

logger = logging.getLogger(__name__)

MAX_LABEL_CHARACTERS = 128
MAX_PAGE_SESSIONS = 1000
MAX_PIECE_TOKENS = 16_384  # of a history in one answer

_ROUTE = re.compile("[0-9a-f]{16}")


class Arguments:
    """The checks that depend on the model and the settings."""

    def __init__(
        self,
        config: EngineConfig,
        geometry: Geometry,
        facts: ModelFacts,
        *,
        prefers_components: bool,
        lacks_components: bool,
    ) -> None:
        """prefers_components: strategies that choose tokens do so by components of keys, unless they say how.
        lacks_components: they would, and none are calibrated.

        Raises InvalidArgument if the model cannot be served with the default strategy.
        """
        self._config = config
        self._geometry = geometry
        self._vocab_size = facts.vocab_size
        self._refused_strategies = dict(facts.refused_strategies)
        self._prefers_components = prefers_components
        self._has_to_advise = lacks_components
        self.default_strategy = self._possible(parse_strategy(config.strategy))

    @property
    def strategies(self) -> tuple[str, ...]:
        """The names of those that this model can be served with."""
        return tuple(name for name in strategy_names() if name not in self._refused_strategies)

    def strategy(self, asked: KVStrategy | None) -> KVStrategy:
        """What a session gets: with its defaults filled in; the default strategy for None.

        Raises InvalidArgument if this model cannot be served with it.
        """
        return self.default_strategy if asked is None else self._possible(asked)

    def _possible(self, strategy: KVStrategy) -> KVStrategy:
        resolved = strategy.resolved(self._geometry, has_components=self._prefers_components)
        if why := self._refused_strategies.get(resolved.name):
            raise InvalidArgument("strategy", f"{resolved.name} is not available with this model: {why}")
        check_strategy(resolved, self._geometry)
        if self._has_to_advise and strategy.resolved(self._geometry, has_components=True) != resolved:
            self._has_to_advise = False  # once, and only where someone asks for such a strategy
            logger.info(
                "%s chooses by bounds of blocks; `kakeya train components` calibrates components of keys, by which it "
                "chooses from the next start on",
                resolved.name,
            )
        return resolved

    def limit(self, strategy: KVStrategy, limit_tokens: int | None) -> int | None:
        """The length limit of a session created with `limit_tokens`. None: no limit.

        With `limit_tokens` None it is the setting `default_limit_tokens`, or else the longest that the strategy allows.
        """
        longest = strategy.length_limit(self._geometry)
        if limit_tokens is None:
            default = self._config.default_limit_tokens
            return longest if longest is None or not default else min(longest, default)
        if limit_tokens < 1 or (longest is not None and limit_tokens > longest):
            upper = "" if longest is None else f" and at most {longest} with {strategy.name}"
            raise InvalidArgument("limit_tokens", f"must be at least 1{upper}, got {limit_tokens}")
        return limit_tokens

    def ids(self, token_ids: Sequence[int] | TokenIds) -> TokenIds:
        """The ids as an array. Raises AppendTooLarge, or TokenOutOfRange for one outside the vocabulary."""
        if len(token_ids) > self._config.max_append_tokens:
            raise AppendTooLarge(len(token_ids), self._config.max_append_tokens)
        return self.check_ids("token_ids", token_ids).astype(np.uint32)

    def check_ids(
        self, field: str, token_ids: Sequence[int] | TokenIds, at_most: int | None = None
    ) -> NDArray[np.int64]:
        """The ids as an array. Raises InvalidArgument for too many, TokenOutOfRange for one outside the vocabulary."""
        if at_most is not None and len(token_ids) > at_most:
            raise InvalidArgument(field, f"at most {at_most} ids, got {len(token_ids)}")
        ids = np.array(token_ids, dtype=np.int64)
        wrong = np.flatnonzero((ids < 0) | (ids >= self._vocab_size))
        if len(wrong):
            first = int(wrong[0])
            raise TokenOutOfRange(
                field,
                f"id {int(ids[first])} at index {first} is not in the vocabulary of {self._vocab_size}; "
                "nothing was changed",
                index=first,
                vocab_size=self._vocab_size,
            )
        return ids

    def check_params(self, params: GenerateParams, end_ids: Collection[int] = ()) -> None:
        """end_ids: those that end every Generate of the session."""
        if params.max_tokens > self._config.max_generate_tokens:
            raise InvalidArgument(
                "max_tokens", f"at most {self._config.max_generate_tokens} on this server, got {params.max_tokens}"
            )
        if params.top_logprobs > self._vocab_size:
            raise InvalidArgument(
                "top_logprobs", f"at most {self._vocab_size}, the ids of the vocabulary, got {params.top_logprobs}"
            )
        self.check_ids("stop_token_ids", params.stop_token_ids)
        self.check_ids("stop_sequences", list(itertools.chain(*params.stop_sequences)))
        self.check_ids("logit_bias", list(params.sampling.logit_bias))
        self._check_permitted(params, end_ids)
        if params.constraint is not None:
            self.check_ids("constraint.choice", list(itertools.chain(*params.constraint.choices)))

    def _check_permitted(self, params: GenerateParams, end_ids: Collection[int]) -> None:
        sampling = params.sampling
        for field in ("allowed_token_ids", "banned_token_ids"):
            token_ids: TokenSet | None = getattr(sampling, field)
            if token_ids is not None and token_ids.packed:
                self.check_ids(field, [token_ids.ranges[0, 0], token_ids.ranges[-1, 1] - 1])
        permitted = permitted_by(sampling, self._vocab_size)
        if permitted is None:
            return
        if not permitted.any():
            field = "allowed_token_ids" if sampling.banned_token_ids is None else "banned_token_ids"
            raise InvalidArgument(field, f"leaves none of the {self._vocab_size} ids of the vocabulary to be drawn")
        permitted[[*end_ids, *params.stop_token_ids]] = False
        if params.min_tokens and not permitted.any():
            raise InvalidArgument(
                "min_tokens", "must be 0 where every id that may be drawn ends the Generate; allow others, too"
            )


def check_label(label: str) -> None:
    if len(label) > MAX_LABEL_CHARACTERS:
        raise InvalidArgument("client_label", f"must be at most {MAX_LABEL_CHARACTERS} characters, got {len(label)}")
    for index, character in enumerate(label):
        if not character.isprintable():
            raise InvalidArgument("client_label", f"must be printable characters, got {character!a} at index {index}")


def check_route(route: str) -> None:
    if route and not _ROUTE.fullmatch(route):
        raise InvalidArgument("kakeya-route", f"must be 16 characters of 0-9 and a-f, got {len(route)} characters")


def check_page(most: int) -> None:
    if not 1 <= most <= MAX_PAGE_SESSIONS:
        raise InvalidArgument("page_size", f"must be from 1 to {MAX_PAGE_SESSIONS}, got {most}")


def check_first(first: int, length: int) -> None:
    if first > length:
        raise InvalidArgument("first_position", f"must be at most {length}, the history's length, got {first}")


def check_length(session_id: str, length: int, expected: int | None) -> None:
    """Raise HistoryLengthMismatch if the caller expects another length."""
    if expected is not None and expected != length:
        raise HistoryLengthMismatch(expected, length, session_id=session_id)
