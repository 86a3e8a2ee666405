"""Guard thread: the grant loop of one guest, and its record of host and guest in `guest.jsonl`.

It is a thread of its own, so that nothing the daemon does can delay a freeze. When the thread dies
the last grant expires and the guest freezes: silence is a revocation.

Ten times a second it records what host and guest do. `sentence` gives the reason of a freeze in
words for the log, `DutyMeter` the share of time in which the guest ran.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

import msgspec

from executor import ControlPage, Grant, GrantController, GuestState, HostState
from executor.freeze_reason import FreezeReason, explained
from executor.grant_controller import Boost, Observation, Reclaim, VoidLeases, Write
from rose.logs.eventlog import EventLog, JsonlLog
from rose.node.guest.kill_switch import KillSwitch
from rose.node.host import HostProcess, HostWatch, lent_on
from rose.node.orders import SchedulerCaps
from rose.process.background_tasks import described

WINDOW_NS = 1_000_000_000


class DutyMeter:
    """Meter of the share of the last second in which the guest made steps and was not held back by
    its gate.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self._points: deque[tuple[int, int, int]] = deque()

    def update(self, now_ns: int, guest: GuestState | None) -> None:
        """Recompute `value` (0 to 1) from the guest's step count and yielded time, the nanoseconds
        in which it had work and its gate was closed; 0 without a guest or a step in the last
        second.
        """
        if guest is None:
            self.value = 0.0
            return
        self._points.append((now_ns, guest.yielded_ns, guest.step_seq))
        while now_ns - self._points[0][0] > WINDOW_NS:
            self._points.popleft()
        then_ns, yielded_ns, steps = self._points[0]
        elapsed_ns = now_ns - then_ns
        stepped = guest.step_seq > steps
        if elapsed_ns <= 0 or not stepped:
            self.value = 0.0
            return
        self.value = max(0.0, 1.0 - (guest.yielded_ns - yielded_ns) / elapsed_ns)


GUEST_SAMPLES: Final = "guest.jsonl"


class GuestSample(msgspec.Struct, frozen=True):
    """One line of `guest.jsonl`: what guest and host did at one moment; times are CLOCK_MONOTONIC.

    reason: why the guest does not run, "ok" while it may. kv_bytes: KV memory that the guest has
    mapped. host_kv: share of the host's KV blocks in use, 0 to 1. Token, step and time counts only
    grow.
    """

    t_s: float
    mode: str
    reason: str
    running: int
    kv_bytes: int
    tokens_total: int
    step_seq: int
    yielded_ns: int
    host_busy_ns: int
    host_running: int
    host_kv: float


TICK_S = 0.02
SAMPLE_EVERY_TICKS = 5
_NS = 1e9

logger = logging.getLogger("rose.node")


@dataclass(frozen=True, slots=True)
class GuardedHost:
    """Host beside a guarded guest: its control page, the reader of its latencies, its pid if the
    node's file names it, and the number of its GPUs that the guest is on.
    """

    page: ControlPage
    watch: HostWatch
    pid: int | None = None
    gpus: int = 1


class GuardedGuest(Protocol):
    """Interface of a guest to its guard; every method is called in the guard's thread."""

    @property
    def name(self) -> str: ...

    @property
    def warming(self) -> bool:
        """True while this daemon starts the guest's engine, before it takes turns."""

    @property
    def ranks(self) -> int:
        """Number of the guest's ranks: the page has the memory of one of them."""

    def lease_epoch(self) -> int | None:
        """Return the epoch of the guest's unexpired lease, None without one."""

    def boost(self, *, on: bool) -> None:
        """Raise the guest's CPU priority with `on`, because it owes memory to its host; lower it
        again without.
        """

    def overdue(self, owed_bytes: int) -> None:
        """Start a reclaim of the `owed_bytes` of KV memory that the guest kept past their
        deadline.
        """

    def stalled(self, reason: str) -> None:
        """Revoke the guest's lease, because the guard stood still for longer than a grant lives."""

    def guard_broke(self) -> None:
        """Report to the daemon that the grant loop ended without being stopped."""


