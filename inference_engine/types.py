"""Types shared by all packages: parameters of a request, events of a Generate, memory of a session.

Frozen values only, safe to pass between threads; `dataclasses.replace` makes a changed copy.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from inference_engine.errors import InvalidArgument, InvalidConstraint

if TYPE_CHECKING:  # who reads the command line alone does not wait for numpy
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

MAX_STOP_TOKEN_IDS = 64
MAX_STOP_SEQUENCES = 64
MAX_STOP_SEQUENCE_IDS = 1024  # of all sequences together
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_SET_NUMBERS = 2**16  # ids, and ends of ranges, of a set of tokens
MAX_SEED = 2**64 - 1
MAX_CONSTRAINT_BYTES = 2**18
MAX_CHOICES = 1024
MAX_CHOICE_IDS = 2**14  # of all choices together
# Below these, logits overflow. Powers of two, which float32 on the wire represents exactly.
SMALLEST_TEMPERATURE = 2.0**-20
SMALLEST_PENALTY = 2.0**-7
LARGEST_PENALTY = 2.0  # of presence and of frequency, either way


class Mark(enum.IntEnum):
    """The origin of a token in the history. What a query may read can depend on it, but not on the sizes of calls."""

    APPENDED = 0
    GENERATED = 1


class Mode(enum.Enum):
    """How equal the results of equal histories are: up to rounding, or to the bit."""

    BATCHED = "batched"
    FIXED_SHAPE = "fixed-shape"


class Durability(enum.Enum):
    """What a session's history survives: nothing, the end of the process, or a loss of power, too."""

    NONE = "none"
    PROCESS = "process"
    POWER = "power"


class StopReason(enum.Enum):
    MAX_TOKENS = "max_tokens"
    EOS = "eos"
    CANCELLED = "cancelled"
    TRUNCATED = "truncated"
    CONSTRAINT = "constraint"  # it permits nothing more


def _shown(value: float) -> str:
    """As it was typed: on the wire it is a float32, and 1.1 comes as 1.100000023841858."""
    return f"{value:.7g}"


def _require(condition: bool, name: str, message: str) -> None:
    if not condition:
        raise InvalidArgument(name, message)


# Counts are checked by themselves, too: before a message's ids become objects.


def check_logit_bias(count: int) -> None:
    _require(count <= MAX_LOGIT_BIAS, "logit_bias", f"at most {MAX_LOGIT_BIAS} entries, got {count}")


def check_stop_token_ids(count: int) -> None:
    _require(count <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS}, got {count}")


def check_stop_sequences(count: int, lengths: Iterable[int]) -> None:
    _require(count <= MAX_STOP_SEQUENCES, "stop_sequences", f"at most {MAX_STOP_SEQUENCES}, got {count}")
    given = list(lengths)
    _require(all(given), "stop_sequences", "one of them is empty; each needs an id at least")
    _require(
        sum(given) <= MAX_STOP_SEQUENCE_IDS,
        "stop_sequences",
        f"at most {MAX_STOP_SEQUENCE_IDS} ids in all of them together, got {sum(given)}",
    )


def check_choices(count: int, lengths: Iterable[int]) -> None:
    if not 1 <= count <= MAX_CHOICES:
        raise InvalidConstraint(f"choice: must be 1 to {MAX_CHOICES} lists of ids, got {count}")
    given = list(lengths)
    if not all(given):
        raise InvalidConstraint("choice: a list of ids is empty")
    if sum(given) > MAX_CHOICE_IDS:
        raise InvalidConstraint(f"choice: at most {MAX_CHOICE_IDS} ids in all lists together, got {sum(given)}")


