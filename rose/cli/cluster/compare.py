"""`rose compare NODE`: the cost of lending to a node's hosts, on their own traffic, on and off.

Blocks with and without lending come in pairs, in a drawn order. Exit code 0 if all limits hold, 1
if one fails, 3 if the data are too few, 2 for bad input or an unreachable service. However it ends,
interrupted or not, lending is restored.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import cast
from urllib.parse import urlsplit

from rich.table import Table

from rose.cli.exit_codes import ExitCode
from rose.cli.options import add_scheduler_options, client_of, metrics_text
from rose.command_line.output import console_of, say
from rose.command_line.parser import Parser
from rose.compare.node_metrics import HostReading, reading_of
from rose.compare.run import ComparisonRun, Plan, Switches, shown_plan
from rose.compare.verdict import Comparison, ComparisonLimits, Finding, PairRead, Verdict, compared
from rose.errors import ConfigError, RefusedError
from rose.operate.client import PolicyClient
from rose.rpc import rose_pb2 as pb

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _run(args: argparse.Namespace) -> int:
    plan = Plan(args.pairs, args.block_s, args.settle_s, args.seed)
    limits = ComparisonLimits(args.max_loss, args.max_ratio)
    if args.dry_run:
        say(*shown_plan(plan))
        return ExitCode.DONE
    if args.metrics is None:
        raise ConfigError("--metrics URL is missing: the node's http://HOST:PORT/metrics")
    if args.out is not None and args.out.exists():
        raise ConfigError(f"{args.out} is there already; give another --out")
    client = client_of(args)
    lending = NodeLending(client, args.node)
    read = _reader(args.metrics, args.host)
    run = ComparisonRun(
        plan, lending, read, _note, pb.HARVEST_MODE_ACTIVE, pb.HARVEST_MODE_HOLD_AND_DRAIN
    )
    lending.check_policy()
    _note(shown_plan(plan)[0])
    with _ended_in_order():
        pairs = run.measure()
    found = compared(pairs, limits, plan.seed)
    if args.out is not None:
        _write(args.out, plan, pairs, found)
    show(found)
    return {Verdict.HOLDS: ExitCode.DONE, Verdict.FAILS: ExitCode.FOUND}.get(
        found.verdict, ExitCode.UNPROVED
    )


def parser(prog: str) -> Parser:
    """Return the command-line parser of `rose compare`."""
    made = Parser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.set_defaults(run=_run)
    plan, limits = Plan(), ComparisonLimits()
    add = made.add_argument
    add("node", metavar="NODE", help="whose guests are switched, as `rose status` names it")
    add("--metrics", metavar="URL", help="of the node: http://HOST:PORT/metrics")
    add("--host", default="", metavar="NAME", help="whose requests count, where it has several")
    add("--pairs", type=int, default=plan.pairs, metavar="N", help=f"default {plan.pairs}")
    add(
        "--block-s", type=float, default=plan.block_s, metavar="S", help=f"default {plan.block_s:g}"
    )
    what = f"after each switch, not measured (default {plan.settle_s:g})"
    add("--settle-s", type=float, default=plan.settle_s, metavar="S", help=what)
    add("--seed", type=int, default=plan.seed, metavar="N", help="of the order (default 0)")
    what = f"of requests within their targets that may be lost (default {limits.max_loss:g})"
    add("--max-loss", type=float, default=limits.max_loss, metavar="SHARE", help=what)
    what = f"of mean TTFT and TPOT, on over off (default {limits.max_ratio:g})"
    add("--max-ratio", type=float, default=limits.max_ratio, metavar="X", help=what)
    add("--out", type=Path, metavar="FILE", help="write what was measured, as JSON")
    add("--dry-run", action="store_true", help="print the schedule, and switch nothing")
    add_scheduler_options(made)
    return made


class NodeLending:
    """Harvest modes of one node's guests, read from the scheduler and set there."""

    def __init__(self, client: PolicyClient, node: str) -> None:
        self._client = client
        self._node = node

    def check_policy(self) -> None:
        """Raise RefusedError if the node's capacity policy is not Active: it lends nothing, so
        nothing would differ.
        """
        for row in self._client.snapshot().capacity:
            if row.node == self._node and row.policy_mode and row.policy_mode != "Active":
                raise RefusedError(
                    f"the policy of {self._node} is {row.policy_mode}, so nothing is lent there;"
                    " compare once it is Active"
                )

    def switches(self) -> Switches:
        snapshot = self._client.snapshot()
        own = {each.replica: each.mode for each in snapshot.overrides}
        guests = {
            each.id: own.get(each.id, pb.HARVEST_MODE_ACTIVE)
            for each in snapshot.replicas
            if each.node == self._node and each.kind == pb.REPLICA_KIND_GUEST
        }
        leased = frozenset(lease.replica for lease in snapshot.leases)
        return Switches(snapshot.harvest, guests, leased)

    def switch(self, guest: str, mode: int) -> None:
        self._client.stop(cast("pb.HarvestMode.ValueType", mode), guest)


def _reader(url: str, host: str) -> Callable[[], HostReading]:
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"--metrics {url} is no URL; write http://HOST:PORT/metrics")

    def read() -> HostReading:
        return reading_of(metrics_text(url), host)

    return read


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into KeyboardInterrupt and ignore later ones, so
    that lending is restored.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show(found: Comparison) -> None:
    """Print a table of the comparison's rows, the numbers of requests, and the verdict."""
    console = console_of()
    table = Table(title_justify="left")
    for column in ("of the hosts", "on", "off", "change (95%)", "must be", "verdict"):
        table.add_column(column, no_wrap=True)
    for each in found.findings:
        table.add_row(
            each.name,
            _value(each, each.on),
            _value(each, each.off),
            _change(each),
            each.limit or "-",
            each.verdict.value,
        )
    if found.findings:
        console.print(table)
    say(
        f"{found.requests_on} requests with lending on, {found.requests_off} with it off;"
        f" guests sampled {found.guest_tokens} tokens"
    )
    if found.missing:
        say(f"no verdict: missing {found.missing}")
    else:
        say(f"verdict: {found.verdict.value}")


def _value(finding: Finding, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3%}" if _is_share(finding) else f"{value * 1e3:.1f} ms"


def _change(finding: Finding) -> str:
    if finding.estimate is None:
        return "-"
    made = "{:+.3%}".format if _is_share(finding) else "{:.3f}x".format
    value, ci95 = finding.estimate.value, finding.estimate.ci95
    return f"{made(value)} ({made(ci95[0])} to {made(ci95[1])})" if ci95 else made(value)


def _is_share(finding: Finding) -> bool:
    return finding.name.startswith("requests")


def _write(file: Path, plan: Plan, pairs: Sequence[PairRead], found: Comparison) -> None:
    said = {
        "plan": asdict(plan),
        "pairs": [asdict(pair) for pair in pairs],
        "comparison": asdict(found) | {"verdict": found.verdict.value},
    }
    try:
        file.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror})") from error


def _note(line: str) -> None:
    sys.stderr.write(f"rose compare: {line}\n")
    sys.stderr.flush()
