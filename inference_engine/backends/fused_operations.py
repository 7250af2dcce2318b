"""Of a list of operations, neighbours that a device has one kernel for.

    norm · product · (gated activation | sum)             one `product` of `kernels/fused.py`
    norms of heads · rotation · K and V written           one `place_heads`, before the step's attention
    norm · sum · factor                                   one `norm`
    norm · router · experts · sum                         one `mix_experts`

What is not found so stays as it is, and is refused by name if there is no kernel for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from inference_engine.kernels.fused import SQUARES
from inference_engine.kv.geometry import UNROTATED
from inference_engine.models.operations import (
    Add,
    Arrange,
    Attend,
    AttendEarlier,
    Experts,
    Gated,
    Norm,
    NoStepListError,
    Operation,
    Product,
    Rotate,
    Scale,
    Slice,
    StepList,
    UnitNorm,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedProduct:
    """output = (output +) (activation of) factor · norm(input) · [matrices] + biases. output None: the logits.

    copied: the keys among its outputs that are values, too, before they are normed. is_part: others fill the rest of
    the output.
    """

    product: Product
    output: str | None
    norm: Norm | None = None
    factor: float = 1.0
    activation: str | None = None
    adds: bool = False
    copied: Slice | None = None
    is_part: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class NormStep:
    """output = ((residual +) norm(input)) · the one number of `scale`."""

    norm: Norm
    output: str
    residual: str | None = None
    scale: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedAttend:
    """Norms of queries, keys and values, their rotation, K and V written, and attention.

    value_epsilon, values_are_keys, shared: as `PlaceHeads` has them. back: where each number of a head lies in what
    attention gives; None: there.
    """

    attend: Attend | AttendEarlier
    norms: tuple[Norm, Norm] | None = None
    rotary: str = UNROTATED
    value_epsilon: float | None = None
    values_are_keys: bool = False
    shared: tuple[int, ...] = ()
    back: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedExperts:
    """output = (output +) the mixture of experts for norm(input), which `router` chooses; None: there are logits."""

    experts: Experts
    router: Product | None
    norm: Norm | None
    output: str
    adds: bool = False


FusedOperation = Operation | FusedProduct | NormStep | FusedAttend | FusedExperts


def fuse(steps: StepList, turned: Mapping[str, int]) -> tuple[FusedOperation, ...]:
    """The operations, neighbours joined where one kernel does both. turned: the numbers that each table rotates.

    Raises NoStepListError for what can only be done joined, and is not.
    """
    found: list[FusedOperation] = []
    left = list(steps.operations)
    while left:
        operation = left.pop(0)
        match operation:
            case Norm(heads=1, offset=0) if operation.width == steps.widths[operation.input]:
                found.append(_fused_norm(operation, left))
            case Norm() | UnitNorm() | Rotate() | Arrange() | Attend() | AttendEarlier():
                found += _fused_attend(operation, left, steps, turned, found[-1] if found else None)
            case Product() if left and isinstance(left[0], Experts) and operation.input == left[0].input:
                found.append(_fused_experts(None, operation, left))
            case Product():
                found.append(_fused_product(operation, None, left))
            case Experts():
                left.insert(0, operation)
                found.append(_fused_experts(None, None, left))
            case _:
                found.append(operation)
    return tuple(found)


def _fused_norm(norm: Norm, left: list[Operation]) -> FusedProduct | NormStep | FusedExperts:
    factor, rest = _factor(norm, left)
    following = rest[0] if rest else None
    if isinstance(following, Product) and following.input == norm.output:
        experts = rest[1] if len(rest) > 1 else None
        is_mixture = isinstance(experts, Experts) and experts.input == norm.output and factor == 1.0
        if not any(norm.output in later.reads for later in _until_written(rest[1 + is_mixture :], norm.output)):
            left[:] = rest[1:]
            return (
                _fused_experts(norm, following, left) if is_mixture else _fused_product(following, norm, left, factor)
            )
    if isinstance(following, Experts) and following.input == norm.output and factor == 1.0:
        return _fused_experts(norm, None, left)
    following = left[0] if left else None
    output, residual = norm.output, None
    if isinstance(following, Add) and norm.output in (following.input, following.output) and following.factor == 1.0:
        left.pop(0)
        output = following.output
        residual = following.input if following.output == norm.output else following.output
    following = left[0] if left else None
    if isinstance(following, Scale) and following == Scale(register=output, tensor=following.tensor):
        left.pop(0)
        return NormStep(norm=norm, output=output, residual=residual, scale=following.tensor)
    return NormStep(norm=norm, output=output, residual=residual)


def _factor(norm: Norm, left: list[Operation]) -> tuple[float, list[Operation]]:
    """What the norm is multiplied by right behind it, and the operations behind that."""
    following = left[0] if left else None
    if isinstance(following, Scale) and following == Scale(register=norm.output, factor=following.factor):
        return following.factor, left[1:]
    return 1.0, left


def _fused_experts(norm: Norm | None, router: Product | None, left: list[Operation]) -> FusedExperts:
    experts = left.pop(0)
    assert isinstance(experts, Experts)
    if router is not None:
        is_one = len(router.matrices) == 1 and not (router.biases or router.offset) and router.count is None
        if router.output != experts.router or not is_one:
            raise NoStepListError(f"{', '.join(router.matrices)} choose experts in another way than one product")
    following = left[0] if left else None
    if isinstance(following, Add) and following.input == experts.output and following.factor == 1.0:
        left.pop(0)
        return FusedExperts(experts=experts, router=router, norm=norm, output=following.output, adds=True)
    return FusedExperts(experts=experts, router=router, norm=norm, output=experts.output)


def _fused_product(product: Product, norm: Norm | None, left: list[Operation], factor: float = 1.0) -> FusedProduct:
    plain = FusedProduct(product=product, norm=norm, factor=factor, output=product.output)
    if product.offset:
        raise NoStepListError(f"{', '.join(product.matrices)} give a part of {product.output}")
    following = left[0] if left else None
    if product.count is not None:
        copy = following
        if not isinstance(copy, Slice) or (copy.output, copy.offset) != (product.output, product.count):
            raise NoStepListError(f"{', '.join(product.matrices)} give a part of {product.output}")
        if copy.input != product.output:
            return replace(plain, is_part=True)
        left.pop(0)
        following = left[0] if left else None
        if isinstance(following, Gated) and following.input == product.output:
            if following.activation != "relu" or (copy.first, copy.count) != (0, product.count):
                raise NoStepListError(f"there is no kernel for {following.activation} of what it is multiplied with")
            left.pop(0)
            return replace(plain, output=following.output, activation=SQUARES)
        return replace(plain, copied=copy)
    if isinstance(following, Gated) and following.input == product.output:
        left.pop(0)
        return replace(plain, output=following.output, activation=following.activation)
    if isinstance(following, Add) and following.input == product.output and following.factor == 1.0:
        left.pop(0)
        return replace(plain, output=following.output, adds=True)
    return plain


def _fused_attend(
    operation: Operation,
    left: list[Operation],
    steps: StepList,
    turned: Mapping[str, int],
    before: FusedOperation | None,
) -> list[FusedOperation]:
    """The operations on heads up to the attention that reads them: one kernel, where they are what it does."""
    own: list[Operation] = [operation]
    while not isinstance(own[-1], (Attend, AttendEarlier)):
        if not left or not isinstance(left[0], (Norm, UnitNorm, Rotate, Arrange, Attend, AttendEarlier)):
            left[:0] = own[1:]
            return [operation]  # of pieces that are no heads
        own.append(left.pop(0))
    attend = own[-1]
    layer, keeps = steps.layers[attend.layer], isinstance(attend, Attend)
    queries, keys, dim = layer.query_heads, layer.kv_heads if keeps else 0, layer.head_dim
    end = (queries + keys) * dim
    norms = [part for part in own if isinstance(part, Norm)]
    units = [part for part in own if isinstance(part, UnitNorm)]
    turns = [part for part in own if isinstance(part, Rotate)]
    orders = [part for part in own if isinstance(part, Arrange)]
    copied = before.copied if isinstance(before, FusedProduct) and before.output == attend.input else None
    of_queries, of_keys = (queries, dim, 0), (keys, dim, queries * dim)
    is_joined = (
        [(norm.heads, norm.width, norm.offset) for norm in norms] in ([], [of_queries, of_keys][: 1 + keeps])
        and len({norm.plus_one for norm in norms}) < 2
        and [(unit.heads, unit.width, unit.offset) for unit in units] in ([], [(keys, dim, end)])
        and [(turn.heads, turn.width, turn.offset) for turn in turns] in ([], [(queries + keys, dim, 0)])
        and all(turned[turn.rotary] <= dim for turn in turns)
        and own[:-1] == [*norms, *units, *turns, *orders]
    )
    if not is_joined and not (units or copied or layer.shared_dim):
        return [*own[:-1], FusedAttend(attend=attend)]
    of_values = None if copied is None else (copied.first, copied.count, copied.offset)
    if not is_joined or of_values not in (None, (queries * dim, keys * dim, end)):
        raise NoStepListError(f"there is no kernel for how heads of stored layer {attend.layer} are made")
    found = FusedAttend(
        attend=attend,
        norms=(norms[0], norms[-1]) if norms else None,
        rotary=turns[0].rotary if turns else UNROTATED,
        value_epsilon=units[0].epsilon if units else None,
        values_are_keys=copied is not None,
    )
    return [_in_order(found, orders, left, queries, keys, dim) if orders else found]


def _in_order(
    found: FusedAttend, orders: Sequence[Arrange], left: list[Operation], queries: int, keys: int, dim: int
) -> FusedAttend:
    """With heads in the order of entries that keys and values share numbers of."""
    first, output, back = orders[0], found.attend.output, left.pop(0) if left else None
    shared, others = first.order[: first.weighted], first.order[first.weighted :]
    register, end = found.attend.input, (queries + keys) * dim
    places = [(queries, 0, first.order), (keys, queries * dim, first.order), (keys, end, others + shared)]
    restored = tuple((others + shared).index(number) for number in range(dim))
    if (
        found.norms is None
        or first.weights is None
        or [(each.heads, each.offset, each.order) for each in orders] != places[: 3 if keys else 1]
        or any((each.register, each.width) != (register, dim) for each in orders)
        or back != Arrange(register=output, heads=queries, width=dim, order=restored)
    ):
        raise NoStepListError(f"there is no kernel for how heads of stored layer {found.attend.layer} are made")
    # Of a layer that reads an earlier one's entries, the norm of keys is there.
    norms = found.norms[0], replace(found.norms[1], weights=first.weights)
    return replace(found, norms=norms, shared=shared, back=restored)


def _until_written(operations: Sequence[Operation], register: str) -> Sequence[Operation]:
    """Those before the first that replaces `register`."""
    for place, operation in enumerate(operations):
        if getattr(operation, "output", None) == register and not isinstance(operation, Add):
            return operations[:place]
    return operations
