"""The recurrent states of one session: what its state layers keep of the history, instead of an entry of each token.

    committed   the state of each layer after `position` tokens, in the pool
    working     those that the step computes, until it is committed; memory of the step, as its activations are
    inputs      of a step of few tokens, what each layer got: if its last tokens are rejected, the layer runs once more
                over the others, from the committed state
    replayed    where entries are recomputed from position 0 on (`restored` without an archive): a second set, which
                goes along while the committed one stays as it is
    prefix      of a fork that reads its first entries in another session's memory: the states where they end
    lent        the same, for forks of this session

A state exists after the last committed token, and where a shared prefix ends. A session that goes back to another
position prefills again, from such an end or from position 0.

A layer runs over one session at a time, in pieces that end at multiples of a segment. So the bits of a state depend on
the inputs and on the cuts that are no such multiples, not on how many segments a step has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.errors import InvariantViolated
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry, Recurrent
from inference_engine.kv.layout import Positions
from inference_engine.kv.memory.allocation import Allocation, allocation_bytes
from inference_engine.kv.memory.pool import Demand, Run
from inference_engine.kv.part import Held, Part, Saved
from inference_engine.kv.views import Mixer, StagedQueries, State, StatesOfStep, StepReads

# Inputs of longer steps are not kept: in a prefill they would be larger than the states. Drafts are shorter.
_MOST_KEPT_INPUTS = 64
MOST_REJECTED = _MOST_KEPT_INPUTS - 1
_ALIGNMENT = 16  # bytes, of each tensor of a state


@dataclass(slots=True)
class States:
    """The states of all layers after the same number of tokens. memory: [bytes], of the pool; after no tokens it holds
    anything."""

    layers: Mapping[int, Recurrent]
    memory: Tensor
    position: int = 0
    views: dict[int, State] = field(init=False)

    def __post_init__(self) -> None:
        self.views, at = {}, 0
        for layer, state in self.layers.items():
            views = []
            for tensor in state.tensors:
                raw = self.memory[at : at + tensor.nbytes]
                views.append(raw.view(getattr(torch, tensor.dtype)).view(tensor.shape))
                at += _aligned(tensor.nbytes)
            self.views[layer] = tuple(views)

    def before(self, layer: int) -> State | None:
        """None before the first token: the mixer begins with a state of its own."""
        return self.views[layer] if self.position else None

    def put(self, layer: int, state: State) -> None:
        for view, tensor in zip(self.views[layer], state, strict=True):
            assert (view.shape, view.dtype) == (tensor.shape, tensor.dtype), "a state is made of the same each time"
            view.copy_(tensor)

    def copy_from(self, other: States) -> None:
        self.memory.copy_(other.memory)
        self.position = other.position

    def clear(self) -> None:
        self.memory.zero_()
        self.position = 0


class PrefixStates:
    """The states at the end of a shared prefix: from them its forks begin, and go on when they were dropped, and so
    does the session that they were made from.

    They are in no session's bound: as entries of a session that ended, they stay until the last borrower has given
    them back. Until the engine's thread has copied them, they are those of `source`, which does not move on before.
    """

    def __init__(self, context: KVContext, allocation: Allocation, source: RecurrentStates, position: int) -> None:
        demand = states_demand(context.geometry)
        self.allocation = allocation
        self.nbytes = allocation.nbytes
        self.position = position
        self._source: RecurrentStates | None = source
        memory = context.pool.run(demand, allocation.starts[0]).view(torch.uint8)
        self._states = States(context.geometry.state_layers, memory)

    @staticmethod
    def reserve(context: KVContext, source: RecurrentStates, position: int) -> PrefixStates | None:
        """None, and nothing taken, if the pool has no room."""
        demands = RecurrentStates.demands(context.geometry, replays=False)
        allocation = Allocation.reserve(context.pool, demands, itemsize=context.geometry.itemsize)
        return None if allocation is None else PrefixStates(context, allocation, source, position)

    def fill(self) -> None:
        """Engine's thread."""
        if self._source is not None and self._source.holds(self.position):
            self._source.copy_to(self._states, self.position)
            self._source = None

    @property
    def states(self) -> States | None:
        """None until they are filled, which they will not be any more if their source has failed."""
        return self._states if self._source is None else None


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def states_demand(geometry: Geometry) -> Demand:
    """The memory of one set of states."""
    tensors = [tensor for state in geometry.state_layers.values() for tensor in state.tensors]
    return Demand.of_bytes(geometry, sum(_aligned(tensor.nbytes) for tensor in tensors))


