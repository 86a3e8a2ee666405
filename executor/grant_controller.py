"""Grant controller: how much compute and KV memory a guest may use for the next half second.

    Observation, 50 times a second
      ──► Write       the grant, in every step
      ──► VoidLeases  the process was paused: its leases are out of date
      ──► Boost       the guest owes memory and needs a core to return it on
      ──► Reclaim     it still owes it: `executor.kv.reclaim_ladder` begins

Everything that the controller does not know counts against the guest. A daemon that stops calling
revokes by silence: the last grant expires.

`HarvestCaps` are the caps of capacity policies, beneath the limits of the node's own file. They
arrive over the network and may change at any time; a missing one bounds nothing. The stricter of
cap and file holds.
"""

import math
from dataclasses import dataclass, field
from typing import Final

from executor.control_page.page import HostView
from executor.control_page.seqlock_records import Grant, GrantMode, GuestState, HostState
from executor.freeze_reason import FreezeReason
from executor.kv.lending import (
    LEAST_CAP,
    PressureCore,
    PressureLimits,
    guest_granules,
    lent_bytes,
    owed_bytes,
)
from executor.kv.reclaim_ladder import OverdueTimer
from executor.kv.shrink_plan import NO_CAP

# Length of a window; in each a guest may begin steps for its share of it.
COMPUTE_WINDOW_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class HarvestCaps:
    """Caps that capacity policies put on a guest; None bounds nothing.

    compute: share of each second in which the guest may begin steps; a step that has begun ends, so
    steps may take one step a second longer. kv_bytes: KV memory that the guest may keep.
    kv_headroom: share of the host's KV memory that stays neither used nor lent, for a guest that
    borrows. slack_share, high_watermark, low_watermark: upper bounds of the node file's values.
    Raises ValueError for invalid ones.
    """

    compute: float | None = None
    kv_bytes: int | None = None
    kv_headroom: float = 0.0
    slack_share: float | None = None
    high_watermark: float | None = None
    low_watermark: float | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "kv_headroom", "slack_share", "high_watermark", "low_watermark"):
            share = getattr(self, name)
            if share is not None and not (math.isfinite(share) and 0.0 <= share <= 1.0):
                raise ValueError(f"{name} is {share}; give a share in 0..1")
        if self.kv_bytes is not None and self.kv_bytes < 0:
            raise ValueError(f"kv_bytes is {self.kv_bytes}; give 0 or more")

    def computes(self, now_ns: int) -> bool:
        """Return True if the compute cap lets the guest begin a step at `now_ns`."""
        if self.compute is None:
            return True
        return now_ns % COMPUTE_WINDOW_NS < self.compute * COMPUTE_WINDOW_NS

    def slack(self, own: float) -> float:
        """Return the share of the host's slack that steps may take: the lesser of cap and `own`.

        own: share in the node's file.
        """
        return own if self.slack_share is None else min(own, self.slack_share)

    def granules(self, granule_bytes: int) -> int:
        """Return the number of KV granules that the guest may keep; NO_CAP without a cap.

        granule_bytes: size of the guest's granules; 0, for unknown, gives LEAST_CAP.
        """
        if self.kv_bytes is None:
            return NO_CAP
        # A guest that does not report the size of its granules gets none beyond the last.
        return max(LEAST_CAP, self.kv_bytes // granule_bytes) if granule_bytes > 0 else LEAST_CAP

    def pressure(self, own: PressureLimits) -> tuple[float, float]:
        """Return the high and low watermark of KV pressure: the lesser of each cap and `own`.

        own: limits in the node's file. The low one is never above the high one.
        """
        high = own.high if self.high_watermark is None else min(own.high, self.high_watermark)
        low = own.low if self.low_watermark is None else min(own.low, self.low_watermark)
        return high, min(low, high)


UNCAPPED: Final = HarvestCaps()


# Time that a guest with a core needs to return the memory that its host wants.
PRESS_NS: Final = 250_000_000
OVERDUE_NS: Final = 2_000_000_000


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """Operator's limits for one guest; ValueError for invalid ones.

    `kv_granule_cap`: KV granules that the guest may keep pages under, 0 for as many as it started
    with. `slack_share` 0..1: 0 for host-idle time only. While the host fills its own KV memory, as
    `pressure` says, the guest's steps have half the tokens and its cap follows the policy.
    `kv_base_bytes`: KV memory of the guest's own, beyond which it may have only what the host lends
    now; 0 does not bind it to that. A guest that keeps more is frozen after `press_ns`, so that it
    does nothing but return memory, and a reclaim begins after every further `overdue_ns`.
    """

    token_budget: int
    max_sequences: int
    kv_granule_cap: int = 0
    slack_share: float = 0.0
    ttl_ns: int = 500_000_000
    pressure: PressureLimits = field(default_factory=PressureLimits)
    kv_base_bytes: int = 0
    press_ns: int = PRESS_NS
    overdue_ns: int = OVERDUE_NS

    def __post_init__(self) -> None:
        if self.token_budget <= 0 or self.max_sequences <= 0 or self.ttl_ns <= 0:
            raise ValueError("token_budget, max_sequences and ttl_ns must be positive")
        if self.kv_base_bytes < 0:
            raise ValueError("kv_base_bytes must not be negative")
        if not 0.0 <= self.slack_share <= 1.0:
            raise ValueError(f"slack_share is {self.slack_share}; give a share in 0..1")


@dataclass(frozen=True, slots=True)
class Observation:
    """Event for the grant controller: all facts about host, guest and lease at one moment.

    `host_doubt`: evidence against the host beside its page, HOST_DEAD, HOST_FOREIGN or None.
    `guest`: None when unreadable (an absent guest is no reason to freeze: it reads its grant when
    it starts). `lease_epoch`: of the present lease, None without one. `reclaim_cap`: KV granules
    that a reclaim leaves the guest (0: all of them), None without a reclaim. `warming`: the guest's
    engine starts and takes no turns yet; it may run in host-idle time. `caps`: of capacity
    policies. `cut_off`: the node has not heard a scheduler for too long; the guest keeps only the
    least memory.
    """

    view: HostView
    guest: GuestState | None = None
    lease_epoch: int | None = None
    kill_switch: bool = False
    host_doubt: FreezeReason | None = None
    draining: bool = False
    operator_hold: bool = False
    reclaim_cap: int | None = None
    warming: bool = False
    caps: HarvestCaps = UNCAPPED
    cut_off: bool = False


@dataclass(frozen=True, slots=True)
class Write:
    """Action of the grant controller: write this grant to the control page."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class VoidLeases:
    """Action of the grant controller: end all leases so far, which were not renewed in a pause."""


@dataclass(frozen=True, slots=True)
class Boost:
    """Action of the grant controller: give the guest's processes normal priority, or take it away.

    `on` False puts them behind all others again.
    """

    on: bool


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Action of the grant controller: begin a reclaim of `owed_bytes` from the guest."""

    owed_bytes: int


Action = Write | VoidLeases | Boost | Reclaim


@dataclass(frozen=True, slots=True)
class GuardStatus:
    """State of the grant controller after a step: its grant's mode and epoch, the guest's debt.

    `owed_bytes`: KV memory that the guest has to return. `boosted`: the guest has a core of its
    host's. `squeezed`: the host needs its KV memory. `void_epoch`: leases up to this epoch are
    void.
    """

    mode: GrantMode
    epoch: int
    owed_bytes: int
    boosted: bool
    squeezed: bool
    void_epoch: int


class GrantController:
    """State machine that decides one guest's grant; its epoch grows with every change of mode."""

    def __init__(self, config: GuardConfig, previous: Grant | None = None) -> None:
        """Create the controller in no mode.

        previous: grant on the page, whose epoch a restarted daemon continues; None for a new page.
        """
        self._config = config
        self._mode: GrantMode | None = None
        self._epoch = previous.epoch if previous is not None else 0
        self._last_step_ns: int | None = None
        self._newest_lease = self._void_epoch = 0
        self._owed_bytes = 0
        self._debt = OverdueTimer(config.press_ns, config.overdue_ns)
        self._boosted = False
        left = previous.kv_granule_cap if previous is not None else NO_CAP
        self._pressure = PressureCore(
            config.pressure, NO_CAP if left == config.kv_granule_cap else left
        )

    def step(self, event: Observation, now_ns: int) -> list[Action]:
        """Return the actions of this moment; the first is always the Write of a grant."""
        stalled = self._was_stalled(now_ns)
        self._newest_lease = max(self._newest_lease, event.lease_epoch or 0)
        leased = event.lease_epoch is not None and event.lease_epoch > self._void_epoch
        doubt = event.host_doubt or event.view.doubt(now_ns)
        host = None if doubt else event.view.state
        self._pressure.bound(*event.caps.pressure(self._config.pressure))
        limit = self._limit(host, event.guest, event.caps)
        cap = _tightest(
            self._cap(now_ns, host, event.guest, limit),
            event.reclaim_cap or NO_CAP,
            LEAST_CAP if event.cut_off else NO_CAP,
        )
        mode, reason = self._judge(event, doubt, stalled=stalled, leased=leased)
        self._last_step_ns = now_ns
        if mode is not self._mode:
            self._mode = mode
            self._epoch += 1
        grant = self._grant(now_ns, mode, reason, cap, event.caps, leased=leased)
        actions: list[Action] = [Write(grant)]
        if stalled:
            self._void_epoch = self._newest_lease
            actions.append(VoidLeases())
        return actions + self._collect(now_ns, mode)

    def status(self) -> GuardStatus:
        """Return mode, epoch and debt after the last step."""
        return GuardStatus(
            self._mode or GrantMode.FREEZE,
            self._epoch,
            self._owed_bytes,
            self._boosted,
            self._pressure.pressed,
            self._void_epoch,
        )

    def _judge(
        self, event: Observation, doubt: FreezeReason | None, *, stalled: bool, leased: bool
    ) -> tuple[GrantMode, FreezeReason]:
        """Return the grant's mode and the first reason of the ladder that applies."""
        guest = event.guest
        drained = event.draining and guest is not None and not (guest.running or guest.waiting)
        applies = (
            event.kill_switch,
            # After a pause longer than a grant's life the caller's leases are out of date.
            stalled,
            doubt is not None,
            event.reclaim_cap is not None,
            self._debt.pressed,
            drained,
            event.draining,
            event.operator_hold,
            event.cut_off,
            not (leased or event.warming),
            self._pressure.pressed,
            leased,
            True,
        )
        mode, reason = _LADDER[applies.index(True)]
        if reason is None:
            assert doubt is not None
            reason = doubt
        return mode, reason

    def _collect(self, now_ns: int, mode: GrantMode) -> list[Action]:
        """Return the Boost and Reclaim actions that the guest's debt requires."""
        actions: list[Action] = []
        overdue = self._debt.step(now_ns, self._owed_bytes)
        # Only a frozen guest gets a core of its host's, and only to return memory.
        boosted = self._debt.pressed and mode is GrantMode.FREEZE
        # Repeated in every step, since it may have other processes by now.
        if boosted or self._boosted:
            actions.append(Boost(boosted))
        self._boosted = boosted
        if overdue:
            actions.append(Reclaim(overdue))
        return actions

    def _was_stalled(self, now_ns: int) -> bool:
        last_ns = self._last_step_ns
        return last_ns is not None and now_ns - last_ns > self._config.ttl_ns

    def _limit(self, host: HostState | None, guest: GuestState | None, caps: HarvestCaps) -> int:
        """Return the most granules that the guest may keep, and record the bytes that it owes.

        NO_CAP for any number. With `kv_base_bytes` the limit is that memory and the host's present
        loan.
        """
        config = self._config
        granule_bytes = guest.granule_bytes if guest is not None else 0
        most = _tightest(config.kv_granule_cap, caps.granules(granule_bytes))
        if not config.kv_base_bytes:
            return most
        self._owed_bytes = owed_bytes(config.kv_base_bytes, host, guest)
        limit = guest_granules(config.kv_base_bytes, host, guest, caps.kv_headroom)
        # Reserved headroom is never granted.
        assert limit == LEAST_CAP or limit * granule_bytes <= config.kv_base_bytes + lent_bytes(
            host
        )
        return _tightest(most, limit)

    def _cap(
        self, now_ns: int, host: HostState | None, guest: GuestState | None, limit: int
    ) -> int:
        """Return the granules that the guest may keep: its limit, or fewer under pressure."""
        used = host.kv_used / host.kv_total if host is not None and host.kv_total > 0 else None
        guest = guest or GuestState()
        most = min((n for n in (limit, guest.granules_total) if n > 0), default=0)
        cap = self._pressure.step(now_ns, used, most, guest.granules_mapped, guest.policy_version)
        return _tightest(limit, cap)

    def _grant(
        self,
        now_ns: int,
        mode: GrantMode,
        reason: FreezeReason,
        cap: int,
        caps: HarvestCaps,
        *,
        leased: bool,
    ) -> Grant:
        config = self._config
        budget = 0
        if mode is GrantMode.RUN:
            budget = config.token_budget
        elif mode is GrantMode.THROTTLE:
            budget = max(1, config.token_budget // 2)
        # Its mode stays: neither epoch nor log changes twice a second.
        budget = budget if caps.computes(now_ns) else 0
        return Grant(
            mode=mode,
            token_budget=budget,
            max_sequences=config.max_sequences if budget else 0,
            # The cap holds in every mode: without one a frozen guest would grow back.
            kv_granule_cap=cap,
            slack_share=caps.slack(config.slack_share) if leased else 0.0,
            epoch=self._epoch,
            expiry_ns=now_ns + config.ttl_ns,
            heartbeat_ns=now_ns,
            reason=reason,
        )


def _tightest(*caps: int) -> int:
    """Return the least of the caps that are set; NO_CAP if none is."""
    return min((cap for cap in caps if cap > NO_CAP), default=NO_CAP)


# None: the reason against the host.
_LADDER: Final[tuple[tuple[GrantMode, FreezeReason | None], ...]] = (
    (GrantMode.KILL, FreezeReason.KILL_SWITCH),
    (GrantMode.FREEZE, FreezeReason.STALLED),
    (GrantMode.FREEZE, None),
    (GrantMode.FREEZE, FreezeReason.RECLAIM),
    (GrantMode.FREEZE, FreezeReason.OWING),
    (GrantMode.FREEZE, FreezeReason.DRAINED),
    (GrantMode.DRAIN, FreezeReason.DRAINING),
    (GrantMode.FREEZE, FreezeReason.OPERATOR_HOLD),
    (GrantMode.FREEZE, FreezeReason.CUT_OFF),
    (GrantMode.FREEZE, FreezeReason.NO_LEASE),
    (GrantMode.THROTTLE, FreezeReason.PRESSURE),
    (GrantMode.RUN, FreezeReason.LEASED),
    (GrantMode.RUN, FreezeReason.WARM_UP),
)
