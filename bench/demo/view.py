"""Live view of a running demo: a page on a terminal, plain lines elsewhere.

`Board` collects stage, steps, rates and latencies in one `ViewState`. A view draws it and decides
nothing.
"""

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bench.demo.experiment.watcher import GatewayFigures, Watcher
from bench.demo.stack import GUEST
from rose.errors import UnavailableError
from rose.node.guest.supervisor import EngineState
from rose.rpc import rose_pb2

if TYPE_CHECKING:
    from bench.demo.experiment.conductor import Conductor, Drills

BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 48
REFRESHES_PER_S = 4
LABEL_WIDTH = 10
BAR_WIDTH = 30


@dataclass(frozen=True, slots=True)
class HostFigures:
    """Host latencies of the last seconds against their targets; None before the first request."""

    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p95_s: float | None = None
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    requests: int = 0
    errors: int = 0


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """A slow part, such as an engine that starts."""

    label: str
    done: float
    total: float


@dataclass(frozen=True, slots=True)
class JobView:
    """One job of several; `share`: its part of the time in which any of them had the guest."""

    name: str
    rewards: Sequence[float] = ()
    version: int = 0
    share: float | None = None
    has_guest: bool = False


@dataclass(frozen=True, slots=True)
class ViewState:
    """Everything on the page at one moment."""

    stage: str
    elapsed_s: float = 0.0
    step: int = 0
    running: bool = False
    arm: str = ""
    rewards: Sequence[float] = ()
    tokens_per_s: Mapping[str, float] = field(default_factory=dict)
    host: HostFigures = field(default_factory=HostFigures)
    guest_mode: str = ""
    guest_reason: str = ""
    revocations: int = 0
    continued_turns: int = 0
    version: int = 0
    wire_bytes: int = 0
    full_bytes: int = 0
    memory_bytes: int = 0
    progress: Sequence[TrainingProgress] = ()
    note: str = ""
    # Of several; empty where there is one.
    jobs: Sequence[JobView] = ()


class DemoView(Protocol):
    """Shows states until it is closed."""

    def show(self, state: ViewState) -> None:
        """Draw a state in place of the one before."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def sparkline(values: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """The last `width` values between 0 and 1 as bars."""
    top = len(BARS) - 1
    return "".join(BARS[round(min(1.0, max(0.0, value)) * top)] for value in values[-width:])


def _latency(p50_s: float | None, p95_s: float | None, target_s: float | None) -> Text:
    """`p50 20 ms  p95 45 ms  of 200 ms`, red when past the target."""
    if p50_s is None or p95_s is None:
        return Text("no requests yet", style="dim")
    text = Text(f"p50 {p50_s * 1e3:6.1f} ms   p95 {p95_s * 1e3:6.1f} ms")
    if target_s is not None:
        text.stylize("green" if p95_s <= target_s else "bold red")
        text.append(f"   target {target_s * 1e3:.0f} ms", style="dim")
    return text


def _rows(state: ViewState) -> list[tuple[str, RenderableType]]:
    rates = "   ".join(f"{name} {rate:,.0f}" for name, rate in sorted(state.tokens_per_s.items()))
    host = state.host
    sent = f"v{state.version}   {state.wire_bytes / 1e6:.1f} MB sent"
    if state.full_bytes:
        sent += f" of {state.full_bytes / 1e6:.1f} MB"
    guest = Text(state.guest_mode or "–", style="bold")
    guest.append(f"  {state.guest_reason}", style="not bold dim")
    moved = f"{state.revocations} revocations   {state.continued_turns} turns went on elsewhere"
    served = f"{host.requests} requests   {host.errors} failed"
    return [
        *_reward_rows(state),
        ("tokens/s", Text(rates or "–")),
        ("host TTFT", _latency(host.ttft_p50_s, host.ttft_p95_s, host.ttft_target_s)),
        ("host TPOT", _latency(host.tpot_p50_s, host.tpot_p95_s, host.tpot_target_s)),
        ("host", Text(served, style="bold red" if host.errors else "")),
        ("guest", guest),
        *([] if state.jobs else [("moved", Text(moved))]),
        ("weights", Text(sent)),
        ("memory", Text(f"{state.memory_bytes / 2**30:.1f} GiB")),
    ]


def _reward_rows(state: ViewState) -> list[tuple[str, RenderableType]]:
    if not state.jobs:
        reward = f"{state.rewards[-1]:.2f}  " if state.rewards else ""
        return [("reward", Text(reward + sparkline(state.rewards), style="cyan"))]
    return [row for number, job in enumerate(state.jobs, 1) for row in _job_rows(number, job)]


def _job_rows(number: int, job: JobView) -> list[tuple[str, RenderableType]]:
    """A job's learning, and its part of the guest's time, marked while it has the guest."""
    reward = f"{job.rewards[-1]:.2f}  " if job.rewards else ""
    part = Text(_percent(job.share), style="bold" if job.has_guest else "")
    part.append(" of the guest's time" + ("   has it now" if job.has_guest else ""), style="dim")
    learned = Text(f"v{job.version}  {reward}{sparkline(job.rewards)}", style="cyan")
    return [(f"job {number}", learned), ("", part)]


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def render(state: ViewState) -> RenderableType:
    """The whole page."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", width=LABEL_WIDTH)
    table.add_column(no_wrap=True)
    if state.running:
        counted = Text(str(state.step))
        counted.append(f"   {state.arm}", style="magenta")
        table.add_row("step", counted)
        for label, value in _rows(state):
            table.add_row(label, value)
    for part in state.progress:
        slow = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=part.total, completed=min(part.done, part.total), width=BAR_WIDTH)
        slow.add_row(bar, f"{part.done:.0f}/{part.total:.0f} s")
        table.add_row(part.label, slow)
    title = Text.assemble(("ROSE demo", "bold"), "  ", state.stage)
    parts: list[RenderableType] = [table]
    if state.note:
        parts.append(Text(state.note, style="dim"))
    elapsed = f"{int(state.elapsed_s) // 60}:{int(state.elapsed_s) % 60:02d}"
    return Panel(
        Group(*parts), title=title, title_align="left", subtitle=elapsed, subtitle_align="right"
    )


