"""`python -m bench.soak`: turns that end in every way, then a storm of ones that time out.

Writes soak.json and soak.txt. Exit code 0, 1 when a bound is broken, 2 for bad input.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import uvloop

from bench.common.checks import FAILS, Check, checks_table, row_verdict
from bench.common.report import add_out_folder, parser_of, put_both, reported, say
from bench.soak.callers import LATE, WAYS
from bench.soak.run import RENEW_S, SoakSeen, checks, soaking
from rose.errors import ConfigError

PROG = "bench.soak"
progress = partial(say, "soak")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return reported(PROG, lambda: _run(args))
    except asyncio.CancelledError:
        progress("ended by a signal")
        return 128 + signal.SIGTERM


def _run(args: argparse.Namespace) -> int:
    if args.turns < 1 or args.in_flight < 1 or args.storm_s < 0:
        raise ConfigError("--turns, --in-flight: at least 1, --storm-s: at least 0")
    folder = args.out / "soak"
    folder.mkdir(parents=True, exist_ok=True)
    mixed, storm = uvloop.run(soak(folder, args))
    judged = checks(mixed, storm)
    result = {"mixed": mixed, "storm": storm, "checks": judged}
    put_both(args.out, "soak", result, table(mixed, storm, judged))
    return int(row_verdict(judged) == FAILS)


async def soak(folder: Path, args: argparse.Namespace) -> tuple[SoakSeen, SoakSeen]:
    """Run both phases on one gateway. A SIGTERM cancels it, which ends all processes."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with soaking(folder) as running:
        running.renewing(RENEW_S)
        progressing = asyncio.create_task(_minutes())
        mixed = await running.phase(WAYS, args.in_flight, args.turns, args.seconds, args.seed)
        progressing.cancel()
        running.renewing(0.0)
        storm = await running.phase([LATE], args.in_flight, sys.maxsize, args.storm_s, args.seed)
    return mixed, storm


def table(mixed: SoakSeen, storm: SoakSeen, judged: Sequence[Check]) -> str:
    """Lay out the answers of each way, other observations, and all bounds."""
    lines = [f"{'way':>26}  {'asked':>7}  answers (0: the caller hung up)"]
    for name, statuses in mixed.statuses.items():
        answers = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
        lines.append(f"{name:>26}  {sum(statuses.values()):>7}  {answers}")
    lines += [
        f"{'WRONG':>26}  {count:>7}  {answers}" for answers, count in mixed.wrong.most_common(8)
    ]
    lines.append("")
    for name, seen in (("mixed", mixed), ("storm", storm)):
        if seen.turns:
            lines.append(
                f"{name}: {seen.turns} turns in {seen.took_s:.0f} s; as seen from outside, a live"
                f" stream was silent for {1e3 * seen.silence_s:.0f} ms, /health took"
                f" {1e3 * seen.health_s:.0f} ms; for {seen.waited:.0%} of the time the gateway"
                " waited for a processor"
            )
    return "\n".join([*lines, "", checks_table(judged, ".3f")])


async def _minutes() -> None:
    for minute in range(1, 60):
        await asyncio.sleep(60)
        progress(f"{minute} min")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, PROG)
    add_out_folder(parser)
    parser.add_argument("--turns", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=540.0, help="at most, for the turns")
    parser.add_argument("--storm-s", type=float, default=60.0, help="of turns that time out")
    parser.add_argument("--in-flight", type=int, default=32, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
