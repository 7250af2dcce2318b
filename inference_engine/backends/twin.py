"""Admits a model by test: small twins of it, made from its configuration alone, must give the model's own logits.

    traits       every layer, its keys at two positions: rotated, unrotated, or changed in a way that cannot be repeated
    full         a few layers: the whole text in the model's own eager attention, against chunks beside another session
                 through our seam
    strategies   small variants of each, against plain attention under its rule. Keys that a strategy moves are compared
                 with keys that the model itself computes: the text has extra tokens at the other positions.

The twins have the same class and small sizes; every window and context field is cut to 8, so that windows matter within
80 tokens. All their weights are random, norms and biases too, so that nothing cancels by chance. An architecture that
attends, rotates or normalises in an unsupported way differs here, before it could give wrong answers. The model's
weights are not needed.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from inference_engine.backends.base import Admitted, Forward, Step
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.errors import InvalidArgument, ModelError
from inference_engine.kernels.components import KeyComponents
from inference_engine.kernels.expanded_attention import OwnQueries
from inference_engine.kv.archives.latent import exact_bytes_per_token, latent_layers
from inference_engine.kv.context import KVContext, WholeTokens
from inference_engine.kv.geometry import Geometry, LayerTraits
from inference_engine.kv.layout import Layout
from inference_engine.kv.memory.tier import Tier
from inference_engine.kv.plan import StepPlan
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies import strategy_kinds
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategy import KVStrategy, check_strategy
from inference_engine.kv.views import Mixer
from inference_engine.models.folder import reason_of
from inference_engine.models.layer_traits import TRIAL, find_traits
from inference_engine.models.layer_types import check_config, layer_types
from inference_engine.models.operations import NoStepListError
from inference_engine.models.seam import ATTENTION, Seam
from inference_engine.types import ModelFacts

logger = logging.getLogger(__name__)

_LENGTH = 80
_SEGMENT = 16
_POOL_BYTES = 2**24
_WINDOW_FIELDS = ("sliding_window", "attention_chunk_size", "local_attention_window")
_SMALL: dict[str, int] = {
    "vocab_size": 96,
    "intermediate_size": 48,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "block_ff_dim": 48,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "num_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "index_topk": 12,
    "index_n_heads": 16,
    "index_head_dim": 24,
}
_MOST_NUMBERS = 300_000_000  # parameters of a twin; more means that a family has a size under an unknown name
# Of state space models: heads, the size of each and of its state, groups of heads, and all heads together.
_STATE_SPACES = (
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_ssm"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "mamba_intermediate_size"),
)
_STATE_HEAD = 16
_LAYER_NUMBERS = ("attn_layer_indices", "full_attn_idxs")  # lists of layers with attention
_SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
_NOISE = 0.1
# What a recurrent state's decay is less by, in its logarithm. As they are made, many states forget within a token: then
# only the token's own query and key say what is read, and norms enlarge the rounding of products that are near zero.
_LONGER_MEMORY = 3.0
# Relative to the largest logit: different summation orders in float32.
TOLERANCE = 2e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class TwinSizes:
    """Sizes of a twin, where its family leaves them open. group: query heads of a KV head; None: those of the model."""

    hidden: int = 64
    head_dim: int = 16
    kv_heads: int = 2
    group: int | None = None


def admit_config(
    config: PretrainedConfig,
    kind: type[PreTrainedModel] | None = None,
    *,
    seed: int = 0,
    sizes: TwinSizes = TwinSizes(),
) -> Admitted:
    """Test a model of this configuration. Raises ModelError unless it is served correctly, at least with `full`.

    kind: the model's class; None: the one that transformers builds for the configuration. Needs no weights, and leaves
    `config` and the random state alone.
    """
    if kind is None:
        config, kind = text_generator(config)
    check_config(_text_config(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        traits = _try(kind, "traits", lambda: _traits(kind, config, sizes))
        twin = _try(kind, "twin", lambda: Twin(kind, config, traits, sizes))
        difference = _try(kind, "logits", twin.difference_of_chunks)
        if not difference <= TOLERANCE:
            raise ModelError(
                f"{kind.__name__} is not served rightly: through the attention seam a small twin's logits differ by "
                f"{difference:.3g} from the model's own. Its attention does something the runtime does not honour"
            )
        differences, refused = {str(Full()): difference}, {}
        for name, strategies in strategy_kinds().items():
            for strategy in strategies.trials(twin.geometry):
                found, why = _try_strategy(kind, twin, strategy)
                if found is not None:
                    differences[str(strategy)] = max(found, differences.get(str(strategy), 0.0))
                if why:
                    refused[name] = why
    return Admitted(traits=traits, refused=tuple(refused.items()), differences=tuple(differences.items()))


def _text_config(config: PretrainedConfig) -> PretrainedConfig:
    try:
        return config.get_text_config()
    except ValueError as error:
        raise ModelError(
            f"{config.model_type!r} has several text models in one configuration; one can be served"
        ) from error


def model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class of transformers that generates text with this configuration. Raises ModelError if there is none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise ModelError(
            f"transformers has no class that generates text for the model type {config.model_type!r}"
        ) from None
    kinds: tuple[type[PreTrainedModel], ...] = tuple(found) if isinstance(found, (list, tuple)) else (found,)
    by_name = {kind.__name__: kind for kind in kinds}
    named = [by_name[name] for name in getattr(config, "architectures", None) or () if name in by_name]
    return named[0] if named else kinds[0]


def text_generator(config: PretrainedConfig) -> tuple[PretrainedConfig, type[PreTrainedModel]]:
    """The configuration and the class with which transformers loads a checkpoint of this configuration.

    Some families with several parts load only the text model. Raises ModelError as `model_class` does.
    """
    kind = model_class(config)
    part = config.sub_configs.get("text_config")
    return (config.get_text_config() if part is not None and kind.config_class == part else config), kind


def _try(kind: type[PreTrainedModel], what: str, trial: Any) -> Any:
    """The result of `trial`. An exception of transformers or torch becomes a ModelError; the log has the details."""
    try:
        return trial()
    except ModelError:
        raise
    except ImportError as error:
        logger.debug("trying out %s: %s", kind.__name__, what, exc_info=True)
        raise ModelError(
            f"{kind.__name__} is not served: a part of it needs a library that is not installed (log level DEBUG says "
            "which). A checkpoint of its text model alone may be served"
        ) from error
    except Exception as error:
        logger.debug("trying out %s: %s", kind.__name__, what, exc_info=True)
        reason = "" if error.args == (TRIAL,) else reason_of(error)  # that name is none of the file's
        raise ModelError(
            f"{kind.__name__} is not served: a small twin of it {_FAILED[what]}. Its kind of attention, or of "
            f"configuration, is one that the runtime does not know{reason} (log level DEBUG has the details)"
        ) from error


_FAILED = {
    "traits": "does not run with another attention function in the place of its own",
    "twin": "cannot be built, or does not run by itself",
    "logits": "does not run in chunks through the attention seam",
}


def _try_strategy(kind: type[PreTrainedModel], twin: Twin, strategy: KVStrategy) -> tuple[float | None, str]:
    """The largest difference with `strategy`, None if it was not measured; and why it is refused, or ""."""
    try:
        check_strategy(strategy, twin.geometry)
    except InvalidArgument:
        return None, ""  # such a session is refused when it is created
    try:
        difference = twin.difference(_in_segments(twin, strategy), _expected(twin, strategy))
    except Exception:
        logger.debug("trying out %s with %s", kind.__name__, strategy, exc_info=True)
        return None, f"a small twin of {kind.__name__} does not run with {strategy}"
    if difference <= TOLERANCE:
        return difference, ""
    return difference, (
        f"with {strategy} a small twin of {kind.__name__} gives logits that differ by {difference:.3g} from those that "
        "the strategy stands for"
    )


def checked(difference: float, kind: type[PreTrainedModel]) -> float:
    """Raise NoStepListError unless the logits that a list gives a twin are the model's own, up to rounding."""
    if not difference <= TOLERANCE:
        raise NoStepListError(
            f"the list of operations gives a small twin of {kind.__name__} logits that differ by {difference:.3g} "
            "from the model's own"
        )
    return difference