@dataclass(frozen=True, slots=True)
class TokenSet:
    """A set of token ids as ranges: ascending, and apart. As bytes: there may be many, and sets are compared."""

    packed: bytes

    @staticmethod
    def of(token_ids: ArrayLike = (), ranges: ArrayLike = ()) -> TokenSet:
        """Equal sets are equal, however they are given. ranges: [n, 2], the first id and the one behind the last; an
        empty range holds nothing.
        """
        import numpy as np

        ids, given = np.array(token_ids, dtype=np.int64), np.array(ranges, dtype=np.int64).reshape(-1, 2)
        given = given[given[:, 0] < given[:, 1]]
        firsts = np.sort(np.concatenate([ids, given[:, 0]]))
        behind = np.sort(np.concatenate([ids + 1, given[:, 1]]))
        # One by one in order: where a range begins behind as many ends as there were beginnings, none is open.
        apart = firsts[1:] > behind[:-1]
        is_first, is_last = np.append(True, apart)[: len(firsts)], np.append(apart, True)[: len(firsts)]
        return TokenSet(np.stack([firsts[is_first], behind[is_last]], axis=1).tobytes())

    @property
    def ranges(self) -> NDArray[np.int64]:
        """[n, 2]: the first id of each and the one behind its last."""
        import numpy as np

        return np.frombuffer(self.packed, dtype=np.int64).reshape(-1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a token is drawn from logits. The defaults are greedy decoding with everything off.

    Applied in the order: penalties, bias, temperature, top_k, top_p, min_p. Randomness is a function of
    (seed, absolute position) alone; `seed = None` lets the engine draw one.

    presence_penalty, frequency_penalty: subtracted from the logit of an id that this Generate has given: once, and once
    for each time. allowed_token_ids, banned_token_ids: what may be drawn at all; None: anything.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    allowed_token_ids: TokenSet | None = None
    banned_token_ids: TokenSet | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(
            self.temperature == 0.0 or SMALLEST_TEMPERATURE <= self.temperature <= 100.0,
            "temperature",
            f"must be 0, or from 2^-20 (about 0.000001) to 100, got {_shown(self.temperature)}",
        )
        _require(0.0 < self.top_p <= 1.0, "top_p", f"must be in (0, 1], got {_shown(self.top_p)}")
        _require(self.top_k >= 0, "top_k", f"must be ≥ 0, got {self.top_k}")
        _require(0.0 <= self.min_p <= 1.0, "min_p", f"must be in [0, 1], got {_shown(self.min_p)}")
        penalty = self.repetition_penalty
        _require(
            SMALLEST_PENALTY <= penalty <= 100.0,
            "repetition_penalty",
            f"must be from {SMALLEST_PENALTY} to 100, got {_shown(penalty)}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value: float = getattr(self, name)
            _require(
                abs(value) <= LARGEST_PENALTY,
                name,
                f"must be from -{LARGEST_PENALTY:g} to {LARGEST_PENALTY:g}, got {_shown(value)}",
            )
        check_logit_bias(len(self.logit_bias))
        for token_id, bias in self.logit_bias.items():
            _require(
                math.isfinite(bias) and abs(bias) <= 1000.0,
                "logit_bias",
                f"must be finite and within ±1000, got {_shown(bias)} for id {token_id}",
            )
        if self.seed is not None:
            _require(0 <= self.seed <= MAX_SEED, "seed", f"must be in [0, 2^64), got {self.seed}")

    @property
    def reads_history(self) -> bool:
        """Does a draw depend on which ids are in the history?"""
        return self.repetition_penalty != 1.0

    @property
    def counts_tokens(self) -> bool:
        """Does a draw depend on how often the Generate has given an id?"""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBytes:
    """The bytes of a model's tokens, by id; or a specification of them, as the tokenizers library writes it.

    specials: ids that stand for no text.
    """

    specification: str = ""
    tokens: tuple[bytes, ...] = ()
    specials: tuple[int, ...] = ()


ReadTokenBytes = Callable[[], TokenBytes]


class ConstraintKind(enum.Enum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    CHOICE = "choice"


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """What the tokens of a Generate must spell: text that fits `source`, or the ids of one of `choices`."""

    kind: ConstraintKind
    source: str = ""
    choices: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.kind is ConstraintKind.CHOICE:
            check_choices(len(self.choices), map(len, self.choices))
        elif not self.source:
            raise InvalidConstraint(f"{self.kind.value}: it is empty")
        elif (size := len(self.source.encode("utf-8", "surrogatepass"))) > MAX_CONSTRAINT_BYTES:
            raise InvalidConstraint(f"{self.kind.value}: at most {MAX_CONSTRAINT_BYTES} bytes, got {size}")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateParams:
    """The parameters of one Generate. The engine checks ids against the vocabulary.

    max_tokens: 0 to prefill, and generate nothing. stop_sequences: end it when its last tokens are one of them.
    min_tokens: so many tokens end nothing: an id that would is not drawn, and a sequence does not count.
    """

    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0  # of so many of the likeliest tokens at each place, too
    expected_history_length: int | None = None
    drafting: bool = True  # may a drafter be used? It changes the speed, never a token
    constraint: Constraint | None = None
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 0, "max_tokens", f"must be ≥ 0, got {self.max_tokens}")
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"must be from 0 to max_tokens, {self.max_tokens}, got {self.min_tokens}",
        )
        _require(
            0 <= self.top_logprobs <= MAX_TOP_LOGPROBS,
            "top_logprobs",
            f"must be from 0 to {MAX_TOP_LOGPROBS}, got {self.top_logprobs}",
        )
        _require(self.logprobs or not self.top_logprobs, "top_logprobs", "needs logprobs, too; set both")
        check_stop_token_ids(len(self.stop_token_ids))
        check_stop_sequences(len(self.stop_sequences), map(len, self.stop_sequences))


# Token ids and natural log-probabilities under the raw logits, the likeliest first; of equals the lower id.
TopLogprobs = tuple[tuple[int, float], ...]


# What a Generate reports, in order: Accepted, Progress*, Truncated?, TokenCommitted*, then Finished or Failed.


@dataclass(frozen=True, slots=True)
class Accepted:
    """first_position: of the first token to come. is_replayed: the Generate already existed."""

    queue_position: int
    prefill_tokens: int
    first_position: int = 0
    is_replayed: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    done_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Truncated:
    """Number of positions that no query of this session can read any more, at the first token."""

    dropped_tokens: int


@dataclass(frozen=True, slots=True)
class TokenCommitted:
    """A token. It is in the history and its journal before this event is emitted.

    top_logprobs: the likeliest tokens in its place and their log-probabilities, if they were asked for.
    """

    token_id: int
    position: int
    logprob: float | None = None
    top_logprobs: TopLogprobs = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    stop_reason: StopReason
    generated_tokens: int
    history_length: int
    prefill_seconds: float
    total_seconds: float
    seed: int
    prefilled_tokens: int
    cached_tokens: int
    attended_positions: int
    evicted_positions: int
    restored_positions: int = 0  # of the attended ones, those read in coded or restored form
    drafted_tokens: int = 0  # draft tokens that were verified, and how many of them were accepted
    accepted_tokens: int = 0
    is_degraded: bool = False  # the drafter failed; the tokens are not affected
    is_replayed: bool = False  # the call attached to an existing Generate
    fits_constraint: bool | None = None  # do the tokens fit the constraint as they are? None: there is none
    stop_sequence: int | None = None  # which of the stop sequences ended it


@dataclass(frozen=True, slots=True)
class Failed:
    """The Generate ended with an error (a `KakeyaError`; anything else is a bug). Committed tokens stay."""

    error: BaseException


Event = Accepted | Progress | Truncated | TokenCommitted | Finished | Failed


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenUsage:
    """What Generates took, once they had ended. cached_tokens: of histories whose K/V was there when they began."""

    prefilled_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            prefilled_tokens=self.prefilled_tokens + other.prefilled_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            generated_tokens=self.generated_tokens + other.generated_tokens,
            drafted_tokens=self.drafted_tokens + other.drafted_tokens,
            accepted_tokens=self.accepted_tokens + other.accepted_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The most bytes of K/V that a session holds: between Generates, and at any time.

    tier_bytes: in addition, in the second tier: host memory.
    """

    sustained_bytes: int
    peak_bytes: int
    tier_bytes: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.sustained_bytes <= self.peak_bytes
        assert self.tier_bytes >= 0


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes held on the device, by kind (`entries`, `sink_copy`, …), and in the second tier."""

    by_kind: Mapping[str, int]
    tier_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(self.by_kind.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Facts about the served model for callers."""

    model_id: str
    vocab_size: int
    trained_positions: int
    device: str
    dtype: str
    # What runs the model, and its numeric identity: within one, equal histories have equal logits.
    backend: str = "torch"
    numerics: str = "torch"
    # What equal histories promise here.
    mode: Mode = Mode.BATCHED
    # Formats of the matrices that products read, that of most bytes first; empty: all are of `dtype`.
    weights: tuple[str, ...] = ()
    # Sizes of the text model; 0 for one without weights.
    layers: int = 0
    hidden_size: int = 0
    # Of K and V, where it is not that of activations.
    kv_dtype: str = ""
    # Strategies that this model does not support, and why: its admission twin gave other logits, or none.
    refused_strategies: tuple[tuple[str, str], ...] = ()
