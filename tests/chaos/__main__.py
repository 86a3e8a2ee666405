"""`python -m tests.chaos --seeds N --first N`: deterministic chaos, until one world breaks.

    faults of the seed ──► schedulers, nodes, engines, gateway, trainers, operator, store
                                        │ every event
                                        ▼
                              invariants: what must never happen

Cores and shells are the product's own, on a simulated clock, network, gRPC and store
(`simulated_loop`, `simulated_grpc`, `simulated_store`): election, fenced writes, the scheduler's
service, the node's session, lease agent and replica. What is still a copy of product code:

| copy | of |
| --- | --- |
| `SimulatedScheduler._lead` | `rose.main.scheduler._lead`: what a term is made of |
| `SimulatedNode._tick_guard` | `rose.node.guest.guard`: one tick of a thread |
| `SimulatedSupervisor`, `SimulatedUpdates` | a node's supervisor and updates, without files |
| `SimulatedEngine` | the guest's endpoint and its gate's loop; the gate's `decide` is real |
| `SimulatedGateway`, `SimulatedClient` | the gateway around its `TurnJournal`; the client's calls |

Each run has seeds of its own, unless `--first` says which; the first one is printed.
A seed that fails is run again with fewer and fewer of its faults; then its history is printed.
Exit code: 0 when every invariant held, 1 when one was broken.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import time

from tests.chaos.world import SeedOutcome, live, shrink

SHOWN_LINES = 80


def explain(failed: SeedOutcome) -> str:
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
    parser.add_argument("--first", type=int, help="the first one (default: new ones each time)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args()
    # A run of less than a second has seeds of its own, too.
    first = int(time.time()) * 1_000 if options.first is None else options.first
    seeds = range(first, first + options.seeds)
    sys.stdout.write(f"{len(seeds)} seeds from {first} on\n")
    sys.stdout.flush()
    # SIGTERM ends its processes too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began_s, lived, events, failures = time.monotonic(), 0, 0, 0
    least = sys.maxsize
    with multiprocessing.get_context("forkserver").Pool(options.jobs) as pool:
        for outcome in pool.imap(live, seeds, chunksize=4):
            lived += 1
            events += outcome.events
            least = min(least, outcome.events)
            if outcome.broken:
                failures += 1
                sys.stdout.write(explain(shrink(outcome)) + "\n")
                break
    took_s = time.monotonic() - began_s
    sys.stdout.write(
        f"{f'the last of {lived} seeds broke' if failures else f'{lived} seeds held'}: {events}"
        f" events, at least {least} a seed, {took_s:.1f} s, {lived / took_s:.1f} seeds/s\n"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