# -- twins -------------------------------------------------------------------------------------------------------------


def _traits(kind: type[PreTrainedModel], config: PretrainedConfig, sizes: TwinSizes) -> tuple[LayerTraits, ...]:
    """The traits of every layer: this twin is as deep as the model, and thin."""
    count = config.get_text_config().num_hidden_layers
    small = shrunken(config, layers=range(count), sizes=sizes)
    small._attn_implementation = TRIAL
    return find_traits(Seam(_built(kind, small)))


class Twin:
    """A few layers of each kind, twice: as transformers runs them, and taken over by the seam.

    tensors: the weights of both, by name.
    """

    def __init__(
        self, kind: type[PreTrainedModel], config: PretrainedConfig, traits: Sequence[LayerTraits], sizes: TwinSizes
    ) -> None:
        layers = representative_layers(config.get_text_config(), traits)
        small = shrunken(config, layers=layers, sizes=sizes)
        vocabulary: int = small.get_text_config().vocab_size
        self.text = np.random.default_rng(int(torch.randint(0, 2**31, ()))).integers(1, vocabulary, _LENGTH)
        small._attn_implementation = "eager"
        own = _built(kind, small)
        with torch.inference_mode():
            self.expected: Tensor = own(input_ids=torch.from_numpy(self.text)[None], use_cache=False).logits[0].float()
        taken_config = copy.deepcopy(small)
        taken_config._attn_implementation = ATTENTION
        taken = kind(taken_config).eval()
        self.tensors: dict[str, Tensor] = own.state_dict()
        taken.load_state_dict(self.tensors)
        self.seam = Seam(taken, _of_layers(traits, layers))
        facts = ModelFacts(
            model_id="twin",
            vocab_size=vocabulary,
            trained_positions=self.seam.trained_positions,
            device="cpu",
            dtype="float32",
        )
        self.forward: Forward = TorchForward(self.seam, facts, torch.device("cpu"))
        self.geometry = self.forward.geometry(page_tokens=4, segment_tokens=_SEGMENT)

    def open(self) -> KVContext:
        return self.forward.open(self.geometry, _POOL_BYTES)

    def difference_of_chunks(self, *, tokens: int = _SEGMENT, is_alone: bool = False) -> float:
        """The largest difference of a logit, as a share of the largest, in chunks of so many tokens.

        Beside another session, or alone.
        """
        return self.difference(_in_chunks(self, tokens, is_alone=is_alone), self.expected)

    @staticmethod
    def difference(ours: Tensor, expected: Tensor) -> float:
        if not bool(ours.isfinite().all()):
            return float("inf")
        return float((expected - ours).abs().max() / expected.abs().max())


