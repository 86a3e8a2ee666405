"""`python -m tests.chaos --seeds N --first N`: deterministic chaos, until one world breaks.

    faults of the seed ──► schedulers, nodes, engines, gateway, trainers, operator, store
                                        │ every event
                                        ▼
                              invariants: what must never happen

The cores are the real ones. The shells around them are written anew, as short as they can be, after
`rose.scheduler.service`, `rose.store.leadership`, `rose.store.fenced` and `rose.node.daemon`.

A seed that fails is run again with fewer and fewer of its faults; then its history is printed.
Exit code: 0 when every invariant held, 1 when one was broken.
"""

import argparse
import multiprocessing
import os
import sys
import time

from tests.chaos.world import Outcome, live, shrink

SHOWN_LINES = 80


def explain(failed: Outcome) -> str:
    """A failure as a story: what broke, by which faults, and what came before."""
    faults = [f"  {fault}" for fault in failed.faults]
    lines = [f"  {line}" for line in failed.history[-SHOWN_LINES:]]
    return "\n".join(
        [
            f"seed {failed.seed}: {failed.broken}",
            f"faults that it needs ({len(faults)}):",
            *faults,
            "history:",
            *lines,
            f"replay: make chaos-sim SEEDS=1 ARGS='--first {failed.seed}'",
        ]
    )


def main() -> int:
    """Run the seeds on all cores."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--seeds", type=int, default=500, help="how many (default 500)")
    parser.add_argument("--first", type=int, default=0, help="the first one (default 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    began_s, events, failures = time.monotonic(), 0, 0
    least = sys.maxsize
    with multiprocessing.get_context("forkserver").Pool(options.jobs) as pool:
        for outcome in pool.imap(live, seeds, chunksize=4):
            events += outcome.events
            least = min(least, outcome.events)
            if outcome.broken:
                failures += 1
                sys.stdout.write(explain(shrink(outcome)) + "\n")
                break
    took_s = time.monotonic() - began_s
    sys.stdout.write(
        f"{'a seed broke' if failures else f'{len(seeds)} seeds held'}: {events} events, at least"
        f" {least} a seed, {took_s:.1f} s, {len(seeds) / took_s:.1f} seeds/s\n"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
