"""`rose top`: hosts' latency against its target, and below each its guests' state and reason.

A frame is drawn from two snapshots: token rates are the difference between them. Hosts that miss
their targets, or come near, are first. In a pipe, or with --once, it is drawn once.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.console import Group, RenderableType

from rose.cli.options import add_scheduler_options, client_of
from rose.cli.tables import headlines, host_name, kv, toned, tpot, ttft, version
from rose.command_line.output import (
    WATCH_S,
    Said,
    Table,
    Tone,
    TonedText,
    View,
    add_output_options,
    ago,
    bytes_of,
    live,
    rendered,
    share_of,
    write,
)
from rose.command_line.output import Format as OutputFormat
from rose.command_line.parser import Parser
from rose.errors import RefusedError
from rose.operate.fleet import Fleet, HostRow, NodeState, NodeStatus, ReplicaRow, fleet_of

BAR: Final = 10
# Time over which the only frame in a pipe has rates.
ONCE_S: Final = 1.0
COLUMNS: Final = (
    "NODE / GUEST", "TTFT P95/TARGET", "TPOT P95/TARGET", "LOAD", "KV", "TOKENS/S", "DOES", "WHY",
)  # fmt: skip
SPARE: Final = ("KV", "TPOT P95/TARGET", "TOKENS/S", "LOAD")


@dataclass(frozen=True, slots=True)
class Frame:
    """Snapshot of the fleet, and each replica's tokens per second since the one before."""

    fleet: Fleet
    tok_s: dict[str, float]


class Rates:
    """Source of frames, which keeps each replica's token count of the last snapshot."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[str, int] = {}
        self._at_s: float | None = None

    def frame(self, fleet: Fleet) -> Frame:
        """Return a frame with token rates since the last call; a new replica, or one whose count
        was reset, has none.
        """
        now_s = self._clock()
        counts = {r.name: r.engine.tokens_total for r in fleet.replicas if r.engine}
        over_s = now_s - self._at_s if self._at_s is not None else 0.0
        rates = {
            name: (count - self._counts[name]) / over_s
            for name, count in counts.items()
            if over_s > 0 and 0 <= self._counts.get(name, -1) <= count
        }
        self._counts, self._at_s = counts, now_s
        return Frame(fleet, rates)


def parser(prog: str) -> Parser:
    """Return the command-line parser of `rose top`."""
    top = Parser(prog)
    top.add_argument("--node", default="", metavar="NODE", help="only this one (default: all)")
    top.add_argument("--once", action="store_true", help="one frame, as in a pipe")
    what = f"between two frames (default {WATCH_S:g})"
    top.add_argument("--every", type=float, default=WATCH_S, metavar="SECONDS", help=what)
    add_scheduler_options(top)
    add_output_options(top)
    top.set_defaults(run=_top)
    return top


def _top(args: argparse.Namespace) -> int:
    client = client_of(args)
    rates = Rates()
    form = OutputFormat(args.output)

    def frame() -> Frame:
        fleet = fleet_of(client.snapshot())
        if args.node and fleet.node(args.node) is None:
            raise RefusedError(f"there is no node {args.node!r}; `rose nodes` lists them")
        return rates.frame(fleet)

    if args.once or form is not OutputFormat.TABLE or not sys.stdout.isatty():
        frame()
        time.sleep(ONCE_S)
        write(frame_view(frame(), args.node), form)
        return 0

    def draw(height: int) -> RenderableType:
        view = frame_view(frame(), args.node)
        return fitted_view(view, height)

    live(draw, max(0.2, args.every))
    return 0


def frame_view(frame: Frame, node: str) -> View:
    """Return a view of a frame: rows of all nodes, or of `node`; the most urgent first."""
    nodes = [each for each in frame.fleet.nodes if node in ("", each.name)]
    replicas = frame.fleet.by_node()
    rows = [
        row
        for each in sorted(nodes, key=_urgency)
        for row in node_rows(frame, each, replicas[each.name])
    ]
    data = {"fleet": frame.fleet, "tok_s": frame.tok_s}
    right = frozenset({"KV", "TOKENS/S"})
    table = Table(COLUMNS, tuple(rows), right=right, spare=SPARE)
    return View(data, headlines(frame.fleet), (table,))


def fitted_view(view: View, height: int) -> RenderableType:
    """Return a view drawn with as many rows as a terminal of `height` lines shows, and a note on
    the rows left out.
    """
    (table,) = view.tables
    room = max(1, height - len(view.lines) - 4)
    left_out = len(table.rows) - room
    shown = replace(table, rows=table.rows[:room])
    drawn = rendered(View(view.data, view.lines, (shown,)))
    if left_out <= 0:
        return drawn
    note = f"{left_out} more rows: make the terminal higher, or give --node"
    return Group(drawn, rendered(View(None, (TonedText(note, Tone.FAINT),))))


def _urgency(node: NodeStatus) -> tuple[float, str]:
    """Return a sort key: nodes with hosts beyond or near their targets first, then by name."""
    return -node.strain, node.name


def node_rows(
    frame: Frame, node: NodeStatus, replicas: Sequence[ReplicaRow]
) -> Iterator[tuple[Said, ...]]:
    """Yield a row for each of the node's hosts, one without any, and for each replica."""
    total = sum(frame.tok_s.get(each.name, 0.0) for each in replicas)
    for host in node.hosts or (None,):
        busy = host.busy_share if host else None
        yield (
            TonedText(host_name(node, host), Tone.HEAD),
            ttft(host),
            tpot(host),
            f"{bar(busy)} {share_of(busy)} busy" if busy is not None else "-",
            kv(host),
            f"{total:.0f}",
            _does(node, host),
            _held_back(node),
        )
    for replica in replicas:
        yield _guest_row(frame, replica)


def _does(node: NodeStatus, host: HostRow | None) -> Said:
    if node.state is not NodeState.ATTACHED:
        return toned(node.state.value)
    if host is None:
        return "no host"
    return f"serves {host.running}+{host.waiting}"


def _held_back(node: NodeStatus) -> Said:
    if node.state is not NodeState.ATTACHED:
        return TonedText(f"last heard {ago(node.heard_s)} ago", Tone.CARE)
    limits = node.capacity.limits if node.capacity else ()
    return f"held back by {'; '.join(limits)}" if limits else ""


def _guest_row(frame: Frame, replica: ReplicaRow) -> tuple[Said, ...]:
    engine, lease = replica.engine, replica.lease
    rate = frame.tok_s.get(replica.name)
    whose = f"{lease.job or replica.job} v{version(replica)}" if lease else "not leased"
    return (
        f"  {replica.name}",
        TonedText(whose, Tone.PLAIN if lease else Tone.FAINT),
        TonedText(f"until {lease.expires_in_s:.1f} s" if lease else "-", Tone.FAINT),
        f"{bar(engine.duty)} {share_of(engine.duty)} duty" if engine else "-",
        bytes_of(engine.kv_bytes) if engine and engine.kv_bytes else "-",
        "-" if rate is None else f"{rate:.0f}",
        _doing(replica),
        (engine.why if engine else "") or (lease.why if lease else "") or "-",
    )


def _doing(replica: ReplicaRow) -> Said:
    engine = replica.engine
    if engine is None:
        return "-"
    if engine.state != "healthy":
        return toned(engine.state)
    return toned(engine.grant if engine.grant != "none" else engine.state)


def bar(share: float | None) -> str:
    """Return a share as a bar of ten characters, `█████·····` for a half; None is an empty bar."""
    full = round(BAR * min(1.0, max(0.0, share or 0.0)))
    return "█" * full + "·" * (BAR - full)
