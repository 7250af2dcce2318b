"""The list of a model that is split between ranks: that of a narrow one, with sums between its operations."""

from __future__ import annotations

from dataclasses import replace

from inference_engine.models.operations import (
    Add,
    AllReduce,
    Attend,
    Convolve,
    DeltaRule,
    Embed,
    Experts,
    Gated,
    NoStepListError,
    Operation,
    Product,
    SelectiveScan,
    StepList,
)


def of_rank(steps: StepList, rank: int, ranks: int) -> StepList:
    """The list of a narrow model as rank number `rank` runs it: with a sum wherever a rank has a part of the numbers.

    What the parts are added to, the first rank alone adds. Raises NoStepListError for what cannot be split.
    """
    if ranks == 1:
        return steps
    found: list[Operation] = []
    split: set[str] = set()  # registers of which each rank has other numbers
    left = list(steps.operations)
    while left:
        operation = left.pop(0)
        if isinstance(operation, (Convolve, DeltaRule, SelectiveScan)):
            raise NoStepListError("its layers with recurrent states are not split between ranks yet")
        if isinstance(operation, (Attend, Gated)):
            split.add(operation.output)
        elif isinstance(operation, Experts) or (isinstance(operation, Product) and operation.input in split):
            found += _summed(operation, left, rank)
            continue
        elif operation.writes is not None and operation.writes not in operation.reads:
            split.discard(operation.writes)
        found.append(operation)
        if isinstance(operation, Embed):
            found.append(AllReduce(register=operation.output))
    return replace(steps, operations=tuple(found))


def _summed(operation: Experts | Product, left: list[Operation], rank: int) -> list[Operation]:
    """The operation whose output is one of `ranks` parts, and the sum behind it."""
    assert operation.output is not None, "the head reads what all ranks have"
    following = left[0] if left else None
    if not isinstance(following, Add) or following.input != operation.output or following.factor != 1.0:
        return [operation, AllReduce(register=operation.output)]
    left.pop(0)
    own = [operation, following] if rank == 0 else [replace(operation, output=following.output)]
    return [*own, AllReduce(register=following.output)]
