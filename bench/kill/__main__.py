"""`python -m bench.kill`: time in which the kill switch gives everything back, trial by trial.

Writes kill.json and kill.txt. Exit code 0, 1 when a trial missed the deadline or pressing the
switch again changed something, 2 for bad input or a bench that does not work.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from bench.common.checks import text_table
from bench.common.report import add_out_folder, machine, parser_of, put_both, reported, say
from bench.kill.trials import KillRow, Trial, rows_of, trials
from executor.control_page.page import PAGE_FOLDER
from rose.errors import ConfigError

PROG = "bench.kill"
# The shortest and longest deadline of a policy.
DEADLINES_S = 1.0, 600.0
progress = partial(say, "kill")


def main(argv: Sequence[str] | None = None) -> int:
    """Run all trials, print the table, keep it."""
    args = _parser().parse_args(argv)
    # Started processes are ended by any end of this one.
    signal.signal(signal.SIGTERM, _ended)
    return reported(PROG, lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if args.trials < 1 or args.guest_mib < 1:
        raise ConfigError("--trials, --guest-mib: at least 1")
    if not DEADLINES_S[0] <= args.deadline_s <= DEADLINES_S[1]:
        raise ConfigError("--deadline-s: 1 to 600, as a policy's reclaimDeadline")
    folder = Path(tempfile.mkdtemp(prefix="rose-kill-", dir=PAGE_FOLDER))
    done: list[Trial] = []
    for trial in trials(folder, args.trials, args.deadline_s, args.guest_mib << 20):
        done.append(trial)
        progress(f"{len(done)}/{2 * args.trials}: {_line(trial)}")
    shutil.rmtree(folder)
    rows = rows_of(done)
    settings = {
        "trials_each": args.trials,
        "deadline_s": args.deadline_s,
        "guest_bytes": args.guest_mib << 20,
        "engine": "a stand-in that holds memory and burns a core",
        "niceness": os.nice(0),
    }
    result = {"settings": settings, "machine": machine(), "rows": rows, "trials": done}
    put_both(args.out, "kill", result, table(rows, args.deadline_s))
    total = rows[-1]
    return int(total.in_time < total.trials or total.changed_again > 0)


def table(rows: Sequence[KillRow], deadline_s: float) -> str:
    """Lay out percentiles of each kind in seconds, and the trials within the deadline."""
    head = (
        *("control plane", "switch", "trials", "gone p50", "p99", "worst"),
        *("proved p50", "p99", "worst", "in time", "changed by a second press"),
    )
    lines = [
        (
            row.plane,
            row.way,
            str(row.trials),
            *(f"{s:.2f} s" for s in (row.gone_p50_s, row.gone_p99_s, row.gone_worst_s)),
            *(f"{s:.2f} s" for s in (row.proved_p50_s, row.proved_p99_s, row.proved_worst_s)),
            f"{row.in_time}/{row.trials}",
            str(row.changed_again),
        )
        for row in rows
    ]
    total = rows[-1]
    held = (
        f"Each guest was leased, stepped, and held {total.held_bytes_least >> 20} MiB or more;"
        f" in the median it used {total.duty_before_p50:.0%} of a core.\n"
        "gone: no process and no byte of it is left, as the kernel says;"
        " proved: its node measured 0 bytes and duty 0.\n"
    )
    return text_table(f"Kill switch, reclaimDeadline {deadline_s:g} s", head, lines) + held


def _line(trial: Trial) -> str:
    again = f", pressed again: {trial.again}" if trial.again else ""
    late = "" if trial.in_time else " LATE"
    return (
        f"{trial.plane}, {trial.way}: gone after {trial.gone_s:.2f} s, proved after"
        f" {trial.proved_s:.2f} s{late}{again}"
    )


def _ended(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, PROG)
    add_out_folder(parser)
    parser.add_argument("--trials", type=int, default=100, help="with each, up and down")
    parser.add_argument("--deadline-s", type=float, default=5.0, metavar="S")
    parser.add_argument("--guest-mib", type=int, default=256, metavar="N")
    return parser


if __name__ == "__main__":
    sys.exit(main())
