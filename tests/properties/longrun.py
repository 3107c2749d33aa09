"""Many synthetic pairs, outside of the test run: `python -m tests.properties.longrun --graphs 10000`."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from tests.properties.judge import judge
from tests.synthetic import random_pair


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="first seed; a failure prints its own")
    parser.add_argument("--layers", type=int, default=0, help="0: 1 to 3 by turns")
    parser.add_argument("--steps", type=int, default=0, help="0: 1 to 10 by turns")
    a = parser.parse_args()
    bad = moves = hidden = 0
    started = time.perf_counter()
    for n in range(a.graphs):
        seed = a.seed + n
        size = {"layers": a.layers or 1 + n % 3, "steps": a.steps or 1 + n % 10, "faithful": n % 7 == 6}
        try:
            judged = judge(*random_pair(seed, **size))
            faults, moves, hidden = judged.faults(), moves + len(judged.planted), hidden + judged.hidden
        except Exception:
            faults = [traceback.format_exc(limit=-3)]
        if faults:
            bad += 1
            print(f"seed {seed} {size}", *faults[:4], sep="\n  ", flush=True)
        if n % 100 == 99:
            rate = (n + 1) / (time.perf_counter() - started)
            print(f"{n + 1} graphs, {bad} with faults, {moves} planted moves, {hidden} of them hidden, {rate:.1f} graphs/s", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
