"""The grant loop: a thread of its own, so that nothing the daemon does can delay a freeze.

When the thread dies the last grant expires and the guest freezes: silence is a revocation.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from executor import ControlPage, Grant, GuardCore, GuestState, HostState, PageUnreadable
from rose.eventlog import EventLog, JsonlLog
from rose.node.duty import DutyMeter
from rose.node.host_watch import HostWatch

TICK_S = 0.02
SAMPLE_EVERY_TICKS = 5


class GuardThread:
    """Writes the guest's grant 50 times a second and records what host and guest do."""

    def __init__(
        self,
        page: ControlPage,
        core: GuardCore,
        lease_active: Callable[[], bool],
        kill_file: Path,
        host_pid: int | None,
        watch: HostWatch,
        log_dir: Path,
        events: EventLog,
        on_broken: Callable[[], object],
    ) -> None:
        """`on_broken` is called in this thread when the loop ends unasked."""
        self._page = page
        self._core = core
        self._lease_active = lease_active
        self._kill_file = kill_file
        self._host_pid = host_pid
        self._watch = watch
        self._samples = JsonlLog(log_dir / "guest.jsonl")
        self._events = events
        self._on_broken = on_broken
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rose-guard", daemon=True)
        self._duty = DutyMeter()
        self.host: HostState | None = None
        self.guest: GuestState | None = None
        self.grant: Grant | None = None

    def start(self) -> None:
        """Begin to grant."""
        self._thread.start()

    def stop(self) -> None:
        """Stop granting; the guest freezes when its last grant expires."""
        self._stopping.set()
        self._thread.join(timeout=1.0)
        self._samples.close()

    def duty(self) -> float:
        """Share of the last second in which the guest was not held back."""
        return self._duty.value

    def _run(self) -> None:
        try:
            self._loop()
        finally:
            if not self._stopping.is_set():
                self._on_broken()

    def _loop(self) -> None:
        ticks = 0
        reason = ""
        while not self._stopping.wait(TICK_S):
            grant = self._tick()
            if grant.reason != reason:
                reason = grant.reason
                self._events.write("grant", mode=grant.mode.name.lower(), reason=reason)
            if ticks % SAMPLE_EVERY_TICKS == 0:
                self._duty.update(time.monotonic_ns(), self.guest)
                self._sample(grant)
                self._watch.drain(self._page)
            ticks += 1

    def _tick(self) -> Grant:
        self.host = self._read_host()
        self.guest = self._read_guest()
        self.grant = self._core.step(
            time.monotonic_ns(),
            self.host,
            self.guest,
            lease_active=self._lease_active(),
            kill_switch=self._kill_file.exists(),
            host_alive=_alive(self._host_pid),
        )
        self._page.grant.write(self.grant)
        return self.grant

    def _read_host(self) -> HostState | None:
        try:
            return self._page.host.read()
        except PageUnreadable:
            return None

    def _read_guest(self) -> GuestState | None:
        try:
            return self._page.guest.read()
        except PageUnreadable:
            return None

    def _sample(self, grant: Grant) -> None:
        host = self.host or HostState()
        guest = self.guest or GuestState()
        # Why the guest does not run: its grant, or else what its gate said last.
        reason = guest.gate_reason if grant.token_budget else grant.reason
        self._samples.write(
            {
                "t_s": time.monotonic(),
                "mode": grant.mode.name.lower(),
                "reason": reason,
                "running": guest.running,
                "tokens_total": guest.tokens_total,
                "step_seq": guest.step_seq,
                "yielded_ns": guest.yielded_ns,
                "host_busy_ns": host.busy_ns,
                "host_running": host.running,
            }
        )


def _alive(pid: int | None) -> bool:
    if pid is None:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
