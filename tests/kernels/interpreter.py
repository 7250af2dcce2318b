"""How Triton's interpreter is prepared in a child process, before kernels are imported."""

from __future__ import annotations

from typing import Any

import numpy as np


class _IsInt(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, int)

    def __call__(cls, *numbers: Any) -> int:
        return int(np.asarray(*numbers).reshape(()))


class _IntOfArray(metaclass=_IsInt):
    """int() as Triton's interpreter calls it: of arrays of one number too, which numpy no longer allows."""


def prepare() -> None:
    """Let the interpreter take this numpy, and make nothing twice that stays the same, which takes most of its time.

    Each operation makes the types of its operands and their shapes anew, finds out of operands of one type, or of a
    pointer and a number, which type both have, and computes whether integers overflow for an assertion of debug mode.
    Each call of a jitted function replaces the functions of the language again.
    """
    from triton import language
    from triton.language import core, semantic
    from triton.runtime import interpreter

    interpreter.int = _IntOfArray
    patch, numpy_type, replaced = interpreter._patch_lang, interpreter._get_np_dtype, set[int]()
    init, equals, type_of = core.tensor.__init__, core.tuple.__eq__, core._type_for_tuple_values
    kept, shapes, most_bytes = dict[object, Any](), dict[str, Any](), dict[str, float]()

    def patch_once(function: Any) -> Any:
        modules = [id(value) for value in function.__globals__.values() if value is language or value is core]
        if not replaced.issuperset(modules):
            patch(function)  # for as long as the process lives
            replaced.update(modules)
        return interpreter._LangPatchScope()

    def numpy_type_once(kind: Any) -> Any:
        if kind.name not in kept:
            kept[kind.name] = numpy_type(kind)
        return kept[kind.name]

    def init_with_shape(self: Any, handle: object, kind: Any) -> None:
        name = kind.name  # which has its shape
        if name not in shapes:
            init(self, handle, kind)
            shapes[name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shapes[name]

    def block_of(self: Any, element: Any, shape: Any) -> None:
        key = ("block", element.name, *[unwrap_plainly(size) for size in unwrap_plainly(shape)])
        if key not in kept:
            init_block(self, element, shape)
            kept[key] = self.shape, self.numel, self.name
        self.element_ty = element
        self.shape, self.numel, self.name = kept[key]

    def block_to_ir_once(self: Any, builder: Any) -> Any:
        key = ("ir", self.name)
        if key not in kept:
            kept[key] = block_to_ir(self, builder)
        return kept[key]

    def fits(array: Any, kind: Any) -> bool:
        if kind.name not in most_bytes:
            is_pointer = isinstance(kind, core.pointer_type)
            most_bytes[kind.name] = float("inf") if is_pointer else max(1.0, kind.primitive_bitwidth / 8)
        return bool(array.itemsize <= most_bytes[kind.name])

    def type_of_numbers_once(values: Any, fields: Any = None) -> Any:
        if fields or any(type(value) is not int for value in values):
            return type_of(values, fields)
        key = ("numbers", *values)
        if key not in kept:
            kept[key] = type_of(values)
        return kept[key]

    def equals_numbers(self: Any, other: Any) -> Any:
        numbers = [value.value if isinstance(value, core.constexpr) else value for value in other]
        if any(type(value) is not int for value in numbers):
            return equals(self, other)
        return core.constexpr(self.values == numbers)

    unwrap, constant, with_element = (
        core._unwrap_if_constexpr,
        semantic.TritonSemantic.scalar_constant,
        core.block_type.with_element_ty,
    )
    one_type = semantic.TritonSemantic.binary_op_type_checking_impl
    init_block, block_to_ir = core.block_type.__init__, core.block_type.to_ir
    plain = {int, bool, float, str, type(None), core.tensor, core.dtype}

    def unwrap_plainly(value: Any) -> Any:
        if type(value) in plain:
            return value
        if isinstance(value, core.constexpr):
            return value.value
        return unwrap(value) if isinstance(value, (list, tuple, core.tuple)) else value

    def constant_once(self: Any, value: Any, dtype: Any) -> Any:
        key = ("constant", type(value), value, dtype.name)
        if key not in kept:
            kept[key] = constant(self, value, dtype)
        return kept[key]

    def with_element_once(self: Any, element: Any) -> Any:
        key = ("with", element.name, self.name)
        if key not in kept:
            kept[key] = with_element(self, element)
        return kept[key]

    def call_with(semantics: Any, member: Any) -> Any:
        return lambda *arguments, _semantic=None, **words: member(*arguments, _semantic=semantics, **words)

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        scope.set_attr(owner, name, call_with(semantic.TritonSemantic(builder), member))

    integers, counted, numbers = {"int32", "int64"}, {"int32", "int64", "fp32"}, {"int1", "int32", "int64", "fp32"}

    def one_type_at_once(
        self: Any,
        left: Any,
        right: Any,
        ptr: bool = False,
        other: bool = False,
        joins: bool = True,
        divides: bool = False,
    ) -> Any:
        if isinstance(left, core.tensor) and joins:
            kind, name = left.type, left.dtype.name
            is_address = ptr and type(left.dtype) is core.pointer_type
            if isinstance(right, core.tensor):
                beside = right.dtype.name
                if name == "int64" and beside == "int32":
                    right = self.cast(right, core.int64)
                elif name == "int32" and beside == "int64":
                    left = self.cast(left, core.int64)
                elif not (beside in integers if is_address else name == beside and name in numbers):
                    return one_type(self, left, right, ptr, other, joins, divides)
                is_one_shape = left.type.name == right.type.name or not (kind.is_block() or right.type.is_block())
                return (left, right) if is_one_shape else self.broadcast_impl_value(left, right)
            if type(right) is int and 0 <= right < 2**31 and (is_address or name in counted):
                key = ("constant of", kind.name, right)
                if key not in kept:
                    kept[key] = one_type(self, left, right, ptr, other, joins, divides)[1]
                return left, kept[key]
        return one_type(self, left, right, ptr, other, joins, divides)

    core._unwrap_if_constexpr, core.block_type.with_element_ty = unwrap_plainly, with_element_once
    core.block_type.__init__, core.block_type.to_ir = block_of, block_to_ir_once
    interpreter._validate_np_data_size = fits
    semantic.TritonSemantic.scalar_constant = constant_once
    semantic.TritonSemantic.binary_op_type_checking_impl = one_type_at_once
    interpreter._patch_attr = patch_attribute
    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, numpy_type_once
    core.tensor.__init__, core.tuple.__eq__, core._type_for_tuple_values = (
        init_with_shape,
        equals_numbers,
        type_of_numbers_once,
    )
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
