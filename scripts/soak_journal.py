"""Long runs of what the journal promises: kills of a server, losses of power, failing disks, flipped bits.

    python scripts/soak_journal.py kill --count 1000      kills, half with each durability that keeps sessions
    python scripts/soak_journal.py power --count 100000   states of the disk that a loss of power could leave
    python scripts/soak_journal.py faults --count 1000    flipped bits, and errors of the first calls of the disk

Exits with 1 if anything that was told is lost, doubled or wrong, or if the control is not caught.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.load.kills import kill_often
from tests.session.talks import cut_power, fail_calls, flip_bits

STATES_AT_ONCE, FLIPS_AT_ONCE = 150, 100


def kills(count: int, seed: int) -> bool:
    is_right = True
    for durability in ("process", "power"):
        with tempfile.TemporaryDirectory() as folder:
            state = Path(folder) / "state"
            counts, wrong = kill_often(state, durability, kills=(count + 1) // 2, agents=6, seed=seed)
        print(f"{durability}: {dict(counts)}, wrong: {wrong}")
        is_right &= not wrong
    with tempfile.TemporaryDirectory() as folder:
        counts, wrong = kill_often(Path(folder) / "state", "process", kills=20, agents=6, seed=seed, is_early=True)
    print(f"control, told before it is recorded: caught after {counts['kills']} kills: {bool(wrong)}")
    return is_right and bool(wrong)


def power(count: int, seed: int) -> bool:
    outcomes = Counter[str]()
    while outcomes.total() < count:
        seed += 1
        with tempfile.TemporaryDirectory() as folder:
            outcomes += cut_power(Path(folder), seed=seed, states=min(STATES_AT_ONCE, count - outcomes.total()))
    with tempfile.TemporaryDirectory() as folder:
        control = cut_power(Path(folder), seed=seed, states=STATES_AT_ONCE, without_syncs_of="-wal")
    print(f"losses of power: {dict(outcomes)}; control, syncs of the log left out: {dict(control)}")
    return outcomes.keys() == {"whole"} and control.keys() != {"whole"}


def faults(count: int, seed: int) -> bool:
    flips = Counter[str]()
    while flips.total() < count:
        seed += 1
        with tempfile.TemporaryDirectory() as folder:
            flips += flip_bits(Path(folder), seed=seed, count=min(FLIPS_AT_ONCE, count - flips.total()))
    print(f"flipped bits: {dict(flips)}; shorter ones lack the last commit of the log")
    is_right = True
    for kind in ("write", "sync"):
        with tempfile.TemporaryDirectory() as folder:
            failed = fail_calls(Path(folder), kind, range(1, 1 + min(count, 150)))
        print(f"errors of a {kind}: {dict(failed)}")
        is_right &= failed.keys() == {"whole"}
    return is_right and flips["shorter"] * 20 <= flips.total()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kill", "power", "faults"))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.disable()  # failing disks are what is asked for
    began = time.monotonic()
    is_right = {"kill": kills, "power": power, "faults": faults}[args.what](args.count, args.seed)
    print(f"{'right' if is_right else 'WRONG'}, {time.monotonic() - began:.0f} s")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
