"""A process that has imported what comparisons of interpreted kernels need, and forks a child for each of them.

Each line of standard input names a module, a function of it, and a file for what the child prints; the answer is the
child's exit status.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable

from tests.kernels import interpreter


def run(compare: Callable[[], None], printed: str) -> int:
    """The exit status of a child that calls it."""
    if (child := os.fork()) == 0:
        status = 1
        try:
            file = os.open(printed, os.O_WRONLY)
            os.dup2(file, 1)
            os.dup2(file, 2)
            compare()
            status = 0
        except BaseException:  # noqa: BLE001 - whatever it was is printed, and nothing of the parent's code runs
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    interpreter.prepare()
    importlib.import_module("torch.distributed.tensor")  # `assert_close` does, and it takes a second
    for line in sys.stdin:
        module, name, printed = line.rstrip("\n").split("\t")
        compare = getattr(importlib.import_module(module), name)
        print(run(compare, printed), flush=True)


if __name__ == "__main__":
    main()