class LiveView:
    """Redraws one page in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=REFRESHES_PER_S)

    def show(self, state: ViewState) -> None:
        self._live.update(render(state))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()


def plain_line(state: ViewState) -> str:
    """A stage or step on one line."""
    line = f"[{state.elapsed_s:6.1f} s] {state.stage}"
    if not state.step:
        return f"{line}: {state.note}" if state.note else line
    rates = " ".join(f"{name}={rate:.0f}" for name, rate in sorted(state.tokens_per_s.items()))
    reward = f" reward={state.rewards[-1]:.2f}" if state.rewards else ""
    ttft_s = state.host.ttft_p95_s
    host = "" if ttft_s is None else f" host_ttft_p95={ttft_s * 1e3:.1f}ms"
    version = f" v{state.version}"
    if state.jobs:
        version = "".join(f" {j.name}=v{j.version},{_percent(j.share)}" for j in state.jobs)
    return (
        f"{line}: step {state.step} {state.arm}{reward} tokens/s {rates}{host}"
        f" guest={state.guest_mode or '–'}{version}"
    )


class PlainView:
    """Writes a line for each new stage, step or note; for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._seen: tuple[str, int, str] | None = None

    def show(self, state: ViewState) -> None:
        """Write a line when stage, step or note changed."""
        seen = (state.stage, state.step, state.note)
        if seen != self._seen:
            self._seen = seen
            self._stream.write(plain_line(state) + "\n")
            self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stream.flush()


def open_view(stream: TextIO | None = None) -> DemoView:
    """The live page when the stream (stdout if None) is a terminal, plain lines otherwise."""
    stream = sys.stdout if stream is None else stream
    console = Console(file=stream)
    return LiveView(console) if console.is_terminal else PlainView(stream)


DRAW_INTERVAL_S = 0.25
ASK_INTERVAL_S = 0.5


