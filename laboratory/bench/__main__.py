"""`python -m laboratory.bench NAME` where the command `kakeya` is not installed, as on a GPU with torch alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from inference_engine.cli.lazy_commands import LateParser
from inference_engine.errors import KakeyaError
from laboratory.bench.experiments import add_parsers


def main(words: Sequence[str] | None = None) -> int:
    parser = LateParser(prog="python -m laboratory.bench", description="Measure how fast the runtime is.")
    add_parsers(parser)
    arguments = parser.parse_args(words)
    try:
        return int(arguments.run(arguments))
    except KakeyaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
