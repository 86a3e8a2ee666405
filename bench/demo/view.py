"""Live view of a running demo: a page on a terminal, plain lines elsewhere.

The run writes its state into one `Board`; `draw` shows the board and decides nothing.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bench.demo.stack import GUEST, GatewayFigures, Watcher
from rose.errors import UnavailableError
from rose.node.guest.supervisor import EngineState
from rose.rpc import rose_pb2

if TYPE_CHECKING:
    from bench.demo.conductor import Conductor

BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 48
LABEL_WIDTH = 10
BAR_WIDTH = 30
DRAW_INTERVAL_S = 0.25
ASK_INTERVAL_S = 0.5


@dataclass(slots=True)
class JobProgress:
    """Rewards of a job's steps, its newest version, and the time in which it had the guest."""

    rewards: list[float] = field(default_factory=list)
    version: int = 0
    guest_s: float = 0.0


@dataclass(slots=True)
class Board:
    """State of a run. `progress`: fraction done of each slow part, such as an engine's start."""

    t0_s: float
    jobs: Mapping[str, JobProgress]
    stage: str = "checking this machine"
    note: str = ""
    steps: int = 0
    memory_bytes: int = 0
    wire_bytes: int = 0
    full_bytes: int = 0
    progress: Mapping[str, float] = field(default_factory=dict)
    tokens_per_s: Mapping[str, float] = field(default_factory=dict)
    gateway: GatewayFigures = field(default_factory=GatewayFigures)
    host: rose_pb2.HostTelemetry = field(default_factory=rose_pb2.HostTelemetry)
    guest_job: str = ""
    guest_mode: str = ""
    guest_reason: str = ""
    conductor: "Conductor | None" = None
    _polled_s: float = 0.0

    def stepped(self, job: str, event: Mapping[str, object]) -> None:
        """Add a finished step of the job's trainer."""
        progress = self.jobs[job]
        progress.rewards.append(float(str(event["reward_mean"])))
        progress.version = int(str(event["version"]))
        self.steps += 1
        self.wire_bytes += int(str(event["wire_bytes"]))
        self.full_bytes += int(str(event["full_bytes"]))

    def share(self, job: str) -> float | None:
        """Return the job's fraction of the time in which any job had the guest."""
        total_s = sum(progress.guest_s for progress in self.jobs.values())
        return self.jobs[job].guest_s / total_s if total_s else None

    async def follow(self, watcher: Watcher) -> None:
        """Poll scheduler and gateway twice a second until cancelled; note one that is silent."""
        while True:
            try:
                self._update(await watcher.snapshot(), await watcher.gateway())
            except UnavailableError as error:
                # A control plane that is still starting is silent, too.
                self.note = str(error) if self._polled_s else ""
            await asyncio.sleep(ASK_INTERVAL_S)

    def _update(self, snapshot: rose_pb2.SnapshotReply, gateway: GatewayFigures) -> None:
        now_s = time.monotonic()
        elapsed_s = now_s - self._polled_s
        self.tokens_per_s = {
            name: (count - self.gateway.tokens.get(name, 0)) / elapsed_s
            for name, count in gateway.tokens.items()
        }
        if self.guest_job in self.jobs and self._polled_s and self.conductor:
            self.jobs[self.guest_job].guest_s += elapsed_s
        leases = [lease.job for lease in snapshot.leases if lease.replica == GUEST]
        self.guest_job = leases[0] if leases else ""
        self.gateway, self._polled_s, self.note = gateway, now_s, ""
        for host in snapshot.hosts:
            self.host = host
        for guest in snapshot.guests:
            if guest.replica == GUEST:
                # A grant says nothing about an engine that is not up.
                up = guest.state == EngineState.HEALTHY
                self.guest_mode = guest.mode if up else guest.state
                self.guest_reason = guest.reason if up else ""


async def draw(board: Board, console: Console) -> None:
    """Show the board until cancelled: redrawn in place, or a line for each new stage or step."""
    if not console.is_terminal:
        shown: tuple[str, int, str] | None = None
        while True:
            if shown != (shown := (board.stage, board.steps, board.note)):
                console.file.write(plain_line(board) + "\n")
                console.file.flush()
            await asyncio.sleep(DRAW_INTERVAL_S)
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                live.update(render(board), refresh=True)
                await asyncio.sleep(DRAW_INTERVAL_S)
        finally:
            live.update(render(board), refresh=True)


