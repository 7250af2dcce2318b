"""`kakeya`: the command line.

Exit status: 0 done; 1 an error, in one line on standard error; 2 wrong usage; 130 interrupted. `process.py` has the
rest: signals, and streams that are closed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from inference_engine.cli import process

if TYPE_CHECKING:
    from inference_engine.cli.lazy_commands import LateParser


def parser() -> LateParser:
    from inference_engine import __version__
    from inference_engine.cli import audit, chat, demo, doctor, gateway, keys, models, serve, sessions, shells
    from inference_engine.cli import journal_commands as journal
    from inference_engine.cli import lazy_commands as late

    top = late.LateParser(
        prog="kakeya",
        description="Sessions with one model, over gRPC,\nin raw token ids.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"kakeya {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=late.LateParser)
    for command in (serve, gateway, chat, demo, doctor, audit, models, keys, sessions, journal, shells):
        command.add_parser(commands)
    late.add_parsers(top, commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Wrong usage raises SystemExit(2), as argparse does.

    Without arguments, the command is this process's own: its streams and signals are set up for it, too.
    """
    return process.run(_run) if arguments is None else _run(arguments)


def _run(arguments: Sequence[str] | None = None) -> int:
    from inference_engine.config import child_environment, configure_threads_environment, forbid_model_hub, quiet_grpc

    top = parser()
    if arguments is None and (asked := child_environment().get("_KAKEYA_COMPLETE")):
        from inference_engine.cli import shells

        shells.answer(asked, top)
        return 0
    words = sys.argv[1:] if arguments is None else list(arguments)
    args = top.parse_args([*words[1:], "--help"] if words[:1] == ["help"] else words)

    import kakeya
    from inference_engine.cli.connection import in_flags
    from inference_engine.errors import KakeyaError

    # Before torch, transformers or grpc are imported; each command imports them only when it needs them.
    configure_threads_environment()
    forbid_model_hub()
    quiet_grpc()
    try:
        process.end_if_stopped()
        status: int = args.run(args)
    except KakeyaError as error:
        process.say(f"kakeya {args.command}: {error}")
        return process.FAILED
    except kakeya.KakeyaError as error:
        process.say(f"kakeya {args.command}: {in_flags(str(error))}")
        return process.FAILED
    except KeyboardInterrupt:
        return process.INTERRUPTED
    except process.SYSTEM_ERRORS as error:
        return process.failed(f"kakeya {args.command}", error)
    return status


if __name__ == "__main__":
    sys.exit(main())