def _built(kind: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """A model with noise on every parameter: norms of one, zero biases and uniform attention would hide differences."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
    if count > _MOST_NUMBERS:
        raise ModelError(
            f"{kind.__name__} cannot be tried out: a small twin of it would still have {count} numbers, as its "
            "configuration has a size under a name that the runtime does not know"
        )
    model = kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * _NOISE)
            if name.endswith("A_log"):
                parameter.sub_(_LONGER_MEMORY)
        kept = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in kept and buffer.is_floating_point():  # the bias of a router
                buffer.add_(torch.randn_like(buffer) * _NOISE)
    return model.eval()


def shrunken(config: PretrainedConfig, *, layers: Sequence[int], sizes: TwinSizes = TwinSizes()) -> PretrainedConfig:
    """A config of the same kind with these layers of it, small sizes, and windows of 8."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    count: int = text.num_hidden_layers
    kinds = layer_types(text)
    own = [_attributes_of_layer(text, layer) for layer in layers]
    text.per_layer_config = None  # what differs by layer can be read as that of all now
    heads: int = text.num_attention_heads
    group = max(1, heads // (getattr(text, "num_key_value_heads", None) or heads))
    if group > 1 and sizes.group is not None:
        group = sizes.group
    changes: dict[str, Any] = {name: value for name, value in _SMALL.items() if getattr(text, name, None)}
    changes |= {name: 8 for name in _WINDOW_FIELDS if getattr(text, name, None)}
    changes |= {
        "num_hidden_layers": len(layers),
        "num_attention_heads": sizes.kv_heads * group,
        "hidden_size": sizes.hidden,
        "max_position_embeddings": 4 * _LENGTH,
    }
    if hasattr(text, "num_key_value_heads"):
        changes["num_key_value_heads"] = sizes.kv_heads
    if hasattr(text, "head_dim"):
        changes["head_dim"] = sizes.head_dim
    if getattr(text, "qk_rope_head_dim", None):
        changes["qk_rope_head_dim"] = sizes.head_dim
        changes["qk_head_dim"] = _SMALL["qk_nope_head_dim"] + sizes.head_dim
    if "index_head_dim" in changes:  # of which as many numbers are rotated
        changes["index_head_dim"] = max(changes["index_head_dim"], sizes.head_dim)
    if dense := getattr(text, "first_k_dense_replace", None):
        changes["first_k_dense_replace"] = sum(layer < dense for layer in layers)
    if not getattr(text, "head_dim", None) or text.head_dim * heads == text.hidden_size:
        changes["hidden_size"] = sizes.kv_heads * group * sizes.head_dim
    for name, value in vars(text).items():
        # Lists with an item for each layer keep the items of the layers that stay.
        if isinstance(value, (list, tuple)) and len(value) == count and count > 1:
            changes[name] = [_SMALL.get(name, value[layer]) for layer in layers]
    for name in _LAYER_NUMBERS:
        if (numbers := getattr(text, name, None)) is not None:
            changes[name] = [place for place, layer in enumerate(layers) if layer in numbers]
    for name in _SPECIAL_IDS:
        if getattr(text, name, None) is not None:
            changes[name] = 0 if name == "pad_token_id" else 1
    if shared := getattr(text, "num_kv_shared_layers", None):
        changes["num_kv_shared_layers"] = sum(layer >= count - shared for layer in layers)
    changes |= _of_state_layers(text, changes["hidden_size"])
    in_all = {name: getattr(text, name, None) for attributes in own for name in attributes}
    for name, value in changes.items():
        # Some names are read-only properties of others that are changed here.
        if not (isinstance(found := getattr(type(text), name, None), property) and found.fset is None):
            setattr(text, name, value)
    if in_all:
        text.per_layer_config = {
            place: {
                name: _in_proportion(value, in_all[name], getattr(text, name, None))
                for name, value in attributes.items()
            }
            for place, attributes in enumerate(own)
        }
    _shrink_longrope(text, sizes.head_dim)
    for part in vars(small).values():
        # Other parts (a vision tower) become as small as possible: no token passes through them.
        if isinstance(part, PretrainedConfig) and part is not text and getattr(part, "num_hidden_layers", None):
            part.num_hidden_layers = 1
    if layer_types(text) != [kinds[layer] for layer in layers]:
        raise ModelError(
            f"{text.model_type!r} has layers of several kinds, and which is which follows from a rule that the runtime "
            "does not know: a small twin of it cannot be made"
        )
    small.dtype = text.dtype = torch.float32
    return small


def _shrink_longrope(config: PretrainedConfig, head_dim: int) -> None:
    """Its factors are of each pair of numbers of a head; the twin's text is one of short histories."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return
    pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        factors = rope[name]
        rope[name] = [factors[pair * len(factors) // pairs] for pair in range(pairs)]
    rope["original_max_position_embeddings"] = 2 * _LENGTH
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = 2 * _LENGTH


def _of_state_layers(config: PretrainedConfig, hidden: int) -> dict[str, int]:
    """Sizes of layers with a recurrent state, with as few heads as show how many of them share keys, or are a group."""
    sizes: dict[str, int] = {}
    keys, values = (getattr(config, f"linear_num_{name}_heads", None) for name in ("key", "value"))
    if keys and values:
        sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * max(1, values // keys)}
    for heads, size, state, groups, inner in _STATE_SPACES:
        if getattr(config, heads, None):
            width = hidden * (getattr(config, "mamba_expand", None) or getattr(config, "expand", None) or 2)
            sizes |= {heads: width // _STATE_HEAD, size: _STATE_HEAD, state: 16}
            sizes |= {groups: min(2, getattr(config, groups, None) or 1)}
            sizes |= {inner: width} if getattr(config, inner, None) else {}
    return sizes


def _attributes_of_layer(config: PretrainedConfig, layer: int) -> dict[str, Any]:
    """What the configuration says of this layer, where it does not say the same of all."""
    own = config.per_layer_config[layer]
    names = [*(config.per_layer_attributes or ()), *(["skip"] if getattr(own, "skip", None) else [])]
    return {name: getattr(own, name) for name in names}


def _in_proportion(value: Any, in_all: Any, small: Any) -> Any:
    """A size of a layer of the twin. in_all: the configuration's size of all others, which is `small` in the twin."""
    sizes = (value, in_all, small)
    return max(1, value * small // in_all) if all(isinstance(size, int) and size > 0 for size in sizes) else value


def representative_layers(config: PretrainedConfig, traits: Sequence[LayerTraits]) -> list[int]:
    """The first layer of each kind, those whose entries they read, and always the first two."""
    count = len(traits)
    by_layer = [value for value in vars(config).values() if isinstance(value, (list, tuple)) and len(value) == count]
    dense = getattr(config, "first_k_dense_replace", None) or 0  # layers before the first with experts
    by_layer.append(layer_types(config))  # some families work it out
    sorts = [(trait, index < dense, *(str(value[index]) for value in by_layer)) for index, trait in enumerate(traits)]
    first = {*(sorts.index(sort) for sort in dict.fromkeys(sorts)), *range(min(2, count))}
    return sorted(first | {read for layer in first if (read := traits[layer].reads) is not None})


def _of_layers(traits: Sequence[LayerTraits], layers: Sequence[int]) -> list[LayerTraits]:
    """The traits of a model that has these layers alone."""
    return [
        trait if trait.reads is None else replace(trait, reads=layers.index(trait.reads))
        for trait in (traits[layer] for layer in layers)
    ]


# -- ours --------------------------------------------------------------------------------------------------------------


def _in_chunks(twin: Twin, tokens: int, *, is_alone: bool) -> Tensor:
    context = twin.open()
    ours, neighbour = (SessionKV(Full(), context, _LENGTH) for _ in range(2))
    sessions = [ours] if is_alone else [neighbour, ours]
    logits = []
    for first in range(0, _LENGTH, tokens):
        chunk = twin.text[first : first + tokens]
        for session in sessions:
            session.stage(len(chunk))
        plan = StepPlan(sessions, context.geometry, context.pool, mask_dtype=torch.float32, ops=context.ops)
        real = plan.spans[-1].real
        packed = chunk if is_alone else np.concatenate([chunk[::-1], chunk])
        logits.append(twin.forward.run(Step(packed, plan, range(real.start, real.stop))).logits.cpu())
        for session in sessions:
            session.commit(session.length + len(chunk))
    return torch.cat(logits)


def _in_segments(twin: Twin, strategy: KVStrategy) -> Tensor:
    """The logits of the text, one segment per step if it may be; between segments the session is idle. All its tokens
    count as generated: appended ones read everything, whatever the strategy."""
    opened = twin.open()
    context = KVContext(
        geometry=opened.geometry,
        pool=opened.pool,
        rotate=opened.rotate,
        device=opened.device,
        latent=_ExactTokens(twin.geometry),
        components=_plain_components(twin.geometry),
        tier=Tier(_POOL_BYTES),
    )
    session = SessionKV(strategy, context, _LENGTH)
    logits: list[Tensor] = []

    def step(count: int) -> Tensor:
        first = session.next_position
        session.stage(count, np.ones(count, dtype=np.bool_))
        plan = StepPlan([session], context.geometry, context.pool, mask_dtype=torch.float32)
        real = plan.spans[0].real
        found = twin.forward.run(Step(twin.text[first : first + count], plan, range(real.start, real.stop))).logits
        session.commit(first + count)
        return found

    for first in range(0, _LENGTH, _SEGMENT):
        assert session.wake(_LENGTH), "the pool of a twin is large enough"
        while session.pending_replay:
            step(session.room())
        end = min(first + _SEGMENT, _LENGTH)
        while session.length < end:
            logits.append(step(min(session.room(), end - session.length)))
        session.idle()
    session.release()
    return torch.cat(logits)


class _ExactTokens(WholeTokens):
    """A latent codec that keeps every number as it is, in float32."""

    def __init__(self, geometry: Geometry) -> None:
        self.layers = latent_layers(geometry)
        self.bytes_per_token = self.least_bytes_per_token = exact_bytes_per_token(geometry)
        self._layers = [geometry.layers[layer] for layer in self.layers]

    def at(self, bytes_per_token: int) -> Self:
        assert bytes_per_token == self.bytes_per_token
        return self

    def encode(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        parts = [
            layer.entry.join(*pair).float().flatten(1) for layer, *pair in zip(self._layers, keys, values, strict=True)
        ]
        return torch.cat(parts, dim=1).view(torch.uint8)

    def decode(self, codes: Tensor, layers: Sequence[int] | None = None) -> tuple[list[Tensor], list[Tensor]]:
        sizes = [layer.kv_heads * layer.entry.width for layer in self._layers]
        parts = torch.split(codes.contiguous().view(torch.float32), sizes, dim=1)
        entries = [
            layer.entry.split(part.reshape(len(codes), layer.kv_heads, -1))
            for layer, part in zip(self._layers, parts, strict=True)
        ]
        wanted = [self.layers.index(layer) for layer in (self.layers if layers is None else layers)]
        return [entries[place][0] for place in wanted], [entries[place][1] for place in wanted]


def _plain_components(geometry: Geometry) -> dict[int, KeyComponents]:
    """The channels of keys as their components, in every layer that may choose tokens."""
    found = {}
    for index, layer in enumerate(geometry.layers):
        if layer.native_window is None:
            heads, head_dim = layer.kv_heads, layer.head_dim
            found[index] = KeyComponents(
                mean=torch.zeros(heads, head_dim),
                basis=torch.eye(head_dim).expand(heads, -1, -1).contiguous(),
                deviations=torch.ones(heads, head_dim),
            )
    return found


# -- plain attention under a rule --------------------------------------------------------------------------------------


def _expected(twin: Twin, strategy: KVStrategy) -> Tensor:
    """The correct logits under `strategy`."""
    rules = [strategy.rule(index, twin.geometry) for index in range(len(twin.geometry.layers))]
    if all(rule.window is None for rule in rules):
        return twin.expected
    plan = _PlainPlan(
        [
            Layout.of(rule, twin.geometry, layer.native_window, _LENGTH)
            for rule, layer in zip(rules, twin.geometry.layers, strict=True)
        ]
    )
    is_long = twin.geometry.within(_LENGTH) is twin.geometry
    with torch.inference_mode(), twin.seam.attending(plan, plan.positions):
        out = twin.seam.model(
            input_ids=torch.from_numpy(twin.text[plan.tokens])[None],
            position_ids=torch.from_numpy(plan.positions if is_long else ~plan.positions)[None],
            use_cache=False,
        )
    logits: Tensor = out.logits[0, :_LENGTH].float()
    return logits


class _PlainPlan:
    """Attention of the whole text at once, under each layer's layout, without code of the runtime.

        tokens   0 … 47 | 0' 1' | 0'' 1'' | …      the text, then each sink token again at every position it is moved to

    In every layer a moved copy gets the attention output of the original token. So it enters the next layer as that
    token does, and its key there is the token's key at the other position, rotated by the model itself.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._layouts = layouts
        moves = {
            (token, shift)
            for layout in layouts
            for start in range(0, _LENGTH, _SEGMENT)
            if (shift := layout.sink_shift(start))
            for token in range(layout.sink)
        }
        self._written: dict[int, tuple[Tensor, Tensor]] = {}  # for layers of the model that read another's
        self._moved = {move: _LENGTH + place for place, move in enumerate(sorted(moves))}
        self.tokens: NDArray[np.int64] = np.array([*range(_LENGTH), *(token for token, _ in self._moved)])
        self.positions: NDArray[np.int64] = np.array([*range(_LENGTH), *(sum(move) for move in self._moved)])

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
        *,
        scaling: float,
        softcap: float | None,
        head_sinks: Tensor | None,
        own: OwnQueries | None,
    ) -> Tensor:
        """queries [1, Hq, N, D], keys and values [1, Hkv, N, D] -> [1, N, Hq, D]."""
        if own is not None:
            queries = own.absorbed(slice(None)).transpose(0, 1)[None]
        if keys is not None and values is not None:
            self._written[layer] = keys, values
        keys, values = self._written[layer]
        group = queries.shape[1] // keys.shape[1]
        own_keys, own_values = (states[0].repeat_interleave(group, dim=0) for states in (keys, values))
        out = queries.new_empty(_LENGTH, queries.shape[1], values.shape[-1])
        for segment, sources, visible in self._segments(self._layouts[layer]):
            scores = queries[0, :, segment] @ own_keys[:, sources].transpose(1, 2) * scaling
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            scores = scores.masked_fill(~torch.from_numpy(visible), float("-inf"))
            if head_sinks is not None:
                drain = head_sinks[:, None, None].expand(-1, scores.shape[1], 1)
                scores = torch.cat([scores, drain], dim=-1)
            weights = scores.softmax(-1)[..., : len(sources)]
            out[segment] = (weights @ own_values[:, self.tokens[sources]]).transpose(0, 1)
        return (out if own is None else own.output(out))[self.tokens][None]

    def mix(self, _layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """The text as one sequence; a moved copy gets the output of its token."""
        return mixer(hidden[:, :_LENGTH], None)[0][:, self.tokens]

    def _segments(self, layout: Layout) -> Iterator[tuple[slice, NDArray[np.int64], NDArray[np.bool_]]]:
        """For each segment: its queries, the token that each position's key is read from, and the attention mask."""
        held = np.arange(_LENGTH)
        for start in range(0, _LENGTH, _SEGMENT):
            positions = np.arange(start, start + _SEGMENT)
            shift = layout.sink_shift(start)
            sources = held.copy()
            for token in range(layout.sink) if shift else ():
                sources[token] = self._moved[token, shift]
            yield slice(start, start + _SEGMENT), sources, layout.visible(positions, held)
