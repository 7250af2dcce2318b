"""Bytes against the servicer, led by coverage to code that none before them reached (atheris, libFuzzer).

    python scripts/guided_fuzz.py --seconds 600 --seed 1             until then; the last line is a tally in JSON
    python scripts/guided_fuzz.py --seconds 600 --corpus FOLDER      goes on from the units there, and adds to them

It begins with valid messages for every method (`tests/load/units.py`). A unit that raises, takes longer than
UNIT_SECONDS or needs more than MEMORY_MB ends the run with another status than 0, and is written to `--failures`.
Needs `pip install atheris==3.0.0`; there are wheels for Linux on x86-64, Python 3.11 to 3.13.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from inference_engine.config import configure_threads_environment, forbid_model_hub

configure_threads_environment()
forbid_model_hub()

UNIT_SECONDS = 30
UNIT_BYTES = 4096
MEMORY_MB = 4096
FIRST_UNITS = 200
REPORTED_EVERY = 64  # units: so many may be missing from the counts, as libFuzzer ends its process at once
VOCABULARY = 256
WATCHED = [
    "inference_engine.server",
    "inference_engine.engine",
    "inference_engine.engine.fork",
    "inference_engine.engine.generation",
    "inference_engine.engine.arguments",
    "inference_engine.engine.calls",
    "inference_engine.session",
]
NEW_UNITS = re.compile(r"stat::new_units_added:\s*(\d+)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, required=True, metavar="S")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--corpus", type=Path, metavar="FOLDER", help="of units (default: one that is thrown away)")
    parser.add_argument("--failures", type=Path, default=Path(), metavar="FOLDER", help="(default: this one)")
    args = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        parser.error("atheris is not installed: `pip install atheris==3.0.0` (Linux on x86-64, Python 3.11 to 3.13)")
    with tempfile.TemporaryDirectory(prefix="kakeya-units-") as folder:
        return _supervise(args, args.corpus or Path(folder) / "corpus", Path(folder) / "counts.json")


def _supervise(args: argparse.Namespace, corpus: Path, counts: Path) -> int:
    """Lay out what to begin with, let another process fuzz, and print what it came to."""
    from tests.load.units import some_units

    corpus.mkdir(parents=True, exist_ok=True)
    for unit in some_units(random.Random(args.seed), FIRST_UNITS, vocab_size=VOCABULARY):
        (corpus / hashlib.sha256(unit).hexdigest()[:32]).write_bytes(unit)
    options = {
        "max_total_time": args.seconds,
        "seed": args.seed + 1,  # 0 would be drawn
        "timeout": UNIT_SECONDS,
        "rss_limit_mb": MEMORY_MB,
        "max_len": UNIT_BYTES,
        "len_control": 0,
        "artifact_prefix": f"{args.failures.resolve()}/",
        "print_final_stats": 1,
    }
    flags = [f"-{name}={value}" for name, value in options.items()]
    done = subprocess.run(
        [sys.executable, __file__, "--within", str(counts), *flags, str(corpus)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        print(done.stdout[-20_000:], file=sys.stderr)
        return done.returncode
    tally = json.loads(counts.read_text(encoding="utf-8"))
    if found := NEW_UNITS.search(done.stdout):
        tally["units that reached new code"] = int(found.group(1))
    print(json.dumps({"counts": tally, "faults": []}), flush=True)
    return 0


def _fuzz(counts: Path, flags: list[str]) -> None:
    """The process in which units run; libFuzzer ends it."""
    import atheris

    with atheris.instrument_imports(include=WATCHED, enable_loader_override=False):
        from tests.load.fuzzing import fuzzed_engine
        from tests.load.units import Units

    units, done = Units(fuzzed_engine()), 0

    def one(data: bytes) -> None:
        nonlocal done
        units.run(data)
        done += 1
        if done % REPORTED_EVERY == 0:
            reported = Counter({"units": done, "messages": units.seen.total()})
            reported.update({f"{method} {reason}": count for (method, reason), count in units.seen.items()})
            counts.write_text(json.dumps(reported), encoding="utf-8")

    atheris.Setup([sys.argv[0], *flags], one)
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--within"]:
        _fuzz(Path(sys.argv[2]), sys.argv[3:])
    sys.exit(main())