@dataclass(slots=True)
class Board:
    """The state of a run as a person sees it. Whoever knows better writes into it.

    jobs: names of the jobs, where there are several.
    """

    t0_s: float
    stage: str = "checking this machine"
    note: str = ""
    memory_bytes: int = 0
    progress: Sequence[TrainingProgress] = ()
    rewards: list[float] = field(default_factory=list)
    version: int = 0
    wire_bytes: int = 0
    full_bytes: int = 0
    jobs: Sequence[str] = ()
    _learned: dict[str, tuple[list[float], int]] = field(default_factory=dict)
    _guest_s: dict[str, float] = field(default_factory=dict)
    _guest_job: str = ""
    _rates: dict[str, float] = field(default_factory=dict)
    _stats: GatewayFigures = field(default_factory=GatewayFigures)
    _stats_at_s: float = 0.0
    _host: HostFigures = field(default_factory=HostFigures)
    _guest_mode: str = ""
    _guest_reason: str = ""
    _conductor: "Conductor | None" = None
    _drills: "Drills | None" = None

    def attach(self, conductor: "Conductor", drills: "Drills") -> None:
        """From now on the arm and the number of revocations are known."""
        self._conductor = conductor
        self._drills = drills

    def stepped(self, job: str, event: dict[str, object]) -> None:
        """The job's trainer finished a step."""
        reward, version = float(str(event["reward_mean"])), int(str(event["version"]))
        self.rewards.append(reward)
        self.version = max(self.version, version)
        rewards, _ = self._learned.get(job, ([], 0))
        self._learned[job] = [*rewards, reward], version
        self.wire_bytes += int(str(event["wire_bytes"]))
        self.full_bytes += int(str(event["full_bytes"]))

    async def draw(self, view: DemoView) -> None:
        """Show the state four times a second until cancelled."""
        while True:
            view.show(self.state())
            await asyncio.sleep(DRAW_INTERVAL_S)

    async def follow(self, watcher: Watcher) -> None:
        """Ask the control plane twice a second until cancelled; a silent one is shown as such."""
        while True:
            try:
                self._take(await watcher.snapshot(), await watcher.gateway())
            except UnavailableError as error:
                # While it starts, its silence says nothing.
                self.note = str(error) if self._stats_at_s else ""
            await asyncio.sleep(ASK_INTERVAL_S)

    def state(self) -> ViewState:
        """What to draw now."""
        return ViewState(
            stage=self.stage,
            elapsed_s=time.monotonic() - self.t0_s,
            step=len(self.rewards),
            running=self._conductor is not None,
            arm=self._conductor.arm if self._conductor else "",
            rewards=self.rewards,
            tokens_per_s=self._rates,
            host=self._host,
            guest_mode=self._guest_mode,
            guest_reason=self._guest_reason,
            revocations=self._drills.revocations if self._drills else 0,
            continued_turns=self._stats.continuations,
            version=self.version,
            wire_bytes=self.wire_bytes,
            full_bytes=self.full_bytes,
            memory_bytes=self.memory_bytes,
            progress=self.progress,
            note=self.note,
            jobs=[self._job_view(job) for job in self.jobs],
        )

    def _job_view(self, job: str) -> JobView:
        rewards, version = self._learned.get(job, ([], 0))
        whole_s = sum(self._guest_s.values())
        share = self._guest_s.get(job, 0.0) / whole_s if whole_s else None
        return JobView(job, rewards, version, share, self._guest_job == job)

    def _take(self, snapshot: rose_pb2.SnapshotReply, stats: GatewayFigures) -> None:
        now_s = time.monotonic()
        elapsed_s = now_s - self._stats_at_s
        self._rates = {
            name: (count - self._stats.tokens.get(name, 0)) / elapsed_s
            for name, count in stats.tokens.items()
        }
        if self._guest_job and self._stats_at_s and self._conductor is not None:
            had_s = self._guest_s.get(self._guest_job, 0.0)
            self._guest_s[self._guest_job] = had_s + elapsed_s
        leased = [lease.job for lease in snapshot.leases if lease.replica == GUEST]
        self._guest_job = leased[0] if leased else ""
        self._stats, self._stats_at_s = stats, now_s
        self.note = ""
        for host in snapshot.hosts:
            self._host = _host_view(host)
        for guest in snapshot.guests:
            if guest.replica == GUEST:
                # The grant of an engine that is not up says nothing: its state does.
                up = guest.state == EngineState.HEALTHY
                self._guest_mode = guest.mode if up else guest.state
                self._guest_reason = guest.reason if up else ""


def _host_view(host: rose_pb2.HostTelemetry) -> HostFigures:
    measured = bool(host.window_requests)
    return HostFigures(
        ttft_p50_s=host.ttft_p50_s if measured else None,
        ttft_p95_s=host.ttft_p95_s if measured else None,
        tpot_p50_s=host.tpot_p50_s if measured else None,
        tpot_p95_s=host.tpot_p95_s if measured else None,
        ttft_target_s=host.ttft_target_s,
        tpot_target_s=host.tpot_target_s,
        requests=host.window_requests,
    )


if __name__ == "__main__":
    from bench.demo.view_rehearsal import rehearse

    rehearse()
