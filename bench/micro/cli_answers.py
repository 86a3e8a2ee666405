"""Time that an operator waits for each read-only command, over a fleet of stand-in nodes.

    python -m bench.micro.cli_answers [--nodes N] [--rounds N] [--out FILE]

Prints one JSON object. A scheduler process leads so many nodes, each with a guest that works, which
this process plays. The commands are run as an operator runs them, each in a process of its own, in
turn and in an order that changes from round to round. Besides its time each has the least of all
rounds and its processor time, which say how much of a wait was a busy machine's; Python that starts
and imports nothing says what of it no command can help. Exit code 1 when one that asks a scheduler
takes longer than a second at best (`rose top` waits one between its two frames), or any fails.
"""

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.common.report import parser_of, put_judged
from bench.micro.stop_all import stoppable_fleet
from rose.cli.cluster.top import ONCE_S
from slo import percentile

MOST_S: Final = 1.0
NOTHING: Final = "python -c pass"
# Rates are those between two frames.
TOP: Final = "rose top --once"
VERBS: Final[Mapping[str, tuple[str, ...]]] = {
    "rose status": ("status",),
    "rose nodes": ("nodes",),
    "rose nodes NODE -o json": ("nodes", "n000", "-o", "json"),
    "rose replicas": ("replicas",),
    "rose jobs": ("jobs",),
    TOP: ("top", "--once"),
    "rose policy get": ("policy", "get"),
    "rose policy explain NODE": ("policy", "explain", "n000"),
    "rose stop-all --dry-run": ("stop-all", "--dry-run"),
}
OFFLINE: Final[Mapping[str, tuple[str, ...]]] = {
    "rose --help": ("--help",),
    "rose completion bash": ("completion", "bash"),
}


class CommandTimes:
    """Times of one command over all rounds so far."""

    def __init__(self) -> None:
        self.took_s: list[float] = []
        self.cpu_s: list[float] = []
        self.bytes = self.failed = 0

    def run(self, words: Sequence[str]) -> None:
        """Run the command once more."""
        began_s = time.monotonic()
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # noqa: S603
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        self.took_s.append(time.monotonic() - began_s)
        self.cpu_s.append(usage.ru_utime + usage.ru_stime)
        process.returncode = os.waitstatus_to_exitcode(status)
        self.bytes = max(self.bytes, len(output))
        self.failed += process.returncode != 0

    def row(self, command: str) -> dict[str, Any]:
        p50_s, p95_s = (round(percentile(self.took_s, at), 3) for at in (0.5, 0.95))
        return {
            "command": command,
            "least_s": round(min(self.took_s), 3),
            "p50_s": p50_s,
            "p95_s": p95_s,
            "cpu_s": round(percentile(self.cpu_s, 0.5), 3),
            "bytes": self.bytes,
            "failed": self.failed,
        }


def good(row: Mapping[str, Any]) -> bool:
    """Return True if the command is quick enough for an operator, and never fails."""
    most_s = MOST_S + (ONCE_S if row["command"] == TOP else 0.0)
    return not row["failed"] and (row["least_s"] <= most_s or row["command"] in OFFLINE)


async def measure(nodes: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each command. Raises UnavailableError where the fleet fails."""
    dice = random.Random(0)  # noqa: S311 - a load, not a secret
    async with stoppable_fleet(nodes, folder, dice) as (address, _, _):
        rose = (sys.executable, "-m", "rose.cli")
        commands = {name: (*rose, *words) for name, words in OFFLINE.items()}
        asking = {name: (*rose, *words, "--scheduler", address) for name, words in VERBS.items()}
        commands |= {**asking, NOTHING: (sys.executable, "-c", "pass")}
        times = {name: CommandTimes() for name in commands}
        for _ in range(rounds):
            for name in dice.sample(sorted(commands), len(commands)):
                await asyncio.to_thread(times[name].run, commands[name])
    return [found.row(name) for name, found in times.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if a command is too slow or fails."""
    args = parser_of(__doc__, "bench.micro.cli_answers", nodes=100, rounds=9).parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="rose-cli-") as folder:
        rows = asyncio.run(measure(args.nodes, args.rounds, Path(folder)))
    held = all(map(good, rows))
    settings = {"nodes": args.nodes, "rounds": args.rounds, "most_s": MOST_S}
    return put_judged({**settings, "good": held, "answers": rows}, args.out, good=held)


if __name__ == "__main__":
    sys.exit(main())
