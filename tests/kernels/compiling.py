"""Compiles, for a GPU that need not be there, the kernels that comparisons launch interpreted.

The interpreter runs more than the compiler takes: a variable that changes its type, shapes that are no powers of two.
Each launch is written down with the types of its arguments and the values of its constants, and the compiler gets the
same.

    python -m tests.kernels.compiling launches MODULE.FUNCTION ...    interpreted; prints launches, a literal a line
    python -m tests.kernels.compiling compile                         reads them; prints what is wrong, a line each
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.kernels import forking, interpreter

OPTIONS = ("num_warps", "num_stages")
MOST_SHARED = 232_448  # bytes that a program may have on Hopper
_TARGET = ("cuda", 90, 32)
_DTYPE = "triton.language."
_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}

# A kernel's module and name, the types of its arguments (of constants their values), and options of the launch.
Launch = tuple[str, str, tuple[tuple[str, Any], ...], tuple[tuple[str, int], ...]]


def print_launches(comparisons: list[str]) -> int:
    """What they launch, each once, in children: some change modules. Returns how many failed."""
    interpreter.prepare()
    failed = 0
    with TemporaryDirectory() as folder:
        found, printed = Path(folder) / "launches", Path(folder) / "printed"
        for comparison in comparisons:
            found.write_text("", encoding="utf-8")
            printed.write_text("", encoding="utf-8")
            if forking.run(partial(_write_launches, comparison, found), str(printed)) == 0:
                print(found.read_text(encoding="utf-8"), end="")
            else:
                print(comparison, printed.read_text(encoding="utf-8"), file=sys.stderr)
                failed += 1
    return failed


def _write_launches(comparison: str, file: Path) -> None:
    module, _, function = comparison.partition(".")
    file.write_text("".join(f"{launch!r}\n" for launch in _launches_of(module, function)), encoding="utf-8")


def _launches_of(module: str, function: str) -> dict[Launch, None]:
    from triton.runtime.interpreter import InterpretedFunction

    found: dict[Launch, None] = {}
    run = InterpretedFunction.run

    def written_down(self: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        found[_launch(self, given, named)] = None
        return run(self, *given, grid=grid, warmup=warmup, **named)

    InterpretedFunction.run = written_down
    getattr(importlib.import_module(f"tests.kernels.{module}"), function)()
    return found


def _launch(kernel: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Launch:
    parameters = inspect.signature(kernel.fn).parameters
    arguments = dict(zip(parameters, given, strict=False)) | {key: named[key] for key in parameters if key in named}
    described = tuple(
        (name, _constant(value) if "constexpr" in str(parameter.annotation) or value is None else _type_of(value))
        for name, parameter in parameters.items()
        for value in (arguments[name],)
    )
    options = tuple((key, named[key]) for key in OPTIONS if key in named)
    return kernel.fn.__module__, kernel.fn.__name__, described, options


def _constant(value: Any) -> Any:
    """As it is; types of Triton's by their names."""
    return repr(value) if repr(value).startswith(_DTYPE) else value


def _type_of(value: Any) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    if isinstance(value, tuple):
        return tuple(_type_of(each) for each in value)
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
    return "fp32" if isinstance(value, float) else "i32" if -(2**31) <= value < 2**31 else "i64"


def _named(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_DTYPE):
        return getattr(importlib.import_module("triton.language"), value.removeprefix(_DTYPE))
    return value


def what_is_wrong(launch: Launch) -> str:
    """Why it cannot be compiled, or that it takes more shared memory than there is; "" if nothing is."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_source
    from triton.errors import TritonError

    module, name, arguments, options = launch
    kernel = getattr(importlib.import_module(module), name)
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    constants |= {key for key, value in arguments if value is None}
    values = {key: True if key == "CHAINED" else _named(value) for key, value in arguments}
    source = ASTSource(
        fn=kernel,
        signature={key: "constexpr" if key in constants else value for key, value in values.items()},
        constexprs={(place,): value for place, (key, value) in enumerate(values.items()) if key in constants},
    )
    chained = {"launch_pdl": True} if "CHAINED" in values else {}
    try:
        compiled = compile_source(source, target=GPUTarget(*_TARGET), options={**dict(options), **chained})
    except (TritonError, RuntimeError) as error:  # of its language and of ptxas; of passes
        return f"{name} {values}: {error}"
    shared = compiled.metadata.shared
    return f"{name} {values}: {shared} bytes of shared memory" if shared > MOST_SHARED else ""


def main() -> None:
    if sys.argv[1] == "launches":
        sys.exit(print_launches(sys.argv[2:]))
    for line in dict.fromkeys(sys.stdin):
        if wrong := what_is_wrong(ast.literal_eval(line)):
            print(wrong.replace("\n", " "))


if __name__ == "__main__":
    main()
