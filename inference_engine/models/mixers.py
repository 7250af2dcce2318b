"""The layers of a model that keep a recurrent state: transformers' own modules, each run for one session at a time.

Their torch functions take one sequence each, and keep its state in a cache that they are given. Here the cache is an
object for one call: it has the state before, and afterwards the state behind it. What a state is made of is found by
test: the module runs over one token, and its cache says what it was given.

    family                          module                      state
    Qwen3-Next, Qwen3.5, 3.6        gated delta rule            last inputs of a convolution, a matrix for each head
    Olmo-Hybrid                     the same
    Granite-4-H, Bamba, Falcon-H1,
    Nemotron-H                      Mamba 2                     the same
    LFM2                            a short convolution         its last inputs
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from inference_engine.errors import ModelError
from inference_engine.kv.geometry import Recurrent, StateTensor
from inference_engine.kv.views import State

# Keywords of transformers that have no effect here; any other that is set is refused.
WITHOUT_EFFECT = {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict", "is_causal"}
# The names under which modules take their cache: `cache_params`, and of LFM2 `past_key_values`.
_CACHE_NAMES = ("cache_params", "past_key_values")


def unhonoured(module: nn.Module, name: str, given: Any, to: str) -> ModelError:
    """The error for a keyword that is set and would change something."""
    says = f"{name}={given!r}" if isinstance(given, bool | int | float | str) else name  # arrays say nothing
    return ModelError(f"{type(module).__name__} passes {says} to {to}, which cannot be honoured")


class StateCache:
    """What a module asks of its cache, for one layer and one session. The tensors that it was made with stay as they
    are: some functions write into what they are given."""

    def __init__(self, before: Mapping[tuple[str, int], Tensor] | None = None) -> None:
        self.tensors = {place: tensor.clone() for place, tensor in (before or {}).items()}

    def get_conv_state(self, _layer: int, state_idx: int = 0) -> Tensor | None:
        return self.tensors.get(("convolution", state_idx))

    def get_recurrent_state(self, _layer: int, state_idx: int = 0) -> Tensor | None:
        return self.tensors.get(("matrix", state_idx))

    def is_recording_past(self, _layer: int) -> bool:
        return False

    def update_conv_state(
        self, inputs: Tensor, _layer: int, state_idx: int = 0, *, conv_kernel_size: int, **_: Any
    ) -> Tensor:
        """inputs [1, C, n]: of the convolution. Returns them behind the last ones before."""
        before = self.get_conv_state(_layer, state_idx)
        if before is None:
            before = inputs.new_zeros(*inputs.shape[:-1], conv_kernel_size)
        inputs = torch.cat([before, inputs], dim=-1)
        self.tensors["convolution", state_idx] = inputs[..., -conv_kernel_size:].clone()
        return inputs

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.tensors["matrix", state_idx] = state
        return state


class SessionMixer(nn.Module):
    """Stands in the place of a module with a state, and has the step's plan run it for each session.

    number: of the layer in the model. now: has the `plan` of the step. keeps: what a session holds for it.
    """

    def __init__(
        self, original: nn.Module, number: int, now: Any, *, hidden_size: int, alike: SessionMixer | None = None
    ) -> None:
        """alike: one whose module has the same sizes. Raises ModelError if it keeps no state in its cache."""
        super().__init__()
        self.original = original
        self.number = number
        self._now: Any = now
        names = inspect.signature(original.forward).parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in names), "")
        if not self._cache_name:
            raise ModelError(
                f"{type(original).__name__} (layer {number}) takes no cache as {' or '.join(_CACHE_NAMES)}, and cannot "
                "be served"
            )
        self._places: tuple[tuple[str, int], ...]
        self.keeps: Recurrent
        if alike is not None:
            self._places, self.keeps = alike._places, alike.keeps
            return
        found = StateCache()
        with torch.inference_mode():
            self._call(_convolution(original).weight.new_zeros(1, 1, hidden_size), found)
        if not found.tensors:
            raise ModelError(
                f"{type(original).__name__} (layer {number}) keeps its state elsewhere than in the cache that it is "
                f"given as {self._cache_name}; it cannot be served"
            )
        self._places = tuple(sorted(found.tensors))
        tensors = [found.tensors[place] for place in self._places]
        self.keeps = Recurrent(
            tuple(
                StateTensor(tuple(each.shape), str(each.dtype).removeprefix("torch."), each.itemsize)
                for each in tensors
            )
        )

    def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
        """hidden_states [1, N, H]: of all tokens of the step; returns as many."""
        for name, value in given.items():
            if value is not None and value is not False and name not in WITHOUT_EFFECT:
                raise unhonoured(self.original, name, value, "a layer with a state")
        assert self._now.plan is not None, "a forward runs within Seam.attending"
        out: Tensor = self._now.plan.mix(self.number, self._mix, hidden_states)
        return out

    def _mix(self, hidden: Tensor, before: State | None) -> tuple[Tensor, State]:
        cache = StateCache(None if before is None else dict(zip(self._places, before, strict=True)))
        out = self._call(hidden, cache)
        return out, tuple(cache.tensors[place] for place in self._places)

    def _call(self, hidden: Tensor, cache: StateCache) -> Tensor:
        out: Tensor = self.original(hidden, **{self._cache_name: cache})
        return out


def original_name(name: str) -> str:
    """The name that a tensor of a model had before its modules with a state were replaced."""
    return name.replace(".original.", ".")


def _convolution(module: nn.Module) -> nn.Conv1d:
    """Over the sequence. It has the dtype of the module's inputs: no format quantises it."""
    return next(child for child in module.children() if isinstance(child, nn.Conv1d))


def _sizes(module: nn.Module) -> tuple[Hashable, ...]:
    """What its state depends on."""
    return type(module), *((name, one.shape, one.dtype) for name, one in module.named_parameters())


def is_mixer(module: nn.Module) -> bool:
    """Has it a state? It knows its layer, and has a convolution over the sequence."""
    return isinstance(getattr(module, "layer_idx", None), int) and any(
        isinstance(child, nn.Conv1d) for child in module.children()
    )


def take_mixers(
    model: PreTrainedModel, config: PretrainedConfig, wanted: list[int], now: Any
) -> dict[int, SessionMixer]:
    """Put a `SessionMixer` in the place of the module with a state of each of these layers. Raises ModelError."""
    places: dict[int, tuple[nn.Module, str, nn.Module]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            if is_mixer(child):
                places[child.layer_idx] = parent, name, child
    if sorted(places) != wanted:
        raise ModelError(
            f"{type(model).__name__}: {len(wanted)} layers have a recurrent state by its configuration, and modules "
            f"with one are found in {len(places)}; it cannot be served"
        )
    found: dict[int, SessionMixer] = {}
    by_sizes: dict[tuple[Hashable, ...], SessionMixer] = {}
    for number in wanted:
        parent, name, child = places[number]
        alike = by_sizes.get(sizes := _sizes(child))
        mixer = SessionMixer(child, number, now, hidden_size=config.hidden_size, alike=alike)
        by_sizes[sizes] = found[number] = mixer
        setattr(parent, name, mixer)
    return found
