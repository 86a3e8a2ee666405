"""The guest's grants: from the node's own guard, under each arm's rules."""

from dataclasses import replace
from pathlib import Path

from executor import (
    ControlPage,
    Grant,
    GrantController,
    GuardConfig,
    PressureLimits,
    PressurePolicy,
)
from rose.bench.coserve.plan import Arm
from rose.errors import RoseError
from rose.logs.eventlog import KEEP_ALL, EventLog, JsonlLog
from rose.node.grants.guard_thread import GUEST_SAMPLES, GuardThread
from rose.node.grants.host_watch import HOST_LATENCY, HostWatch
from rose.node.guest.kill import KillSwitch

# Shares of the host's KV memory that a loaded bench host crosses again and again, so that the two
# policies differ.
KV_HIGH, KV_LOW = 0.12, 0.08


def guard_config(arm: Arm, token_budget: int, max_sequences: int) -> GuardConfig:
    """The arm's limits."""
    policy = PressurePolicy(arm.policy or PressurePolicy.ADAPTIVE)
    pressure = PressureLimits(policy, high=KV_HIGH, low=KV_LOW)
    return GuardConfig(
        token_budget, max_sequences, slack_share=arm.slack_share or 0.0, pressure=pressure
    )


class Granting:
    """Runs one guard at a time; without a ROSE guest in the arm it grants nothing."""

    def __init__(self, page: ControlPage, out: Path, logs: Path) -> None:
        self._page = page
        self._logs = logs
        # Figures are computed from every record; and nobody's host waits for this disk.
        self._watch = HostWatch(JsonlLog(out / HOST_LATENCY, KEEP_ALL))
        self._samples = JsonlLog(out / GUEST_SAMPLES, KEEP_ALL)
        self._events = EventLog(logs, "guard", KEEP_ALL)
        self._guard: GuardThread | None = None
        self._broken = False
        self._arm = 0

    def rule(self, arm: Arm, host_pid: int | None, token_budget: int, max_sequences: int) -> None:
        """Grant by the arm's rules from now on."""
        self._end()
        config = guard_config(arm, token_budget, max_sequences)
        self._arm += 1
        self._guard = GuardThread(
            name=arm.name,
            page=self._page,
            core=GrantController(config, self._uncapped()),
            lease_epoch=lambda: self._arm if arm.guest == "rose" else None,
            kill_switch=KillSwitch(self._logs / "KILL"),
            host_pid=host_pid,
            watch=self._watch,
            samples=self._samples,
            events=self._events,
            on_broken=self._break,
            on_stall=self._stall,
        )
        self._guard.start()

    def check(self) -> None:
        """Raise when the guard ended by itself: what was measured since says nothing."""
        if self._broken:
            raise RoseError(f"the guard broke; see {self._logs}")

    def drain_latencies(self) -> None:
        """Write the host's latencies that are still in the ring; call it after `stop`."""
        self._watch.drain(self._page)

    def stop(self) -> None:
        """Grant nothing more."""
        self._end()

    def _end(self) -> None:
        if self._guard is not None:
            self._guard.stop()
            self._guard = None

    def _uncapped(self) -> Grant | None:
        """The last grant, whose epoch goes on; no arm begins with what another one took."""
        last = self._page.grant.peek()
        return None if last is None else replace(last, kv_granule_cap=0)

    def _stall(self, reason: str) -> None:
        # A bench that stood still knows no more than a node: the arm goes on under a new lease.
        self._events.write("stalled", reason=reason)
        self._arm += 1

    def _break(self) -> None:
        self._broken = True