class RecurrentStates(Part):
    def __init__(
        self, context: KVContext, allocation: Allocation, demands: Sequence[Demand], prefix: PrefixStates | None
    ) -> None:
        """demands: of the committed set and, where entries are recomputed from position 0 on, of a second one.

        prefix: borrowed by the caller, as long as this is used.
        """
        self._context = context
        self._segment = context.geometry.segment_tokens
        self._allocation = allocation
        self._nbytes = [allocation_bytes([demand], itemsize=context.geometry.itemsize) for demand in demands]
        layers = context.geometry.state_layers
        sets = [
            States(layers, context.pool.run(demand, start).view(torch.uint8))
            for demand, start in zip(demands, allocation.starts, strict=True)
        ]
        self.committed, self._replayed = sets[0], sets[1] if len(sets) > 1 else None
        self._prefix = prefix
        self._lent: list[PrefixStates] = []  # this session holds them, too
        self._working: dict[int, State] = {}
        self._inputs: dict[int, tuple[Mixer, Tensor]] = {}
        self._of = self.committed  # the set that the staged tokens go on from
        self._staged = 0

    @staticmethod
    def demands(geometry: Geometry, *, replays: bool) -> tuple[Demand, ...]:
        return (states_demand(geometry),) * (1 + replays) if geometry.states else ()

    @staticmethod
    def bytes_of(geometry: Geometry) -> int:
        """Those of one set of states, as they are reserved; 0 if no layer has one."""
        demands = RecurrentStates.demands(geometry, replays=False)
        return allocation_bytes(demands, itemsize=geometry.itemsize)

    @classmethod
    def reserve(cls, context: KVContext, *, replays: bool, prefix: PrefixStates | None = None) -> Self | None:
        """None, and nothing taken, if the pool has no room."""
        demands = RecurrentStates.demands(context.geometry, replays=replays)
        allocation = Allocation.reserve(context.pool, demands, itemsize=context.geometry.itemsize)
        return None if allocation is None else cls(context, allocation, demands, prefix)

    @property
    def runs(self) -> Sequence[Run]:
        return self._allocation.runs

    def _after(self, position: int) -> States | None:
        """Those after so many tokens, if they are there."""
        if position == self.committed.position:
            return self.committed
        ends = [*self._lent, *([] if self._prefix is None else [self._prefix])]
        return next((each.states for each in ends if each.position == position), None)

    def holds(self, position: int) -> bool:
        """Are the states there after so many tokens?"""
        return self._after(position) is not None

    def copy_to(self, to: States, position: int) -> None:
        """Those that it holds after so many tokens."""
        states = self._after(position)
        assert states is not None
        to.copy_from(states)

    # -- a shared prefix -------------------------------------------------------------------------------------------

    def lend(self, position: int) -> PrefixStates | None:
        """The states after so many tokens, which it holds, for a fork that reads their entries. None if the pool has no
        room."""
        for each in self._lent:
            if each.position == position:
                return each
        if (lent := PrefixStates.reserve(self._context, self, position)) is not None:
            self._lent.append(lent)
        return lent

    def end_lending(self, until: int) -> None:
        """Give back what no fork has borrowed. until: the position to which forks read entries, where this session may
        have to go back to, whether or not that fork is still there; 0: none reads any."""
        lent, self._lent = self._lent, []
        for each in lent:
            if each.allocation.is_lent or 0 < until == each.position:
                self._lent.append(each)
            else:
                each.allocation.release()

    # -- a step ----------------------------------------------------------------------------------------------------

    def stage(self, positions: Positions, generated: NDArray[np.bool_]) -> int:
        first = int(positions[0])
        for lent in self._lent:
            lent.fill()
        replayed = self._replayed
        is_replay = replayed is not None and first == replayed.position
        if first and first != self.committed.position and not is_replay and self.holds(first):
            self.copy_to(self.committed, first)
        if first == self.committed.position:
            self._of = self.committed
            if replayed is not None:
                replayed.position = 0  # it is over
        else:
            if replayed is None or first not in (0, replayed.position):
                raise InvariantViolated(
                    "INV1", f"states after {self.committed.position} tokens, and positions from {first} on are staged"
                )
            if not first:
                replayed.position = 0
            self._of = replayed
        self._staged = len(positions)
        return first

    def read(self, queries: StagedQueries, step: StepReads) -> int:
        return sys.maxsize

    def of_step(self) -> StatesOfStep | None:
        """For kernels that compute the staged tokens before they are committed. None: modules do, by `mix`."""
        return None

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """The output [1, n, H] of a state layer for the staged tokens, whose inputs are `hidden` [1, n, H]."""
        count = hidden.shape[1]
        if count != self._staged:
            raise InvariantViolated("INV1", f"{self._staged} tokens are staged, a state layer gets {count}")
        if 1 < count <= _MOST_KEPT_INPUTS:
            self._inputs[layer] = mixer, hidden.clone()
        return self._run(layer, mixer, hidden)

    def _run(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        state, outs = self._of.before(layer), []
        for some in self._pieces(hidden.shape[1]):
            out, state = mixer(hidden[:, some], state)
            outs.append(out)
        assert state is not None
        self._working[layer] = state
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def _pieces(self, count: int) -> Iterator[slice]:
        """Cuts of the staged tokens at multiples of a segment, counted from position 0."""
        first = self._of.position
        cuts = range((first // self._segment + 1) * self._segment, first + count, self._segment)
        for begin, end in pairwise([first, *cuts, first + count]):
            yield slice(begin - first, end - first)

    def keepable(self, count: int) -> int:
        """How many of the staged tokens can be kept if the last ones are rejected, `count` at most."""
        return count if count == self._staged or len(self._inputs) else 0

    def commit(self, before: int, length: int, rejected: Positions) -> None:
        kept = length - before
        try:
            if kept and len(rejected):
                if len(self._inputs) != len(self.committed.layers):
                    raise InvariantViolated(
                        "INV1", f"{kept} of {self._staged} tokens are kept, and states are there after all of them"
                    )
                with torch.inference_mode():
                    for layer, (mixer, hidden) in self._inputs.items():
                        self._run(layer, mixer, hidden[:, :kept])
            if kept:
                if len(self._working) != len(self.committed.layers):
                    raise InvariantViolated("INV1", f"{len(self._working)} states were computed for {kept} tokens")
                for layer, state in self._working.items():
                    self._of.put(layer, state)
                self._of.position = length
        finally:
            self._working.clear()
            self._inputs.clear()
            self._staged = 0

    # -- as a whole ------------------------------------------------------------------------------------------------

    def copy_from(self, other: RecurrentStates, length: int) -> None:
        other.copy_to(self.committed, length)

    def save(self, length: int) -> Saved:
        if not length:
            return {}
        states = self._after(length)
        assert states is not None
        return {"states": list(states.views.values())}

    def load(self, length: int, saved: Saved) -> None:
        for layer, state in zip(self.committed.views, saved["states"], strict=True):
            self.committed.put(layer, state)
        self.committed.position = length

    def can_rewind(self, at: int, length: int) -> bool:
        return self.holds(at)

    def forget(self, at: int, length: int) -> None:
        self._working.clear()
        self._inputs.clear()
        self._staged = 0
        if at != self.committed.position:
            self.committed.clear()  # the next step begins where a shared prefix ends, if it is not position 0

    def release(self) -> None:
        self._working.clear()
        self._inputs.clear()
        lent, self._lent = self._lent, []
        for each in lent:
            each.allocation.release()
        self._allocation.release()

    # -- facts -----------------------------------------------------------------------------------------------------

    def report(self, held: Held, length: int, end: int) -> None:
        used = [self.committed.position + self._staged > 0, self._replayed is not None and self._replayed.position > 0]
        held.add(states=sum(nbytes for nbytes, is_used in zip(self._nbytes, used, strict=False) if is_used))