def plain_line(board: Board) -> str:
    """Return the stage, or the newest step, on one line."""
    line = f"[{time.monotonic() - board.t0_s:6.1f} s] {board.stage}"
    if not board.steps:
        return f"{line}: {board.note}" if board.note else line
    rates = " ".join(f"{name}={rate:.0f}" for name, rate in sorted(board.tokens_per_s.items()))
    host = f" host_ttft_p95={board.host.ttft_p95_s * 1e3:.1f}ms"
    jobs = [
        f" {name}=v{job.version},{_percent(board.share(name))}" if len(board.jobs) > 1
        else f" reward={job.rewards[-1]:.2f} v{job.version}"
        for name, job in board.jobs.items()
    ]  # fmt: skip
    return (
        f"{line}: step {board.steps} {_arm(board)} tokens/s {rates}"
        f"{host if board.host.window_requests else ''} guest={board.guest_mode or '–'}"
        f"{''.join(jobs)}"
    )


def render(board: Board) -> RenderableType:
    """Return the whole page."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", width=LABEL_WIDTH)
    table.add_column(no_wrap=True)
    if board.conductor:
        for label, value in _rows(board):
            table.add_row(label, value)
    for label, done in board.progress.items():
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=1.0, completed=done, width=BAR_WIDTH), f"{done:.0%}")
        table.add_row(label, bar)
    if board.note:
        table.add_row("", Text(board.note, style="dim"))
    minutes, seconds = divmod(int(time.monotonic() - board.t0_s), 60)
    title = Text.assemble(("ROSE demo", "bold"), "  ", board.stage)
    return Panel(
        table, title=title, title_align="left",
        subtitle=f"{minutes}:{seconds:02d}", subtitle_align="right",
    )  # fmt: skip


def _rows(board: Board) -> list[tuple[str, RenderableType]]:
    step = Text(str(board.steps))
    step.append(f"   {_arm(board)}", style="magenta")
    rates = "   ".join(f"{name} {rate:,.0f}" for name, rate in sorted(board.tokens_per_s.items()))
    host = board.host
    guest = Text(board.guest_mode or "–", style="bold")
    guest.append(f"  {board.guest_reason}", style="not bold dim")
    sent = f"{board.wire_bytes / 1e6:.1f} MB sent of {board.full_bytes / 1e6:.1f} MB"
    revocations = board.conductor.drills.revocations if board.conductor else 0
    moved = f"{revocations} revocations   {board.gateway.continuations} turns went on elsewhere"
    return [
        ("step", step),
        *(row for name in board.jobs for row in _job_rows(board, name)),
        ("tokens/s", Text(rates or "–")),
        ("host TTFT", _latency(host, host.ttft_p50_s, host.ttft_p95_s, host.ttft_target_s)),
        ("host TPOT", _latency(host, host.tpot_p50_s, host.tpot_p95_s, host.tpot_target_s)),
        ("host", Text(f"{host.window_requests} requests in the last seconds")),
        ("guest", guest),
        *([("moved", Text(moved))] if len(board.jobs) == 1 else []),
        ("weights", Text(sent)),
        ("memory", Text(f"{board.memory_bytes / 2**30:.1f} GiB")),
    ]


def _job_rows(board: Board, name: str) -> list[tuple[str, RenderableType]]:
    """Rows of a job's reward, and where there are several jobs of its share of the guest."""
    job = board.jobs[name]
    reward = f"{job.rewards[-1]:.2f}  " if job.rewards else ""
    learned = Text(f"v{job.version}  {reward}{sparkline(job.rewards)}", style="cyan")
    if len(board.jobs) == 1:
        return [("reward", learned)]
    has_guest = board.guest_job == name
    part = Text(_percent(board.share(name)), style="bold" if has_guest else "")
    part.append(" of the guest's time" + ("   has it now" if has_guest else ""), style="dim")
    return [(name[-LABEL_WIDTH:], learned), ("", part)]


def _latency(host: rose_pb2.HostTelemetry, p50_s: float, p95_s: float, target_s: float) -> Text:
    """Return `p50 20 ms  p95 45 ms  target 200 ms`, red when past the target."""
    if not host.window_requests:
        return Text("no requests yet", style="dim")
    text = Text(f"p50 {p50_s * 1e3:6.1f} ms   p95 {p95_s * 1e3:6.1f} ms")
    text.stylize("green" if p95_s <= target_s else "bold red")
    text.append(f"   target {target_s * 1e3:.0f} ms", style="dim")
    return text


def sparkline(values: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """Return the last `width` values, clamped to 0 to 1, as bars."""
    top = len(BARS) - 1
    return "".join(BARS[round(min(1.0, max(0.0, value)) * top)] for value in values[-width:])


def _arm(board: Board) -> str:
    return board.conductor.arm if board.conductor else ""


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"
