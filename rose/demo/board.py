"""Collects what the view shows: one place that knows stage, steps, rates and latencies."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rose.demo.stack import GUEST
from rose.demo.view import HostView, Progress, View, ViewState
from rose.demo.watcher import GatewayStats, Watcher
from rose.errors import UnavailableError
from rose.node.supervisor import EngineState
from rose.rpc import rose_pb2

DRAW_INTERVAL_S = 0.25
ASK_INTERVAL_S = 0.5


class Conducting(Protocol):
    """What the board reads of the conductor."""

    arm: str


class Drilling(Protocol):
    """What the board reads of the drills."""

    revocations: int


@dataclass(slots=True)
class Board:
    """The state of a run as a person sees it. Whoever knows better writes into it."""

    t0_s: float
    stage: str = "checking this machine"
    note: str = ""
    memory_bytes: int = 0
    progress: Sequence[Progress] = ()
    rewards: list[float] = field(default_factory=list)
    version: int = 0
    wire_bytes: int = 0
    full_bytes: int = 0
    _rates: dict[str, float] = field(default_factory=dict)
    _stats: GatewayStats = field(default_factory=GatewayStats)
    _stats_at_s: float = 0.0
    _host: HostView = field(default_factory=HostView)
    _guest_mode: str = ""
    _guest_reason: str = ""
    _conductor: Conducting | None = None
    _drills: Drilling | None = None

    def attach(self, conductor: Conducting, drills: Drilling) -> None:
        """From now on the arm and the number of revocations are known."""
        self._conductor = conductor
        self._drills = drills

    def stepped(self, event: dict[str, object]) -> None:
        """The trainer finished a step."""
        self.rewards.append(float(str(event["reward_mean"])))
        self.version = int(str(event["version"]))
        self.wire_bytes += int(str(event["wire_bytes"]))
        self.full_bytes += int(str(event["full_bytes"]))

    async def draw(self, view: View) -> None:
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
        )

    def _take(self, snapshot: rose_pb2.SnapshotReply, stats: GatewayStats) -> None:
        now_s = time.monotonic()
        elapsed_s = now_s - self._stats_at_s
        self._rates = {
            name: (count - self._stats.tokens.get(name, 0)) / elapsed_s
            for name, count in stats.tokens.items()
        }
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


def _host_view(host: rose_pb2.HostTelemetry) -> HostView:
    measured = bool(host.window_requests)
    return HostView(
        ttft_p50_s=host.ttft_p50_s if measured else None,
        ttft_p95_s=host.ttft_p95_s if measured else None,
        tpot_p50_s=host.tpot_p50_s if measured else None,
        tpot_p95_s=host.tpot_p95_s if measured else None,
        ttft_target_s=host.ttft_target_s,
        tpot_target_s=host.tpot_target_s,
        requests=host.window_requests,
    )