class GuardThread:
    """Thread that writes the guest's grant to the host's control page 50 times a second and records
    samples of host and guest.

    host, guest: their last states on the page. host_idle: True if the host is known to be idle.
    grant: the last grant; granted: number of grants written. broke: the error that ended the loop.
    """

    def __init__(
        self,
        guest: GuardedGuest,
        host: GuardedHost,
        core: GrantController,
        kill_switch: KillSwitch,
        samples: JsonlLog,
        events: EventLog,
        caps: SchedulerCaps | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Prepare the thread without starting it.

        Sections of the page have the memory of one rank and one GPU, everything here that of all.
        caps: the scheduler's capacity caps; without them nothing is capped. events, samples: logs
        whose writes must not wait for a disk.
        """
        self._guest = guest
        self._name = guest.name
        self._page, self._gpus, self._ranks = host.page, host.gpus, guest.ranks
        self._core = core
        self._kill_switch = kill_switch
        self._process = HostProcess(host.pid)
        self._clock_ns = clock_ns
        self._watch = host.watch
        self._samples = samples
        self._events = events
        self._reclaim_cap: int | None = None
        if caps is None:
            caps = SchedulerCaps()
            caps.heard()
        self._caps = caps
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rose-guard", daemon=True)
        self._duty = DutyMeter()
        self._ticks = 0
        self._reason = ""
        self.host: HostState | None = None
        self.host_idle = False
        self.guest: GuestState | None = None
        self.grant: Grant | None = None
        self.granted = 0
        self.broke = ""

    def start(self) -> None:
        """Start the thread, which writes grants from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait up to a second for it; the guest freezes when its last grant
        expires.
        """
        self._stopping.set()
        self._thread.join(timeout=1.0)

    def hold(self, reclaim_cap: int | None) -> None:
        """Freeze the guest and cap its KV memory at this number of granules for a reclaim; None
        lifts both (any thread).
        """
        self._reclaim_cap = reclaim_cap

    def duty(self) -> float:
        """Return the share of the last second in which the guest made steps and was not held back,
        0 to 1.
        """
        return self._duty.value

    @property
    def owed_bytes(self) -> int:
        """Bytes of KV memory that the host took back and the guest still keeps."""
        return self._core.status().owed_bytes

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001 - whatever broke: it is said, and the node ends
            self.broke = described(error)
            self._events.write("guard_broke", replica=self._name, message=self.broke)
        finally:
            if not self._stopping.is_set():
                self._guest.guard_broke()

    def _loop(self) -> None:
        unreadable = ""
        while not self._stopping.wait(TICK_S):
            try:
                self.tick()
            except OSError as error:
                # This process has no free descriptor, or the kill file's disk does not answer: no
                # grant is written, so the guest's last one expires.
                if unreadable != str(error):
                    unreadable = str(error)
                    self._events.write("guard_held_up", replica=self._name, message=unreadable)

    def tick(self) -> Grant:
        """Read the control page, write one grant to it and return that grant; every fifth call also
        records a sample. No content of the page makes it raise: it freezes the guest.
        """
        lost = self._page.cut_short
        grant = self._silenced() if lost else self._grant()
        if grant.reason != self._reason:
            self._reason = grant.reason
            self._changed(grant)
        if self._ticks % SAMPLE_EVERY_TICKS == 0 and not lost:
            self._duty.update(self._clock_ns(), self.guest)
            self._sample(grant)
            self._watch.drain(self._page)
        self._ticks += 1
        return grant

    def _changed(self, grant: Grant) -> None:
        mode = grant.mode.name.lower()
        self._events.write("grant", replica=self._name, mode=mode, reason=grant.reason)
        logger.info("%s %s: %s", self._name, mode, explained(grant.reason))

    def _silenced(self) -> Grant:
        """Return a grant that says PAGE_REPLACED and write nothing, because the page was cut short;
        the last grant expires.
        """
        self.host, self.host_idle = None, False
        self.grant = Grant(reason=FreezeReason.PAGE_REPLACED)
        return self.grant

    def _grant(self) -> Grant:
        view = self._page.host_view()
        if view.doubt(self._clock_ns()) is FreezeReason.HOST_UNREADABLE:
            # A host that is written at this moment is read again; without it the guest freezes.
            view = self._page.host_view()
        if view.state is not None:
            view = replace(view, state=lent_on(view.state, self._gpus))
        now_ns = self._clock_ns()
        doubt = self._process.doubt(*view.seats)
        self.host = view.state
        believed = None if doubt else view.believed(now_ns)
        self.host_idle = believed is not None and believed.idle
        # The section may be half written by a guest that lost its core: keep the last state.
        if state := self._page.guest.peek():
            self.guest = replace(
                state,
                bytes_mapped=self._ranks * state.bytes_mapped,
                granule_bytes=self._ranks * state.granule_bytes,
            )
        seen = Observation(
            view,
            self.guest,
            lease_epoch=self._guest.lease_epoch(),
            kill_switch=self._kill_switch.checked(),
            host_doubt=doubt,
            reclaim_cap=self._reclaim_cap,
            warming=self._guest.warming,
            caps=self._caps.harvest,
            cut_off=self._caps.cut_off,
        )
        for action in self._core.step(seen, now_ns):
            match action:
                case Write():
                    self._page.grant.write(action.grant)
                    self.grant = action.grant
                    self.granted += 1
                case VoidLeases():
                    self._guest.stalled(FreezeReason.STALLED)
                case Boost():
                    self._guest.boost(on=action.on)
                case Reclaim():
                    self._guest.overdue(action.owed_bytes)
        assert self.grant is not None
        return self.grant

    def _sample(self, grant: Grant) -> None:
        host = self.host or HostState()
        guest = self.guest or GuestState()
        # Reason why the guest does not run: its grant's, or else the last one of its gate.
        reason = guest.gate_reason if grant.token_budget else grant.reason
        sample = GuestSample(
            t_s=self._clock_ns() / _NS,
            mode=grant.mode.name.lower(),
            reason=reason,
            running=guest.running,
            kv_bytes=guest.bytes_mapped,
            tokens_total=guest.tokens_total,
            step_seq=guest.step_seq,
            yielded_ns=guest.yielded_ns,
            host_busy_ns=host.busy_ns,
            host_running=host.running,
            host_kv=host.kv_used / host.kv_total if host.kv_total else 0.0,
        )
        self._samples.write(msgspec.to_builtins(sample))
